#include "python/extension/python_module.hpp"

#include "python/extension/kept_dict.hpp"
#include "python/extension/registered_class.hpp"
#include "python/extension/traced_changes.hpp"
#include "python/extension/values.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/shared_call.hpp"
#include "runtime/intercept/trace/tracer.hpp"
#include "runtime/lazy/promise.hpp"
#include "runtime/model/model_map.hpp"
#include "transport/error.hpp"

#include <c10/core/AutogradState.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

namespace smp::python {

namespace {

constexpr const char* slot = "_compiled_call_impl";

const uint64_t invoker_number = register_invoker("smp.python",
                                                 &called_module::serve);

/// smp._elsewhere.Elsewhere
PyTypeObject* elsewhere_class() {
  static auto& result = *new py::object{
    py::module_::import("smp._elsewhere").attr("Elsewhere")};
  return reinterpret_cast<PyTypeObject*>(result.ptr());
}

/// @returns the entry of a dict, or null
PyObject* entry_of(py::handle dict, const char* name) {
  return PyDict_GetItemString(dict.ptr(), name);
}

py::dict attributes_of(py::handle x) {
  return x.attr("__dict__");
}

} // namespace

// -- what it is ---------------------------------------------------------------

python_module::python_module(const py::object& self)
  : torch::nn::Module(path_of_class(py::type::handle_of(self))), self_(self) {
  // nop
}

void python_module::train(bool on) {
  py::gil_scoped_acquire lock;
  user_code([&] { self().attr("train")(on); });
}

bool python_module::is_training() const noexcept {
  py::gil_scoped_acquire lock;
  return entry_of(attributes_of(self()), "training") == Py_True;
}

foreign_module::contents python_module::find() {
  py::gil_scoped_acquire lock;
  contents result;
  auto tensors = [this](const char* where, auto& to) {
    for (auto [name, x] : py::dict(self().attr(where)))
      if (THPVariable_Check(x.ptr()))
        to.emplace_back(py::str(name), THPVariable_Unpack(x.ptr()));
  };
  tensors("_parameters", result.parameters);
  tensors("_buffers", result.buffers);
  for (auto [name, x] : py::dict(self().attr("_modules")))
    if (!x.is_none())
      result.children.emplace_back(py::str(name), called_module_of(x));
  return result;
}

bool python_module::is_container() const {
  py::gil_scoped_acquire lock;
  auto base = py::module_::import("torch.nn").attr("Module");
  return py::type::handle_of(self()).attr("forward").is(base.attr("forward"))
         && !attributes_of(self()).contains("forward");
}

std::string python_module::differs_from_class() const {
  py::gil_scoped_acquire lock;
  auto attributes = attributes_of(self());
  if (attributes.contains("forward"))
    return "its forward was replaced";
  for (auto* hooks : {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
                      "_backward_pre_hooks"})
    if (auto* x = entry_of(attributes, hooks);
        x != nullptr && PyObject_Size(x) > 0)
      return "it has hooks; give them to the module around it";
  if (auto* x = entry_of(attributes, "_modules");
      x != nullptr && PyDict_GetItemString(x, "parametrizations") != nullptr)
    return "it has parametrizations";
  return {};
}

c10::IValue python_module::option(const char* name) const {
  py::gil_scoped_acquire lock;
  auto x = py::getattr(self(), name, py::none());
  if (PyBool_Check(x.ptr()))
    return x.cast<bool>();
  if (PyLong_Check(x.ptr()))
    return x.cast<int64_t>();
  if (PyFloat_Check(x.ptr()))
    return x.cast<double>();
  if (!PyTuple_Check(x.ptr()) && !PyList_Check(x.ptr()))
    return {};
  c10::List<int64_t> result;
  for (auto y : x) {
    if (!PyLong_Check(y.ptr()))
      return {};
    result.push_back(y.cast<int64_t>());
  }
  return result;
}

std::unique_ptr<kept_attributes> python_module::keep_attributes() const {
  py::gil_scoped_acquire lock;
  return std::make_unique<kept_dict>(self(), kept_value::purpose::copy);
}

bool python_module::is_compiled() const {
  return entry_of(attributes_of(self()), "_smp_compiled_call") != nullptr;
}

// -- calls --------------------------------------------------------------------

py::object python_module::operator()(const py::args& args,
                                     const py::kwargs& kwargs) {
  return has_rows(args, kwargs) ? run_rows(args[0]) : self()(*args, **kwargs);
}

called_module::called_module(const py::object& self) : python_module(self) {
  // nop
}

namespace {

std::shared_ptr<called_module> called_module_in(py::handle x) {
  auto* content = entry_of(attributes_of(x), slot);
  if (content == nullptr || !py::isinstance<called_module>(content))
    return nullptr;
  return py::cast<std::shared_ptr<called_module>>(py::handle{content});
}

/// What the module's code is called by: what `torch.compile` left, or its own.
py::object code_of(const py::object& self, bool& compiled) {
  auto* inner = entry_of(attributes_of(self), "_smp_compiled_call");
  compiled = inner != nullptr;
  return compiled ? py::reinterpret_borrow<py::object>(inner)
                  : self.attr("_call_impl");
}

/// Dynamo holds a lock while it looks at its arguments, and a wait for one of
/// them would hold up all that need it.
void await_arguments(const std::vector<at::Tensor>& xs) {
  py::gil_scoped_release meanwhile;
  keep_promises(xs);
}

/// Tells whether this is the forward of a `torch.autograd.Function`, such as
/// that of torch.utils.checkpoint: autograd then takes the sizes of what it
/// returns, which a promise does not have.
bool in_function() {
  auto& state = c10::AutogradState::get_tls_state();
  return !state.get_grad_mode() && !state.get_fw_grad_mode()
         && !state.get_inference_mode();
}

} // namespace

std::shared_ptr<called_module> called_module_of(py::handle x) {
  if (auto known = called_module_in(x))
    return known;
  auto self = py::reinterpret_borrow<py::object>(x);
  auto attributes = attributes_of(x);
  if (auto* compiled = entry_of(attributes, slot);
      compiled != nullptr && compiled != Py_None)
    attributes["_smp_compiled_call"] = py::handle{compiled};
  auto result = std::make_shared<called_module>(self);
  attributes[slot] = py::cast(result);
  return result;
}

void release_module(py::handle x) {
  if (!called_module_in(x))
    return;
  auto attributes = attributes_of(x);
  if (auto* compiled = entry_of(attributes, "_smp_compiled_call")) {
    attributes[slot] = py::handle{compiled};
    attributes.attr("pop")("_smp_compiled_call");
  } else {
    attributes.attr("pop")(slot);
  }
}

/// Runs the module's own code.
py::object called_module::run(call_scope& noted, const py::tuple& args,
                              const py::dict& kwargs) {
  bool compiled = false;
  auto code = code_of(self(), compiled);
  if (compiled)
    await_arguments(tensors_in_call(args, kwargs));
  if (noted.looks())
    noted.arguments(dynamic_cast<const void*>(static_cast<Module*>(this)),
                    tensors_in_call(args, kwargs));
  auto before = state_before_call();
  traced_frame frame{self()};
  auto result = has_rows(args, kwargs)
                  ? run_rows(args[0])
                  : py::reinterpret_steal<py::object>(
                    PyObject_Call(code.ptr(), args.ptr(), kwargs.ptr()));
  if (!result)
    throw py::error_already_set();
  look_at_changes(before);
  if (noted.looks())
    noted.results(tensors_in_result(result));
  return result;
}

/// Runs this rank's part of a call that tensor-parallel ranks share.
py::object called_module::run_shared_part(call_scope& noted,
                                          const py::tuple& args,
                                          const py::dict& kwargs) {
  auto* object = dynamic_cast<const void*>(static_cast<Module*>(this));
  if (auto* how = registered_in(*smp_hook.distributed)) {
    if (noted.looks())
      noted.arguments(object, tensors_in_call(args, kwargs));
    auto result = (*how)(args, kwargs);
    if (noted.looks())
      noted.results(tensors_in_result(result));
    return result;
  }
  if (py::len(kwargs) != 0 || args.size() == 0
      || !std::ranges::all_of(
        args, [](auto x) { return THPVariable_Check(x.ptr()); }))
    refuse_shared_call();
  auto xs = tensors_in(args);
  std::vector<at::Tensor> found;
  {
    py::gil_scoped_release meanwhile;
    found = run_shared(noted, *smp_hook.distributed, object, xs);
  }
  if (found.size() == 1)
    return py::cast(found.front());
  py::tuple result(found.size());
  for (size_t i = 0; i < found.size(); ++i)
    result[i] = found[i];
  return result;
}

py::object called_module::call_here(const py::tuple& args,
                                    const py::dict& kwargs) {
  call_scope noted{
    {smp_hook.id, smp_hook.ordered, false, smp_hook.stream, true}};
  return smp_hook.distributed ? run_shared_part(noted, args, kwargs)
                              : run(noted, args, kwargs);
}

call_result called_module::await_in_function(call_result x) {
  if (in_function())
    keep_promises(x.tensors.tensors());
  return x;
}

void called_module::refuse_set_attributes() const {
  for (auto& name : elsewhere) {
    auto* now = entry_of(attributes_of(self()), name.c_str());
    if (now != nullptr && Py_TYPE(now) == elsewhere_class())
      continue;
    auto& map = *rank_context::current_model()->map;
    auto path = map.name(smp_hook.id);
    throw error{error_code::user_code,
                "attribute '" + name + "' of '" + path
                  + "' was set here, but '" + path + "' runs on rank "
                  + std::to_string(smp_hook.owner.value)
                  + ", which does not see it: give it to the call as an "
                    "argument"};
  }
}

py::object called_module::call_there(const py::tuple& args,
                                     const py::dict& kwargs) {
  refuse_set_attributes();
  packer in;
  std::vector<py::handle> objects;
  std::vector<value> names;
  for (auto x : args)
    objects.push_back(x);
  for (auto [name, x] : kwargs) {
    names.push_back(put(in, name));
    objects.push_back(x);
  }
  std::vector<value> values{value::tuple(std::move(names))};
  try {
    for (size_t i = 0; i < objects.size(); ++i) {
      value_path::scope place{in, "argument", i};
      values.push_back(put(in, objects[i]));
    }
  } catch (const error& x) {
    fail_call(smp_hook.id, x);
  }
  call_target target;
  target.invoker = invoker_number;
  target.training = is_training();
  target.tensors_only = true; // what it returned the last time decides
  auto result = [&] {
    py::gil_scoped_release meanwhile;
    return await_in_function(
      call_remote(smp_hook.owner, smp_hook.id, target, in, std::move(values)));
  }();
  for (auto& [position, content] : result.changed)
    replace_content(objects.at(position), get(result.tensors, content));
  return get(result.tensors, result.result);
}

py::object called_module::operator()(const py::args& args,
                                     const py::kwargs& kwargs) {
  return smp_hook.local ? call_here(args, kwargs) : call_there(args, kwargs);
}

invocation called_module::serve(torch::nn::Module& object, unpacker& in,
                                const std::vector<value>& args, packer& out) {
  auto* self = dynamic_cast<called_module*>(&object);
  auto* names = args.empty() ? nullptr : args[0].get_if<tuple_value>();
  if (self == nullptr || names == nullptr || names->items.size() >= args.size())
    throw error{error_code::protocol, "a call does not fit its module"};
  intercepted_call what{.served = true};
  what.module = self->smp_hook.id;
  call_scope noted{what};
  running_python python;
  auto positional = args.size() - 1 - names->items.size();
  std::vector<py::object> objects;
  py::tuple xs(positional);
  py::dict kwargs;
  for (size_t i = 0; i + 1 < args.size(); ++i) {
    value_path::scope place{in, "argument", i};
    objects.push_back(get(in, args[i + 1]));
    if (i < positional)
      xs[i] = objects[i];
    else
      kwargs[get(in, names->items[i - positional])] = objects[i];
  }
  auto result = user_code([&] {
    return self->smp_hook.distributed ? self->run_shared_part(noted, xs, kwargs)
                                      : self->run(noted, xs, kwargs);
  });
  invocation done;
  {
    value_path::scope place{out, "result"};
    done.result = put(out, result);
  }
  for (size_t i = 0; i < objects.size(); ++i) {
    if (!is_mutable(args[i + 1]))
      continue;
    packer now;
    auto content = put(now, objects[i]);
    if (!same(args[i + 1], in.tensors(), content, now.tensors()))
      done.changed.emplace_back(i, put(out, objects[i]));
  }
  return done;
}

// -- state --------------------------------------------------------------------

namespace {

std::vector<std::pair<std::string, at::Tensor>> buffers_of(py::handle x) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  PyObject* name = nullptr;
  PyObject* content = nullptr;
  py::dict buffers = x.attr("_buffers");
  for (Py_ssize_t at = 0;
       PyDict_Next(buffers.ptr(), &at, &name, &content) != 0;)
    if (THPVariable_Check(content))
      result.emplace_back(py::str(name), THPVariable_Unpack(content));
  return result;
}

/// Tells whether microbatches pass a module in order for what it keeps beside
/// its tensors.
bool keeps_state(const model_map& map, module_id x) {
  auto& entries = map.order().entries();
  auto found = entries.find(static_cast<uint32_t>(x.value));
  return found != entries.end() && !found->second.reasons.empty();
}

} // namespace

