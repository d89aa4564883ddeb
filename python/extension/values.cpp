#include "python/extension/values.hpp"

#include "runtime/intercept/trace/trace_notes.hpp"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <complex>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace smp::python {

namespace {

/// Precedes the name of a class in a list that is an object of it.
constexpr std::string_view of_class = "py:";

py::object& take_apart = *new py::object;
py::object& put_together = *new py::object;
py::object& replace = *new py::object;

value put_items(packer& to, py::handle xs, size_t n, const char* what,
                bool tuple) {
  std::vector<value> items;
  items.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    value_path::scope place{to, what, i};
    auto at = static_cast<Py_ssize_t>(i);
    items.push_back(put(to, tuple ? PyTuple_GET_ITEM(xs.ptr(), at)
                                  : PyList_GET_ITEM(xs.ptr(), at)));
  }
  return tuple ? value::tuple(std::move(items)) : value::list(std::move(items));
}

value put_dict(packer& to, py::handle x) {
  std::vector<std::pair<value, value>> items;
  PyObject* key = nullptr;
  PyObject* content = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(x.ptr(), &at, &key, &content) != 0;) {
    value_path::scope place{to, "entry", items.size()};
    auto name = put(to, key);
    items.emplace_back(std::move(name), put(to, content));
  }
  return value::dict(std::move(items));
}

value put_int(packer& to, py::handle x) {
  int overflow = 0;
  auto y = PyLong_AsLongLongAndOverflow(x.ptr(), &overflow);
  if (overflow != 0)
    to.refuse("an int of more than 64 bits cannot be sent to another rank");
  return value::of(static_cast<int64_t>(y));
}

value put_text(py::handle x) {
  Py_ssize_t n = 0;
  auto* text = PyUnicode_AsUTF8AndSize(x.ptr(), &n);
  if (text == nullptr)
    throw py::error_already_set();
  return value::of(std::string_view{text, static_cast<size_t>(n)});
}

value put_parts(packer& to, py::handle x) {
  auto parts = user_code([&] { return take_apart(x).cast<py::tuple>(); });
  if (parts.size() == 1)
    to.refuse(parts[0].cast<std::string>());
  std::vector<value> items{put(to, parts[1])};
  size_t i = 0;
  for (auto child : parts[2]) {
    value_path::scope place{to, "part", i++};
    items.push_back(put(to, child));
  }
  return value::list(std::move(items),
                     std::string{of_class} + parts[0].cast<std::string>());
}

} // namespace

void prepare_values(const py::module_& module) {
  take_apart = module.attr("take_apart");
  put_together = module.attr("put_together");
  replace = module.attr("replace");
}

value put(packer& to, py::handle x) {
  if (to.depth() > max_value_depth)
    to.refuse("nested too deeply");
  auto* o = x.ptr();
  if (o == Py_None)
    return value::none();
  if (THPVariable_Check(o)) {
    auto& t = THPVariable_Unpack(o);
    return t.defined() ? put_value(to, t) : value::undefined();
  }
  if (PyBool_Check(o))
    return value::of(o == Py_True);
  if (PyLong_CheckExact(o))
    return put_int(to, x);
  if (PyFloat_CheckExact(o))
    return value::of(PyFloat_AS_DOUBLE(o));
  if (PyUnicode_CheckExact(o))
    return put_text(x);
  if (PyTuple_CheckExact(o))
    return put_items(to, x, static_cast<size_t>(PyTuple_GET_SIZE(o)), "element",
                     true);
  if (PyList_CheckExact(o))
    return put_items(to, x, static_cast<size_t>(PyList_GET_SIZE(o)), "item",
                     false);
  if (PyDict_CheckExact(o))
    return put_dict(to, x);
  if (PyComplex_CheckExact(o))
    return value::of(std::complex<double>{PyComplex_RealAsDouble(o),
                                          PyComplex_ImagAsDouble(o)});
  if (THPDtype_Check(o))
    return value::of(dtype_value{
      static_cast<uint8_t>(reinterpret_cast<THPDtype*>(o)->scalar_type)});
  if (THPDevice_Check(o)) {
    auto& device = reinterpret_cast<THPDevice*>(o)->device;
    return value::of(
      device_ref{static_cast<uint8_t>(device.type()), device.index()});
  }
  return put_parts(to, x);
}

namespace {

py::tuple get_items(unpacker& from, const std::vector<value>& xs,
                    size_t first = 0) {
  py::tuple result(xs.size() - first);
  for (size_t i = first; i < xs.size(); ++i)
    result[i - first] = get(from, xs[i]);
  return result;
}

py::object get_list(unpacker& from, const list_value& x) {
  if (x.type.empty())
    return py::list(get_items(from, x.items));
  if (!x.type.starts_with(of_class) || x.items.empty())
    from.fail("a list that is not of Python");
  return user_code([&] {
    return put_together(x.type.substr(of_class.size()), get(from, x.items[0]),
                        get_items(from, x.items, 1));
  });
}

py::object get_dict(unpacker& from, const dict_value& x) {
  py::dict result;
  for (auto& [key, content] : x.items)
    result[get(from, key)] = get(from, content);
  return result;
}

py::object stolen(PyObject* x) {
  return py::reinterpret_steal<py::object>(x);
}

} // namespace

