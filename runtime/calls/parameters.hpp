#pragma once

#include "actors/protocol/request.hpp"
#include "runtime/calls/messages.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "transport/wait.hpp"

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torch::autograd {
struct Node;
} // namespace torch::autograd

namespace smp {

class running_call;
class model_map;
class promise_book;
class rank_context;

/// Parameters and buffers of the model that other ranks own (R14): serves reads
/// and writes of their placeholders here and sends them their gradients.
class remote_parameters final : public placeholder_source {
public:
  remote_parameters(const rank_context& rank, const model_map& map,
                    const promise_book& promises);

  ~remote_parameters() override;

  /// Frees the storage of a tensor that another rank owns.
  void replace(uint32_t tensor);

  // -- placeholder_source -----------------------------------------------------

  uint32_t position(const at::Tensor& x) const override;

  bool is_buffer(uint32_t tensor) const override;

  /// The value of another rank's tensor, as a copy whose gradient goes to its
  /// owner. Parameters are fetched once per step; buffers, and parameters that
  /// calls change, each time. (Steps replayed with promises fetch parameters
  /// once per execution, as there the order of executions depends on timing.)
  /// Parks; only inside a step.
  at::Tensor fetch(uint32_t tensor) override;

  /// Writes a new value to another rank's buffer. Parks; only inside a step.
  void store(uint32_t tensor, const at::Tensor& x) override;

  /// A view of a fetched copy may be written to unnoticed: `flush` compares the
  /// bits and sends changes to the owner.
  /// @param copy the tensor that `fetch` returned
  void lend(uint32_t tensor, const at::Tensor& copy) override;

  [[noreturn]] void refuse_write(uint32_t tensor,
                                 const std::string& op) const override;

  bool run_at_owner(const c10::OperatorHandle& op,
                    torch::jit::Stack& stack) override;

  // -- steps ------------------------------------------------------------------

  /// Settles the copies lent to the calling execution: before it sends a
  /// request to another rank, and before it ends. Parks if a copy changed.
  /// @throws error (unsupported) if the copy of a parameter was changed
  void flush();

  /// Drops the fetched copies.
  void end_step();

private:
  running_call& executing(uint32_t tensor) const;

  /// @returns a request about one tensor, addressed to its owner
  call ask(const parameter_request& x, const char* what) const;

  struct copy {
    std::shared_ptr<awaited<at::Tensor>> value;
    at::Tensor known; // once it is here
    uint32_t version = 0;
  };

  const rank_context& rank_;
  const model_map& map_;
  const promise_book& promises_;
  /// The autograd nodes that send gradients to their owners.
  std::vector<std::shared_ptr<torch::autograd::Node>> gradients_;
  std::mutex mutex_;
  /// By tensor and, where each execution has its own, that execution.
  std::map<std::pair<uint32_t, request_id>, copy> copies_;
};

} // namespace smp
