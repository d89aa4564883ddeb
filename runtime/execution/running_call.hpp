#pragma once

#include "actors/protocol/request.hpp"
#include "runtime/execution/call_states.hpp"
#include "runtime/execution/call_streams.hpp"
#include "runtime/execution/recompute_pass.hpp"
#include "tp/entered_tensors.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp {

class executor;
class rank_context;
class sent_request;

/// The unit of work that a thread executes: a microbatch of the step body, or a
/// request of another rank. Owns the remote calls, random numbers and errors of
/// that work. Only the executing thread touches it.
class running_call {
public:
  /// Both outlive this.
  running_call(const rank_context& rank, smp::executor& where)
    : rank_(rank), executor_(where) {
    // nop
  }

  running_call(const running_call&) = delete;
  running_call& operator=(const running_call&) = delete;

  /// Makes this execute `x` from now on.
  /// @param seed of the microbatch
  void begin(const request& x, uint64_t seed);

  void end();

  // -- what it is -------------------------------------------------------------

  const rank_context& rank() const noexcept {
    return rank_;
  }

  /// Sends its remote calls, and parks it.
  smp::executor& executor() const noexcept {
    return executor_;
  }

  step_id step() const noexcept {
    return step_;
  }

  microbatch_id microbatch() const noexcept {
    return microbatch_;
  }

  /// The request this executes, as the MODULE SERVER identifies it.
  request_id id() const noexcept {
    return id_;
  }

  /// Number of microbatches of the step that started before this one.
  uint64_t start_number() const noexcept {
    return start_number_;
  }

  /// True for the step body on pp_rank 0.
  bool is_root() const noexcept {
    return is_root_;
  }

  // -- its remote calls -------------------------------------------------------

  /// Number of requests that this execution sent.
  uint32_t requests() const noexcept {
    return requests_;
  }

  void count_request() noexcept {
    ++requests_;
  }

  /// Records `x`, which was sent and not awaited.
  void add_outstanding(std::shared_ptr<sent_request> x) {
    outstanding_.push_back(std::move(x));
  }

  std::vector<std::shared_ptr<sent_request>> take_outstanding() {
    return std::exchange(outstanding_, {});
  }

  /// A call returned the promise `x`.
  void add_promise(const at::Tensor& x) {
    promises_.emplace_back(x.getIntrusivePtr());
  }

  /// @returns the promises that are still referenced.
  std::vector<at::Tensor> take_promises();

  // -- random numbers (R23) ---------------------------------------------------

  call_streams& streams() noexcept {
    return streams_;
  }

  // -- activation checkpointing (R52) -----------------------------------------

  /// How activations computed now are treated: kept or recomputed.
  const recompute_pass& pass() const noexcept {
    return pass_;
  }

  /// The region whose code is running, see `model_map::recomputed`; 0: none.
  uint32_t region() const noexcept {
    return region_;
  }

  /// The module states that this execution changes or restores.
  call_states& states() noexcept {
    return states_;
  }

  class pass_scope {
  public:
    pass_scope(running_call& ex, const recompute_pass& x, uint32_t region)
      : execution_(ex),
        pass_(std::exchange(ex.pass_, x)),
        region_(std::exchange(ex.region_, region)),
        entered_(std::exchange(ex.entered_, {})) {
      ex.streams_.draw_others(x.numbers);
    }
    ~pass_scope() {
      execution_.pass_ = pass_;
      execution_.region_ = region_;
      execution_.entered_ = std::move(entered_);
      execution_.streams_.draw_others(pass_.numbers);
    }
    pass_scope(const pass_scope&) = delete;
    pass_scope& operator=(const pass_scope&) = delete;

  private:
    running_call& execution_;
    recompute_pass pass_;
    uint32_t region_;
    entered_tensors entered_;
  };

  // -- modules that ranks share (R50) -----------------------------------------

  /// Tensors that shared modules derived; a recomputation derives them again.
  entered_tensors& entered() noexcept {
    return entered_;
  }

  /// The Sequential whose children smp's code is calling back to back, so that
  /// no other code sees the values between them. Null: none.
  const void* row() const noexcept {
    return row_;
  }

