#include "runtime/intercept/script/marks.hpp"

#include "runtime/intercept/call_observer.hpp"

#include <ATen/core/stack.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

namespace smp {

namespace {

namespace jit = torch::jit;

void begin_operation(jit::Stack& stack) {
  auto object = jit::pop(stack).toObject();
  if (auto* x = call_observer::current())
    x->begin(object.get(), {});
}

void end_operation(jit::Stack& stack) {
  auto object = jit::pop(stack).toObject();
  if (auto* x = call_observer::current())
    x->end(object.get(), {});
}

// No pass moves or removes them.
const jit::RegisterOperators mark_operations{{
  jit::Operator("smp::begin_call(Any object) -> ()", begin_operation,
                c10::AliasAnalysisKind::CONSERVATIVE),
  jit::Operator("smp::end_call(Any object) -> ()", end_operation,
                c10::AliasAnalysisKind::CONSERVATIVE),
}};

void mark(jit::Graph& graph, const char* operation) {
  graph.insertNode(graph.create(c10::Symbol::fromQualString(operation),
                                {graph.inputs().at(0)}, 0));
}

} // namespace

void mark_methods(const std::vector<c10::ClassTypePtr>& classes) {
  for (auto& cls : classes)
    for (auto* method : cls->methods()) {
      auto& function = jit::toGraphFunction(*method);
      auto& graph = *function.graph();
      {
        jit::WithInsertPoint first{*graph.block()->nodes().begin()};
        mark(graph, "smp::begin_call");
      }
      jit::WithInsertPoint last{graph.block()};
      mark(graph, "smp::end_call");
      function.clear_optimized_graphs();
    }
}

} // namespace smp
