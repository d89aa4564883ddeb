#include "runtime/intercept/script/script_calls.hpp"

#include "runtime/base/here.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/call_scope.hpp"
#include "runtime/intercept/script/rewrite.hpp"
#include "runtime/intercept/script/script_body.hpp"
#include "runtime/intercept/script/script_values.hpp"
#include "runtime/intercept/shared_call.hpp"
#include "runtime/intercept/submodule.hpp"
#include "runtime/intercept/trace/tracer.hpp"
#include "runtime/model/call_translation.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/model/traced_code.hpp"

#include <ATen/core/function.h>
#include <ATen/core/stack.h>
#include <ATen/ops/dropout.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <optional>

namespace smp {

namespace {

namespace iv = c10::ivalue;
namespace jit = torch::jit;

/// Where a module of the session's model lives.
struct place {
  std::shared_ptr<model_context> model;
  module_id module;
  rank_id owner;
  bool local = true;
  /// See `model_map::recomputed`; 0 for modules of other ranks.
  uint32_t region = 0;

  /// Its code does not run directly at the call site.
  bool asked() const {
    return !local || region != 0;
  }

  const std::string& name() const {
    return model->map->name(module);
  }

  const script_code* code() const {
    return model->script;
  }
};

/// @returns nullopt for objects outside of the session's model: their code runs
/// in place.
std::optional<place> place_of(const iv::Object& x) {
  auto model = rank_context::current_model();
  if (!model || !(model->map->partitioned() || tracer::current()))
    return std::nullopt;
  auto& index = model->map->model().module_index;
  auto i = index.find(&x);
  if (i == index.end())
    return std::nullopt;
  auto module = module_id{i->second};
  auto owner = model->map->owner(module);
  auto local = owner == rank_context::current()->self();
  auto region = local ? model->map->recomputed(module).region : 0;
  return place{std::move(model), module, owner, local, region};
}

/// Names the module whose code runs, for errors; an error leaves the name.
class running_module {
public:
  explicit running_module(const place* x) : ex_(running_call::current()) {
    if (!ex_ || !x)
      ex_ = nullptr;
    else
      previous_ = ex_->enter_module(x->name());
  }

