#include "runtime/lazy/promise.hpp"

#include "runtime/deferred/boxed_arguments.hpp"
#include "transport/error.hpp"

#include <ATen/core/TensorBase.h>
#include <c10/core/Contiguity.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/strides.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace smp {

namespace {

class promise_impl final : public c10::TensorImpl {
public:
  promise_impl(std::shared_ptr<promise_source> x, at::ScalarType dtype,
               at::Device device)
    : TensorImpl(
      c10::DispatchKeySet{c10::computeDispatchKey(dtype, c10::kStrided, device)}
        .add(absent_key),
      caffe2::TypeMeta::fromScalarType(dtype), device),
      source_(std::move(x)) {
    set_custom_sizes_strides(SizesStridesPolicy::CustomSizes);
  }

  bool pending() const noexcept {
    return pending_;
  }

  std::shared_ptr<promise_source> source() const {
    std::lock_guard guard{mutex_};
    return source_;
  }

  void know(std::vector<int64_t> sizes) const {
    std::lock_guard guard{mutex_};
    if (known_)
      return;
    shape_ = std::move(sizes);
    elements_ = 1;
    for (auto n : shape_)
      elements_ *= n;
    known_ = true;
  }

  /// Turns into `x`: same object, same autograd data, same version counter.
  void become(const at::Tensor& x) const {
    know(x.sizes().vec());
    std::lock_guard guard{mutex_};
    if (!pending_)
      return;
    // Whatever read its device has gone on with that.
    if (x.device() != device_default())
      throw error{error_code::internal, "a promise on " + device_default().str()
                                          + " got a content on "
                                          + x.device().str()};
    auto* self = const_cast<promise_impl*>(this);
    // The keys of `x` may come from another mode (inference, no grad).
    auto keys = key_set_.remove(absent_key);
    self->TensorImpl::shallow_copy_from(x.getIntrusivePtr());
    // The copy does not change the policy: set_data, t_ and resize_ would
    // show the old sizes.
    self->set_custom_sizes_strides(SizesStridesPolicy::Default);
    self->key_set_ = keys;
    source_.reset();
    pending_ = false;
  }

  /// Waits until it is an ordinary tensor.
  void keep() const {
    auto x = source();
    if (!x)
      return;
    // Waits without a lock: another microbatch may access it meanwhile.
    x->wait();
    std::unique_lock guard{keeping_};
    if (pending())
      become(x->take());
  }

  // -- sizes ------------------------------------------------------------------

  at::IntArrayRef sizes_custom() const override {
    need_sizes();
    return pending() ? at::IntArrayRef{shape_} : sizes_default();
  }

  at::IntArrayRef strides_custom() const override {
    need_strides();
    return pending() ? at::IntArrayRef{strides_} : strides_default();
  }

  int64_t dim_custom() const override {
    return static_cast<int64_t>(sizes_custom().size());
  }

  int64_t numel_custom() const override {
    need_sizes();
    return elements_;
  }

  int64_t size_custom(int64_t d) const override {
    auto xs = sizes_custom();
    return xs[c10::maybe_wrap_dim(d, static_cast<int64_t>(xs.size()))];
  }

  int64_t storage_offset_custom() const override {
    return 0;
  }

  c10::SymIntArrayRef sym_sizes_custom() const override {
    return c10::fromIntArrayRefSlow(sizes_custom());
  }

  c10::SymIntArrayRef sym_strides_custom() const override {
    return c10::fromIntArrayRefSlow(strides_custom());
  }

  c10::SymInt sym_numel_custom() const override {
    return numel_custom();
  }

  c10::SymInt sym_size_custom(int64_t d) const override {
    return size_custom(d);
  }

  c10::SymInt sym_storage_offset_custom() const override {
    return 0;
  }

  c10::SymBool sym_is_contiguous_custom(at::MemoryFormat x) const override {
    auto strides = strides_custom();
    auto sizes = sizes_custom();
    switch (x) {
      case at::MemoryFormat::ChannelsLast:
        return c10::_compute_channels_last_contiguous_2d(sizes, strides);
      case at::MemoryFormat::ChannelsLast3d:
        return c10::_compute_channels_last_contiguous_3d(sizes, strides);
      default:
        return c10::_compute_contiguous(sizes, strides, elements_);
    }
  }

  bool is_strides_like_custom(at::MemoryFormat x) const override {
    auto strides = strides_custom();
    auto sizes = sizes_custom();
    switch (x) {
      case at::MemoryFormat::ChannelsLast:
        return c10::is_channels_last_strides_2d(sizes, strides);
      case at::MemoryFormat::ChannelsLast3d:
        return c10::is_channels_last_strides_3d(sizes, strides);
      default:
        return false;
    }
  }