called_module::state called_module::state_before_call() const {
  auto model = rank_context::current_model();
  if (!model || tracer::current())
    return {};
  state result{buffers_of(self())};
  // Modules of torch.nn itself keep nothing else.
  if (running_call::current() != nullptr && model->map->overlaps()
      && !name().starts_with("torch.nn.modules.")
      && !keeps_state(*model->map, smp_hook.id))
    result.attributes = std::make_unique<kept_dict>(self(),
                                                    kept_value::purpose::look);
  return result;
}

/// Code may have put other tensors into the slots of buffers, and anything into
/// attributes.
void called_module::look_at_changes(const state& before) const {
  auto model = rank_context::current_model();
  if (!model || tracer::current())
    return;
  if (!before.buffers.empty())
    for (auto& [name, now] : buffers_of(self()))
      for (auto& [known_name, known] : before.buffers)
        if (known_name == name && !known.is_same(now))
          model->changes->rebind(known, now);
  if (!before.attributes)
    return;
  auto what = before.attributes->changes();
  // Another microbatch may have shown it meanwhile.
  if (what.empty() || keeps_state(*model->map, smp_hook.id))
    return;
  model->changes->note_late_state(smp_hook.id, what);
  auto region = running_call::current()->region();
  throw error{error_code::user_code,
              "module '" + model->map->name(smp_hook.id) + "' " + what
                + ", which it was not seen to do before, so that microbatches "
                  "passed it in any order; from now on they keep it. "
                  "smp.set_stateful(module, why), before the first step, makes "
                  "them do so from the start"
                + (region == 0 ? ""
                               : "; it must then be left out of activation "
                                 "checkpointing")};
}

// -- Python -------------------------------------------------------------------

void bind_modules(py::module_& m) {
  py::class_<python_module, module_ptr>(m, "Module")
    .def(py::init([](const py::object& self) {
      return std::make_shared<python_module>(self);
    }))
    .def("__call__", &python_module::operator());
  py::class_<called_module, python_module, std::shared_ptr<called_module>>(
    m, "CalledModule")
    .def("__call__", &called_module::operator());
  m.def("release_module", &release_module);
  m.def("set_elsewhere", [](py::handle x, std::vector<std::string> names) {
    called_module_of(x)->elsewhere = std::move(names);
  });
}

} // namespace smp::python