  void done() {
    if (ex_)
      ex_->enter_module(std::move(previous_));
  }

private:
  running_call* ex_;
  std::string previous_;
};

c10::IValue run_body(call_scope& call, const place* where,
                     const script_object& self, const std::string& method,
                     std::vector<c10::IValue> args);

// -- the caller's side --------------------------------------------------------

/// A tensor or a tuple of tensors.
bool is_tensors(const c10::Type& x) {
  if (x.kind() != c10::TypeKind::TupleType)
    return x.kind() == c10::TypeKind::TensorType;
  auto types = x.containedTypes();
  return std::all_of(types.begin(), types.end(), [](auto& y) {
    return y->kind() == c10::TypeKind::TensorType;
  });
}

c10::IValue ask(const place& where, const script_object& self, request_kind op,
                const std::string& name, std::vector<c10::IValue>& args,
                const std::vector<c10::TypePtr>& types,
                const c10::TypePtr& result_type, uint32_t first = 0,
                uint32_t last = 0) {
  packer in;
  std::vector<value> values;
  try {
    for (size_t i = 0; i < args.size(); ++i) {
      value_path::scope place{in, "argument", i};
      values.push_back(put_script_argument(in, args[i], types.at(i)));
    }
  } catch (const error& err) {
    fail_call(where.module, err);
  }
  call_target target;
  target.kind = op;
  target.name = name;
  target.first = first;
  target.last = last;
  target.training = is_training(*self);
  target.tensors_only = is_tensors(*result_type);
  auto result = call_remote(where.owner, where.module, target, in,
                            std::move(values));
  for (auto& [position, content] : result.changed)
    if (position < args.size())
      replace_content(args[position], get_script_value(result.tensors, content,
                                                       types[position]));
  return get_script_value(result.tensors, result.result, result_type);
}

c10::IValue ask_method(const place& where, const script_object& self,
                       const std::string& method,
                       std::vector<c10::IValue> args) {
  auto& schema = body_of(*self, method).getSchema();
  std::vector<c10::TypePtr> types;
  for (size_t i = 1; i < schema.arguments().size(); ++i)
    types.push_back(schema.arguments()[i].type());
  return ask(where, self, request_kind::method, method, args, types,
             schema.returns().at(0).type());
}

/// @returns `xs` without parameters of the module itself, which traced code
/// passes if other modules have them, too
std::vector<c10::IValue> without_own(const place& where,
                                     std::vector<c10::IValue> xs) {
  auto& model = where.model->map->model();
  auto& own = model.modules[where.module.value].tensors;
  std::erase_if(xs, [&](const c10::IValue& x) {
    return x.isTensor() && std::ranges::any_of(own, [&](auto i) {
             return model.tensors[i].tensor.is_same(x.toTensor());
           });
  });
  return xs;
}

// -- here ---------------------------------------------------------------------

script_object child_of(const iv::Object& x, const std::string& attribute) {
  return x.getAttr(attribute).toObject();
}

/// Runs the method here, in its turn.
c10::IValue call_here(const place* where, const script_object& self,
                      const std::string& method,
                      std::vector<c10::IValue> args) {
  intercepted_call what;
  if (where) {
    what.module = where->module;
    what.ordered = where->model->map->keeps_order(where->module);
    what.stream = where->model->map->stream_of(where->module);
  }
  if (tracer::current()) [[unlikely]] {
    auto& schema = body_of(*self, method).getSchema();
    what.tensors_only = is_tensors(*schema.returns().at(0).type());
  }
  call_scope call{what};
  return run_body(call, where, self, method, std::move(args));
}

/// Runs the method here, or at the owner.
c10::IValue call_method(const place* where, const script_object& self,
                        const std::string& method,
                        std::vector<c10::IValue> args) {
  return where && where->asked()
           ? ask_method(*where, self, method, std::move(args))
           : call_here(where, self, method, std::move(args));
}

c10::IValue run_link(const script_object& self, const chain_link& x,
                     c10::IValue moving) {
  auto child = child_of(*self, x.child);
  auto where = place_of(*child);
  std::vector<c10::IValue> args;
  args.push_back(std::move(moving));
  return call_method(where ? &*where : nullptr, child, x.method,
                     std::move(args));
}

/// Runs the children of a Sequential in order; consecutive ones on another rank
/// are one request (R8), those of one region are one call.
c10::IValue run_chain(const place& where, const script_object& self,
                      const std::string& method, const chain& links,
                      c10::IValue moving) {
  uint32_t i = 0;
  auto count = static_cast<uint32_t>(links.size());
  auto asked_of = [&](uint32_t k) {
    auto child = place_of(*child_of(*self, links[k].child));
    return child && child->asked()
             ? std::optional{std::pair{child->owner, child->region}}
             : std::nullopt;
  };
  while (i < count) {
    auto asked = asked_of(i);
    auto last = i + 1;
    while (asked && last < count && asked_of(last) == asked)
      ++last;
    if (last == i + 1) {
      moving = run_link(self, links[i], std::move(moving));
    } else {
      auto type_of = [&](uint32_t k) -> const c10::FunctionSchema& {
        return body_of(*child_of(*self, links[k].child), links[k].method)
          .getSchema();
      };
      auto there = where;
      there.owner = asked->first;
      std::vector<c10::IValue> args;
      args.push_back(std::move(moving));
      moving = ask(there, self, request_kind::method_range, method, args,
                   {type_of(i).arguments().at(1).type()},
                   type_of(last - 1).returns().at(0).type(), i, last);
    }
    i = last;
  }
  return moving;
}

/// @returns the tensors in `xs`, each once
std::vector<at::Tensor> tensors_in(const std::vector<c10::IValue>& xs,
                                   const char* what) {
  packer found;
  for (size_t i = 0; i < xs.size(); ++i) {
    value_path::scope place{found, what, i};
    detail::collect_tensors(found, xs[i]);
  }
  return found.tensors();
}

c10::IValue run_body(call_scope& call, const place* where,
                     const script_object& self, const std::string& method,
                     std::vector<c10::IValue> args) {
  running_module running{where};
  auto* how = where ? where->model->map->shared(where->module) : nullptr;
  if (how) // all its methods are calls
    args = without_own(*where, std::move(args));
  auto* translated = dynamic_cast<const translated_module*>(how);
  if (how && !translated) {
    auto found = run_shared(call, *how, self.get(), tensors_of(args));
    running.done();
    return script_result(found);
  }
  if (call.looks()) [[unlikely]]
    call.arguments(self.get(), tensors_in(args, "argument"));
  auto result = [&]() -> c10::IValue {
    if (translated)
      return translated->call(args);
    auto* code = where ? where->code() : nullptr;
    if (code && args.size() == 1)
      if (auto* links = code->find_chain(self->type().get(), method))
        return run_chain(*where, self, method, *links, std::move(args[0]));
    jit::Stack stack;
    stack.reserve(args.size() + 1);
    stack.emplace_back(self);
    for (auto& x : args)
      stack.push_back(std::move(x));
    args.clear();
    run_code(body_of(*self, method), stack);
    return std::move(stack.back());
  }();
  if (call.looks()) [[unlikely]]
    call.results(tensors_in({result}, "result"));
  running.done();
  return result;
}

// -- operations ---------------------------------------------------------------

/// The interpreter reduces an exception to its text. The first error of an
/// execution is kept in the execution (R6), that of other code by the thread.
template <class F>
void keep_error(F&& f) {
  try {
    f();
  } catch (const error& err) {
    auto x = err.cause();
    if (auto* ex = running_call::current()) {
      ex->keep_error(ex->here(std::move(x)));
    } else if (auto& first = here::of_thread().first_error; !first) {
      first = x;
    }
    throw;
  }
}

/// Takes the inputs of an operation from the stack, whose top is their number:
/// (self, inputs..., name).
struct operation {
  explicit operation(jit::Stack& stack) {
    auto n = static_cast<size_t>(jit::pop(stack).toInt());
    name = jit::pop(stack).toStringRef();
    for (auto i = stack.end() - static_cast<ptrdiff_t>(n - 2); i != stack.end();
         ++i)
      inputs.push_back(std::move(*i));
    jit::drop(stack, n - 2);
    self = jit::pop(stack).toObject();
  }

