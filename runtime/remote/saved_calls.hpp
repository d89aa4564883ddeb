#pragma once

#include "runtime/remote/call_states.hpp"
#include "runtime/remote/call_streams.hpp"
#include "transport/ids.hpp"

#include <torch/csrc/autograd/edge.h>

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace smp {

/// What an owner keeps of a forward call until its backward: where gradients
/// of the outputs enter the graph, and the leaves where those of the inputs
/// come out. Gradient edges, not output tensors: else every activation would
/// be held twice (R3).
struct saved_call {
  /// Per output tensor of the call; invalid where no gradient can enter.
  std::vector<torch::autograd::Edge> outputs;
  /// Per input tensor; undefined where no gradient is wanted.
  std::vector<at::Tensor> leaves;
  /// Path of the module, for errors.
  std::string module;
  /// Of its random numbers, and those of the calls in it (R23).
  uint64_t path = 0;
  std::vector<call_streams::made_call> made;
};

/// Saved calls by (step, microbatch, call). Thread-safe: executions add and
/// take, the actors drop whole microbatches.
class saved_calls {
public:
  void put(step_id s, microbatch_id m, request_id call,
           std::shared_ptr<saved_call> x);

  /// @returns null if nothing is saved under that name.
  /// @param keep leave it for another backward
  std::shared_ptr<saved_call> take(step_id s, microbatch_id m, request_id call,
                                   bool keep);

  /// Keeps what a call found in `module`, for when it is computed again (R52).
  /// @param path of the call, see `call_streams`
  void put_state(step_id s, microbatch_id m, uint64_t path, module_id module,
                 module_state x);

  /// @returns null if nothing was kept of that call.
  std::shared_ptr<const module_state>
  state(step_id s, microbatch_id m, uint64_t path, module_id module) const;

  /// Drops what a microbatch left behind.
  void drop(step_id s, microbatch_id m);

  /// Drops everything.
  void clear();

  size_t size() const;

private:
  using microbatch_key = std::pair<step_id, microbatch_id>;

  mutable std::mutex mutex_;
  std::map<microbatch_key, std::map<request_id, std::shared_ptr<saved_call>>>
    calls_;
  std::map<microbatch_key, std::map<std::pair<uint64_t, module_id>,
                                    std::shared_ptr<const module_state>>>
    states_;
};

} // namespace smp
