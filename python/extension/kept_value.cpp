#include "python/extension/kept_value.hpp"

#include "runtime/base/copied_on_write.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace smp::python {

namespace {

/// Larger contents are not copied only to see changes.
constexpr Py_ssize_t looked_at_items = 100'000;

/// Larger tensors are copied when they are written.
constexpr size_t copied_tensor_bytes = 1 << 20;

/// How deep lists in lists, and objects in objects, are looked at.
constexpr unsigned max_depth = 8;

bool is_number_or_text(PyObject* x) {
  return PyLong_CheckExact(x) || PyFloat_CheckExact(x)
         || PyUnicode_CheckExact(x) || PyBytes_CheckExact(x) || PyBool_Check(x)
         || PyComplex_CheckExact(x);
}

/// The same object, or an equal number or text.
bool is_same(PyObject* x, PyObject* y) {
  return x == y
         || (is_number_or_text(x) && Py_TYPE(x) == Py_TYPE(y)
             && PyObject_RichCompareBool(x, y, Py_EQ) == 1);
}

// -- classes ------------------------------------------------------------------

enum class content { none, sequence, dict, set, object, opaque };

py::module_ opaque_module() {
  return py::module_::import("smp._opaque");
}

bool begins_with(const py::object& text, std::string_view x) {
  return py::isinstance<py::str>(text)
         && text.cast<std::string>().starts_with(x);
}

/// @returns the names of `__slots__` of a class and its bases
py::list slots_of_class(py::handle type) {
  return py::module_::import("copyreg").attr("_slotnames")(type);
}

/// Objects of the user's classes keep state in their attributes. What Python
/// and PyTorch have there is no state of the model: locks, caches, loggers.
content content_of_class(py::handle type, const py::list& slots) {
  auto is = [&](const char* module, const char* name) {
    auto base = py::module_::import(module).attr(name);
    return PyObject_IsSubclass(type.ptr(), base.ptr()) == 1;
  };
  if (is("builtins", "list") || is("collections", "deque"))
    return content::sequence;
  if (is("builtins", "dict"))
    return content::dict;
  if (is("builtins", "set"))
    return content::set;
  auto opaque = opaque_module().attr("classes")();
  if (PyObject_IsSubclass(type.ptr(), opaque.ptr()) == 1)
    return content::opaque;
  if (is("types", "SimpleNamespace"))
    return content::object;
  auto* self = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (PyType_HasFeature(self, Py_TPFLAGS_HEAPTYPE) == 0
      || (self->tp_dictoffset == 0 && slots.empty()) || is("torch.nn", "Module")
      || is("builtins", "type") || is("builtins", "BaseException")
      || is("enum", "Enum") || is("logging", "Filterer")
      || is("smp._elsewhere", "Elsewhere"))
    return content::none;
  auto module = py::getattr(type, "__module__", py::none());
  for (auto* x : {"torch.", "logging", "threading", "functools", "typing",
                  "pathlib", "inspect"})
    if (begins_with(module, x))
      return content::none;
  return content::object;
}

struct known_class {
  content what;
  py::list slots;
};

const known_class& known_class_of(PyObject* x) {
  // Classes live on, so that no other one gets the address of one.
  static auto& known = *new std::unordered_map<PyTypeObject*, known_class>;
  auto* type = Py_TYPE(x);
  auto i = known.find(type);
  if (i == known.end()) {
    Py_INCREF(type);
    py::handle self{reinterpret_cast<PyObject*>(type)};
    auto slots = slots_of_class(self);
    auto what = content_of_class(self, slots);
    i = known.emplace(type, known_class{what, std::move(slots)}).first;
  }
  return i->second;
}

content content_of(PyObject* x) {
  return known_class_of(x).what;
}

// -- copies -------------------------------------------------------------------

auto& noted_shared = *new std::vector<shared_by_modules>;

shared_by_modules* shared_entry(PyObject* x) {
  auto i = std::ranges::find_if(noted_shared,
                                [x](auto& y) { return y.object.ptr() == x; });
  return i == noted_shared.end() ? nullptr : &*i;
}

py::dict dict_of(PyObject* x) {
  if (Py_TYPE(x)->tp_dictoffset == 0)
    return {};
  auto result = py::reinterpret_steal<py::dict>(
    PyObject_GenericGetDict(x, nullptr));
  if (!result)
    throw py::error_already_set();
  return result;
}

} // namespace

