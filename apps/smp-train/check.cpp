#include "apps/smp-train/check.hpp"

#include "runtime/base/out_of_memory.hpp"
#include "runtime/plan/planner.hpp"
#include "runtime/plan/schedule_plan.hpp"
#include "runtime/train/resume_plan.hpp"
#include "runtime/train/trainable.hpp"
#include "transport/error.hpp"

#include <algorithm>
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

} // namespace smp::app
