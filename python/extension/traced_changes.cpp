#include "python/extension/traced_changes.hpp"

#include "runtime/intercept/trace/tracer.hpp"

#include <unordered_map>
#include <utility>

namespace smp::python {

namespace {

/// What traces have found since it was last taken. Outlives the interpreter.
struct found_changes {
  py::list attributes; // pairs of a module and a name
  py::list shared;     // objects of several modules, and settings of them
  std::unordered_map<PyObject*, std::string> of_others; // by who changes them
  traced_frame* innermost = nullptr;
};

found_changes& found() {
  static auto& result = *new found_changes;
  return result;
}

std::string class_of(const py::object& x) {
  return py::str(py::type::handle_of(x).attr("__name__"));
}

} // namespace

traced_frame::traced_frame(const py::object& module) {
  auto* tracer = tracer::current();
  if (tracer == nullptr || !tracer->counts())
    return;
  module_ = module;
  self_ = look_at(module, false);
  for (auto x : module.attr("modules")())
    if (!x.is(module))
      others_.push_back(look_at(py::reinterpret_borrow<py::object>(x), false));
  for (auto& x : shared_objects())
    others_.push_back(look_at(x.object, true));
  outer_ = std::exchange(found().innermost, this);
}

traced_frame::~traced_frame() {
  if (!module_)
    return;
  found().innermost = outer_;
  try {
    leave();
  } catch (const std::exception&) {
    // The call's own error tells more.
  }
}

std::string traced_frame::watched::changes() const {
  if (attributes)
    return attributes->changes();
  std::string place;
  return content->differs(object.ptr(), place) ? place : "";
}

traced_frame::watched traced_frame::look_at(const py::object& x, bool shared) {
  using purpose = kept_value::purpose;
  watched result{x, nullptr, nullptr};
  if (shared)
    result.content = std::make_unique<kept_value>(x, purpose::look_at_shared);
  else
    result.attributes = std::make_unique<kept_dict>(x, purpose::look);
  return result;
}

void traced_frame::leave() {
  if (!self_.changes().empty())
    changed_.insert(module_.ptr());
  for (auto& x : others_)
    if (auto what = x.changes(); !what.empty()) {
      changed_.insert(x.object.ptr());
      note(x, what);
    }
  if (outer_ == nullptr)
    return;
  // What has changed in this call was not changed by the code around it.
  outer_->changed_.insert(changed_.begin(), changed_.end());
  for (auto& x : outer_->others_)
    if (changed_.contains(x.object.ptr()))
      x = look_at(x.object, x.attributes == nullptr);
}

void traced_frame::note(const watched& x, const std::string& what) {
  if (x.attributes) {
    found().of_others.emplace(module_.ptr(),
                              what + ", of a " + class_of(x.object) + " in it");
    return;
  }
  auto settings = x.content->changed_settings();
  found().shared.append(
    py::make_tuple(x.object, settings ? settings : py::none()));
  if (!settings)
    found().of_others.emplace(module_.ptr(), "sets '" + what.substr(1)
                                               + "' of a " + class_of(x.object)
                                               + " that others have, too");
}

std::string traced_changes_by(const py::object& module) {
  auto i = found().of_others.find(module.ptr());
  return i == found().of_others.end() ? "" : i->second;
}

void note_traced_change(const py::object& module, const py::object& name) {
  found().attributes.append(py::make_tuple(module, name));
}

void bind_traced_changes(py::module_& m) {
  m.def("call_traced", [](const py::object& module, const py::args& args,
                          const py::kwargs& kwargs) {
    traced_frame frame{module};
    return module(*args, **kwargs);
  });
  m.def("keeps_attributes", &keeps_attributes);
  m.def("fields_of", &fields_of);
  m.def("note_shared_objects", &note_shared_objects);
  m.def("note_changing_objects", &note_changing_objects);
  m.def("take_traced_changes", [] {
    auto& x = found();
    x.of_others.clear();
    return py::make_tuple(std::exchange(x.attributes, py::list{}),
                          std::exchange(x.shared, py::list{}));
  });
}

} // namespace smp::python
