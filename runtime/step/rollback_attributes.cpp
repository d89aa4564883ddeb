#include "runtime/step/rollback_attributes.hpp"

#include "runtime/model/model_map.hpp"
#include "runtime/model/script_code.hpp"
#include "runtime/values/tensor_bridge.hpp"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

namespace smp {

namespace {

/// Tells whether nothing in `x` can change.
bool never_changes(const c10::IValue& x) {
  return x.isNone() || x.isBool() || x.isInt() || x.isDouble()
         || x.isComplexDouble() || x.isString() || x.isDevice() || x.isEnum();
}

/// The write count of autograd, which has none for inference tensors.
uint32_t write_count(const at::Tensor& x) {
  return x.is_inference() ? 0 : static_cast<uint32_t>(x._version());
}

} // namespace

void rollback_attributes::keep(const model_map& map, const script_code* code) {
  at::NoGradGuard no_grad;
  drop();
  complete_ = true;
  auto& modules = map.model().modules;
  for (uint32_t i = 0; i < modules.size(); ++i)
    if (modules[i].foreign && map.owner(module_id{i}) == map.self())
      foreign_.push_back(modules[i].foreign->keep_attributes());
  if (code == nullptr || map.order().unseen().empty())
    return; // no code changes them
  for (uint32_t i = 0; i < modules.size(); ++i) {
    auto* self = modules[i].script;
    if (self == nullptr || map.owner(module_id{i}) != map.self())
      continue;
    auto type = self->type();
    for (size_t k = 0; k < self->slots().size(); ++k)
      if (code->is_mutable({type.get(), type->getAttributeName(k)}))
        keep_slot(*self, k);
  }
}

void rollback_attributes::keep_slot(c10::ivalue::Object& x, size_t index) {
  auto& value = x.getSlot(index);
  slots_.push_back({&x, index, value});
  keep_value(value);
}

void rollback_attributes::keep_value(const c10::IValue& x) {
  if (x.isTensor()) {
    keep_tensor(x.toTensor());
  } else if (x.isTuple()) {
    for (auto& item : x.toTupleRef().elements())
      keep_value(item);
  } else if (x.isList()) {
    auto items = x.toListRef();
    containers_.push_back(
      {x, std::vector<c10::IValue>(items.begin(), items.end())});
    for (auto& item : items)
      keep_value(item);
  } else if (x.isGenericDict()) {
    std::vector<c10::IValue> items;
    for (auto& entry : x.toGenericDict()) {
      items.push_back(entry.key());
      items.push_back(entry.value());
      keep_value(entry.value());
    }
    containers_.push_back({x, std::move(items)});
  } else if (x.isObject()) {
    auto& object = x.toObjectRef();
    if (object.type()->is_module() || !seen_.insert(&object).second)
      return;
    for (size_t k = 0; k < object.slots().size(); ++k)
      keep_slot(object, k);
  } else if (!never_changes(x)) {
    complete_ = false;
  }
}

void rollback_attributes::keep_tensor(const at::Tensor& x) {
  if (!x.defined())
    return;
  if (!refusal_of(x).empty())
    complete_ = false; // not plain memory
  else
    tensors_.push_back({x, x.detach().clone(), write_count(x)});
}

void rollback_attributes::put_back(model_map& map) {
  at::NoGradGuard no_grad;
  for (auto& x : tensors_) {
    // A backward that needs it must not see that it was written.
    if (!x.tensor.is_inference() && write_count(x.tensor) == x.version)
      continue;
    c10::InferenceMode mode{x.tensor.is_inference()};
    if (x.tensor.sizes() == x.copy.sizes()
        && x.tensor.dtype() == x.copy.dtype())
      x.tensor.detach().copy_(x.copy);
  }
  for (auto& x : containers_)
    if (x.value.isList()) {
      auto list = x.value.toList();
      list.clear();
      for (auto& item : x.items)
        list.push_back(item);
    } else {
      auto dict = x.value.toGenericDict();
      dict.clear();
      for (size_t k = 0; k + 1 < x.items.size(); k += 2)
        dict.insert(x.items[k], x.items[k + 1]);
    }
  for (auto& x : slots_) {
    auto& now = x.object->getSlot(x.index);
    if (now.isTensor() && x.value.isTensor())
      map.rebind(now.toTensor(), x.value.toTensor());
    x.object->setSlot(x.index, x.value);
  }
  for (auto& x : foreign_)
    x->put_back(false);
  drop();
}

void rollback_attributes::drop() noexcept {
  slots_.clear();
  foreign_.clear();
  containers_.clear();
  tensors_.clear();
  seen_.clear();
}

} // namespace smp
