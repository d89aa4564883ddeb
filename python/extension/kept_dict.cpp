#include "python/extension/kept_dict.hpp"

#include "python/extension/traced_changes.hpp"
#include "runtime/model/model_map.hpp"

#include <string_view>
#include <utility>

namespace smp::python {

namespace {

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

} // namespace

kept_dict::kept_dict(const py::object& module, kept_value::purpose why)
  : module_(module),
    why_(why),
    buffers_(kept_value{module.attr("_buffers"), why}) {
  PyObject* name = nullptr;
  PyObject* x = nullptr;
  py::dict attributes = module.attr("__dict__");
  entries_.reserve(attributes.size());
  for (Py_ssize_t at = 0; PyDict_Next(attributes.ptr(), &at, &name, &x) != 0;)
    if (!is_of_torch(text_of(name)))
      entries_.emplace_back(
        py::reinterpret_borrow<py::object>(name),
        kept_value{py::reinterpret_borrow<py::object>(x), why});
}

kept_dict::~kept_dict() {
  py::gil_scoped_acquire lock;
  entries_.clear();
  buffers_.reset();
  module_ = {};
}

std::string kept_dict::changes() const {
  py::gil_scoped_acquire lock;
  py::dict attributes = module_.attr("__dict__");
  Py_ssize_t found = 0;
  for (auto& [name, x] : entries_) {
    auto* now = PyDict_GetItem(attributes.ptr(), name.ptr());
    std::string place;
    if (x.differs(now, place))
      return "sets its attribute '" + std::string{text_of(name)} + place + "'";
    found += now != nullptr ? 1 : 0;
  }
  PyObject* name = nullptr;
  PyObject* x = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(attributes.ptr(), &at, &name, &x) != 0;) {
    if (is_of_torch(text_of(name)))
      continue;
    if (found-- == 0)
      return "makes its attribute '" + std::string{text_of(name)} + "'";
  }
  return why_ == kept_value::purpose::copy ? traced_changes_by(module_) : "";
}

std::vector<py::object> kept_dict::made() const {
  py::set known;
  for (auto& x : entries_)
    known.add(x.first);
  std::vector<py::object> result;
  for (auto [name, x] : py::dict(module_.attr("__dict__")))
    if (!is_of_torch(text_of(name)) && !known.contains(name))
      result.push_back(py::reinterpret_borrow<py::object>(name));
  return result;
}

void kept_dict::put_back(map_changes* changes) {
  py::gil_scoped_acquire lock;
  py::dict attributes = module_.attr("__dict__");
  auto undone = made();
  for (auto& name : undone)
    PyDict_DelItem(attributes.ptr(), name.ptr());
  if (changes == nullptr) {
    std::string place;
    for (auto& [name, x] : entries_)
      if (x.differs(PyDict_GetItem(attributes.ptr(), name.ptr()), place))
        undone.push_back(name);
    for (auto& name : undone)
      note_traced_change(module_, name);
  }
  for (auto& [name, x] : entries_) {
    PyDict_SetItem(attributes.ptr(), name.ptr(), x.get().ptr());
    x.put_back();
  }
  put_back_buffers(changes);
}

void kept_dict::put_back_buffers(map_changes* changes) {
  std::vector<std::pair<std::string, at::Tensor>> now;
  for (auto [name, x] : py::dict(buffers_->get()))
    if (THPVariable_Check(x.ptr()))
      now.emplace_back(py::str(name), THPVariable_Unpack(x.ptr()));
  buffers_->put_back();
  if (changes == nullptr)
    return;
  for (auto& [name, x] : now)
    if (auto* kept = PyDict_GetItemString(buffers_->get().ptr(), name.c_str());
        kept != nullptr && THPVariable_Check(kept))
      changes->rebind(x, THPVariable_Unpack(kept));
}

} // namespace smp::python
