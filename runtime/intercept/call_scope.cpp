#include "runtime/intercept/call_scope.hpp"

#include "runtime/calls/invoker.hpp"
#include "runtime/offload/offloaded_tensors.hpp"

#include <exception>

namespace smp {

call_interceptor::~call_interceptor() = default;

std::optional<invocation> call_interceptor::around(const packed_call&,
                                                   unpacker&, packer&) {
  return std::nullopt;
}

std::unique_ptr<offloaded_tensors>
call_interceptor::keep(const std::vector<at::Tensor>&) {
  return nullptr;
}

void set_interceptor(interceptor place, call_interceptor* x) noexcept {
  here::of_thread().interceptors[static_cast<size_t>(place)] = x;
}

call_interceptor* interceptor_at(size_t place) noexcept {
  return here::of_thread().interceptors[place];
}

std::unique_ptr<offloaded_tensors>
keep_for_backward(const std::vector<at::Tensor>& xs) {
  for (auto* x : here::of_thread().interceptors)
    if (auto kept = x ? x->keep(xs) : nullptr)
      return kept;
  return nullptr;
}

call_scope::call_scope(const intercepted_call& x)
  : call_(x), exceptions_(std::uncaught_exceptions()) {
  auto& installed = here::of_thread().interceptors;
  try {
    for (size_t i = 0; i < num_interceptors; ++i)
      if (auto* y = installed[i]) {
        y->enter(call_);
        entered_[i] = y;
        looks_ = looks_ || y->looks();
      }
  } catch (...) {
    leave(true);
    throw;
  }
}

call_scope::~call_scope() {
  leave(std::uncaught_exceptions() > exceptions_);
}

void call_scope::leave(bool failed) {
  for (auto i = num_interceptors; i-- > 0;)
    if (entered_[i])
      entered_[i]->leave(call_, failed);
}

void call_scope::arguments(const void* object, std::span<const at::Tensor> xs) {
  for (auto* x : entered_)
    if (x)
      x->arguments(call_, object, xs);
}

void call_scope::results(std::span<const at::Tensor> xs) {
  for (auto* x : entered_)
    if (x)
      x->results(call_, xs);
}

} // namespace smp
