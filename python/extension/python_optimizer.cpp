#include "python/extension/python_optimizer.hpp"

#include "python/extension/model.hpp"
#include "python/extension/values.hpp"
#include "runtime/session/distributed_optimizer.hpp"

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>

namespace smp::python {

struct python_optimizer::group_options final
  : torch::optim::OptimizerCloneableOptions<group_options> {
  explicit group_options(size_t n) : index(n) {
    // nop
  }

  /// @returns Python's group
  py::object of(const py::object& inner) const {
    return inner.attr("param_groups")[py::int_(index)];
  }

  size_t index;
};

std::vector<torch::optim::OptimizerParamGroup>
python_optimizer::groups_of(const py::object& inner) {
  std::vector<torch::optim::OptimizerParamGroup> result;
  for (auto group : inner.attr("param_groups"))
    result.emplace_back(group["params"].cast<std::vector<at::Tensor>>(),
                        std::make_unique<group_options>(result.size()));
  return result;
}

python_optimizer::python_optimizer(const py::object& inner,
                                   const py::module_& helper)
  : Optimizer(groups_of(inner), std::make_unique<group_options>(0)),
    inner_(inner),
    helper_(helper) {
  for (auto& group : param_groups())
    given_.push_back(group.params());
}

void python_optimizer::update_groups() {
  py::gil_scoped_acquire lock;
  auto& groups = param_groups();
  bool changed = false;
  for (size_t i = 0; i < groups.size(); ++i) {
    auto& now = groups[i].params();
    auto same = [](const at::Tensor& x, const at::Tensor& y) {
      return x.is_same(y);
    };
    if (std::equal(now.begin(), now.end(), given_[i].begin(), given_[i].end(),
                   same))
      continue;
    changed = true;
    given_[i] = now;
    inner_.get().attr("param_groups")[py::int_(i)]["params"] = py::cast(now);
  }
  if (changed)
    user_code([&] { helper_.get().attr("forget_others")(inner_.get()); });
}

at::Tensor python_optimizer::step(LossClosure) {
  py::gil_scoped_acquire lock;
  update_groups();
  user_code([&] { inner_.get().attr("step")(); });
  return {};
}

std::string python_optimizer::type() const {
  py::gil_scoped_acquire lock;
  return helper_.get().attr("type_of")(inner_.get()).cast<std::string>();
}

std::map<std::string, double> python_optimizer::options_of(
  const torch::optim::OptimizerOptions& group) const {
  py::gil_scoped_acquire lock;
  auto of = static_cast<const group_options&>(group).of(inner_.get());
  return helper_.get()
    .attr("options_of")(of)
    .cast<std::map<std::string, double>>();
}

void python_optimizer::set_options(
  const torch::optim::OptimizerOptions& group,
  const std::map<std::string, double>& values) {
  py::gil_scoped_acquire lock;
  auto of = static_cast<const group_options&>(group).of(inner_.get());
  helper_.get().attr("set_options")(of, values);
}

std::vector<state_field> python_optimizer::state_fields() const {
  py::gil_scoped_acquire lock;
  std::vector<state_field> result;
  for (auto x : helper_.get().attr("state_fields")(inner_.get())) {
    auto [name, is_count] = x.cast<std::pair<std::string, bool>>();
    result.push_back({name, is_count});
  }
  return result;
}

void python_optimizer::expect_fields(const std::vector<state_field>& xs) {
  py::gil_scoped_acquire lock;
  py::dict fields;
  for (auto& x : xs)
    fields[py::str(x.name)] = x.is_count;
  user_code([&] { helper_.get().attr("expect_fields")(inner_.get(), fields); });
}

named_tensors python_optimizer::state_of(const at::Tensor& parameter) const {
  py::gil_scoped_acquire lock;
  named_tensors result;
  user_code([&] {
    for (auto x : helper_.get().attr("state_of")(inner_.get(), parameter)) {
      auto [name, t] = x.cast<std::pair<std::string, at::Tensor>>();
      result.emplace_back(name, t);
    }
  });
  return result;
}

void python_optimizer::set_state(const at::Tensor& parameter,
                                 const named_tensors& state) {
  py::gil_scoped_acquire lock;
  py::dict fields;
  for (auto& [name, t] : state)
    fields[py::str(name)] = t;
  user_code(
    [&] { helper_.get().attr("set_state")(inner_.get(), parameter, fields); });
}

// -- Python -------------------------------------------------------------------

namespace {

/// A Python optimizer and smp's around it.
struct optimizer_pair {
  python_optimizer inner;
  distributed_optimizer outer;

  optimizer_pair(const py::object& x, const py::module_& helper,
                 const optimizer_options& options)
    : inner(x, helper), outer(inner, options) {
    // nop
  }
};

std::unique_ptr<optimizer_pair>
make_pair(const py::object& x, const py::module_& helper,
          std::optional<double> static_loss_scale, bool dynamic_loss_scale,
          const py::dict& dynamic_loss_args, std::optional<double> ema_decay) {
  optimizer_options options;
  options.static_loss_scale = static_loss_scale;
  options.dynamic_loss_scale = dynamic_loss_scale;
  auto& args = options.dynamic_loss_args;
  for (auto [key, x] : dynamic_loss_args) {
    auto name = key.cast<std::string>();
    if (name == "init_scale")
      args.init_scale = x.cast<double>();
    else if (name == "scale_factor")
      args.scale_factor = x.cast<double>();
    else if (name == "scale_window")
      args.scale_window = x.cast<uint64_t>();
    else if (name == "min_scale")
      args.min_scale = x.cast<double>();
    else
      throw error{error_code::config,
                  "dynamic_loss_args: unknown '" + name
                    + "'; it may have init_scale, scale_factor, scale_window "
                      "and min_scale"};
  }
  options.ema_decay = ema_decay;
  return std::make_unique<optimizer_pair>(x, helper, options);
}

} // namespace

distributed_optimizer& optimizer_of(py::handle x) {
  return x.cast<optimizer_pair&>().outer;
}

void bind_optimizer(py::module_& m) {
  using without_lock = py::call_guard<py::gil_scoped_release>;
  py::class_<optimizer_pair>(m, "Optimizer")
    .def(py::init(&make_pair), py::arg("inner"), py::arg("helper"),
         py::arg("static_loss_scale") = py::none(),
         py::arg("dynamic_loss_scale") = false,
         py::arg("dynamic_loss_args") = py::dict(),
         py::arg("ema_decay") = py::none())
    .def(
      "step", [](optimizer_pair& x) { return x.outer.step(); }, without_lock{})
    .def(
      "zero_grad", [](optimizer_pair& x) { x.outer.zero_grad(); },
      without_lock{})
    .def("update_groups", [](optimizer_pair& x) { x.inner.update_groups(); })
    .def(
      "swap_averages", [](optimizer_pair& x) { x.outer.swap_averages(); },
      without_lock{})
    .def_property_readonly(
      "loss_scale", [](optimizer_pair& x) { return x.outer.loss_scale(); })
    .def("state_dict",
         [](optimizer_pair& x) {
           return dict_of([&] { return x.outer.state_dict(); });
         })
    .def("local_state_dict",
         [](optimizer_pair& x) {
           return dict_of([&] { return x.outer.local_state_dict(); });
         })
    .def("load_state_dict",
         [](optimizer_pair& x, const std::map<std::string, at::Tensor>& state) {
           py::gil_scoped_release meanwhile;
           x.outer.load_state_dict({state.begin(), state.end()});
         });
}

} // namespace smp::python