py::object get(unpacker& from, const value& x) {
  switch (x.kind()) {
    case value_kind::none:
    case value_kind::undefined:
      return py::none();
    case value_kind::boolean:
      return py::bool_(*x.get_if<bool>());
    case value_kind::integer:
      return py::int_(*x.get_if<int64_t>());
    case value_kind::real:
      return py::float_(*x.get_if<double>());
    case value_kind::complex: {
      auto& y = *x.get_if<std::complex<double>>();
      return stolen(PyComplex_FromDoubles(y.real(), y.imag()));
    }
    case value_kind::string:
      return py::str(*x.get_if<std::string>());
    case value_kind::tensor:
    case value_kind::nested:
      return stolen(THPVariable_Wrap(get_value<at::Tensor>(from, x)));
    case value_kind::tuple:
      return get_items(from, x.get_if<tuple_value>()->items);
    case value_kind::list:
      return get_list(from, *x.get_if<list_value>());
    case value_kind::dict:
      return get_dict(from, *x.get_if<dict_value>());
    case value_kind::dtype:
      return py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyObject*>(torch::getTHPDtype(
          static_cast<at::ScalarType>(x.get_if<dtype_value>()->code))));
    case value_kind::device: {
      auto& y = *x.get_if<device_ref>();
      return stolen(
        THPDevice_New(c10::Device{static_cast<c10::DeviceType>(y.type),
                                  static_cast<c10::DeviceIndex>(y.index)}));
    }
  }
  from.fail("a value of an unknown kind");
}

void replace_content(py::handle old, const py::object& now) {
  user_code([&] { return replace(old, now); });
}

std::vector<at::Tensor> tensors_in(py::handle x) {
  packer found;
  try {
    put(found, x);
  } catch (const error&) {
    // Observers ignore values that smp cannot send.
  }
  return found.tensors();
}

std::vector<at::Tensor> tensors_in_call(const py::tuple& args,
                                        const py::dict& kwargs) {
  packer found;
  size_t i = 0;
  auto add = [&](py::handle x) {
    value_path::scope place{found, "argument", i++};
    note_if_unsendable([&] { put(found, x); });
  };
  for (auto x : args)
    add(x);
  for (auto [name, x] : kwargs)
    add(x);
  return found.tensors();
}

std::vector<at::Tensor> tensors_in_result(py::handle x) {
  packer found;
  value_path::scope place{found, "result"};
  note_if_unsendable([&] { put(found, x); });
  return found.tensors();
}

bool is_mutable(const value& x) {
  if (x.kind() == value_kind::list || x.kind() == value_kind::dict)
    return true;
  if (auto* tuple = x.get_if<tuple_value>())
    for (auto& y : tuple->items)
      if (is_mutable(y))
        return true;
  return false;
}

namespace {

/// A tree with its tensors.
struct tree {
  const value& root;
  const std::vector<at::Tensor>& tensors;
};

bool same(const tree& x, const tree& y);

bool same_items(const tree& x, const std::vector<value>& xs, const tree& y,
                const std::vector<value>& ys) {
  if (xs.size() != ys.size())
    return false;
  for (size_t i = 0; i < xs.size(); ++i)
    if (!same({xs[i], x.tensors}, {ys[i], y.tensors}))
      return false;
  return true;
}

bool same(const tree& x, const tree& y) {
  if (x.root.kind() != y.root.kind())
    return false;
  if (auto* i = x.root.get_if<tensor_index>())
    return x.tensors.at(i->index).is_same(
      y.tensors.at(y.root.get_if<tensor_index>()->index));
  if (auto* items = x.root.get_if<tuple_value>())
    return same_items(x, items->items, y, y.root.get_if<tuple_value>()->items);
  if (auto* list = x.root.get_if<list_value>()) {
    auto* other = y.root.get_if<list_value>();
    return list->type == other->type
           && same_items(x, list->items, y, other->items);
  }
  if (auto* dict = x.root.get_if<dict_value>()) {
    auto& items = dict->items;
    auto& others = y.root.get_if<dict_value>()->items;
    if (items.size() != others.size())
      return false;
    for (size_t i = 0; i < items.size(); ++i)
      if (!same({items[i].first, x.tensors}, {others[i].first, y.tensors})
          || !same({items[i].second, x.tensors}, {others[i].second, y.tensors}))
        return false;
    return true;
  }
  return x.root == y.root;
}

} // namespace

bool same(const value& x, const std::vector<at::Tensor>& of_x, const value& y,
          const std::vector<at::Tensor>& of_y) {
  return same(tree{x, of_x}, tree{y, of_y});
}

} // namespace smp::python