py::dict fields_of(py::handle object) {
  auto* x = object.ptr();
  auto result = dict_of(x);
  auto& slots = known_class_of(x).slots;
  if (slots.empty())
    return result;
  result = py::reinterpret_steal<py::dict>(PyDict_Copy(result.ptr()));
  for (auto name : slots)
    if (auto value = py::getattr(x, name, py::handle{}))
      result[name] = value;
  return result;
}

namespace {

/// @param kept as `fields_of` had them
void put_back_fields(PyObject* x, const py::dict& kept) {
  auto rest = py::reinterpret_steal<py::dict>(PyDict_Copy(kept.ptr()));
  for (auto name : known_class_of(x).slots) {
    auto* value = PyDict_GetItem(kept.ptr(), name.ptr());
    if (PyObject_GenericSetAttr(x, name.ptr(), value) != 0)
      PyErr_Clear(); // it had no value, and has none
    if (value != nullptr)
      PyDict_DelItem(rest.ptr(), name.ptr());
  }
  auto now = dict_of(x);
  now.clear();
  PyDict_Update(now.ptr(), rest.ptr());
}

/// @returns a new list, dict or set
py::object items_of(PyObject* x, content what) {
  auto* result = what == content::sequence ? PySequence_List(x)
                 : what == content::set    ? PySet_New(x)
                                           : PyDict_Copy(x);
  if (result == nullptr)
    throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

bool same_items(PyObject* kept, PyObject* now) {
  if (PySet_Check(kept))
    return PyObject_RichCompareBool(kept, now, Py_EQ) == 1;
  if (PyList_Check(kept)) {
    auto xs = py::reinterpret_steal<py::object>(
      PySequence_Fast(now, "a list has become something else"));
    if (!xs)
      throw py::error_already_set();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(kept); ++i)
      if (i >= PySequence_Fast_GET_SIZE(xs.ptr())
          || !is_same(PyList_GET_ITEM(kept, i),
                      PySequence_Fast_GET_ITEM(xs.ptr(), i)))
        return false;
    return true;
  }
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(kept, &at, &key, &value) != 0;) {
    auto* other = PyDict_GetItem(now, key);
    if (other == nullptr || !is_same(value, other))
      return false;
  }
  return true;
}

uint32_t version_of(const at::Tensor& x) {
  return x.is_inference() ? 0 : static_cast<uint32_t>(x._version());
}

std::string text_of(const py::object& key) {
  if (!key)
    return {};
  return py::isinstance<py::str>(key) ? key.cast<std::string>()
                                      : std::string{py::str(key)};
}

} // namespace

// -- one value ----------------------------------------------------------------

/// From a value into what is in it.
struct kept_value::walk {
  purpose why = purpose::look;
  unsigned depth = 0;
  unsigned objects = 0; // around this value
  /// Objects may know each other in circles.
  std::unordered_set<PyObject*> seen = {};
  Py_ssize_t items = 0; // that were looked at so far

  /// @returns whether there is to be looked at `n` more in an object
  bool takes(Py_ssize_t n) {
    items += n;
    return objects == 0 || items <= looked_at_items;
  }
};

kept_value::kept_value(py::object x, purpose why) : object_(std::move(x)) {
  walk on{why};
  *this = kept_value{std::move(object_), on};
}

