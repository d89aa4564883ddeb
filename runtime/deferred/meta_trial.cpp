#include "runtime/deferred/meta_trial.hpp"

#include "runtime/deferred/boxed_arguments.hpp"
#include "runtime/deferred/deferred_tensor.hpp"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <exception>

namespace smp {

bool meta_trial::run(const boxed_call& x) {
  for (auto& result : x.schema.returns())
    if (!result.type()->isSubtypeOf(*c10::TensorType::get())
        && !result.type()->isSubtypeOf(*c10::ListType::ofTensors()))
      return false;
  auto arguments = x.arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (!prepare(x.schema.arguments()[i].name(), arguments[i]))
      return false;
  try {
    call_boxed(x.op, arguments);
  } catch (const std::exception&) {
    // The real operation either works or throws the right error.
    return false;
  }
  results_ = std::move(arguments);
  return std::ranges::all_of(flatten_tensors(results_), [&](auto& y) {
    return !y.defined() || is_ours(y);
  });
}

at::Tensor meta_trial::find(const at::Tensor& twin) const {
  for (auto& x : arguments_)
    if (deferred(x)->twin().is_same(twin))
      return x;
  return {};
}

at::Tensor meta_trial::find_base(const at::Tensor& twin) const {
  for (auto& x : arguments_)
    if (deferred(x)->twin().storage().is_alias_of(twin.storage()))
      return x;
  return {};
}

bool meta_trial::prepare(const std::string& name, c10::IValue& x) {
  if (x.isDevice() || (name == "device" && x.isNone())) {
    if (x.isDevice() && x.toDevice().type() != c10::kCPU)
      return false;
    x = c10::Device{c10::kMeta};
  } else if (x.isGenerator()) {
    x = c10::IValue{};
  } else if (name == "pin_memory" && x.isBool() && x.toBool()) {
    return false;
  }
  bool possible = true;
  visit_tensors(x, [&](const at::Tensor& t) {
    possible = possible && t.device().is_cpu() && t.layout() == c10::kStrided
               && !t.is_nested() && !t.is_conj() && !t.is_neg()
               && !t._is_zerotensor() && !t.is_quantized();
  });
  if (possible)
    replace_tensors(x, [this](const at::Tensor& t) { return twin_of(t); });
  return possible;
}

at::Tensor meta_trial::twin_of(const at::Tensor& x) {
  if (auto* impl = deferred(x)) {
    arguments_.push_back(x);
    auto& twin = impl->twin();
    if (twin.is_leaf() && x.is_leaf()
        && twin.requires_grad() != x.requires_grad())
      twin.set_requires_grad(x.requires_grad());
    return twin;
  }
  // Wrapped numbers rank below tensors in type promotion.
  if (x.unsafeGetTensorImpl()->is_wrapped_number())
    return x;
  auto result = at::empty_strided(x.sizes(), x.strides(),
                                  x.options().device(c10::kMeta));
  result.set_requires_grad(x.requires_grad());
  others_.push_back(result);
  return result;
}

bool meta_trial::is_ours(const at::Tensor& x) const {
  return x.is_meta() && x.layout() == c10::kStrided && !x.is_nested()
         && !x.is_conj() && !x.is_neg() && !x._is_zerotensor()
         && std::ranges::none_of(others_, [&x](auto& y) {
              return y.storage().is_alias_of(x.storage());
            });
}

} // namespace smp
