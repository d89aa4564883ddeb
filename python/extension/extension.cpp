// smp._core: what the Python package needs of libsmp.

#include "python/extension/interpreter.hpp"
#include "python/extension/model.hpp"
#include "python/extension/python_module.hpp"
#include "python/extension/python_optimizer.hpp"
#include "python/extension/python_schedule.hpp"
#include "python/extension/registered_class.hpp"
#include "python/extension/traced_changes.hpp"
#include "python/extension/values.hpp"

PYBIND11_MODULE(_core, m) {
  using namespace smp::python;
  m.def("prepare", [](const py::object& error, const py::object& finished,
                      const py::module_& values) {
    prepare_interpreter(error, finished);
    prepare_values(values);
  });
  bind_session(m);
  bind_modules(m);
  bind_model(m);
  bind_step(m);
  bind_optimizer(m);
  bind_checkpoint(m);
  bind_schedule(m);
  bind_verify(m);
  bind_registered(m);
  bind_generators(m);
  bind_traced_changes(m);
}
