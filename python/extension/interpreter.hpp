#pragma once

// Where C++ and Python meet: the interpreter's lock, objects that any thread
// may drop, and exceptions that cross.

#include "transport/error.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

namespace smp::python {

namespace py = pybind11;

/// From now on waits release the interpreter's lock, and exceptions of smp
/// become those of Python.
/// @param error smp.Error @param finished see `tracer::finished`
void prepare_interpreter(const py::object& error, const py::object& finished);

/// Python code that the engine runs, on one of its threads.
class running_python {
public:
  running_python();

private:
  /// A thread of the engine keeps its Python state: to make one for each call
  /// costs system calls (CPython maps memory for its stack).
  struct kept_state {
    kept_state();
  };

  kept_state state_;
  py::gil_scoped_acquire lock_;
};

/// An object that a thread without the lock may drop.
class shared_object {
public:
  explicit shared_object(py::object x) : object_(std::move(x)) {
    // nop
  }

  shared_object(const shared_object&) = delete;
  shared_object& operator=(const shared_object&) = delete;

  ~shared_object();

  const py::object& get() const noexcept {
    return object_;
  }

private:
  py::object object_;
};

/// @throws what the exception of Python means to the engine
[[noreturn]] void rethrow_for_engine(py::error_already_set& x);

/// Runs `f`, the user's code. With the lock.
/// @throws error, or `tracer::finished`, for what `f` raises
template <class F>
auto user_code(F&& f) {
  try {
    return f();
  } catch (py::error_already_set& x) {
    rethrow_for_engine(x);
  }
}

/// @returns the exception of which `rethrow_for_engine` said that, or None; and
/// forgets all
py::object take_exception(const std::string& text);

/// @returns the kind of error of that name; of another name, that of user code
error_code error_code_called(const std::string& name);

/// @returns the class's path: "torch.nn.modules.linear.Linear"
std::string path_of_class(py::handle type);

} // namespace smp::python
