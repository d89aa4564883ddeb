#include "runtime/intercept/script/script_values.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/model/model_map.hpp"
#include "transport/error.hpp"

#include <ATen/core/class_type.h>

#include <algorithm>
#include <bit>

namespace smp {

namespace {

using c10::impl::GenericDict;
using c10::impl::GenericList;

bool is_module(const c10::TypePtr& x) {
  auto* type = x->castRaw<c10::ClassType>();
  return type && type->is_module();
}

/// Tells whether a value of the type contains a named tuple or a module, which
/// only the type distinguishes from a tuple and a number.
bool needs_type(const c10::TypePtr& x) {
  if (auto* tuple = x->castRaw<c10::TupleType>(); tuple && tuple->schema())
    return true;
  if (is_module(x))
    return true;
  for (auto& part : x->containedTypes())
    if (needs_type(part))
      return true;
  return false;
}

const model_map& map_of_rank() {
  auto model = rank_context::current_model();
  if (!model)
    throw error{error_code::unsupported,
                "a module of a model whose session ended is called"};
  return *model->map;
}

const walked_model& walked_model_of_rank() {
  return map_of_rank().model();
}

/// @returns the position of a parameter of a module that ranks share, or -1
int64_t shared_position(const c10::IValue& x) {
  auto model = rank_context::current_model();
  if (!x.isTensor() || !model || !model->map->any_shared())
    return -1;
  auto i = model->map->model().find(x.toTensor());
  return i >= 0 && model->map->is_of_shared(static_cast<uint32_t>(i)) ? i : -1;
}

at::Tensor get_shared_parameter(unpacker& u, const value& x, int64_t i) {
  auto& map = map_of_rank();
  auto& tensors = map.model().tensors;
  if (i < 0 || static_cast<size_t>(i) >= tensors.size()
      || !map.is_of_shared(static_cast<uint32_t>(i)))
    u.mismatch("no parameter of a shared module", x);
  return tensors[static_cast<size_t>(i)].tensor;
}

/// Modules are the same on all ranks, so a module is sent as its position in
/// the walk. (Traces give shared modules to others as arguments.)
value put_module(packer& p, const c10::IValue& x) {
  auto& index = walked_model_of_rank().module_index;
  auto i = index.find(x.toObject().get());
  if (i == index.end())
    return pack<c10::IValue>::put(p, x); // rejects it by its class
  return value::of(static_cast<int64_t>(i->second));
}

/// The interpreter trusts the types of its values.
c10::IValue checked(unpacker& u, c10::IValue x, const c10::TypePtr& type) {
  auto fits = x.isTensor() ? c10::TensorType::get()->isSubtypeOf(*type)
                           : x.type()->isSubtypeOf(*type);
  if (!fits)
    u.fail(type->annotation_str() + " expected, found "
           + x.type()->annotation_str());
  return x;
}

c10::IValue get_module(unpacker& u, const value& x, const c10::TypePtr& type) {
  auto& modules = walked_model_of_rank().modules;
  auto* i = x.get_if<int64_t>();
  if (!i || *i < 0 || static_cast<size_t>(*i) >= modules.size()
      || !modules[static_cast<size_t>(*i)].script)
    u.mismatch("no module", x);
  auto* object = modules[static_cast<size_t>(*i)].script;
  return checked(
    u, c10::intrusive_ptr<c10::ivalue::Object>::reclaim_copy(object), type);
}

const c10::TypePtr& without_optional(const c10::TypePtr& x) {
  if (auto* optional = x->castRaw<c10::OptionalType>())
    return optional->getElementType();
  return x;
}

bool is_tensor(const c10::TypePtr& type) {
  return without_optional(type)->kind() == c10::TypeKind::TensorType;
}

} // namespace

value put_script_value(packer& p, const c10::IValue& x,
                       const c10::TypePtr& type) {
  if (!needs_type(type) || x.isNone())
    return pack<c10::IValue>::put(p, x);
  auto& known = without_optional(type);
  if (x.isObject() && is_module(known))
    return put_module(p, x);
  if (x.isTuple() && known->kind() == c10::TypeKind::TupleType) {
    auto& elements = x.toTupleRef().elements();
    std::vector<value> items;
    for (size_t i = 0; i < elements.size(); ++i) {
      value_path::scope here{p, "item", i};
      items.push_back(
        put_script_value(p, elements[i], known->containedTypes().at(i)));
    }
    return value::tuple(std::move(items));
  }
  if (x.isList() && known->kind() == c10::TypeKind::ListType) {
    std::vector<value> items;
    for (auto& item : x.toListRef()) {
      value_path::scope here{p, "item", items.size()};
      items.push_back(put_script_value(p, item, known->containedTypes()[0]));
    }
    return value::list(std::move(items));
  }
  if (x.isGenericDict() && known->kind() == c10::TypeKind::DictType) {
    std::vector<std::pair<value, value>> items;
    for (auto& entry : x.toGenericDict()) {
      value_path::scope here{p, "entry", items.size()};
      items.emplace_back(
        put_script_value(p, entry.key(), known->containedTypes()[0]),
        put_script_value(p, entry.value(), known->containedTypes()[1]));
    }
    return value::dict(std::move(items));
  }
  return pack<c10::IValue>::put(p, x);
}

c10::IValue get_script_value(unpacker& u, const value& x,
                             const c10::TypePtr& type) {
  if (!needs_type(type) || x.kind() == value_kind::none)
    return checked(u, pack<c10::IValue>::get(u, x), type);
  auto& known = without_optional(type);
  if (is_module(known))
    return get_module(u, x, known);
  if (auto* tuple = x.get_if<tuple_value>()) {
    auto expected = known->cast<c10::TupleType>();
    if (!expected || expected->elements().size() != tuple->items.size())
      u.mismatch("tuple of another size", x);
    std::vector<c10::IValue> items;
    for (size_t i = 0; i < tuple->items.size(); ++i) {
      value_path::scope here{u, "item", i};
      items.push_back(
        get_script_value(u, tuple->items[i], expected->elements()[i]));
    }
    if (expected->schema())
      return c10::ivalue::Tuple::createNamed(std::move(items), expected);
    return c10::ivalue::Tuple::create(std::move(items));
  }
  if (auto* list = x.get_if<list_value>()) {
    auto expected = known->cast<c10::ListType>();
    if (!expected)
      u.mismatch("no list", x);
    GenericList result{expected->getElementType()};
    for (size_t i = 0; i < list->items.size(); ++i) {
      value_path::scope here{u, "item", i};
      result.push_back(
        get_script_value(u, list->items[i], expected->getElementType()));
    }
    return result;
  }
  if (auto* dict = x.get_if<dict_value>()) {
    auto expected = known->cast<c10::DictType>();
    if (!expected)
      u.mismatch("no dict", x);
    GenericDict result{expected->getKeyType(), expected->getValueType()};
    for (size_t i = 0; i < dict->items.size(); ++i) {
      value_path::scope here{u, "entry", i};
      auto& [key, item] = dict->items[i];
      result.insert(get_script_value(u, key, expected->getKeyType()),
                    get_script_value(u, item, expected->getValueType()));
    }
    return result;
  }
  return pack<c10::IValue>::get(u, x);
}

value put_script_argument(packer& p, const c10::IValue& x,
                          const c10::TypePtr& type) {
  if (auto i = is_tensor(type) ? shared_position(x) : -1; i >= 0)
    return value::of(i);
  return put_script_value(p, x, type);
}

c10::IValue get_script_argument(unpacker& u, const value& x,
                                const c10::TypePtr& type) {
  if (auto* i = x.get_if<int64_t>(); i && is_tensor(type))
    return get_shared_parameter(u, x, *i);
  return get_script_value(u, x, type);
}

bool is_shared_parameter(const c10::IValue& x) {
  return shared_position(x) >= 0;
}

c10::IValue shallow_copy(const c10::IValue& x) {
  if (x.isTuple()) {
    std::vector<c10::IValue> items;
    for (auto& item : x.toTupleRef().elements())
      items.push_back(shallow_copy(item));
    return c10::ivalue::Tuple::create(std::move(items));
  }
  if (x.isList()) {
    auto from = x.toList();
    GenericList result{from.elementType()};
    for (auto& item : x.toListRef())
      result.push_back(shallow_copy(item));
    return result;
  }
  if (x.isGenericDict()) {
    auto from = x.toGenericDict();
    GenericDict result{from.keyType(), from.valueType()};
    for (auto& entry : from)
      result.insert(entry.key(), shallow_copy(entry.value()));
    return result;
  }
  return x;
}

bool same_content(const c10::IValue& x, const c10::IValue& y) {
  if (x.isTensor() && y.isTensor())
    return x.toTensor().is_same(y.toTensor());
  if (x.isTuple() && y.isTuple()) {
    auto& xs = x.toTupleRef().elements();
    auto& ys = y.toTupleRef().elements();
    return std::equal(xs.begin(), xs.end(), ys.begin(), ys.end(), same_content);
  }
  if (x.isList() && y.isList()) {
    auto xs = x.toListRef();
    auto ys = y.toListRef();
    return std::equal(xs.begin(), xs.end(), ys.begin(), ys.end(), same_content);
  }
  if (x.isGenericDict() && y.isGenericDict()) {
    auto xs = x.toGenericDict();
    auto ys = y.toGenericDict();
    if (xs.size() != ys.size())
      return false;
    auto i = xs.begin();
    for (auto& entry : ys) {
      if (!same_content(i->key(), entry.key())
          || !same_content(i->value(), entry.value()))
        return false;
      ++i;
    }
    return true;
  }
  if (x.isDouble() && y.isDouble()) // NaN is the same content as NaN
    return std::bit_cast<uint64_t>(x.toDouble())
           == std::bit_cast<uint64_t>(y.toDouble());
  return x.is(y) || (!x.isPtrType() && !y.isPtrType() && x == y)
         || (x.isString() && y.isString()
             && x.toStringRef() == y.toStringRef());
}

void replace_content(const c10::IValue& x, const c10::IValue& y) {
  if (x.isList() && y.isList()) {
    auto to = x.toList();
    to.clear();
    for (auto& item : y.toListRef())
      to.push_back(item);
  } else if (x.isGenericDict() && y.isGenericDict()) {
    auto to = x.toGenericDict();
    to.clear();
    for (auto& entry : y.toGenericDict())
      to.insert(entry.key(), entry.value());
  } else {
    throw error{error_code::protocol,
                "new content for a value that is not a container"};
  }
}

} // namespace smp
