#pragma once

// Models that come as TorchScript files, exported from Python:
//
//   smp::distributed_model model{smp::load_script("model.pt")};
//   auto train_step = smp::step([&](torch::Tensor x, torch::Tensor y) {
//     auto loss = smp::loss_of(model(x, y)); // forward(x, y)
//     model.backward(loss);
//     return loss;
//   });
//
// The requirements on such a file, and its limits: docs/torchscript.md.

#include "runtime/session/distributed_model.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

// <torch/script.h> takes ten seconds to compile; programs with such a model
// include it themselves.
namespace c10 {
struct IValue;
} // namespace c10
namespace torch::jit {
struct Module;
} // namespace torch::jit

namespace smp {

namespace detail {

/// T, but resolved only where a template that takes Ts is used: it may be
/// incomplete before.
template <class T, class...>
struct known_later {
  using type = T;
};

} // namespace detail

/// Loads a file that Python's `torch.jit.save` wrote for a scripted or traced
/// module with its module tree. Every rank loads the file itself.
/// @throws error (config) naming the file and how to export it right, if it is
/// missing, not TorchScript, or frozen or inlined, which leaves nothing to
/// split
torch::jit::Module load_script(const std::string& path);

/// The loss in the result of a model's forward.
/// @throws error (unsupported) if that is neither a tensor nor a tuple whose
/// first element is one
at::Tensor loss_of(const c10::IValue& x);

/// Places a TorchScript module and all modules below it on a pp_rank
/// (manual placement); before the partition.
/// @throws error (unsupported) after the partition
void set_partition(const torch::jit::Module& x, uint32_t pp_rank);

/// Sets whether tensor-parallel ranks share a TorchScript module with all below
/// it (docs/tensor_parallel.md); before the partition, on rank 0 at least.
/// @param how for a shared module: its own or its nearest ancestor's
/// @throws error (config) if invalid or without effect; (unsupported) after the
/// partition
void set_tensor_parallelism(const torch::jit::Module& x, bool enabled = true,
                            const tensor_parallel_config& how = {});

/// A TorchScript model, of which each rank will own a part. The module's code
/// is rewritten in memory at the partition; the file stays unchanged, and
/// parameters keep their names from the file.
template <>
class distributed_model<torch::jit::Module> : public distributed_model_base {
public:
  /// @param model freshly loaded: none of its methods may have run yet
  explicit distributed_model(torch::jit::Module model);
  ~distributed_model() override;

  /// Calls the model's forward, inside a step body.
  /// @returns an IValue
  template <class... Ts>
  auto operator()(Ts&&... xs) {
    using type = typename detail::known_later<c10::IValue, Ts...>::type;
    return run("forward", std::vector<type>{type{std::forward<Ts>(xs)}...});
  }

  /// Calls a method of the model, inside a step body.
  /// @throws error (user_code) with the failed module, wherever it lives
  c10::IValue run(const std::string& method, std::vector<c10::IValue> args);

  torch::jit::Module* operator->() {
    return model_.get();
  }

  torch::jit::Module& operator*() {
    return *model_;
  }

  torch::jit::Module& module() noexcept {
    return *model_;
  }

private:
  std::unique_ptr<torch::jit::Module> model_;
};

} // namespace smp