kept_value::kept_value(py::object x, walk& on) : object_(std::move(x)) {
  auto why = on.why;
  if (THPVariable_Check(object_.ptr())) {
    keep_tensor(why);
    return;
  }
  if (is_number_or_text(object_.ptr()) || object_.is_none())
    return;
  if (PyTuple_Check(object_.ptr())) {
    if (on.depth < max_depth)
      for (auto y : py::reinterpret_borrow<py::tuple>(object_))
        keep_inside({}, y.ptr(), on);
    return;
  }
  auto what = content_of(object_.ptr());
  is_object_ = what == content::object;
  is_opaque_ = what == content::opaque;
  if (is_opaque_) {
    items_ = opaque_module().attr("state_of")(object_);
    return;
  }
  if (what == content::none || on.depth == max_depth
      || (is_object_ && !on.seen.insert(object_.ptr()).second))
    return;
  auto* shared = is_object_ && why != purpose::look_at_shared
                   ? shared_entry(object_.ptr())
                   : nullptr;
  is_shared_ = shared != nullptr && !shared->is_set;
  if (is_shared_ && (why == purpose::look || !shared->changes))
    return;
  auto where = is_object_ ? py::object{fields_of(object_.ptr())} : object_;
  auto n = PyObject_Size(where.ptr());
  if (!on.takes(n))
    return;
  count_ = n;
  if (why != purpose::copy && count_ > looked_at_items)
    return;
  items_ = items_of(where.ptr(), what);
  on.objects += is_object_ ? 1 : 0;
  keep_items(on);
  on.objects -= is_object_ ? 1 : 0;
}

void kept_value::keep_items(walk& on) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  if (PyList_Check(items_.ptr()))
    for (Py_ssize_t i = 0; i < count_; ++i)
      keep_inside({}, PyList_GET_ITEM(items_.ptr(), i), on);
  else if (PyDict_Check(items_.ptr()))
    for (Py_ssize_t at = 0; PyDict_Next(items_.ptr(), &at, &key, &value) != 0;)
      keep_inside(py::reinterpret_borrow<py::object>(key), value, on);
}

void kept_value::keep_tensor(purpose why) {
  auto& t = THPVariable_Unpack(object_.ptr());
  version_ = version_of(t);
  if (why != purpose::copy || !t.defined() || !t.has_storage())
    return;
  at::NoGradGuard no_grad;
  if (t.nbytes() > copied_tensor_bytes)
    copy_ = copied_on_write(t);
  if (!copy_.defined())
    copy_ = t.detach().clone();
}

void kept_value::keep_inside(const py::object& key, PyObject* x, walk& on) {
  if (is_number_or_text(x) || x == Py_None)
    return;
  ++on.depth;
  kept_value inside{py::reinterpret_borrow<py::object>(x), on};
  --on.depth;
  if (inside.count_ >= 0 || inside.items_ || !inside.parts_.empty()
      || THPVariable_Check(x))
    parts_.push_back({key, std::move(inside)});
}

bool kept_value::differs(PyObject* now, std::string& place) const {
  return now == nullptr || !is_same(object_.ptr(), now)
         || contents_differ(place);
}

bool kept_value::contents_differ(std::string& place) const {
  if (is_shared_)
    return false;
  auto* self = object_.ptr();
  if (THPVariable_Check(self))
    return version_of(THPVariable_Unpack(self)) != version_;
  if (is_opaque_) {
    auto now = opaque_module().attr("state_of")(object_);
    return !items_[py::int_(0)].equal(now[py::int_(0)]);
  }
  if (count_ >= 0) {
    auto where = is_object_ ? py::object{fields_of(self)} : object_;
    if (is_object_ && items_) {
      // Which attribute it is tells more than that one is.
      for (auto [name, x] : py::reinterpret_borrow<py::dict>(where)) {
        auto* kept = PyDict_GetItem(items_.ptr(), name.ptr());
        if (kept == nullptr || !is_same(kept, x.ptr())) {
          place = "." + text_of(py::reinterpret_borrow<py::object>(name));
          return true;
        }
      }
    } else if (items_ && !same_items(items_.ptr(), where.ptr())) {
      return true;
    }
    if (PyObject_Size(where.ptr()) != count_)
      return true;
  }
  for (auto& x : parts_)
    if (x.value.contents_differ(place)) {
      if (is_object_)
        place = "." + text_of(x.key) + place;
      return true;
    }
  return false;
}

