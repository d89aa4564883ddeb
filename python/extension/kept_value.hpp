#pragma once

#include "python/extension/interpreter.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace smp::python {

/// What an attribute of a module is at one time: which object, and of lists,
/// dicts, sets, deques, tensors, numpy's arrays, generators of random numbers
/// and objects of the user's classes also what is in them: a few levels deep,
/// many thousand items. All functions want the lock.
class kept_value {
public:
  enum class purpose {
    look,           ///< to see changes; large contents are not copied for that
    look_at_shared, ///< the same of an object that several modules have
    copy,           ///< to put it back
  };

  kept_value(py::object x, purpose why);

  kept_value(kept_value&&) noexcept = default;
  kept_value& operator=(kept_value&&) noexcept = default;

  const py::object& get() const noexcept {
    return object_;
  }

  /// Tells whether `now` is something else, or has other contents. Equal
  /// numbers and texts are the same.
  /// @param now null: nothing
  /// @param place gets where inside it differs, such as ".level"; only if it
  /// does
  bool differs(PyObject* now, std::string& place) const;

  /// Of an object: its attributes that differ, if all of these are settings
  /// now: texts, flags or None. Else null.
  py::object changed_settings() const;

  /// Gives the object the contents that it had; may be called again.
  void put_back() const;

private:
  struct walk;

  kept_value(py::object x, walk& on);

  void keep_tensor(purpose why);
  void keep_items(walk& on);
  void keep_inside(const py::object& name, PyObject* x, walk& on);
  bool contents_differ(std::string& place) const;

  py::object object_;
  /// A copy of a list, dict, set or deque, or of the attributes of an object,
  /// or the state of what keeps it elsewhere (smp._opaque); null for others,
  /// and where `count_` is all that is looked at.
  py::object items_;
  Py_ssize_t count_ = -1; // of items
  bool is_object_ = false;
  bool is_opaque_ = false;
  bool is_shared_ = false;
  /// Of a tensor: a copy, and autograd's counter.
  at::Tensor copy_;
  uint32_t version_ = 0;
  /// Those items that have contents, and their keys; null: they have none.
  struct part;
  std::vector<part> parts_;
};

/// Tells whether `x` is an object of a class of the user's, which keeps state
/// in attributes.
bool keeps_attributes(py::handle x);

/// @returns the dict of an object itself, or with `__slots__` a new one
py::dict fields_of(py::handle object);

struct kept_value::part {
  py::object key;
  kept_value value;
};

/// Notes objects that several of `modules` hold as attributes, or in attributes
/// of such objects: configurations, mostly. No single module has them as its
/// state: their contents are put back, but what differs in them does not count.
/// Forgets earlier ones.
void note_shared_objects(const py::list& modules);

struct shared_by_modules {
  py::object object;
  /// As far as is known: all of them, until a trace has seen it.
  bool changes = true;
  /// Code was seen to set texts or flags of it, once: it is looked at.
  bool is_set = false;
};

const std::vector<shared_by_modules>& shared_objects();

/// Which of them change, and which are only set: the others are not copied from
/// now on.
void note_changing_objects(const py::list& changing, const py::list& set);

} // namespace smp::python
