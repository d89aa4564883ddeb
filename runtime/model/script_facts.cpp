#include "runtime/model/script_facts.hpp"

#include "runtime/base/copied_on_write.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/model/script_code.hpp"
#include "runtime/values/tensor_bridge.hpp"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <unordered_set>

namespace smp {

namespace {

/// Tells whether nothing in `x` can change.
bool never_changes(const c10::IValue& x) {
  return x.isNone() || x.isBool() || x.isInt() || x.isDouble()
         || x.isComplexDouble() || x.isString() || x.isDevice() || x.isEnum();
}

/// A list that two attributes share stays one list, and a tensor stays the same
/// tensor.
class kept_slots final : public kept_attributes {
public:
  /// @param slots those that code sets or changes
  kept_slots(const script_object& self, const std::vector<size_t>& slots)
    : self_(self) {
    at::NoGradGuard no_grad;
    for (auto i : slots)
      keep_slot(*self, i);
    seen_.clear();
  }

  std::string changes() const override {
    return {};
  }

  /// Of a custom C++ class, for example, nobody knows how.
  bool complete() const override {
    return complete_;
  }

  void put_back(map_changes* changes) override;

private:
  struct slot {
    c10::ivalue::Object* object = nullptr; // of the model
    size_t index = 0;
    c10::IValue value;
  };

  /// A list, or a dictionary with its keys and values alternating.
  struct container {
    c10::IValue value;
    std::vector<c10::IValue> items;
  };

  struct content {
    at::Tensor tensor;
    at::Tensor copy;
  };

  void keep_slot(c10::ivalue::Object& x, size_t index);
  void keep_value(const c10::IValue& x);
  void keep_tensor(const at::Tensor& x);

  script_object self_;
  std::vector<slot> slots_;
  std::vector<container> containers_;
  std::vector<content> tensors_;
  std::unordered_set<const void*> seen_; // objects of script classes
  bool complete_ = true;
};

void kept_slots::keep_slot(c10::ivalue::Object& x, size_t index) {
  auto& value = x.getSlot(index);
  slots_.push_back({&x, index, value});
  keep_value(value);
}

void kept_slots::keep_value(const c10::IValue& x) {
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

void kept_slots::keep_tensor(const at::Tensor& x) {
  if (!x.defined())
    return;
  if (!refusal_of(x).empty())
    complete_ = false; // not plain memory
  else
    tensors_.push_back({x, x.detach().clone()});
}

void kept_slots::put_back(map_changes* changes) {
  for (auto& x : tensors_)
    put_content(x.tensor, x.copy);
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
    if (changes && now.isTensor() && x.value.isTensor())
      changes->rebind(now.toTensor(), x.value.toTensor());
    x.object->setSlot(x.index, x.value);
  }
}

class script_facts final : public module_facts {
public:
  script_facts(script_object x, const script_code& code) : self_(std::move(x)) {
    auto type = self_->type();
    for (size_t i = 0; i < type->numAttributes(); ++i)
      if (code.is_mutable({type.get(), type->getAttributeName(i)}))
        changing_.push_back(i);
  }

  bool is_training() const noexcept override {
    return smp::is_training(*self_);
  }

  void train(bool on) override {
    set_training(*self_, on);
  }

  std::string differs_from_class() const override {
    std::string result;
    for_each_method(*self_->type(), [&](auto& name, auto&) {
      if (!is_forward(name))
        result = fmt::format(
          "its class has a method '{}', which would run on "
          "a part of it; do that in the module around it",
          name);
    });
    return result;
  }

  c10::IValue option(const char* name) const override {
    auto type = self_->type();
    if (auto i = type->findAttributeSlot(name))
      return self_->getSlot(*i);
    return type->findConstantSlot(name) ? type->getConstant(name)
                                        : c10::IValue{};
  }

  std::unique_ptr<kept_attributes> keep_attributes() const override {
    return changing_.empty() ? nullptr
                             : std::make_unique<kept_slots>(self_, changing_);
  }

private:
  script_object self_;
  std::vector<size_t> changing_; // slots
};

} // namespace

std::shared_ptr<module_facts> facts_of(script_object x,
                                       const script_code& code) {
  return std::make_shared<script_facts>(std::move(x), code);
}

} // namespace smp
