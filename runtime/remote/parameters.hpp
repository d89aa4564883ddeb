#pragma once

#include "actors/protocol/request.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/remote/messages.hpp"
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

class execution;
class model_map;
class promise_book;
class rank_context;

/// Parameters and buffers of the model that other ranks own (R14): reads and
/// writes by whoever touches their placeholders here, gradients for them.
class remote_parameters final : public placeholder_source {
public:
  remote_parameters(const rank_context& rank, const model_map& map,
                    const promise_book& promises);

  ~remote_parameters() override;

  /// Frees the bytes of a tensor that another rank owns.
  void replace(uint32_t tensor);

  // -- placeholder_source -----------------------------------------------------

  uint32_t position(const at::Tensor& x) const override;

  bool is_buffer(uint32_t tensor) const override;

  /// The value of a tensor of another rank, as a copy whose gradient goes to
  /// its owner. Parameters are fetched once per step, buffers each time. (In
  /// steps that are replayed with promises once per execution: which one comes
  /// first is a matter of timing there.)
  /// Parks; only inside a step.
  at::Tensor fetch(uint32_t tensor) override;

  /// Gives a buffer of another rank a new value. Parks; only inside a step.
  void store(uint32_t tensor, const at::Tensor& x) override;

  /// A view of a fetched copy may be written into when nobody looks: `flush`
  /// compares the bits and takes changes to the owner.
  /// @param copy what `fetch` returned
  void lend(uint32_t tensor, const at::Tensor& copy) override;

  [[noreturn]] void refuse_write(uint32_t tensor,
                                 const std::string& op) const override;

  bool run_at_owner(const c10::OperatorHandle& op,
                    torch::jit::Stack& stack) override;

  // -- steps ------------------------------------------------------------------

  /// Settles what the calling execution was lent: before it asks anything of
  /// another rank, and before it ends. Parks if something changed.
  /// @throws error (unsupported) if the copy of a parameter was changed
  void flush();

  /// Forgets the copies.
  void end_step();

private:
  execution& executing(uint32_t tensor) const;

  /// @returns a request about one tensor, for its owner
  call ask(const parameter_request& x, const char* what) const;

  struct copy {
    std::shared_ptr<awaited<at::Tensor>> value;
    at::Tensor known; // once it is here
    uint32_t version = 0;
  };

  const rank_context& rank_;
  const model_map& map_;
  const promise_book& promises_;
  /// What takes gradients to their owners.
  std::vector<std::shared_ptr<torch::autograd::Node>> gradients_;
  std::mutex mutex_;
  /// By tensor and, where each execution has its own, that execution.
  std::map<std::pair<uint32_t, request_id>, copy> copies_;
};

} // namespace smp