  script_object self;
  std::vector<c10::IValue> inputs;
  std::string name;
};

void call_operation(jit::Stack& stack) {
  operation x{stack};
  auto where = place_of(*x.self);
  keep_error([&] {
    stack.push_back(call_method(where ? &*where : nullptr, x.self, x.name,
                                std::move(x.inputs)));
  });
}

c10::TypePtr attribute_type(const iv::Object& x, const std::string& name) {
  if (auto type = x.type()->findAttribute(name))
    return type;
  throw error{error_code::protocol, "a module of class " + x.name()
                                      + " has no attribute '" + name + "'"};
}

void getattr_operation(jit::Stack& stack) {
  operation x{stack};
  auto where = place_of(*x.self);
  auto here = x.self->getAttr(x.name);
  if (!where || where->local || is_shared_parameter(here)) {
    stack.push_back(std::move(here));
    return;
  }
  keep_error([&] {
    stack.push_back(ask(*where, x.self, request_kind::get_attribute, x.name,
                        x.inputs, {}, attribute_type(*x.self, x.name)));
  });
}

/// Prevents changing a fetched copy instead of the list itself.
void changeattr_operation(jit::Stack& stack) {
  operation x{stack};
  auto where = place_of(*x.self);
  keep_error([&] {
    if (where && !where->local)
      throw error{error_code::unsupported,
                  "changes the list or dictionary '" + x.name + "' of '"
                    + where->name() + "', which rank "
                    + std::to_string(where->owner.value)
                    + " owns: change it in a method of that module"};
    stack.push_back(x.self->getAttr(x.name));
  });
}

void set_attribute(map_changes* changes, iv::Object& self,
                   const std::string& name, c10::IValue x) {
  auto old = self.getAttr(name);
  if (changes && old.isTensor() && x.isTensor())
    changes->rebind(old.toTensor(), x.toTensor());
  self.setAttr(name, std::move(x));
}

void setattr_operation(jit::Stack& stack) {
  operation x{stack};
  auto where = place_of(*x.self);
  keep_error([&] {
    if (!where || where->local) {
      set_attribute(where ? where->model->changes : nullptr, *x.self, x.name,
                    std::move(x.inputs.at(0)));
      return;
    }
    if (auto& t = x.inputs.at(0); t.isTensor() && t.toTensor().requires_grad())
      throw error{error_code::unsupported,
                  "stores a tensor that requires grad in the attribute '"
                    + x.name + "' of '" + where->name() + "', which rank "
                    + std::to_string(where->owner.value)
                    + " owns: store it detached"};
    auto* ex = running_call::current();
    if (ex && ex->pass().what == recompute_pass::kind::again)
      return; // stored in the first pass
    ask(*where, x.self, request_kind::set_attribute, x.name, x.inputs,
        {attribute_type(*x.self, x.name)}, c10::NoneType::get());
  });
}

void dropout_operation(jit::Stack& stack) {
  auto train = jit::pop(stack).toBool();
  auto p = jit::pop(stack).toDouble();
  auto x = jit::pop(stack).toTensor();
  stack.emplace_back(at::dropout(x, p, train));
}

/// @returns where the calling code computes; traces are on the host
c10::Device device_of_code() {
  return tracer::current() ? c10::Device{c10::kCPU}
                           : rank_context::current_device();
}

void device_operation(jit::Stack& stack) {
  auto named = jit::pop(stack).toDevice();
  auto mine = device_of_code();
  stack.emplace_back(named.is_cpu() || named.type() == mine.type() ? mine
                                                                   : named);
}

void constant_operation(jit::Stack& stack) {
  auto x = jit::pop(stack).toTensor();
  stack.emplace_back(x.to(device_of_code(), /*non_blocking=*/true));
}

// Passes know nothing about their effects, so none moves, merges or removes
// them.
const jit::RegisterOperators operations{{
  jit::Operator("smp::call(...) -> ...", call_operation,
                c10::AliasAnalysisKind::CONSERVATIVE),
  jit::Operator("smp::getattr(...) -> ...", getattr_operation,
                c10::AliasAnalysisKind::CONSERVATIVE),
  jit::Operator("smp::changeattr(...) -> ...", changeattr_operation,
                c10::AliasAnalysisKind::CONSERVATIVE),
  jit::Operator("smp::setattr(...) -> ...", setattr_operation,
                c10::AliasAnalysisKind::CONSERVATIVE),
  jit::Operator("smp::dropout(Tensor input, float p, bool train) -> Tensor",
                dropout_operation, c10::AliasAnalysisKind::CONSERVATIVE),
  jit::Operator("smp::device(Device named) -> Device", device_operation,
                c10::AliasAnalysisKind::CONSERVATIVE),
  jit::Operator("smp::constant(Tensor x) -> Tensor", constant_operation,
                c10::AliasAnalysisKind::CONSERVATIVE),
}};

// -- the owner's side ---------------------------------------------------------

std::vector<c10::IValue>
take_arguments(unpacker& in, const std::vector<value>& args,
               const std::vector<c10::TypePtr>& types) {
  if (args.size() != types.size())
    throw error{error_code::protocol, "a call does not fit its method"};
  std::vector<c10::IValue> result;
  for (size_t i = 0; i < args.size(); ++i) {
    value_path::scope place{in, "argument", i};
    result.push_back(get_script_argument(in, args[i], types[i]));
  }
  return result;
}

invocation serve_method(const place& where, const script_object& self,
                        const std::string& method, unpacker& in,
                        const std::vector<value>& args, packer& out) {
  auto& schema = body_of(*self, method).getSchema();
  std::vector<c10::TypePtr> types;
  for (size_t i = 1; i < schema.arguments().size(); ++i)
    types.push_back(schema.arguments()[i].type());
  auto xs = take_arguments(in, args, types);
  std::vector<c10::IValue> before;
  for (auto& x : xs)
    before.push_back(shallow_copy(x));
  call_scope call{{where.module, false, true}};
  auto result = run_body(call, &where, self, method, xs);
  invocation done;
  done.result = put_script_value(out, result, schema.returns().at(0).type());
  for (size_t i = 0; i < xs.size(); ++i) {
    if (same_content(xs[i], before[i]))
      continue;
    if (!xs[i].isList() && !xs[i].isGenericDict())
      throw error{error_code::unsupported,
                  "'" + method + "' changes a list or dictionary inside its "
                  "argument " + std::to_string(i) + ", which came from another "
                  "rank: pass the list itself"};
    value_path::scope place{out, "argument", i};
    done.changed.emplace_back(static_cast<uint32_t>(i),
                              put_script_value(out, xs[i], types[i]));
  }
  return done;
}

invocation serve_range(const place& where, const script_object& self,
                       const call_target& x, unpacker& in,
                       const std::vector<value>& args, packer& out) {
  auto* links = where.code()->find_chain(self->type().get(), x.name);
  if (!links || x.first >= x.last || x.last > links->size())
    throw error{error_code::protocol, "no such range of a Sequential"};
  auto schema_of = [&](uint32_t k) -> const c10::FunctionSchema& {
    auto& link = (*links)[k];
    return body_of(*child_of(*self, link.child), link.method).getSchema();
  };
  auto xs = take_arguments(in, args,
                           {schema_of(x.first).arguments().at(1).type()});
  auto moving = std::move(xs[0]);
  for (auto i = x.first; i < x.last; ++i) {
    auto& link = (*links)[i];
    auto child = child_of(*self, link.child);
    auto where = place_of(*child);
    if (where && !where->local)
      throw error{error_code::protocol, "a range of children on several ranks"};
    moving = call_here(where ? &*where : nullptr, child, link.method,
                       {std::move(moving)});
  }
  return {
    put_script_value(out, moving, schema_of(x.last - 1).returns().at(0).type()),
    {}};
}

} // namespace

script_program::script_program(const walked_model& x, size_t ranks)
  : classes_(classes_of(x)), code_(classes_) {
  if (auto* x = code_.forks(); x && ranks > 1)
    throw error{error_code::unsupported,
                "the code of class " + x->name()->name()
                  + " uses torch.jit.fork, whose tasks belong to no "
                    "microbatch: call the function instead"};
  rewrite(classes_, code_, has_mixed_types(x));
}

c10::IValue run_method(const script_object& self, const std::string& method,
                       std::vector<c10::IValue> args) {
  auto* f = self->type()->findMethod(method);
  if (!f)
    throw error{error_code::config, "the model has no method '" + method + "'"};
  args.insert(args.begin(), self);
  here::of_thread().first_error = {};
  try {
    return (*f)(std::move(args));
  } catch (const std::exception& err) {
    if (auto x = std::exchange(here::of_thread().first_error, {}))
      throw error{x};
    if (auto* ex = running_call::current(); ex && ex->first_error())
      throw error{ex->first_error()};
    throw;
  }
}

invocation run_script(model_context& model, module_id module,
                      const call_target& x, unpacker& in,
                      const std::vector<value>& args, packer& out) {
  auto& map = *model.map;
  auto* raw = map.model().modules.at(module.value).script;
  auto self = script_object::reclaim_copy(raw);
  if (is_training(*self) != x.training)
    set_training(*self, x.training);
  auto where = place_of(*self);
  if (!where || (!where->local && x.kind != request_kind::method_range))
    throw error{error_code::protocol, "asked for '" + map.name(module)
                                        + "', which this rank does not own"};
  invocation result;
  keep_error([&] {
    switch (x.kind) {
      case request_kind::method:
        result = serve_method(*where, self, x.name, in, args, out);
        break;
      case request_kind::method_range:
        result = serve_range(*where, self, x, in, args, out);
        break;
      case request_kind::get_attribute: {
        auto type = attribute_type(*self, x.name);
        result.result = put_script_value(out, self->getAttr(x.name), type);
        break;
      }
      case request_kind::set_attribute: {
        auto type = attribute_type(*self, x.name);
        set_attribute(model.changes, *self, x.name,
                      take_arguments(in, args, {type})[0]);
        break;
      }
      default:
        throw error{error_code::protocol, "no work for a TorchScript module"};
    }
  });
  return result;
}

} // namespace smp
