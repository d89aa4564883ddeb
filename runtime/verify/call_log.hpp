#pragma once

// What a run did in one step, in the compact form in which two runs are
// compared: which calls ran, their arguments, results and gradients of results,
// and which microbatches went through.

#include "runtime/intercept/call_observer.hpp"
#include "runtime/verify/tensor_digest.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace smp {

/// A gradient that backward computed for a result of a call.
struct logged_gradient {
  uint32_t tensor = 0; // position among the results
  uint64_t order = 0;  // among all gradients of its logger
  tensor_digest value;
  uint64_t node = 0; // number of the autograd node that made the tensor
};

/// One call of a module.
struct logged_call {
  std::string module; // path
  uint64_t microbatch = 0;
  uint64_t number = 0;   // of this module's calls in this microbatch, from 0
  bool repeated = false; // by code that backward runs, as for checkpointing
  /// When it began and ended, as numbers of events of its logger.
  uint64_t begun = 0, ended = 0;
  /// Numbers of the autograd nodes made in the meantime: from `first_node`,
  /// below `end_node`.
  uint64_t first_node = 0, end_node = 0;
  uint64_t rank = 0; // that ran it; set when logs are gathered
  /// Position of the enclosing call, if that was logged, too.
  std::optional<uint32_t> outer;
  /// Positions of the calls that got a result of this one as an argument.
  std::vector<uint32_t> used_by;
  /// Nothing for a tensor that is elsewhere.
  std::vector<std::optional<tensor_digest>> arguments;
  std::vector<std::optional<tensor_digest>> results;
  std::vector<logged_gradient> gradients;
};

/// One run of the step's body.
struct logged_pass {
  uint64_t microbatch = 0;
  std::vector<tensor_digest> inputs;
  std::vector<tensor_digest> results; // the loss, or what the body returns
  /// The gradients of the results that backward began with, one per backward.
  std::vector<tensor_digest> seeds;
};

struct observed_step {
  std::vector<logged_call> calls; // in the order in which they began
  std::vector<logged_pass> passes;
};

template <class Inspector>
bool inspect(Inspector& f, logged_gradient& x) {
  return f.object(x).fields(f.field("tensor", x.tensor),
                            f.field("value", x.value));
}

/// The order of calls, enclosing calls, users and autograd nodes are read from
/// the reference's log only, which is never sent.
template <class Inspector>
bool inspect(Inspector& f, logged_call& x) {
  return f.object(x).fields(
    f.field("module", x.module), f.field("microbatch", x.microbatch),
    f.field("number", x.number), f.field("repeated", x.repeated),
    f.field("arguments", x.arguments), f.field("results", x.results),
    f.field("gradients", x.gradients));
}

template <class Inspector>
bool inspect(Inspector& f, logged_pass& x) {
  return f.object(x).fields(
    f.field("microbatch", x.microbatch), f.field("inputs", x.inputs),
    f.field("results", x.results), f.field("seeds", x.seeds));
}

template <class Inspector>
bool inspect(Inspector& f, observed_step& x) {
  return f.object(x).fields(f.field("calls", x.calls),
                            f.field("passes", x.passes));
}

/// Makes an `observed_step` of what it observes. Thread-safe.
class call_logger final : public call_observer {
public:
  call_logger();

  ~call_logger() override;

  /// Sets the microbatch of the following calls, outside of an execution.
  void set_microbatch(uint64_t x);

  /// @param name returns the path of a module; calls of modules without a path
  /// are left out
  /// @returns what was logged since the last `take`
  observed_step
  take(const std::function<std::optional<std::string>(const void*)>& name);

  // -- call_observer ----------------------------------------------------------

  void begin(const void* object,
             std::span<const at::Tensor> arguments) override;

  void end(const void* object, std::span<const at::Tensor> results) override;

  void fail(const void* object) override;

  void body_done(std::span<const at::Tensor> inputs,
                 std::span<const at::Tensor> results) override;

  void take_back() override;

private:
  struct state;

  /// Hooks in autograd graphs may outlive this.
  std::shared_ptr<state> state_;
};

} // namespace smp
