#include "runtime/optimizer/host_weights.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/device/storage_copies.hpp"
#include "runtime/optimizer/optimizer_state.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <utility>

namespace smp {

namespace {

/// Small tensors are copied together up to this size, from and to memory of the
/// device of that size. Pinned memory is given in powers of two.
constexpr uint64_t copied_at_once = 16 << 20;
/// From this size on a copy takes much longer than its launch, and needs no
/// other memory.
constexpr uint64_t copied_alone = 1 << 20;

/// @returns a tensor over bytes of the host
at::Tensor tensor_over(const c10::Storage& memory, uint64_t offset,
                       at::ScalarType type, at::IntArrayRef sizes,
                       at::IntArrayRef strides = {}) {
  auto result = at::empty({0}, at::TensorOptions{type});
  return result.set_(memory, static_cast<int64_t>(offset / result.itemsize()),
                     sizes, strides);
}

uint64_t value_version(const at::Tensor& x) {
  return static_cast<uint64_t>(x._version());
}

c10::weak_intrusive_ptr<c10::StorageImpl> storage_of(const at::Tensor& x) {
  auto* impl = x.storage().unsafeGetStorageImpl();
  return c10::weak_intrusive_ptr<c10::StorageImpl>{
    c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl)};
}

uint64_t offset_of(const at::Tensor& x) {
  return static_cast<uint64_t>(x.storage_offset()) * x.itemsize();
}

/// Gradients of one type that come to the host together.
class gradient_batch {
public:
  void add(const at::Tensor& gradient, at::Tensor to) {
    from_.push_back(gradient.resolve_conj().contiguous().view(-1));
    to_.push_back(std::move(to));
    bytes_ += from_.back().nbytes();
  }

  uint64_t bytes() const noexcept {
    return bytes_;
  }

  /// Copies what the kernels that were launched leave there.
  std::shared_ptr<device_point> leave(const storage_copies& copies) {
    auto flat = from_.size() == 1 ? from_.front() : at::cat(from_);
    auto copy = copies.to_host(flat.storage(), offset_of(flat), bytes_);
    uint64_t offset = 0;
    for (auto& x : to_) {
      auto gradient = tensor_over(copy.copy, offset, flat.scalar_type(),
                                  x.sizes());
      offset += gradient.nbytes();
      x.mutable_grad() = std::move(gradient);
    }
    *this = {};
    return std::move(copy.done);
  }

private:
  std::vector<at::Tensor> from_;
  std::vector<at::Tensor> to_;
  uint64_t bytes_ = 0;
};

} // namespace

void host_weights::replace(torch::optim::Optimizer& x,
                           std::shared_ptr<const storage_copies> copies) {
  at::NoGradGuard no_grad;
  copies_ = std::move(copies);
  std::vector<at::Tensor*> places;
  for (auto& group : x.param_groups())
    for (auto& p : group.params())
      if (p.device() == copies_->device()) {
        entries_.push_back({p, {}, value_version(p), storage_of(p)});
        places.push_back(&p);
      }
  make_blocks();
  for (size_t i = 0; i < places.size(); ++i) {
    move_state(x, entries_[i].parameter, entries_[i].host);
    *places[i] = entries_[i].host;
  }
}

void host_weights::make_blocks() {
  std::map<at::ScalarType, size_t> open;
  for (size_t i = 0; i < entries_.size(); ++i) {
    auto& p = entries_[i].parameter;
    auto alone = p.nbytes() >= copied_alone;
    auto found = open.find(p.scalar_type());
    auto fits = !alone && found != open.end()
                && blocks_[found->second].bytes + p.nbytes() <= copied_at_once;
    auto number = fits ? found->second : blocks_.size();
    if (!fits)
      blocks_.emplace_back();
    if (!alone)
      open[p.scalar_type()] = number;
    blocks_[number].entries.push_back(i);
    blocks_[number].bytes += p.nbytes();
  }
  for (auto& x : blocks_) {
    x.memory = copies_->pinned(std::max<uint64_t>(x.bytes, 1));
    uint64_t offset = 0;
    for (auto i : x.entries) {
      auto& e = entries_[i];
      auto& p = e.parameter;
      // The same order of axes (R63), without gaps.
      auto like = at::empty_like(p, p.options().device(at::kMeta));
      e.host = tensor_over(x.memory, offset, p.scalar_type(), p.sizes(),
                           like.strides());
      e.host.copy_(e.parameter);
      e.host.set_requires_grad(e.parameter.requires_grad());
      offset += e.parameter.nbytes();
    }
  }
}

