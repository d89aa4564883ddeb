#include "apps/smp-train/check.hpp"

#include "runtime/schedule_plan.hpp"
#include "runtime/smp.hpp"
#include "runtime/trainable.hpp"

#include <functional>

namespace smp::app {

namespace {

/// Partitions for real, on as many virtual ranks of this process.
std::string partition_text_of(const train_config& x) {
  virtual_world_options world;
  world.config = x.smp;
  std::string result;
  run_virtual_world(x.smp.pipeline_parallel_degree, world, [&](session& s) {
    auto whole = make_trainable(x);
    auto model = whole->distribute();
    model->partition();
    if (s.rank() == 0)
      result = model->partition_text();
  });
  return result;
}

} // namespace

std::vector<std::string> check(const train_config& x, std::string& partition) {
  std::vector<std::string> result;
  auto attempt = [&result](const std::function<void()>& f) {
    try {
      f();
    } catch (const error& e) {
      result.emplace_back(e.what());
    }
  };
  attempt([&] { make_data(x); });
  attempt([&] { partition = partition_text_of(x); });
  if (result.empty())
    attempt([&] { predict_schedule(x); });
  return result;
}

} // namespace smp::app
