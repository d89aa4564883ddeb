#pragma once

#include "actors/protocol/rank_services.hpp"

#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace smp {

/// Services out of functions; those that a test does not set do nothing.
struct function_services : rank_services {
  std::shared_ptr<smp::executor> make_executor() override {
    return executor();
  }

  schedule_ptr make_schedule(uint64_t microbatches) override {
    return schedule(microbatches);
  }

  std::vector<module_id> ordered_modules(const request& x) override {
    return ordered ? ordered(x) : std::vector<module_id>{};
  }

  std::string module_name(module_id x) override {
    return name ? name(x) : std::string{};
  }

  void microbatch_over(step_id step, microbatch_id x) override {
    if (over)
      over(step, x);
  }

  std::function<std::shared_ptr<smp::executor>()> executor;
  std::function<schedule_ptr(uint64_t)> schedule = [](uint64_t n) {
    return smp::make_schedule("interleaved", n, 4);
  };
  std::function<std::vector<module_id>(const request&)> ordered;
  std::function<std::string(module_id)> name;
  std::function<void(step_id, microbatch_id)> over;
};

} // namespace smp
