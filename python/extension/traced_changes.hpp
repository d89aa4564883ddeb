#pragma once

#include "python/extension/interpreter.hpp"
#include "python/extension/kept_dict.hpp"

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace smp::python {

/// A call of a module while a model is measured: finds whether its code changes
/// attributes of modules below it, or objects that several modules have. Such
/// code is state of the calling module, too: microbatches have to pass it in
/// order. Does nothing in other calls. With the lock.
class traced_frame {
public:
  explicit traced_frame(const py::object& module);
  ~traced_frame();
  traced_frame(const traced_frame&) = delete;
  traced_frame& operator=(const traced_frame&) = delete;

private:
  struct watched {
    py::object object;
    std::unique_ptr<kept_dict> attributes; // null: a shared object
    std::unique_ptr<kept_value> content;

    std::string changes() const;
  };

  static watched look_at(const py::object& x, bool shared);
  void leave();
  void note(const watched& x, const std::string& what);

  py::object module_;
  std::vector<watched> others_;
  watched self_;
  /// By this call and those in it.
  std::unordered_set<PyObject*> changed_;
  traced_frame* outer_ = nullptr;
};

/// @returns what the code of a module does to others, as far as traces have
/// seen; empty: nothing
std::string traced_changes_by(const py::object& module);

/// Notes that traces have changed an attribute.
void note_traced_change(const py::object& module, const py::object& name);

void bind_traced_changes(py::module_& m);

} // namespace smp::python
