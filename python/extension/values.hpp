#pragma once

// Arguments and results of Python as values that ranks exchange. Nothing is
// pickled: a value of another class travels as the name of the class and its
// parts, and arrives only where that class is loaded.

#include "python/extension/interpreter.hpp"
#include "runtime/values/pack.hpp"

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

namespace smp::python {

/// @param module `smp._values`, which takes classes apart and puts them
/// together
void prepare_values(const py::module_& module);

/// @throws error (unsupported) naming the place and the class of what cannot be
/// sent
value put(packer& to, py::handle x);

/// @throws error (protocol) for what no correct rank sends
py::object get(unpacker& from, const value& x);

/// Gives the containers in `old` the content of `now`, which arrived for them.
void replace_content(py::handle old, const py::object& now);

/// @returns the tensors in `x`, each once, as far as smp can look into it
std::vector<at::Tensor> tensors_in(py::handle x);

/// The same for a call, whose trace is told of what cannot be sent.
std::vector<at::Tensor> tensors_in_call(const py::tuple& args,
                                        const py::dict& kwargs);
std::vector<at::Tensor> tensors_in_result(py::handle x);

/// Tells whether the one who gets `x` could change it other than by its
/// tensors.
bool is_mutable(const value& x);

/// Tells whether both are the same tree of the same tensors.
bool same(const value& x, const std::vector<at::Tensor>& of_x, const value& y,
          const std::vector<at::Tensor>& of_y);

/// @returns a dict of what `f` returns, for which it is called without the lock
template <class F>
py::dict dict_of(F f) {
  std::vector<std::pair<std::string, at::Tensor>> found;
  {
    py::gil_scoped_release meanwhile;
    found = f();
  }
  py::dict result;
  for (auto& [name, x] : found)
    result[py::str(name)] = x;
  return result;
}

/// So that results of steps can be read as objects.
struct any_object {
  py::object object;
};

} // namespace smp::python

template <>
struct smp::pack<smp::python::any_object> {
  static value put(packer& p, const python::any_object& x) {
    return python::put(p, x.object);
  }
  static python::any_object get(unpacker& u, const value& x) {
    return {python::get(u, x)};
  }
};
