#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace smp {

/// Consecutive layers take the same masks and attend to the same hidden states;
/// each would exchange them again, and keep another copy for backward. So what
/// one layer received for a tensor is kept here for the others of the same
/// execution, as long as the tensor exists and is not written to. The gradients
/// of all of them are added up before they travel.
///
/// Peers run the same code, so if one finds an entry, all do.
class entered_tensors {
public:
  /// What the samples of this peer turn into.
  enum class form : uint8_t {
    whole, // those of all peers
    part,  // those of all peers, a part of the channels
    mask   // those of all peers, for the heads of this peer
  };

  /// @param samples number of this peer's samples that `x` is for
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
    /// Keeps the address from being reused.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    int64_t version = 0;
    bool has_gradient = false;
    form how = form::whole;
    int64_t samples = 0;
    at::Tensor entered;
  };

  std::vector<entry> entries_;
};

/// @param enter exchanges `x` by one collective
/// @returns what another module of the calling thread's execution received for
/// `x`, or else the result of `enter`
at::Tensor enter_once(const at::Tensor& x, entered_tensors::form how,
                      int64_t samples,
                      const std::function<at::Tensor()>& enter);

} // namespace smp
