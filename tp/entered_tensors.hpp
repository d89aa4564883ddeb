#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace smp {

/// Layers behind each other take the same masks, and attend to the same hidden
/// states; each would exchange them again, and keep what came for backward once
/// more. So what one of them made of a tensor is here for the others of the
/// same execution, while the tensor is there and nobody writes to it. Gradients
/// of all of them are added up before they travel.
///
/// Peers run the same code, so where one finds something, all do.
class entered_tensors {
public:
  /// What becomes of the samples of this peer.
  enum class form : uint8_t {
    whole, // those of all peers
    part,  // those of all peers, a part of the channels
    mask   // those of all peers, for the heads of this one
  };

  /// @param samples of this peer, for which it is
  /// @returns an undefined tensor if there is nothing
  at::Tensor find(const at::Tensor& x, form how, int64_t samples);

  /// @param entered what `x` became
  void add(const at::Tensor& x, form how, int64_t samples,
           const at::Tensor& entered);

  void clear() noexcept {
    entries_.clear();
  }

private:
  struct entry {
    /// Keeps the address from being used again.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    int64_t version = 0;
    bool has_gradient = false;
    form how = form::whole;
    int64_t samples = 0;
    at::Tensor entered;
  };

  std::vector<entry> entries_;
};

/// @param enter makes it of `x` by one collective
/// @returns what another module of the calling thread's execution made of `x`,
/// or else what `enter` gives
at::Tensor enter_once(const at::Tensor& x, entered_tensors::form how,
                      int64_t samples,
                      const std::function<at::Tensor()>& enter);

} // namespace smp
