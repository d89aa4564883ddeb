#pragma once

// The tensors behind delay_param_initialization.hpp: everything of a tensor but
// its bytes, and how to compute those.

#include "runtime/deferred/captured_ops.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <mutex>
#include <vector>

namespace smp {

/// A key made for this (torchdistx), unused in LibTorch 2.11; it is above
/// autograd and autocast, and below the key of placeholder.cpp.
inline constexpr auto deferred_key = c10::DispatchKey::DeferredInit;

/// Capture and replay are rare, and use the one generator of the process.
std::recursive_mutex& capture_mutex();

class deferred_impl;

/// Memory that does not exist yet, with the tensors that are views of it.
struct future_memory {
  captured_op_ptr last_write;
  std::vector<deferred_impl*> members;
};

/// Knows everything about a tensor but its elements. When they are computed, it
/// becomes an ordinary tensor and stays the same object. Access to its storage
/// without dispatch (`has_storage`, `storage`) computes them.
class deferred_impl final : public c10::TensorImpl {
public:
  /// @param twin the same tensor on the meta device
  deferred_impl(at::Tensor twin, captured_tensor origin,
                std::shared_ptr<future_memory> memory)
    : TensorImpl(c10::DispatchKeySet{c10::DispatchKey::CPU}.add(deferred_key),
                 twin.dtype(), c10::Device{c10::kCPU}),
      twin_(std::move(twin)),
      origin_(std::move(origin)),
      memory_(std::move(memory)) {
    memory_->members.push_back(this);
    refresh();
  }

  ~deferred_impl() override {
    forget();
  }

  bool pending() const noexcept {
    return twin_.defined();
  }

  const at::Tensor& twin() const noexcept {
    return twin_;
  }

  const captured_tensor& origin() const noexcept {
    return origin_;
  }

  const std::shared_ptr<future_memory>& memory() const noexcept {
    return memory_;
  }

  /// Copies what an operation changed in the metadata of the twin.
  void refresh();

  /// Becomes an ordinary tensor with the storage of `x`.
  void become(const at::Tensor& x);

  /// Drops how to compute the bytes, which are never needed.
  void forget();

  // -- TensorImpl -------------------------------------------------------------

  bool has_storage() const override {
    make_now();
    return TensorImpl::has_storage();
  }

  const c10::Storage& storage() const override {
    make_now();
    return TensorImpl::storage();
  }

  c10::intrusive_ptr<TensorImpl>
  shallow_copy_and_detach(const c10::VariableVersion& version,
                          bool allow_change) const override {
    if (pending())
      return alias(version, allow_change);
    return TensorImpl::shallow_copy_and_detach(version, allow_change);
  }

  c10::intrusive_ptr<TensorImpl>
  shallow_copy_and_detach(c10::VariableVersion&& version,
                          bool allow_change) const override {
    if (pending())
      return alias(version, allow_change);
    return TensorImpl::shallow_copy_and_detach(std::move(version),
                                               allow_change);
  }

  /// Implements `set_data`.
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& x) override;

  void release_resources() override {
    forget();
    TensorImpl::release_resources();
  }

  const char* tensorimpl_type_name() const override {
    return "smp::deferred_impl";
  }

private:
  void make_now() const;

  /// Another tensor with the same elements, now and later.
  c10::intrusive_ptr<deferred_impl> alias(const c10::VariableVersion& version,
                                          bool allow_change) const;

  void take_over(deferred_impl& x);

  at::Tensor twin_; // defined while this has no bytes
  captured_tensor origin_;
  std::shared_ptr<future_memory> memory_;
};

/// @returns the state of `x` if it has no bytes yet, else null
/// @throws error (unsupported) if an ordinary tensor shares its memory
deferred_impl* deferred(const at::Tensor& x);

/// Computes the bytes of `xs` and of all tensors that share their memory.
void make_bytes(const std::vector<deferred_impl*>& xs);

/// @returns the elements of `x` without keeping them
at::Tensor value_now(const deferred_impl& x);

} // namespace smp
