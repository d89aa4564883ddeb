#include "runtime/intercept/call_observer.hpp"

#include <torch/nn/module.h>

namespace smp {

namespace {

thread_local call_observer* current_observer = nullptr;
thread_local const void* innermost_object = nullptr;

} // namespace

call_observer::~call_observer() = default;

call_observer* call_observer::current() noexcept {
  return current_observer;
}

void call_observer::set_current(call_observer* x) noexcept {
  current_observer = x;
}

observed_call::observed_call(call_observer& x, const void* object,
                             std::span<const at::Tensor> arguments)
  : observer_(innermost_object == object ? nullptr : &x),
    object_(object),
    outer_(innermost_object) {
  if (!observer_)
    return;
  observer_->begin(object_, arguments);
  innermost_object = object_;
}

observed_call::observed_call(call_observer& x, const torch::nn::Module& object,
                             std::span<const at::Tensor> arguments)
  // `Module` is a virtual base: the complete object is the identity.
  : observed_call(x, dynamic_cast<const void*>(&object), arguments) {
  // nop
}

observed_call::~observed_call() {
  if (!observer_)
    return;
  innermost_object = outer_;
  observer_->fail(object_);
}

void observed_call::end(std::span<const at::Tensor> results) {
  if (!observer_)
    return;
  innermost_object = outer_;
  std::exchange(observer_, nullptr)->end(object_, results);
}

} // namespace smp