  /// Keeps the autograd engine from accumulating into it in place, which would
  /// access the storage without dispatch.
  c10::SymBool sym_is_non_overlapping_and_dense_custom() const override {
    return false;
  }

  // -- content ----------------------------------------------------------------

  bool has_storage() const override {
    keep();
    return TensorImpl::has_storage();
  }

  const c10::Storage& storage() const override {
    keep();
    return TensorImpl::storage();
  }

  c10::intrusive_ptr<TensorImpl>
  shallow_copy_and_detach(const c10::VariableVersion& version,
                          bool allow_change) const override {
    keep();
    return TensorImpl::shallow_copy_and_detach(version, allow_change);
  }

  c10::intrusive_ptr<TensorImpl>
  shallow_copy_and_detach(c10::VariableVersion&& version,
                          bool allow_change) const override {
    keep();
    return TensorImpl::shallow_copy_and_detach(std::move(version),
                                               allow_change);
  }

  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& x) override {
    keep();
    TensorImpl::shallow_copy_from(x);
  }

  void release_resources() override {
    std::shared_ptr<promise_source> gone;
    {
      std::lock_guard guard{mutex_};
      gone.swap(source_);
    }
    TensorImpl::release_resources();
  }

  const char* tensorimpl_type_name() const override {
    return "smp::promise_impl";
  }

private:
  void need_sizes() const {
    if (known_)
      return;
    if (auto x = source())
      know(x->sizes());
  }

  void need_strides() const {
    need_sizes();
    auto x = laid_out_ ? nullptr : source();
    if (!x)
      return;
    auto known = x->strides();
    if (!known)
      return keep();
    std::lock_guard guard{mutex_};
    if (laid_out_)
      return;
    if (known->empty())
      strides_ = c10::contiguous_strides(shape_);
    else
      strides_.assign(known->begin(), known->end());
    laid_out_ = true;
  }

  mutable std::mutex mutex_;
  mutable std::mutex keeping_; // guards `take`; not held during waits
  mutable std::shared_ptr<promise_source> source_;
  mutable std::atomic<bool> pending_ = true;
  mutable std::atomic<bool> known_ = false;
  mutable std::atomic<bool> laid_out_ = false; // `strides_` is valid
  mutable std::vector<int64_t> shape_;
  mutable c10::DimVector strides_;
  mutable int64_t elements_ = 0;
};

/// @returns the promise in `x`, or null; ordinary tensors cost one test.
promise_impl* promise_in(const at::Tensor& x) {
  if (!is_absent(x))
    return nullptr;
  auto* result = dynamic_cast<promise_impl*>(x.unsafeGetTensorImpl());
  return result && result->pending() ? result : nullptr;
}

void keep(const std::vector<promise_impl*>& xs) {
  if (xs.size() > 1) {
    // Start all transfers before the first wait.
    std::vector<completion_ptr> missing;
    std::vector<std::pair<completion_ptr, wait_reason>> whys;
    auto in_order = false;
    for (auto* x : xs)
      if (auto source = x->source())
        if (auto y = source->content(); !y->done()) {
          in_order = in_order || source->waits_in_order();
          whys.emplace_back(y, source->why());
          missing.push_back(std::move(y));
        }
    if (missing.size() > 1 && !in_order)
      waiter::current().wait(all_of(missing), reason_of_all(std::move(whys)));
  }
  for (auto* x : xs)
    x->keep();
}

} // namespace

at::Tensor make_promise(std::shared_ptr<promise_source> x, at::ScalarType dtype,
                        const std::vector<int64_t>* known, at::Device device) {
  auto result = at::detail::make_tensor<promise_impl>(std::move(x), dtype,
                                                      device);
  if (known)
    static_cast<promise_impl*>(result.unsafeGetTensorImpl())->know(*known);
  return result;
}

bool is_promise(const at::Tensor& x) {
  return promise_in(x) != nullptr;
}

std::shared_ptr<promise_source> source_of(const at::Tensor& x) {
  auto* p = promise_in(x);
  return p ? p->source() : nullptr;
}

void keep_promise(const at::Tensor& x, const at::Tensor& content) {
  if (auto* p = promise_in(x))
    p->become(content);
}

void keep_promises(const std::vector<at::Tensor>& xs) {
  std::vector<promise_impl*> found;
  for (auto& x : xs)
    if (auto* p = promise_in(x))
      found.push_back(p);
  keep(found);
}

void keep_promises(at::ArrayRef<c10::IValue> xs) {
  std::vector<promise_impl*> found;
  for (auto& x : xs)
    visit_tensors(x, [&found](const at::Tensor& t) {
      if (auto* p = promise_in(t))
        found.push_back(p);
    });
  keep(found);
}

} // namespace smp
