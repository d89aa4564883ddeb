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
  /// An argument that has a gradient.
  struct argument {
    uint32_t position = 0;
    tensor_meta gradient;
    /// The request whose reply gives the sizes, with `output`; null: known.
    sent_request_ptr from = {};
    uint32_t output = 0;
  };

  request_id id;
  step_id step;
  microbatch_id microbatch;
  /// One entry per edge of the node.
  std::vector<argument> arguments;
  /// Per input of the node: the position of its output.
  std::vector<uint32_t> outputs;
  uint32_t num_outputs = 0;
  /// The call; once done, it tells which arguments a gradient reaches.
  sent_request_ptr request;
  /// Backward waits for the owner's reply.
  bool waits = true;
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
  /// @param results by output
  void set_shapes(const std::vector<tensor_meta>& results);

  /// @returns the edges that a gradient of input `nr` reaches.
  std::vector<uint32_t> reached(uint32_t nr) const;

private:
  running_call& check() const;
  std::vector<size_t> wanted(const torch::autograd::variable_list& grads) const;
  call make_call(running_call& ex, const torch::autograd::variable_list& grads,
                 const std::vector<size_t>& wanted, bool waits,
                 sent_request& request) const;
  at::Tensor promise(const running_call& ex, const sent_request_ptr& request,
                     uint32_t position, const sent_call::argument& x) const;

  sent_call call_;
};

} // namespace smp
