#include "apps/smp-train/check.hpp"

#include "runtime/base/out_of_memory.hpp"
#include "runtime/device/cuda_driver.hpp"
#include "runtime/plan/planner.hpp"
#include "runtime/plan/schedule_plan.hpp"
#include "runtime/train/resume_plan.hpp"
#include "runtime/train/trainable.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <functional>

namespace smp::app {

std::vector<std::string> check(const train_config& x, std::string& partition) {
  std::vector<std::string> result;
  auto attempt = [&result](const std::function<void()>& f) {
    try {
      f();
    } catch (const error& e) {
      if (std::find(result.begin(), result.end(), e.what()) == result.end())
        result.emplace_back(e.what());
    }
  };
  auto begins = x;
  attempt([&] {
    auto data = make_data(x, replicas_of(x));
    if (plan_resume(x, *data))
      begins.train.init_from.clear(); // the run does not read it
  });
  attempt([&] {
    auto plan = plan_model(begins);
    begins.train.init_from.clear(); // it was compared with the model
    partition = plan.text;
    // Ranks may have room for what is too large for this process.
    if (!plan.failure.empty() && !is_out_of_memory(plan.failure))
      try_first_microbatch(x, plan.failure);
    if (!plan.evaluation.empty())
      fail_on_microbatch(x, "held-out microbatch, in evaluation mode",
                         plan.evaluation);
  });
  if (result.empty())
    attempt([&] { predict_schedule(begins); });
  return result;
}

std::string outlook_on_devices(const train_config& x) {
  auto ranks = ranks_of(x);
  auto text = fmt::format("devices: {} rank{} on ", ranks,
                          ranks > 1 ? "s" : "");
  auto& wanted = x.smp.device;
  if (wanted != "auto" && wanted != "cuda")
    return text + wanted + "\n";
  auto driver = ask_cuda_driver();
  if (!driver.problem.empty())
    return text + (wanted == "auto" ? "cpu: " : "cuda, but not here: ")
           + driver.problem + "\n";
  text += "cuda\n";
  for (size_t i = 0; i < std::min<size_t>(ranks, driver.gpus.size()); ++i) {
    std::vector<uint64_t> here;
    for (uint64_t rank = i; rank < ranks; rank += driver.gpus.size())
      here.push_back(rank);
    auto& gpu = driver.gpus[i];
    text += fmt::format("  cuda:{}  {}, {:.1f} GB: rank{} {}\n", i, gpu.name,
                        static_cast<double>(gpu.memory) * 1e-9,
                        here.size() > 1 ? "s" : "", fmt::join(here, ", "));
  }
  return text;
}

} // namespace smp::app
