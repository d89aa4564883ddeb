#include "runtime/model/call_translation.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace smp {

namespace {

/// Adds the tensors in `x`, which may be nested.
void add_tensors(std::vector<at::Tensor>& result, const c10::IValue& x) {
  if (x.isTensor()) {
    result.push_back(x.toTensor());
  } else if (x.isTuple()) {
    for (auto& y : x.toTupleRef().elements())
      add_tensors(result, y);
  } else if (x.isList()) {
    for (const c10::IValue& y : x.toListRef())
      add_tensors(result, y);
  } else if (x.isGenericDict()) {
    for (auto& entry : x.toGenericDict())
      add_tensors(result, entry.value());
  }
}

} // namespace

std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& xs) {
  std::vector<at::Tensor> result;
  for (auto& x : xs)
    add_tensors(result, x);
  return result;
}

c10::IValue script_result(const std::vector<at::Tensor>& xs) {
  if (xs.size() == 1)
    return xs[0];
  return c10::ivalue::Tuple::create({xs.begin(), xs.end()});
}

c10::IValue
translated_module::call(const std::vector<c10::IValue>& arguments) const {
  return calls_->call(*inner_, arguments);
}

} // namespace smp