py::object kept_value::changed_settings() const {
  if (!is_object_ || !items_)
    return {};
  py::dict result;
  auto now = fields_of(object_.ptr());
  for (auto [name, x] : now) {
    auto* kept = PyDict_GetItem(items_.ptr(), name.ptr());
    if (kept != nullptr && is_same(kept, x.ptr()))
      continue;
    if (!x.is_none() && !PyBool_Check(x.ptr()) && !PyUnicode_Check(x.ptr()))
      return {};
    result[name] = x;
  }
  std::string place;
  auto others = std::ranges::any_of(
    parts_, [&](auto& x) { return x.value.contents_differ(place); });
  auto gone = PyObject_Size(now.ptr()) < count_;
  return others || gone ? py::object{} : result;
}

void kept_value::put_back() const {
  if (copy_.defined()) {
    auto& t = THPVariable_Unpack(object_.ptr());
    if (copy_.const_data_ptr() != t.const_data_ptr())
      put_content(t, copy_);
    return;
  }
  if (is_opaque_) {
    opaque_module().attr("put_back_into")(object_, items_[py::int_(1)]);
    return;
  }
  if (items_) {
    auto where = is_object_ ? py::object{fields_of(object_.ptr())} : object_;
    if (PyObject_Size(where.ptr()) == count_
        && same_items(items_.ptr(), where.ptr())) {
      // nop
    } else if (is_object_) {
      put_back_fields(object_.ptr(), items_);
    } else {
      where.attr("clear")();
      where.attr(PyList_Check(items_.ptr()) ? "extend" : "update")(items_);
    }
  }
  for (auto& x : parts_)
    x.value.put_back();
}

// -- objects of several modules -----------------------------------------------

const std::vector<shared_by_modules>& shared_objects() {
  return noted_shared;
}

namespace {

/// The objects that an object or a module has as attributes.
std::vector<py::object> objects_in(py::handle attributes) {
  std::vector<py::object> result;
  for (auto [name, x] : py::reinterpret_borrow<py::dict>(attributes))
    if (keeps_attributes(x))
      result.push_back(py::reinterpret_borrow<py::object>(x));
  return result;
}

} // namespace

bool keeps_attributes(py::handle x) {
  return !THPVariable_Check(x.ptr()) && content_of(x.ptr()) == content::object;
}

void note_shared_objects(const py::list& modules) {
  noted_shared.clear();
  std::vector<std::pair<PyObject*, py::object>> held;
  for (auto module : modules)
    for (auto& x : objects_in(module.attr("__dict__")))
      held.emplace_back(module.ptr(), std::move(x));
  std::unordered_map<PyObject*, PyObject*> holders;
  for (unsigned depth = 0; depth < max_depth && !held.empty(); ++depth) {
    std::vector<std::pair<PyObject*, py::object>> first;
    for (auto& [module, x] : held) {
      auto [i, added] = holders.emplace(x.ptr(), module);
      if (added)
        first.emplace_back(module, x);
      else if (i->second != module && shared_entry(x.ptr()) == nullptr)
        noted_shared.push_back({x});
    }
    // What is in an object that is noted belongs to that one.
    held.clear();
    for (auto& [module, x] : first)
      if (shared_entry(x.ptr()) == nullptr)
        for (auto& y : objects_in(fields_of(x.ptr())))
          held.emplace_back(module, std::move(y));
  }
}

void note_changing_objects(const py::list& changing, const py::list& set) {
  auto contains = [](const py::list& xs, const py::object& x) {
    return std::ranges::any_of(xs, [&](auto y) { return y.is(x); });
  };
  for (auto& x : noted_shared) {
    x.changes = contains(changing, x.object);
    x.is_set = !x.changes && contains(set, x.object);
  }
}

} // namespace smp::python
