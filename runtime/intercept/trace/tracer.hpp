#pragma once

// Tracing (paper, appendix "Tracing"): before the partition, pp_rank 0 runs the
// forward phase of the first microbatch alone, to measure the order in which
// modules run, their time and their memory.

#include "partition/trace.hpp"
#include "runtime/base/random_stream.hpp"
#include "runtime/intercept/call_scope.hpp"
#include "runtime/intercept/trace/call_times.hpp"
#include "runtime/intercept/trace/result_tracker.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

class state_before_trace;
struct walked_model;

/// What to trace, see `smp.trace_*`.
struct trace_options {
  bool gpu = false; // modules run on `device` from the start
  /// That of the rank; the host: the first GPU, if there is one. Modules that
  /// cannot run on the host are measured there as well.
  c10::Device device{c10::kCPU};
  bool times = true;
  bool memory = true;
};

/// Runs `body`, the forward phase of a microbatch, and measures what its
/// modules do. Parameters, buffers and random numbers are restored afterwards;
/// other state of modules is not. An exception of `body` ends the trace and is
/// stored in the result.
/// If there is no room on the GPU, all runs once more, on the host.
/// @param body may be called several times: what it computes outside of the
/// model is slow the first time
/// @param stream random numbers of the microbatch
/// @throws error (config) if it is to run on a GPU and there is none, and
/// config errors of `body`: they affect everything that follows
trace_result trace_forward(const walked_model& model,
                           const trace_options& options, random_stream stream,
                           const std::function<void()>& body);

/// Measures the calls of one trace, on one thread.
class tracer final : public call_interceptor {
public:
  ~tracer() override;

  tracer(const tracer&) = delete;
  tracer& operator=(const tracer&) = delete;

  /// @returns the tracer of the calling thread, or null.
  static tracer* current() noexcept;

  /// Thrown to leave the body of a step; not a std::exception, so that user
  /// code does not catch it.
  struct finished {};

  /// The forward phase is over.
  [[noreturn]] void finish() const {
    throw finished{};
  }

  /// Whether this pass finds out what calls do: others only take times.
  bool counts() const noexcept;

  /// @returns a copy of an input of the step: the body may change it.
  at::Tensor input(const at::Tensor& x) const;

  // See runtime/intercept/trace/trace_notes.hpp.
  void note_outside_call(const torch::nn::Module& x);
  void note_unsendable(const error& why);

  bool may_retry_on_gpu() const noexcept {
    return !options_.gpu && !options_.device.is_cpu();
  }

  /// See runtime/intercept/trace/retry_on_gpu.hpp.
  std::vector<at::Tensor>
  retry_on_gpu(torch::nn::Module& module, const std::vector<at::Tensor>& xs,
               const std::function<
                 std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& f);

  // -- call_interceptor -------------------------------------------------------

  void enter(const intercepted_call& x) override;

  bool looks() const noexcept override {
    return true;
  }

  void arguments(const intercepted_call& x, const void* object,
                 std::span<const at::Tensor> xs) override;

  void results(const intercepted_call& x,
               std::span<const at::Tensor> xs) override;

  void leave(const intercepted_call& x, bool failed) override;

private:
  friend class traced_model_call;
  friend trace_result trace_once(const walked_model&, const trace_options&,
                                 random_stream, const std::function<void()>&);

  /// The purpose of the current pass.
  enum class pass : uint8_t {
    all,   // the only one
    count, // memory, transfers and order; warms up caches and thread pools
    time,
    none,
  };

  struct frame {
    module_id module;
    /// The module was entered twice for one call.
    bool again = false;
    size_t call = 0;  // in `times_`
    int64_t live = 0; // bytes at its start
    int64_t kept = 0; // bytes kept by its callees
    int64_t peak = 0; // bytes of its own
    passed_tensors arguments;
  };

  struct memory_meter;

  tracer(const walked_model& model, const trace_options& options,
         random_stream stream);

  void enter(module_id x);
  void leave();
  /// @returns the module that called the innermost one; nullopt: the step
  std::optional<module_id> caller() const;
  void add_bytes(std::span<const at::Tensor> xs);
  void note_arguments(std::span<const at::Tensor> xs);
  void on_memory();
  void note_returned(const intercepted_call& x, std::span<const at::Tensor> xs);
  void track_results(bool on);
  /// Undoes the changes of a pass to the model.
  void restore();
  /// The forward phase is over, or has failed.
  /// @returns seconds outside of repeated calls, by module
  std::vector<double> end_run();
  void take_fastest(const std::vector<double>& seconds);
  bool wants_body_again() const;
  void time_body_again(const std::function<void()>& body);

  const walked_model& model_;
  trace_options options_;
  pass pass_ = pass::all;
  std::vector<frame> stack_;
  trace_result result_;
  call_times times_;
  std::vector<double> once_;     // the least seconds in other calls, by module
  std::vector<double> repeated_; // seconds in repeated calls, by module
  uint64_t order_ = 0;
  bool unwinding_ = false;
  std::set<std::string> outside_; // types
  std::unique_ptr<memory_meter> memory_;
  std::unique_ptr<result_tracker> tracker_;
  std::unique_ptr<state_before_trace> saved_;
};

} // namespace smp
