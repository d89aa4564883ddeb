#include "runtime/deferred/deferred_tensor.hpp"

#include "runtime/deferred/deferred_init.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"
#include "transport/error.hpp"

#include <unordered_set>
#include <utility>

namespace smp {

std::recursive_mutex& capture_mutex() {
  static auto& result = *new std::recursive_mutex; // outlives all tensors
  return result;
}

// -- one tensor ---------------------------------------------------------------

void deferred_impl::refresh() {
  auto allowed = allow_tensor_metadata_change();
  set_allow_tensor_metadata_change(true);
  set_sizes_and_strides(twin_.sizes(), twin_.strides(), twin_.storage_offset());
  set_allow_tensor_metadata_change(allowed);
}

void deferred_impl::become(const at::Tensor& x) {
  if (x.sizes() != sizes() || x.dtype() != dtype())
    throw error{error_code::unsupported,
                "delay_param_initialization: '" + origin_.op->op.schema().name()
                  + "' gave another shape or type than predicted; create "
                    "this tensor in a "
                    "smp::delay_param_initialization{false} scope"};
  forget();
  auto keys = key_set_;
  TensorImpl::shallow_copy_from(x.getIntrusivePtr());
  key_set_ = keys;
}

void deferred_impl::forget() {
  std::unique_lock guard{capture_mutex()};
  if (!pending())
    return;
  std::erase(memory_->members, this);
  memory_.reset();
  origin_ = {};
  twin_.reset();
  key_set_ = key_set_.remove(deferred_key);
}

void deferred_impl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& x) {
  std::unique_lock guard{capture_mutex()};
  auto* other = dynamic_cast<deferred_impl*>(x.get());
  if (other && other->pending() && pending()) {
    auto source = other->alias(c10::VariableVersion{0}, true);
    take_over(static_cast<deferred_impl&>(*source));
    return;
  }
  if (other)
    other->make_now();
  auto keys = key_set_.remove(deferred_key);
  forget();
  TensorImpl::shallow_copy_from(x);
  key_set_ = keys;
  _change_backend_component_keys(x->device()); // the partition moves parameters
}

c10::intrusive_ptr<deferred_impl>
deferred_impl::alias(const c10::VariableVersion& version,
                     bool allow_change) const {
  static const auto detach = c10::Dispatcher::singleton().findSchemaOrThrow(
    "aten::detach", "");
  std::unique_lock guard{capture_mutex()};
  delay_param_initialization plain{false};
  auto op = std::make_shared<captured_op>(detach,
                                          torch::jit::Stack{at::Tensor{}});
  op->holes.push_back({0, 0, origin_});
  op->before.push_back(memory_->last_write);
  auto result = c10::make_intrusive<deferred_impl>(
    twin_.detach(), captured_tensor{op, 0}, memory_);
  result->set_version_counter(version);
  result->set_allow_tensor_metadata_change(allow_change);
  return result;
}

void deferred_impl::take_over(deferred_impl& x) {
  std::erase(memory_->members, this);
  memory_ = x.memory_;
  memory_->members.push_back(this);
  origin_ = x.origin_;
  twin_ = x.twin_;
  data_type_ = x.data_type_;
  refresh();
}

void deferred_impl::make_now() const {
  if (pending())
    make_bytes({const_cast<deferred_impl*>(this)});
}

// -- making -------------------------------------------------------------------

deferred_impl* deferred(const at::Tensor& x) {
  if (!is_deferred(x))
    return nullptr;
  if (auto* impl = dynamic_cast<deferred_impl*>(x.unsafeGetTensorImpl()))
    return impl;
  throw error{error_code::unsupported,
              "delay_param_initialization: an ordinary tensor was made to "
              "share the memory of one that has none yet"};
}

namespace {

wanted_tensor want(const deferred_impl& x) {
  return {x.origin(), x.memory()->last_write};
}

} // namespace

void make_bytes(const std::vector<deferred_impl*>& xs) {
  std::unique_lock guard{capture_mutex()};
  std::vector<deferred_impl*> targets;
  std::unordered_set<const future_memory*> seen;
  for (auto* x : xs)
    if (x->pending() && seen.insert(x->memory().get()).second)
      targets.insert(targets.end(), x->memory()->members.begin(),
                     x->memory()->members.end());
  std::vector<wanted_tensor> wanted;
  for (auto* x : targets)
    wanted.push_back(want(*x));
  run_captured(wanted, [&](size_t i, at::Tensor x) { targets[i]->become(x); });
}

at::Tensor value_now(const deferred_impl& x) {
  at::Tensor result;
  run_captured({want(x)}, [&result](size_t, at::Tensor y) { result = y; });
  return result;
}

} // namespace smp
