#include "runtime/session/step.hpp"
#include "python/extension/model.hpp"
#include "python/extension/values.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/call_observer.hpp"
#include "runtime/intercept/trace/tracer.hpp"

#include <c10/core/GradMode.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

namespace smp::python {

namespace {

/// Before torch's own engine runs in an execution: it looks at the sizes of
/// what may not have arrived.
/// @returns whether this is the forward phase of a step's function, in which
/// only `distributed_model::backward` may run it
bool prepare_backward() {
  auto* execution = running_call::current();
  if (execution == nullptr || tracer::current())
    return execution != nullptr;
  py::gil_scoped_release meanwhile;
  fence(*execution);
  return execution->is_root() && !execution->in_backward()
         && c10::GradMode::is_enabled();
}

/// @param body called with the number of a microbatch: `(arguments, f)`, what
/// the step's function gets, and itself
/// @param inputs of the whole step
/// @returns what each microbatch returned, on every rank
py::list run_step(const py::function& body, uint64_t microbatches,
                  uint64_t function, const py::object& inputs, bool detach,
                  bool no_rerun) {
  auto given = tensors_in(inputs);
  packer all;
  for (auto& x : given)
    all.add(x);
  auto signature = detail::needs_signature() ? detail::signature(function, all)
                                             : 0;
  auto run = [&](packer& out, uint64_t index,
                 form_comparison& compared) -> value {
    running_python python;
    return user_code([&] {
      auto made = body(index).cast<py::tuple>();
      if (detail::compares_samples()) {
        packer arguments;
        for (auto& x : tensors_in(made[0]))
          arguments.add(x);
        detail::compare_samples(arguments, compared);
      }
      py::object result = made[1]();
      if (auto* observer = call_observer::current())
        observer->body_done(tensors_in(made[0]), tensors_in(result));
      value_path::scope place{out, "result"};
      return put(out, result);
    });
  };
  std::vector<std::shared_ptr<step_result>> results;
  {
    py::gil_scoped_release meanwhile;
    results = detail::run_step(
      {microbatches, signature, no_rerun, detail::written_since(given)}, run,
      detach);
  }
  py::list result;
  for (auto& x : results)
    result.append(x->get<any_object>().object);
  return result;
}

} // namespace

void bind_step(py::module_& m) {
  m.def("run_step", &run_step);
  m.def("prepare_backward", &prepare_backward);
  m.def(
    "slice",
    [](const at::Tensor& x, uint64_t parts, uint64_t index, int64_t axis) {
      return slice_tensor(x, parts, index, axis);
    },
    "One of `parts` slices of a tensor along an axis.");
  m.def("on_device", [](const std::vector<at::Tensor>& xs) {
    return detail::computes_on_device() ? detail::on_device(xs) : xs;
  });
  m.def("take_exception", &take_exception);
}

} // namespace smp::python
