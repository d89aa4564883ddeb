#include "python/extension/registered_class.hpp"

#include "python/extension/kept_dict.hpp"
#include "python/extension/python_module.hpp"
#include "runtime/model/module_walk.hpp"
#include "tp/functions.hpp"

#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

namespace smp::python {

namespace {

/// A module of a registered class, once its parameters are this rank's slices.
struct shared_by_class {
  shared_by_class(const registered_module& x, const nn::parameter_parts&)
    : module(x) {
    py::gil_scoped_acquire lock;
    user_code([&] { x.object->get().attr("adopt")(); });
  }

  static parameter_axes axes(const registered_module& x) {
    return x.axes;
  }

  registered_module module;
};

using distributed = detail::custom_distribution<shared_by_class,
                                                registered_module>;

/// Of a class that uses its slices for one batch.
const distribution& for_one_batch() {
  static const auto result = [] {
    auto x = distributed::get();
    x.counts_samples_once = true;
    return x;
  }();
  return result;
}

/// Only the distributed class runs, not the code of the module.
std::string why_not_of_its_class(const py::object& module) {
  for (auto [name, x] : py::dict(module.attr("named_modules")())) {
    auto path = py::str(name).cast<std::string>();
    if (auto why = called_module_of(x)->differs_from_class(); !why.empty())
      return path.empty() ? why : "'" + path + "' in it: " + why;
  }
  return {};
}

/// @param describe `smp._registered.describe` @param x as the walk has it
registered_module described(const py::object& describe, called_module& x) {
  auto found = describe(x.self()).cast<py::tuple>();
  registered_module result{.type = py::str(found[0]),
                           .doubt = why_not_of_its_class(x.self())};
  if (result.doubt.empty())
    result.doubt = py::str(found[1]);
  if (!result.doubt.empty())
    return result;
  result.axes = found[2].cast<parameter_axes>();
  result.scaled_batch = found[3].cast<bool>();
  result.object = std::make_shared<shared_object>(found[4]);
  return result;
}

native_module read(const py::object& describe, const walked_module& m) {
  auto* x = dynamic_cast<called_module*>(m.object);
  registered_module found{.type = m.type, .doubt = "it is the whole model"};
  if (x != nullptr) {
    py::gil_scoped_acquire lock;
    if (!x->registered)
      x->registered = std::make_shared<const registered_module>(
        user_code([&] { return described(describe, *x); }));
    found = *x->registered;
  }
  native_module result;
  result.type = found.type;
  result.doubt = found.doubt;
  result.how = found.scaled_batch ? &distributed::get() : &for_one_batch();
  result.options = std::make_shared<const registered_module>(std::move(found));
  return result;
}

void add(py::handle type, py::object describe) {
  auto kept = std::make_shared<shared_object>(std::move(describe));
  registered_class x;
  x.read = [kept](const walked_module& m) { return read(kept->get(), m); };
  register_class(path_of_class(type), std::move(x));
}

} // namespace

py::object registered_module::operator()(const py::tuple& args,
                                         const py::dict& kwargs) const {
  auto& stand_in = object->get();
  std::vector<std::unique_ptr<kept_dict>> before;
  for (auto x : py::list(stand_in.attr("watched")))
    before.push_back(std::make_unique<kept_dict>(
      py::reinterpret_borrow<py::object>(x), kept_value::purpose::look));
  auto result = stand_in(args, kwargs);
  for (auto& x : before)
    if (auto what = x->changes(); !what.empty())
      throw error{error_code::user_code,
                  type + " " + what
                    + ": smp does not see the state of a distributed class; "
                      "make it in __init__, or keep it in the module around"};
  return result;
}

const registered_module* registered_in(const distributed_module& x) {
  auto* found = dynamic_cast<const distributed::module*>(&x);
  return found == nullptr ? nullptr : &found->inner.module;
}

void bind_registered(py::module_& m) {
  using without_lock = py::call_guard<py::gil_scoped_release>;
  m.def("tp_register", &add);
  m.def("fused_allgather_for_tp", &nn::fused_allgather_for_tp, without_lock{});
  m.def("reduce_scatter_for_tp", &nn::reduce_scatter_for_tp, without_lock{});
  m.def("scatter_and_merge_for_tp", &nn::scatter_and_merge_for_tp,
        without_lock{});
  m.def("fwd_allreduce_for_tp", &nn::fwd_allreduce_for_tp, without_lock{});
  m.def("bwd_allreduce_for_tp", &nn::bwd_allreduce_for_tp, without_lock{});
  m.def("narrow_for_tp", &nn::narrow_for_tp, without_lock{});
  m.def("merge_for_tp", &nn::merge_for_tp, without_lock{});
}

} // namespace smp::python
