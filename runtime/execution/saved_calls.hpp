#pragma once

#include "runtime/execution/call_states.hpp"
#include "runtime/execution/call_streams.hpp"
#include "transport/ids.hpp"

#include <torch/csrc/autograd/edge.h>

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace smp {

/// The part of a forward call that its owner keeps until backward: where
/// gradients of the outputs enter the graph, and the leaves where gradients of
/// the inputs come out. Gradient edges, not output tensors: those would hold
/// every activation twice (R3).
struct saved_call {
  /// Per output tensor of the call; invalid where no gradient can enter.
  std::vector<torch::autograd::Edge> outputs;
  /// Per input tensor; undefined where no gradient is wanted.
  std::vector<at::Tensor> leaves;
  /// Path of the module, for errors.
  std::string module;
  /// Path for its random numbers, and the calls made inside it (R23).
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

  /// Keeps the state a call found in `module`, for its recomputation (R52).
  /// @param path of the call, see `call_streams`
  void put_state(step_id s, microbatch_id m, uint64_t path, module_id module,
                 module_state x);

  /// @returns null if nothing was kept of that call.
  std::shared_ptr<const module_state>
  state(step_id s, microbatch_id m, uint64_t path, module_id module) const;

  /// Drops the calls and states of a microbatch.
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
