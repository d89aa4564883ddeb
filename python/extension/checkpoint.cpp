#include "runtime/checkpoint/checkpoint.hpp"
#include "python/extension/model.hpp"
#include "runtime/checkpoint/load_state_dict.hpp"
#include "runtime/checkpoint/saved_model.hpp"

#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>
#include <vector>

namespace smp::python {

namespace {

std::vector<distributed_optimizer*> optimizers_of(const py::list& xs) {
  std::vector<distributed_optimizer*> result;
  for (auto x : xs)
    result.push_back(&optimizer_of(x));
  return result;
}

std::string save(const std::string& path, uint64_t step,
                 const py::object& model, const py::list& optimizers,
                 const std::map<std::string, std::string>& content,
                 uint64_t kept) {
  auto& x = model_of(model);
  auto ys = optimizers_of(optimizers);
  py::gil_scoped_release meanwhile;
  return save_checkpoint(
           path, step, x, ys,
           {.user_content = content, .num_kept_partial_checkpoints = kept})
    .folder;
}

/// @returns the folder, the step and the program's data; none: no checkpoint
py::object resume(const std::string& path, const py::object& model,
                  const py::list& optimizers) {
  auto& x = model_of(model);
  auto ys = optimizers_of(optimizers);
  std::optional<resumed_checkpoint> found;
  {
    py::gil_scoped_release meanwhile;
    found = resume_from_checkpoint(path, x, ys);
  }
  if (!found)
    return py::none();
  return py::make_tuple(found->folder, found->step, found->user_content);
}

} // namespace

void bind_checkpoint(py::module_& m) {
  m.def("save_checkpoint", &save);
  m.def("resume_from_checkpoint", &resume);
  m.def("save_state", [](const std::string& path, const py::object& model) {
    auto& x = model_of(model);
    py::gil_scoped_release meanwhile;
    save_state(path, x);
  });
}

} // namespace smp::python
