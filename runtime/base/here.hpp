#pragma once

#include "transport/error.hpp"

#include <c10/core/Device.h>

#include <array>
#include <cstddef>
#include <vector>

namespace smp {

class call_interceptor;
class call_observer;
class call_slot;
class rank_context;
class result_tracker;
class running_call;

inline constexpr size_t num_interceptors = 9;

/// What the calling thread works for. A thread that stops in the middle of an
/// execution may serve others meanwhile, so it sets all of this aside as a
/// whole.
struct here {
  const rank_context* rank = nullptr;
  /// Where that rank computes.
  c10::Device device{c10::kCPU};
  running_call* call = nullptr;
  /// Where the running module is shown.
  call_slot* slot = nullptr;
  /// By `interceptor`.
  std::array<call_interceptor*, num_interceptors> interceptors = {};
  call_observer* observer = nullptr;
  /// The calls that run, from the outermost to the innermost; null: not
  /// reported to `observer`.
  std::vector<const void*> observed;

  /// During a trace.
  result_tracker* tracker = nullptr;
  /// Of code that belongs to no execution.
  failure first_error;

  static here& of_thread() noexcept {
    thread_local here result;
    return result;
  }
};

} // namespace smp
