#pragma once

// The autograd node of a call that ran on another rank.

#include "runtime/calls/messages.hpp"
#include "runtime/calls/promised_call.hpp"
#include "transport/ids.hpp"

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// The state that a remote call left at its owner, as the caller sees it.
struct sent_call {
  /// An argument that has a gradient: the dtype and sizes of that gradient.
  struct argument {
    uint32_t position = 0;
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> sizes;
    /// The request whose reply gives the sizes, with `output`; null: known.
    promised_request_ptr from = {};
    uint32_t output = 0;
  };

  rank_id owner;
  module_id module;
  std::string name;
  request_id id;
  step_id step;
  microbatch_id microbatch;
  /// One entry per edge of the node.
  std::vector<argument> arguments;
  /// Per input of the node: the position of its output.
  std::vector<uint32_t> outputs;
  uint32_t num_outputs = 0;
  /// Backward waits for the owner's reply.
  bool waits = true;
  /// Per output: positions of the arguments that its gradient reaches; empty if
  /// the owner did not report them. For a promise they arrive with its reply.
  reached_positions reaches;
  promised_request_ptr promise;
};

/// Backward of a remote call: runs at the owner, which kept the graph (R3).
class backward_node : public torch::autograd::Node {
public:
  explicit backward_node(sent_call x);

  std::string name() const override;

  void release_variables() override {
    // nop: the owner drops its side with the backward (R3)
  }

  torch::autograd::variable_list
  apply(torch::autograd::variable_list&& grads) override;

  /// A promise has no shape yet: {-1} rejects every gradient until the reply
  /// gives the sizes ({} would silently sum a gradient to a scalar, R40).
  /// @param sizes by output
  void set_shapes(const std::vector<std::vector<int64_t>>& sizes);

  /// @returns the edges that a gradient of input `nr` reaches.
  std::vector<uint32_t> reached(uint32_t nr) const;

private:
  /// A backward request and the gradients it sends to the owner.
  struct outgoing {
    backward_request asked;
    std::vector<object_id> needs;
    /// Must stay alive until the reply arrives.
    std::vector<promised_value_ptr> kept;
  };

  running_call& check() const;
  outgoing put(const torch::autograd::variable_list& grads,
               bool snapshot) const;
  call make_call(running_call& ex, outgoing x,
                 const std::vector<size_t>& wanted,
                 const std::vector<bool>& pushed) const;
  std::vector<bool>
  reached_by(const torch::autograd::variable_list& grads) const;
  torch::autograd::variable_list wait(running_call& ex,
                                      torch::autograd::variable_list grads);
  torch::autograd::variable_list promise(running_call& ex,
                                         torch::autograd::variable_list grads);

  sent_call call_;
};

} // namespace smp
