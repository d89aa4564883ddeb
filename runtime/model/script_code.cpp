#include "runtime/model/script_code.hpp"

#include <ATen/core/interned_strings.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>

namespace smp {

namespace {

namespace jit = torch::jit;

const c10::ClassType* module_class(const jit::Value& x) {
  auto* result = x.type()->castRaw<c10::ClassType>();
  return result && result->is_module() ? result : nullptr;
}

bool is_container(const c10::TypePtr& x) {
  return x->kind() == c10::TypeKind::ListType
         || x->kind() == c10::TypeKind::DictType;
}

/// @returns the attributes that lead from `self` to `x`, or nothing if it is
/// reached another way.
std::optional<std::vector<std::string>> path_from(const jit::Value* self,
                                                  const jit::Value* x) {
  std::vector<std::string> result;
  while (x != self) {
    auto access = access_of(*x->node());
    if (!access.object || access.writes)
      return std::nullopt;
    result.push_back(access.name);
    x = access.object;
  }
  std::reverse(result.begin(), result.end());
  return result;
}

/// @returns the links if the body of a method of `self` and one argument is
/// nothing but calls of children, each with the result of the one before.
std::optional<chain> chain_of(const jit::Graph& graph) {
  if (graph.inputs().size() != 2 || graph.outputs().size() != 1)
    return std::nullopt;
  auto* self = graph.inputs()[0];
  auto* moving = graph.inputs()[1];
  chain result;
  for (auto* node : graph.nodes()) {
    auto access = access_of(*node);
    if (access.object == self && !access.writes
        && module_class(*node->output()))
      continue;
    if (node->kind() != c10::prim::CallMethod || node->inputs().size() != 2
        || node->input(1) != moving || moving->uses().size() != 1)
      return std::nullopt;
    auto child = access_of(*node->input(0)->node());
    if (child.object != self)
      return std::nullopt;
    result.push_back({child.name, node->s(c10::attr::name)});
    moving = node->output();
  }
  if (graph.outputs()[0] != moving || moving->uses().size() != 1)
    return std::nullopt;
  return result;
}

bool is_sequential(const c10::ClassType& x) {
  // __torch__.torch.nn.modules.container.___torch_mangle_7.Sequential
  auto name = x.name();
  return name && name->name() == "Sequential"
         && name->qualifiedName().starts_with(
           "__torch__.torch.nn.modules.container.");
}

void visit(const body_visitor& f, const std::string& name,
           jit::Function& function) {
  if (auto* body = jit::tryToGraphFunction(function))
    f(name, *body->graph());
}

bool is_parameter_of_operation(const jit::Use& x) {
  return x.user->kind() == c10::aten::linear
           ? x.offset == 1 || x.offset == 2
           : x.user->kind() == c10::aten::embedding && x.offset == 0;
}

/// Adds the classes in which `x` is the parameter of an operation.
/// @param in the class whose code this is
/// @returns whether it is nothing else
bool find_parameter(const jit::Value& x, const c10::ClassType* in,
                    std::set<const c10::ClassType*>& to) {
  return std::ranges::all_of(x.uses(), [&](const jit::Use& use) {
    if (is_parameter_of_operation(use)) {
      to.insert(in);
      return true;
    }
    if (use.user->kind() != c10::prim::CallMethod || use.offset == 0)
      return false;
    auto* callee = module_class(*use.user->input(0));
    auto* graph = callee ? graph_of(*callee, use.user->s(c10::attr::name))
                         : nullptr;
    return graph && find_parameter(*graph->inputs().at(use.offset), callee, to);
  });
}

bool has_children(const c10::ClassType& x) {
  return std::ranges::any_of(x.getAttributes(), [](auto& y) {
    auto* type = y.getType()->template castRaw<c10::ClassType>();
    return type && type->is_module();
  });
}

} // namespace

bool is_parameter_of_operation(const jit::Value& x) {
  return !x.uses().empty()
         && std::ranges::all_of(x.uses(), [](const jit::Use& use) {
              return is_parameter_of_operation(use);
            });
}

const jit::Graph* graph_of(const c10::ClassType& x, const std::string& method) {
  auto* f = x.findMethod(std::string{kept_prefix} + method);
  if (!f)
    f = x.findMethod(method);
  auto* code = f ? jit::tryToGraphFunction(*f) : nullptr;
  return code ? code->graph().get() : nullptr;
}

void for_each_method(const c10::ClassType& x, const body_visitor& f) {
  auto methods = x.methods();
  for (auto* method : methods) {
    auto& name = method->name();
    if (name.starts_with(kept_prefix))
      visit(f, name.substr(kept_prefix.size()), *method);
    else if (!x.findMethod(std::string{kept_prefix} + name))
      visit(f, name, *method);
  }
}

void for_each_body(const c10::ClassType& x, const body_visitor& f) {
  for_each_method(x, f);
  for (auto* hook : x.getForwardHooks())
    visit(f, hook->name(), *hook);
  for (auto* hook : x.getForwardPreHooks())
    visit(f, hook->name(), *hook);
}

bool is_forward(std::string_view method) {
  constexpr std::string_view first = "forward";
  return method.starts_with(first)
         && method.find_first_not_of("0123456789", first.size()) == method.npos;
}

void for_each_node(jit::Block& x, const std::function<void(jit::Node&)>& f) {
  for (auto i = x.nodes().begin(); i != x.nodes().end();) {
    auto& node = **i;
    ++i;
    for (auto* block : node.blocks())
      for_each_node(*block, f);
    f(node);
  }
}

bool is_changed_in_place(const jit::Value& x) {
  if (!is_container(x.type()))
    return false;
  return std::any_of(x.uses().begin(), x.uses().end(), [](const jit::Use& use) {
    auto* schema = use.user->maybeSchema();
    if (!schema || use.offset >= schema->arguments().size())
      return false;
    auto* alias = schema->arguments()[use.offset].alias_info();
    return alias && alias->isWrite();
  });
}

attribute_access access_of(const jit::Node& x) {
  static const auto get = c10::Symbol::fromQualString("smp::getattr");
  static const auto change = c10::Symbol::fromQualString("smp::changeattr");
  static const auto set = c10::Symbol::fromQualString("smp::setattr");
  attribute_access result;
  result.writes = x.kind() == c10::prim::SetAttr || x.kind() == set;
  if (x.kind() == c10::prim::GetAttr || x.kind() == c10::prim::SetAttr)
    result.name = x.s(c10::attr::name);
  else if (x.kind() == get || x.kind() == change || x.kind() == set)
    result.name = jit::toIValue(x.inputs().back())->toStringRef();
  else
    return {};
  if (auto* object = x.inputs()[0];
      module_class(*object)
      || object->type()->kind() == c10::TypeKind::InterfaceType)
    result.object = const_cast<jit::Value*>(object);
  return result;
}

script_code::script_code(const std::vector<c10::ClassTypePtr>& classes) {
  for (auto& cls : classes)
    for_each_body(*cls, [&](const std::string& name, jit::Graph& graph) {
      read(cls.get(), graph, *graph.block());
      if (is_sequential(*cls))
        if (auto links = chain_of(graph))
          chains_.emplace(class_attribute{cls.get(), name}, *links);
    });
}

void script_code::read(const c10::ClassType* cls, const jit::Graph& graph,
                       const jit::Block& block) {
  auto* self = graph.inputs().at(0);
  auto children = has_children(*cls);
  auto changes = [&](const attribute_access& access) {
    auto* of = module_class(*access.object);
    if (!of)
      return;
    mutable_.emplace(of, access.name);
    if (access.object == self)
      sets_[cls].insert(access.name);
    else
      outside_[cls].push_back(
        {path_from(self, access.object).value_or(std::vector<std::string>{}),
         {of, access.name},
         true});
  };
  for (auto* node : block.nodes()) {
    for (auto* inner : node->blocks())
      read(cls, graph, *inner);
    auto access = access_of(*node);
    if (access.object && access.writes) {
      changes(access);
    } else if (access.object && !module_class(*node->output())
               && (access.object != self
                   || (children
                       && node->output()->type()->kind()
                            == c10::TypeKind::TensorType))) {
      if (auto* of = module_class(*access.object))
        if (auto path = path_from(self, access.object)) {
          outside_access read{*path, {of, access.name}};
          if (!find_parameter(*node->output(), cls, read.passed_to))
            read.passed_to.clear();
          outside_[cls].push_back(std::move(read));
        }
    }
    if (node->kind() == c10::prim::fork && !forks_)
      forks_ = cls;
    if (access.object && !access.writes && is_changed_in_place(*node->output()))
      changes(access);
  }
}

const std::set<std::string>& script_code::sets(const c10::ClassType* x) const {
  static const std::set<std::string> none;
  auto i = sets_.find(x);
  return i == sets_.end() ? none : i->second;
}

const std::vector<outside_access>&
script_code::outside_accesses(const c10::ClassType* x) const {
  static const std::vector<outside_access> none;
  auto i = outside_.find(x);
  return i == outside_.end() ? none : i->second;
}

const chain* script_code::find_chain(const c10::ClassType* x,
                                     const std::string& method) const {
  auto i = chains_.find({x, method});
  return i == chains_.end() ? nullptr : &i->second;
}

} // namespace smp
