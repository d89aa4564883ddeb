#pragma once

#include "actors/protocol/request.hpp"
#include "runtime/base/random_stream.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace smp {

class engine;
class promised_request;

/// What the calling thread executes: a microbatch of the step body, or a
/// request of another rank. Remote calls, random numbers and errors belong to
/// it. Only the thread that executes touches it.
class execution {
public:
  virtual ~execution() = default;

  /// Gives the token back until the answer is there.
  /// @throws error with the first failure of this execution (R6); from then on
  /// every call of this execution throws it
  virtual response park(call x) = 0;

  /// Sends the promise `x` and goes on.
  /// @throws error with the first failure of this execution
  virtual void send(call x) = 0;

  engine* eng = nullptr;
  step_id step;
  microbatch_id microbatch;

  /// What this executes, as the MODULE SERVER knows it.
  request_id id;

  /// Requests that this execution sent.
  uint32_t requests = 0;

  /// How many microbatches of the step were started before this one.
  uint64_t turn = 0;

  /// Numbers the remote calls of this execution.
  uint64_t calls = 0;

  /// The microbatch's random stream when it last came or went (R23); while
  /// this executes, the default generator holds the stream itself.
  random_stream last_stream{0};

  /// `last_stream` is the one that every rank derives by itself, so that a
  /// request need not carry it.
  bool stream_is_initial = true;

  /// Set while `distributed_model::backward` or a backward request runs the
  /// autograd engine (R16).
  bool in_backward = false;

  /// The grant for the backward phase came (R4: once per microbatch).
  bool granted = false;

  /// True for the step body on pp_rank 0.
  bool is_root = false;

  /// It met state that calls of others may change, or changed such: its place
  /// among the calls of its microbatch matters.
  bool stateful = false;

  /// What it sent and did not wait for (runtime/remote/promised_call.hpp).
  std::vector<std::shared_ptr<promised_request>> outstanding;

  /// Promises that its calls returned.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> promises;

  /// The first failure (R6): what the rank reports whatever user code catches.
  failure first_error;

  /// Module whose code runs, for error texts; empty in the step body.
  std::string module_path;

  /// A fetched copy of another rank's buffer that something here still holds
  /// (`model_state::lend`).
  struct lent_copy {
    uint32_t tensor = 0;
    at::Tensor copy;
    at::Tensor content; // what the owner has
  };
  std::vector<lent_copy> lent;

  /// A Sequential that handed a range of children over and now lets the
  /// others pass (runtime/intercept/sequential.cpp).
  struct range_marker {
    const void* sequential = nullptr;
    size_t next = 0;
    size_t last = 0;
    /// The value that moves through holds the only reference to its tensor.
    bool exclusive = false;
  } range;

  /// @returns the execution of the calling thread, or null.
  static execution* current() noexcept;

  /// Makes `x` the execution of the calling thread.
  static void set_current(execution* x) noexcept;
};

} // namespace smp