void host_weights::follow_parameters() {
  at::NoGradGuard no_grad;
  for (auto& x : entries_)
    if (value_version(x.parameter) != x.version
        || storage_of(x.parameter) != x.storage)
      x.host.copy_(x.parameter);
}

void host_weights::begin_update() {
  follow_parameters();
  at::NoGradGuard no_grad;
  // What was sent has left then, too: kernels have waited for it, and gradients
  // for the kernels.
  if (auto arrived = fetch_gradients();
      arrived && !SMP_FAULT("unawaited-gradients"))
    copies_->await(*arrived);
}

/// @returns when they are there; null: there are none, or they are
std::shared_ptr<device_point> host_weights::fetch_gradients() {
  std::shared_ptr<device_point> result;
  std::map<at::ScalarType, gradient_batch> together;
  for (auto& x : entries_) {
    auto& gradient = x.parameter.grad();
    x.host.mutable_grad().reset();
    if (!gradient.defined())
      continue;
    if (gradient.layout() != at::kStrided || gradient.numel() == 0) {
      x.host.mutable_grad() = gradient.to(at::kCPU); // waits
      continue;
    }
    auto type = gradient.scalar_type();
    if (gradient.nbytes() >= copied_alone) {
      gradient_batch alone;
      alone.add(gradient, x.host);
      result = alone.leave(*copies_);
      continue;
    }
    auto& batch = together[type];
    if (batch.bytes() + gradient.nbytes() > copied_at_once)
      result = batch.leave(*copies_);
    batch.add(gradient, x.host);
  }
  for (auto& [type, batch] : together)
    result = batch.leave(*copies_);
  return result;
}

void host_weights::end_update(bool updated) {
  at::NoGradGuard no_grad;
  for (auto& x : blocks_) {
    std::vector<entry*> changed;
    for (auto i : x.entries)
      if (entries_[i].host.grad().defined()) {
        entries_[i].host.mutable_grad().reset();
        changed.push_back(&entries_[i]);
      }
    if (updated && !changed.empty())
      send(x, changed);
  }
}

void host_weights::send_all() {
  at::NoGradGuard no_grad;
  for (auto& x : blocks_) {
    std::vector<entry*> all;
    for (auto i : x.entries)
      all.push_back(&entries_[i]);
    send(x, all);
  }
}

void host_weights::send(const block& x, const std::vector<entry*>& changed) {
  if (x.bytes == 0)
    return;
  auto& first = changed.front()->parameter;
  if (x.entries.size() == 1
      && first.strides() == changed.front()->host.strides()) {
    first.mutable_data_ptr(); // of its own, if others share it until now
    sent_ = copies_->overwrite(x.memory, first.storage(), offset_of(first),
                               x.bytes);
  } else {
    auto length = static_cast<int64_t>(x.bytes / first.itemsize());
    auto flat = at::empty({length}, first.options());
    sent_ = copies_->overwrite(x.memory, flat.storage(), 0, x.bytes);
    std::vector<at::Tensor> to, from;
    for (auto* e : changed) {
      to.push_back(e->parameter.detach());
      from.push_back(flat.as_strided(e->host.sizes(), e->host.strides(),
                                     e->host.storage_offset()));
    }
    at::_foreach_copy_(to, from, true);
  }
  for (auto* e : changed)
    e->parameter.unsafeGetTensorImpl()->bump_version();
}

void host_weights::await_sent() {
  if (sent_ && !SMP_FAULT("unawaited-values"))
    copies_->await(*sent_);
  sent_ = nullptr;
}

void host_weights::note_values() {
  for (auto& x : entries_) {
    x.version = value_version(x.parameter);
    x.storage = storage_of(x.parameter);
  }
}

void host_weights::zero_grad() {
  for (auto& x : entries_)
    x.parameter.mutable_grad().reset();
}

at::Tensor host_weights::host_of(const at::Tensor& x) const {
  auto i = std::ranges::find_if(
    entries_, [&](const entry& y) { return y.parameter.is_same(x); });
  return i == entries_.end() ? x : i->host;
}

at::Tensor host_weights::parameter_of(const at::Tensor& x) const {
  auto i = std::ranges::find_if(
    entries_, [&](const entry& y) { return y.host.is_same(x); });
  return i == entries_.end() ? x : i->parameter;
}

} // namespace smp