  class row_scope {
  public:
    row_scope(running_call& ex, const void* sequential)
      : execution_(ex), before_(std::exchange(ex.row_, sequential)) {
      // nop
    }
    ~row_scope() {
      execution_.row_ = before_;
    }
    row_scope(const row_scope&) = delete;
    row_scope& operator=(const row_scope&) = delete;

  private:
    running_call& execution_;
    const void* before_;
  };

  // -- phases -----------------------------------------------------------------

  /// True while `distributed_model::backward` or a backward request runs the
  /// autograd engine (R16).
  bool in_backward() const noexcept {
    return in_backward_;
  }

  class backward_scope {
  public:
    explicit backward_scope(running_call& x)
      : execution_(x), before_(std::exchange(x.in_backward_, true)) {
      x.entered_.clear(); // what follows is of another graph
    }
    ~backward_scope() {
      execution_.in_backward_ = before_;
    }
    backward_scope(const backward_scope&) = delete;
    backward_scope& operator=(const backward_scope&) = delete;

  private:
    running_call& execution_;
    bool before_;
  };

  /// @returns true once per microbatch: its backward phase must be granted
  /// (R4).
  bool needs_grant() noexcept {
    return !std::exchange(granted_, true);
  }

  /// True if it read or changed state that other calls may change: its position
  /// among the calls of its microbatch matters.
  bool met_state() const noexcept {
    return met_state_;
  }

  void note_state() noexcept {
    met_state_ = true;
  }

  // -- errors -----------------------------------------------------------------

  /// The first failure (R6). The rank reports it even if user code catches it.
  const failure& first_error() const noexcept {
    return first_error_;
  }

  /// Keeps `x` if it is the first one.
  void keep_error(failure x);

  /// @returns `x` with this rank and the running module filled in where it
  /// names none.
  failure here(failure x) const;

  /// Path of the running module, for error texts; empty in the step body.
  const std::string& module_path() const noexcept {
    return module_path_;
  }

  /// @returns the previous path
  std::string enter_module(std::string path) {
    return std::exchange(module_path_, std::move(path));
  }

  // -- what its calls leave for later ones ------------------------------------

  /// A fetched copy of another rank's buffer that is still referenced here
  /// (`remote_parameters::lend`).
  struct lent_copy {
    uint32_t tensor = 0;
    at::Tensor copy;
    at::Tensor content; // content at the owner
  };

  void add_lent(lent_copy x) {
    lent_.push_back(std::move(x));
  }

  std::vector<lent_copy> take_lent() {
    return std::exchange(lent_, {});
  }

  /// A Sequential that handed a range of children over as one call and now
  /// skips the other children of that range (runtime/intercept/sequential.cpp).
  struct range_marker {
    const void* sequential = nullptr;
    size_t next = 0;
    size_t last = 0;
    /// The value passing through holds the only reference to its tensor.
    bool exclusive = false;
  };

  void begin_range(const range_marker& x) noexcept {
    range_ = x;
  }

  const range_marker& range() const noexcept {
    return range_;
  }

  /// The next child of the range has passed its value on unchanged.
  void pass_child() noexcept {
    if (++range_.next == range_.last)
      range_ = {};
  }

  /// @returns whether a range was open, with children that were not passed yet.
  bool end_range() noexcept {
    return std::exchange(range_, {}).sequential != nullptr;
  }

  /// @returns the execution of the calling thread, or null.
  static running_call* current() noexcept;

  /// Makes `x` the execution of the calling thread.
  static void set_current(running_call* x) noexcept;

private:
  const rank_context& rank_;
  smp::executor& executor_;
  step_id step_;
  microbatch_id microbatch_;
  request_id id_;
  uint64_t start_number_ = 0;
  bool is_root_ = false;
  uint32_t requests_ = 0;
  std::vector<std::shared_ptr<sent_request>> outstanding_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> promises_;
  call_streams streams_;
  call_states states_;
  recompute_pass pass_;
  uint32_t region_ = 0;
  entered_tensors entered_;
  const void* row_ = nullptr;
  bool in_backward_ = false;
  bool granted_ = false;
  bool met_state_ = false;
  failure first_error_;
  std::string module_path_;
  std::vector<lent_copy> lent_;
  range_marker range_;
};

} // namespace smp
