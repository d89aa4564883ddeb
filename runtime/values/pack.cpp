#include "runtime/values/pack.hpp"

#include "runtime/values/tensor_bridge.hpp"
#include "transport/error.hpp"

#include <ATen/NestedTensorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/_nested_view_from_buffer.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>

#include <algorithm>
#include <limits>

namespace smp {

// -- where an error is --------------------------------------------------------

std::string value_path::place() const {
  std::string result;
  for (auto& x : places_) {
    if (!result.empty())
      result += ", ";
    result += x.what;
    if (x.index)
      result += ' ' + std::to_string(*x.index);
  }
  return result.empty() ? "value" : result;
}

void value_path::refuse(const std::string& why) const {
  throw error(error_code::unsupported, place() + ": " + why);
}

void value_path::fail(const std::string& why) const {
  throw error(error_code::protocol, place() + ": " + why);
}

void value_path::mismatch(const char* expected, const value& found) const {
  fail(std::string{expected} + " expected, found " + to_string(found.kind()));
}

// -- the tensor table ---------------------------------------------------------

uint32_t packer::add(const at::Tensor& x) {
  auto [i, fresh] = positions_.try_emplace(
    x.unsafeGetTensorImpl(), static_cast<uint32_t>(tensors_.size()));
  // Kept in the table, so that no other TensorImpl gets this address.
  if (fresh)
    tensors_.push_back(x);
  return i->second;
}

const at::Tensor& unpacker::tensor(uint32_t index) const {
  if (index >= tensors_.size())
    fail("tensor " + std::to_string(index) + " of a message with "
         + std::to_string(tensors_.size()));
  return tensors_[index];
}

// -- single values ------------------------------------------------------------

namespace {

template <class T>
const T& as(unpacker& u, const value& x, const char* expected) {
  auto result = x.get_if<T>();
  if (result == nullptr)
    u.mismatch(expected, x);
  return *result;
}

} // namespace

namespace {

/// Travels as its parts, which are plain tensors and share its memory.
value put_nested(packer& p, const at::Tensor& x) {
  if (x.requires_grad())
    p.refuse(
      "a nested tensor that requires grad cannot be sent to another "
      "rank");
  auto* nested = at::native::get_nested_tensor_impl_or_null(x);
  if (!nested)
    p.refuse(
      "a nested tensor without one memory for all cannot be sent to "
      "another rank");
  auto put = [&p](const at::Tensor& part) {
    if (auto why = refusal_of(part); !why.empty())
      p.refuse("nested: " + why);
    return tensor_index{p.add(part)};
  };
  return value::of(nested_tensor{put(nested->get_unsafe_storage_as_tensor()),
                                 put(nested->get_nested_sizes()),
                                 put(nested->get_nested_strides()),
                                 put(nested->get_storage_offsets())});
}

/// Checks that each of the tensors is in the memory of all.
void check_nested(unpacker& u, int64_t elements, const at::Tensor& sizes,
                  const at::Tensor& strides, const at::Tensor& offsets) {
  for (auto* x : {&sizes, &strides, &offsets})
    if (x->scalar_type() != at::kLong)
      u.fail("a nested tensor whose sizes are not integers");
  if (sizes.dim() != 2 || sizes.sizes() != strides.sizes() || offsets.dim() != 1
      || offsets.size(0) != sizes.size(0))
    u.fail("a nested tensor whose sizes, strides and offsets do not fit");
  for (int64_t i = 0; i < sizes.size(0); ++i) {
    auto last = offsets[i].item<int64_t>();
    auto wrong = last < 0;
    auto empty = false;
    for (int64_t d = 0; d < sizes.size(1); ++d) {
      auto size = sizes[i][d].item<int64_t>();
      auto stride = strides[i][d].item<int64_t>();
      int64_t reach = 0;
      empty = empty || size == 0;
      wrong = wrong || size < 0 || stride < 0
              || __builtin_mul_overflow(std::max<int64_t>(size - 1, 0), stride,
                                        &reach)
              || __builtin_add_overflow(last, reach, &last);
    }
    if (wrong || (!empty && last >= elements))
      u.fail("a nested tensor beyond its memory");
  }
}

at::Tensor get_nested(unpacker& u, const nested_tensor& x) {
  auto elements = u.tensor(x.elements.index);
  // Copies, which are here even if the originals have not been read yet.
  auto sizes = u.tensor(x.sizes.index).clone();
  auto strides = u.tensor(x.strides.index).clone();
  auto offsets = u.tensor(x.offsets.index).clone();
  if (elements.dim() != 1)
    u.fail("a nested tensor whose memory is not a row of elements");
  check_nested(u, elements.numel(), sizes, strides, offsets);
  return at::_nested_view_from_buffer(elements, sizes, strides, offsets);
}

} // namespace

value pack<at::Tensor>::put(packer& p, const at::Tensor& x) {
  if (!x.defined())
    return value::undefined();
  if (x.is_nested())
    return put_nested(p, x);
  // Refused here and not when it is sent: only here its place is known.
  if (auto why = refusal_of(x); !why.empty())
    p.refuse(why);
  return value::tensor(p.add(x));
}

at::Tensor pack<at::Tensor>::get(unpacker& u, const value& x) {
  if (x.kind() == value_kind::undefined)
    return {};
  if (auto* nested = x.get_if<nested_tensor>())
    return get_nested(u, *nested);
  return u.tensor(as<tensor_index>(u, x, "tensor").index);
}

bool pack<bool>::get(unpacker& u, const value& x) {
  return as<bool>(u, x, "bool");
}

int64_t pack<int64_t>::get(unpacker& u, const value& x) {
  return as<int64_t>(u, x, "int");
}

double pack<double>::get(unpacker& u, const value& x) {
  return as<double>(u, x, "float");
}

std::complex<double> pack<std::complex<double>>::get(unpacker& u,
                                                     const value& x) {
  return as<std::complex<double>>(u, x, "complex");
}

std::string pack<std::string>::get(unpacker& u, const value& x) {
  return as<std::string>(u, x, "string");
}

std::nullopt_t pack<std::nullopt_t>::get(unpacker& u, const value& x) {
  as<std::monostate>(u, x, "none");
  return std::nullopt;
}

std::monostate pack<std::monostate>::get(unpacker& u, const value& x) {
  return as<std::monostate>(u, x, "none");
}

std::nullptr_t pack<std::nullptr_t>::get(unpacker& u, const value& x) {
  as<std::monostate>(u, x, "none");
  return nullptr;
}

// -- types of the tensor library ----------------------------------------------

value pack<c10::Scalar>::put(packer& p, const c10::Scalar& x) {
  if (x.isSymbolic())
    p.refuse("a symbolic number cannot be sent");
  if (x.isIntegral(false) && x.isUnsigned()
      && x.toUInt64() > uint64_t{std::numeric_limits<int64_t>::max()})
    p.refuse("an unsigned number that does not fit into 64 bits with sign");
  if (x.isBoolean())
    return value::of(x.toBool());
  if (x.isComplex()) {
    auto y = x.toComplexDouble();
    return value::of(std::complex<double>{y.real(), y.imag()});
  }
  return x.isFloatingPoint() ? value::of(x.toDouble())
                             : value::of(int64_t{x.toLong()});
}

c10::Scalar pack<c10::Scalar>::get(unpacker& u, const value& x) {
  switch (x.kind()) {
    case value_kind::boolean:
      return std::get<bool>(x.data);
    case value_kind::integer:
      return std::get<int64_t>(x.data);
    case value_kind::real:
      return std::get<double>(x.data);
    case value_kind::complex:
      return c10::complex<double>{std::get<std::complex<double>>(x.data)};
    default:
      u.mismatch("number", x);
  }
}

c10::Device pack<c10::Device>::get(unpacker& u, const value& x) {
  auto [type, index] = as<device_ref>(u, x, "device");
  auto kind = static_cast<c10::DeviceType>(type);
  auto highest = kind == c10::kCPU
                   ? 0
                   : std::numeric_limits<c10::DeviceIndex>::max();
  if (!c10::isValidDeviceType(kind) || index < -1 || index > highest)
    u.fail("there is no device " + std::to_string(type) + ":"
           + std::to_string(index));
  return {kind, static_cast<c10::DeviceIndex>(index)};
}

c10::ScalarType pack<c10::ScalarType>::get(unpacker& u, const value& x) {
  auto code = as<dtype_value>(u, x, "dtype").code;
  if (code >= c10::NumScalarTypes)
    u.fail("there is no dtype " + std::to_string(code));
  return static_cast<c10::ScalarType>(code);
}

// -- containers ---------------------------------------------------------------

namespace detail {

const std::vector<value>& list_items(unpacker& u, const value& x) {
  return as<list_value>(u, x, "list").items;
}

const std::vector<value>& tuple_items(unpacker& u, const value& x,
                                      size_t size) {
  auto& result = as<tuple_value>(u, x, "tuple").items;
  if (result.size() != size)
    u.fail("tuple of " + std::to_string(size) + " expected, found tuple of "
           + std::to_string(result.size()));
  return result;
}

const std::vector<std::pair<value, value>>& dict_items(unpacker& u,
                                                       const value& x) {
  return as<dict_value>(u, x, "dict").items;
}

} // namespace detail

// -- values of TorchScript ----------------------------------------------------

namespace {

std::string name_of(const c10::IValue& x) {
  return x.isObject() ? "object of class " + x.toObject()->name()
                      : "TorchScript value of kind " + x.tagKind();
}

std::vector<value> put_items(packer& p, c10::ArrayRef<c10::IValue> xs) {
  std::vector<value> result;
  result.reserve(xs.size());
  for (size_t i = 0; i < xs.size(); ++i) {
    value_path::scope here{p, "item", i};
    result.push_back(pack<c10::IValue>::put(p, xs[i]));
  }
  return result;
}

value put_tuple(packer& p, const c10::IValue& x) {
  if (auto name = x.type()->expectRef<c10::TupleType>().name())
    p.refuse("a named tuple (" + name->qualifiedName()
             + ") would arrive without its names");
  return value::tuple(put_items(p, x.toTupleRef().elements()));
}

value put_dict(packer& p, const c10::IValue& x) {
  std::vector<std::pair<value, value>> items;
  for (auto& entry : x.toGenericDict()) {
    value_path::scope here{p, "entry", items.size()};
    auto key = pack<c10::IValue>::put(p, entry.key());
    auto item = pack<c10::IValue>::put(p, entry.value());
    items.emplace_back(std::move(key), std::move(item));
  }
  return value::dict(std::move(items), x.type()->annotation_str());
}

/// Parses what `annotation_str` wrote. @throws error
c10::TypePtr parse_type(unpacker& u, const std::string& x) {
  // The parser recurses; no type of a real program is this long.
  if (x.size() > 256)
    u.fail("a type name of " + std::to_string(x.size()) + " characters");
  try {
    return torch::jit::ScriptTypeParser{}.parseType(x);
  } catch (const std::exception&) {
    u.fail("\"" + x + "\" is not a TorchScript type");
  }
}

/// @returns the element type of a list of type `x`; an untyped one, from C++,
/// may hold anything.
c10::TypePtr type_of_elements(unpacker& u, const std::string& x) {
  static constexpr std::string_view tensors = "List[Tensor]";
  static constexpr std::string_view ints = "List[int]";
  if (x.empty())
    return c10::AnyType::get();
  if (x == tensors) // shortcuts for what nearly all lists are
    return c10::TensorType::get();
  if (x == ints)
    return c10::IntType::get();
  auto result = parse_type(u, x)->cast<c10::ListType>();
  if (!result)
    u.fail("\"" + x + "\" is not a list type");
  return result->getElementType();
}

/// TorchScript trusts the types of its values, so a message must not
/// invent one.
c10::IValue checked(unpacker& u, c10::IValue x, const c10::TypePtr& type) {
  if (!x.isTensor() && !x.type()->isSubtypeOf(*type))
    u.fail(type->annotation_str() + " expected, found "
           + x.type()->annotation_str());
  if (x.isTensor() && !c10::TensorType::get()->isSubtypeOf(*type))
    u.fail(type->annotation_str() + " expected, found Tensor");
  return x;
}

c10::IValue get_list(unpacker& u, const list_value& x) {
  auto type = type_of_elements(u, x.type);
  c10::impl::GenericList result{type};
  result.reserve(x.items.size());
  for (size_t i = 0; i < x.items.size(); ++i) {
    value_path::scope here{u, "item", i};
    result.push_back(checked(u, pack<c10::IValue>::get(u, x.items[i]), type));
  }
  return result;
}

c10::IValue get_tuple(unpacker& u, const tuple_value& x) {
  std::vector<c10::IValue> items;
  items.reserve(x.items.size());
  for (size_t i = 0; i < x.items.size(); ++i) {
    value_path::scope here{u, "item", i};
    items.push_back(pack<c10::IValue>::get(u, x.items[i]));
  }
  return c10::ivalue::Tuple::create(std::move(items));
}

c10::IValue get_dict(unpacker& u, const dict_value& x) {
  auto type = parse_type(u, x.type.empty() ? "Dict[str, Any]" : x.type)
                ->cast<c10::DictType>();
  if (!type)
    u.fail("\"" + x.type + "\" is not a dict type");
  c10::impl::GenericDict result{type->getKeyType(), type->getValueType()};
  for (size_t i = 0; i < x.items.size(); ++i) {
    value_path::scope here{u, "entry", i};
    auto key = checked(u, pack<c10::IValue>::get(u, x.items[i].first),
                       type->getKeyType());
    auto item = checked(u, pack<c10::IValue>::get(u, x.items[i].second),
                        type->getValueType());
    if (!result.insert(std::move(key), std::move(item)).second)
      u.fail("this key stands twice in its dict");
  }
  return result;
}

} // namespace

value pack<c10::IValue>::put(packer& p, const c10::IValue& x) {
  if (p.depth() > max_value_depth) // a list can hold itself
    p.refuse("nested too deep");
  if (x.isNone())
    return {};
  if (x.isTensor())
    return pack<at::Tensor>::put(p, x.toTensor());
  if (x.isBool())
    return value::of(x.toBool());
  if (x.isInt())
    return value::of(int64_t{x.toInt()});
  if (x.isDouble())
    return value::of(x.toDouble());
  if (x.isComplexDouble())
    return pack<c10::complex<double>>::put(p, x.toComplexDouble());
  if (x.isString())
    return value::of(x.toStringRef());
  if (x.isDevice())
    return pack<c10::Device>::put(p, x.toDevice());
  if (x.isTuple())
    return put_tuple(p, x);
  if (x.isList())
    return value::list(put_items(p, x.toListRef()), x.type()->annotation_str());
  if (x.isGenericDict())
    return put_dict(p, x);
  p.refuse(name_of(x) + " cannot be sent to another rank");
}

c10::IValue pack<c10::IValue>::get(unpacker& u, const value& x) {
  switch (x.kind()) {
    case value_kind::none:
      return {};
    case value_kind::boolean:
      return std::get<bool>(x.data);
    case value_kind::integer:
      return std::get<int64_t>(x.data);
    case value_kind::real:
      return std::get<double>(x.data);
    case value_kind::complex:
      return c10::complex<double>{std::get<std::complex<double>>(x.data)};
    case value_kind::string:
      return std::get<std::string>(x.data);
    case value_kind::tensor:
    case value_kind::undefined:
    case value_kind::nested:
      return pack<at::Tensor>::get(u, x);
    case value_kind::list:
      return get_list(u, std::get<list_value>(x.data));
    case value_kind::tuple:
      return get_tuple(u, std::get<tuple_value>(x.data));
    case value_kind::dict:
      return get_dict(u, std::get<dict_value>(x.data));
    case value_kind::device:
      return pack<c10::Device>::get(u, x);
    case value_kind::dtype:
      // TorchScript has no type for them but int.
      return int64_t{std::get<dtype_value>(x.data).code};
  }
  u.mismatch("TorchScript value", x);
}

} // namespace smp
