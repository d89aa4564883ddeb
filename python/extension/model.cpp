#include "python/extension/model.hpp"

#include "python/extension/python_module.hpp"
#include "python/extension/values.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"
#include "runtime/intercept/trace/traced_model_call.hpp"
#include "runtime/session/activation_checkpointing.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/step/model_state.hpp"

#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>

namespace smp::python {

namespace {

using without_lock = py::call_guard<py::gil_scoped_release>;

/// The model of a session, and what stands for its root.
class python_model final : public distributed_model_base {
public:
  explicit python_model(module_ptr root)
    : distributed_model_base(std::shared_ptr<torch::nn::Module>(root)),
      root_(std::move(root)) {
    // nop
  }

private:
  module_ptr root_;
};

/// @param x what stands for the root, or any other module
module_ptr module_of(py::handle x) {
  return py::isinstance<python_module>(x) ? x.cast<module_ptr>()
                                          : called_module_of(x);
}

/// @returns the modules of this rank that microbatches pass in order
std::vector<std::string> stateful_modules(const python_model& x) {
  std::vector<std::string> result;
  auto& map = x.state().map();
  for (auto& [module, what] : map.order().entries())
    if (map.owner(module_id{module}) == rank_id{rank()})
      result.push_back(map.model().modules[module].names.front());
  return result;
}

void bind_class(py::module_& m) {
  py::class_<python_model>(m, "Model")
    .def(py::init<module_ptr>(), without_lock{})
    .def(
      "backward",
      [](python_model& x, const std::vector<at::Tensor>& outputs,
         std::vector<std::optional<at::Tensor>> grads, bool keep_graph) {
        std::vector<at::Tensor> seeds;
        for (auto& y : grads)
          seeds.push_back(y.value_or(at::Tensor{}));
        x.backward(outputs, seeds, keep_graph);
      },
      without_lock{})
    .def(
      "train", [](python_model& x, bool on) { x.train(on); }, without_lock{})
    .def(
      "partition", [](python_model& x) { x.partition(); }, without_lock{})
    .def_property_readonly("partitioned", &python_model::partitioned)
    .def("partition_text", &python_model::partition_text,
         py::arg("colour") = false, py::arg("all") = false)
    .def("order_text", &python_model::order_text)
    .def("stateful_modules", &stateful_modules)
    .def("on_partition",
         [](python_model& x, py::function f) {
           auto kept = std::make_shared<shared_object>(std::move(f));
           x.register_post_partition_hook([kept] {
             py::gil_scoped_acquire lock;
             user_code([&] { kept->get()(); });
           });
         })
    .def("run_serially", [](python_model& x) { x.state().run_serially(); })
    .def("local_module_names", &python_model::local_module_names)
    .def("local_parameters",
         [](python_model& x) {
           return dict_of([&] { return x.local_named_parameters(); });
         })
    .def("local_state_dict",
         [](python_model& x) {
           return dict_of([&] { return x.local_state_dict(); });
         })
    .def(
      "state_dict",
      [](python_model& x) { return dict_of([&] { return x.state_dict(); }); })
    .def("gradients",
         [](python_model& x) { return dict_of([&] { return x.gradients(); }); })
    .def(
      "load_state_dict",
      [](python_model& x, const std::map<std::string, at::Tensor>& state) {
        x.load_state_dict({state.begin(), state.end()});
      },
      without_lock{})
    .def(
      "clip_grad_norm_",
      [](python_model& x, double most) { return clip_grad_norm_(x, most); },
      without_lock{})
    .def("begin_no_sync", [](python_model& x) {
      using scope = distributed_model_base::no_sync_scope;
      return std::unique_ptr<scope>(new scope(x.no_sync()));
    });
}

} // namespace

distributed_model_base& model_of(py::handle x) {
  return x.cast<python_model&>();
}

void bind_model(py::module_& m) {
  bind_class(m);
  py::class_<distributed_model_base::no_sync_scope>(m, "NoSync");
  py::class_<traced_model_call>(m, "TracedCall")
    .def(py::init<>())
    .def("again", &traced_model_call::again);
  py::class_<delay_param_initialization>(m, "Deferring").def(py::init<bool>());
  m.def("set_partition", [](py::handle x, uint32_t pp_rank) {
    set_partition(*module_of(x), pp_rank);
  });
  m.def("set_stateful", [](py::handle x, std::string why) {
    set_stateful(*module_of(x), std::move(why));
  });
  m.def("set_tensor_parallelism",
        [](py::handle x, bool enabled, std::string optimize) {
          set_tensor_parallelism(*module_of(x), enabled, {std::move(optimize)});
        });
  m.def("set_activation_checkpointing",
        [](py::handle x, std::string strategy, bool preserve_rng_state) {
          set_activation_checkpointing(
            *module_of(x), {std::move(strategy), preserve_rng_state});
        });
}

} // namespace smp::python
