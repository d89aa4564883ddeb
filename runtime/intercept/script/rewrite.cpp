#include "runtime/intercept/script/rewrite.hpp"

#include "runtime/base/rank_context.hpp"

#include <ATen/core/interned_strings.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <optional>
#include <set>

namespace smp {

namespace {

namespace jit = torch::jit;

jit::Node* insert_operation(jit::Graph& graph, const char* name,
                            at::ArrayRef<jit::Value*> inputs, size_t outputs) {
  auto symbol = c10::Symbol::fromQualString(name);
  return graph.insertNode(graph.create(symbol, inputs, outputs));
}

void rewrite_access(jit::Node& node, const script_code& code) {
  auto get = node.kind() == c10::prim::GetAttr;
  auto set = node.kind() == c10::prim::SetAttr;
  if (!get && !set)
    return;
  auto* type = node.input(0)->type()->castRaw<c10::ClassType>();
  auto name = node.s(c10::attr::name);
  if (!type || !type->is_module() || !code.is_mutable({type, name}))
    return;
  auto& graph = *node.owningGraph();
  jit::WithInsertPoint here{&node};
  std::vector<jit::Value*> inputs{node.inputs().begin(), node.inputs().end()};
  inputs.push_back(graph.insertConstant(name));
  auto* operation = set                                   ? "smp::setattr"
                    : is_changed_in_place(*node.output()) ? "smp::changeattr"
                                                          : "smp::getattr";
  auto* result = insert_operation(graph, operation, inputs, get ? 1 : 0);
  result->setSourceRange(node.sourceRange());
  if (get) {
    result->output()->copyMetadata(node.output());
    node.output()->replaceAllUsesWith(result->output());
  }
  node.destroy();
}

/// Optimised code draws numbers even for a dropout of 0, code that runs for the
/// first time does not: `smp::dropout` does what eager PyTorch does.
void rewrite_dropout(jit::Node& node) {
  if (node.kind() != c10::aten::dropout)
    return;
  jit::WithInsertPoint here{&node};
  auto* result = insert_operation(*node.owningGraph(), "smp::dropout",
                                  node.inputs(), 1);
  result->setSourceRange(node.sourceRange());
  result->output()->copyMetadata(node.output());
  node.output()->replaceAllUsesWith(result->output());
  node.destroy();
}

/// Files name the device that they were exported on, and have constants there.
void rewrite_constant(jit::Node& node) {
  if (node.kind() != c10::prim::Constant)
    return;
  auto* x = node.output();
  auto kind = x->type()->kind();
  if (kind != c10::TypeKind::DeviceObjType && kind != c10::TypeKind::TensorType)
    return;
  jit::WithInsertPoint here{node.next()};
  auto* result = insert_operation(
    *node.owningGraph(),
    kind == c10::TypeKind::TensorType ? "smp::constant" : "smp::device", {x},
    1);
  result->output()->copyMetadata(x);
  x->replaceAllUsesAfterNodeWith(result, result->output());
}

/// Operations that make a tensor from numbers make it on the host unless told
/// otherwise, and nothing tells them when a model is moved.
void rewrite_factory(jit::Node& node) {
  auto* schema = node.maybeSchema();
  auto index = schema ? schema->argumentIndexWithName("device") : std::nullopt;
  if (!index || node.input(*index)->type()->kind() != c10::TypeKind::NoneType
      || std::ranges::any_of(node.inputs(), [](const jit::Value* x) {
           return x->type()->kind() == c10::TypeKind::TensorType;
         }))
    return;
  auto& graph = *node.owningGraph();
  jit::WithInsertPoint here{&node};
  auto* host = graph.insertConstant(c10::Device{c10::kCPU});
  auto* device = insert_operation(graph, "smp::device", {host}, 1)->output();
  device->setType(c10::DeviceObjType::get());
  node.replaceInput(*index, device);
}

/// Rewrites operations in `graph` and in the functions that it calls, such as
/// `torch.nn.functional.dropout`.
void rewrite_operations(jit::Graph& graph, bool constants,
                        std::set<const void*>& seen) {
  for_each_node(*graph.block(), [&](jit::Node& x) {
    if (x.kind() == c10::prim::CallFunction) {
      auto type = x.input(0)->type()->cast<c10::FunctionType>();
      auto* function = type ? jit::tryToGraphFunction(*type->function())
                            : nullptr;
      if (function && seen.insert(function).second) {
        rewrite_operations(*function->graph(), constants, seen);
        function->clear_optimized_graphs();
      }
      return;
    }
    if (constants) {
      rewrite_constant(x);
      rewrite_factory(x);
    }
    rewrite_dropout(x);
  });
}

/// Keeps the code of a method under another name and puts the lookup in its
/// place.
void wrap(c10::ClassType& cls, jit::Function& method, bool as_written) {
  auto& function = jit::toGraphFunction(method);
  auto graph = function.graph();
  auto kept = std::string{kept_prefix} + method.name();
  auto* original = cls.compilation_unit()->create_function(
    c10::QualifiedName{*cls.name(), kept}, graph->copy());
  if (as_written)
    jit::toGraphFunction(*original)._set_initial_executor_execution_mode(
      jit::ExecutorExecutionMode::SIMPLE);
  original->setSchema(method.getSchema().cloneWithName(kept, ""));
  cls.addMethod(original);
  auto result_type = graph->outputs().at(0)->type();
  graph->eraseOutput(0);
  std::vector<jit::Node*> nodes{graph->nodes().begin(), graph->nodes().end()};
  for (auto i = nodes.rbegin(); i != nodes.rend(); ++i)
    (*i)->destroy(); // users before their inputs
  std::vector<jit::Value*> inputs{graph->inputs().begin(),
                                  graph->inputs().end()};
  jit::WithInsertPoint here{graph->block()};
  inputs.push_back(graph->insertConstant(method.name()));
  auto* call = insert_operation(*graph, "smp::call", inputs, 1);
  call->output()->setType(result_type);
  graph->registerOutput(call->output());
  function.clear_optimized_graphs();
}

} // namespace

void rewrite(const std::vector<c10::ClassTypePtr>& classes,
             const script_code& code, bool as_written) {
  std::set<const void*> functions;
  const auto constants = !rank_context::current_device().is_cpu();
  for (auto& cls : classes)
    for_each_body(*cls, [&](const std::string&, jit::Graph& graph) {
      for_each_node(*graph.block(),
                    [&](jit::Node& x) { rewrite_access(x, code); });
      rewrite_operations(graph, constants, functions);
    });
  for (auto& cls : classes) {
    auto methods = cls->methods(); // a copy: wrapping adds to it
    for (auto* method : methods)
      if (!method->name().starts_with(kept_prefix)
          && !cls->findMethod(std::string{kept_prefix} + method->name()))
        wrap(*cls, *method, as_written);
  }
}

} // namespace smp
