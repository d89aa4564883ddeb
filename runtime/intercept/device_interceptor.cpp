#include "runtime/intercept/device_interceptor.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/execution/device_failure.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/model/model_map.hpp"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <string>

namespace smp {

namespace {

std::string name_of(const intercepted_call& x, const running_call& ex) {
  auto& model = ex.rank().model();
  return x.module && model ? model->map->name(*x.module) : ex.module_path();
}

/// When backward comes here, all that follows the module in forward is done.
void name_in_backward(const at::Tensor& x, const std::string& name) {
  // A module inside has the same result, and is the better name.
  if (!x.defined() || !x.grad_fn() || !x.grad_fn()->tensor_pre_hooks().empty())
    return;
  x.register_hook([name](const at::TensorBase&) {
    if (auto* ex = running_call::current()) {
      settle_device(*ex);
      ex->enter_module(name);
    }
  });
}

} // namespace

void device_interceptor::results(const intercepted_call& x,
                                 std::span<const at::Tensor> xs) {
  auto* ex = running_call::current();
  if (ex == nullptr)
    return;
  auto name = name_of(x, *ex);
  auto before = ex->enter_module(name);
  settle_device(*ex);
  ex->enter_module(std::move(before));
  for (auto& t : xs)
    name_in_backward(t, name);
}

/// A launch inside of the module was told of the error.
void device_interceptor::leave(const intercepted_call& x, bool failed) {
  auto* ex = failed ? running_call::current() : nullptr;
  if (ex == nullptr || ex->first_error())
    return;
  if (auto why = ex->rank().launches()->failed())
    ex->keep_error(
      {error_code::user_code, ex->rank().self(), name_of(x, *ex), *why});
}

} // namespace smp
