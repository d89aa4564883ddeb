#include "python/extension/kept_dict.hpp"

#include <ATen/core/grad_mode.h>

#include <string_view>
#include <utility>

namespace smp::python {

namespace {

/// A larger tensor is watched, but not copied.
constexpr size_t copied_tensor_bytes = 1 << 20;

/// Attributes of each module that hold what smp walks, or what Python calls.
bool is_of_torch(std::string_view name) {
  return name == "training" || name == "_parameters" || name == "_buffers"
         || name == "_modules" || name == "_non_persistent_buffers_set"
         || name == "_compiled_call_impl" || name == "_smp_compiled_call"
         || (name.starts_with('_') && name.find("_hooks") != name.npos);
}

std::string_view text_of(py::handle x) {
  Py_ssize_t n = 0;
  auto* text = PyUnicode_AsUTF8AndSize(x.ptr(), &n);
  if (text == nullptr) {
    PyErr_Clear();
    return {};
  }
  return {text, static_cast<size_t>(n)};
}

bool is_number_or_text(PyObject* x) {
  return PyLong_CheckExact(x) || PyFloat_CheckExact(x)
         || PyUnicode_CheckExact(x) || PyBytes_CheckExact(x) || PyBool_Check(x)
         || PyComplex_CheckExact(x);
}

/// The same object, or an equal number or text.
bool same_content(PyObject* x, PyObject* y) {
  return x == y
         || (is_number_or_text(x) && Py_TYPE(x) == Py_TYPE(y)
             && PyObject_RichCompareBool(x, y, Py_EQ) == 1);
}

/// @returns a copy of the items of a list, dict or set; none for others
py::object items_of(PyObject* x) {
  if (PyList_Check(x))
    return py::reinterpret_steal<py::object>(PySequence_List(x));
  if (PyDict_Check(x))
    return py::reinterpret_steal<py::object>(PyDict_Copy(x));
  if (PySet_Check(x))
    return py::reinterpret_steal<py::object>(PySet_New(x));
  return py::none();
}

bool same_items(PyObject* kept, PyObject* now) {
  if (PyObject_Size(kept) != PyObject_Size(now))
    return false;
  if (PyList_Check(kept)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(kept); ++i)
      if (!same_content(PyList_GET_ITEM(kept, i), PyList_GET_ITEM(now, i)))
        return false;
    return true;
  }
  if (PySet_Check(kept))
    return PyObject_RichCompareBool(kept, now, Py_EQ) == 1;
  PyObject* key = nullptr;
  PyObject* content = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(kept, &at, &key, &content) != 0;) {
    auto* other = PyDict_GetItem(now, key);
    if (other == nullptr || !same_content(content, other))
      return false;
  }
  return true;
}

py::list& traced_changes = *new py::list; // outlives the interpreter

uint32_t version_of(const at::Tensor& x) {
  return x.is_inference() ? 0 : static_cast<uint32_t>(x._version());
}

} // namespace

kept_dict::kept_dict(const py::object& module)
  : module_(module), buffers_(items_of(module.attr("_buffers").ptr())) {
  at::NoGradGuard no_grad;
  PyObject* name = nullptr;
  PyObject* content = nullptr;
  py::dict attributes = module.attr("__dict__");
  for (Py_ssize_t at = 0;
       PyDict_Next(attributes.ptr(), &at, &name, &content) != 0;) {
    if (is_of_torch(text_of(name)))
      continue;
    entry x{py::reinterpret_borrow<py::object>(name),
            py::reinterpret_borrow<py::object>(content),
            items_of(content),
            {}};
    if (THPVariable_Check(content)) {
      auto& t = THPVariable_Unpack(content);
      x.version = version_of(t);
      if (t.defined() && t.has_storage() && t.nbytes() <= copied_tensor_bytes)
        x.tensor = t.detach().clone();
    }
    entries_.push_back(std::move(x));
  }
}

kept_dict::~kept_dict() {
  py::gil_scoped_acquire lock;
  entries_.clear();
  buffers_ = {};
  module_ = {};
}

bool kept_dict::changed(const entry& x, PyObject* now) const {
  if (now == nullptr || !same_content(x.content.ptr(), now))
    return true;
  if (THPVariable_Check(now))
    return version_of(THPVariable_Unpack(now)) != x.version;
  return !x.items.is_none() && !same_items(x.items.ptr(), now);
}

std::string kept_dict::changes() const {
  py::gil_scoped_acquire lock;
  py::dict attributes = module_.attr("__dict__");
  Py_ssize_t found = 0;
  for (auto& x : entries_) {
    auto* now = PyDict_GetItem(attributes.ptr(), x.name.ptr());
    if (changed(x, now))
      return "sets its attribute '" + std::string{text_of(x.name)} + "'";
    found += now != nullptr ? 1 : 0;
  }
  PyObject* name = nullptr;
  PyObject* content = nullptr;
  for (Py_ssize_t at = 0;
       PyDict_Next(attributes.ptr(), &at, &name, &content) != 0;) {
    if (is_of_torch(text_of(name)))
      continue;
    if (found-- == 0)
      return "makes its attribute '" + std::string{text_of(name)} + "'";
  }
  return {};
}

std::vector<py::object> kept_dict::made() const {
  py::set known;
  for (auto& x : entries_)
    known.add(x.name);
  std::vector<py::object> result;
  for (auto [name, content] : py::dict(module_.attr("__dict__")))
    if (!is_of_torch(text_of(name)) && !known.contains(name))
      result.push_back(py::reinterpret_borrow<py::object>(name));
  return result;
}

void kept_dict::put_back(const entry& x) {
  if (THPVariable_Check(x.content.ptr())) {
    auto& t = THPVariable_Unpack(x.content.ptr());
    if (x.tensor.defined() && version_of(t) != x.version
        && t.sizes() == x.tensor.sizes())
      t.detach().copy_(x.tensor);
    return;
  }
  if (x.items.is_none() || same_items(x.items.ptr(), x.content.ptr()))
    return;
  x.content.attr("clear")();
  x.content.attr(PyList_Check(x.content.ptr()) ? "extend" : "update")(x.items);
}

void kept_dict::put_back(model_map* map) {
  py::gil_scoped_acquire lock;
  at::NoGradGuard no_grad;
  py::dict attributes = module_.attr("__dict__");
  auto undone = made();
  for (auto& name : undone)
    PyDict_DelItem(attributes.ptr(), name.ptr());
  if (map == nullptr) {
    for (auto& x : entries_)
      if (changed(x, PyDict_GetItem(attributes.ptr(), x.name.ptr())))
        undone.push_back(x.name);
    for (auto& name : undone)
      traced_changes.append(py::make_tuple(module_, name));
  }
  for (auto& x : entries_) {
    PyDict_SetItem(attributes.ptr(), x.name.ptr(), x.content.ptr());
    put_back(x);
  }
  // Otherwise buffers are put back by the map.
  if (map == nullptr
      && !same_items(buffers_.ptr(), module_.attr("_buffers").ptr()))
    module_.attr("_buffers").attr("update")(buffers_);
}

py::list take_traced_changes() {
  return std::exchange(traced_changes, py::list{});
}

} // namespace smp::python
