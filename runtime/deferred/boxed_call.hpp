#pragma once

// An operation that the dispatcher hands over with its arguments on a stack,
// and what its name and schema tell about it.

#include "runtime/deferred/boxed_arguments.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <string>
#include <utility>

namespace smp {

/// The arguments of an operation, on top of a stack.
struct boxed_call {
  boxed_call(const c10::OperatorHandle& op, torch::jit::Stack& s)
    : op(op),
      schema(op.schema()),
      name(schema.name()),
      all(s),
      base(s.size() - schema.arguments().size()) {
    // nop
  }

  size_t size() const {
    return schema.arguments().size();
  }

  c10::IValue& operator[](size_t i) const {
    return all[base + i];
  }

  bool writes(size_t i) const {
    auto* alias = schema.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  /// Whether the result may be that argument, or a view of it.
  bool aliases(size_t i) const {
    return schema.arguments()[i].alias_info() != nullptr;
  }

  /// Calls `f(i, tensor)`.
  template <class F>
  void visit(F f) const {
    for (size_t i = 0; i < size(); ++i)
      visit_tensors((*this)[i], [&](const at::Tensor& x) { f(i, x); });
  }

  torch::jit::Stack arguments() const {
    return {all.begin() + static_cast<std::ptrdiff_t>(base), all.end()};
  }

  void finish(torch::jit::Stack results) const {
    all.resize(base);
    for (auto& x : results)
      all.push_back(std::move(x));
  }

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  const std::string& name;
  torch::jit::Stack& all;
  size_t base;
};

/// These only look at or change what a tensor without bytes has.
bool needs_no_bytes(const std::string& name);

/// These change an argument that their schema declares unchanged, or
/// exchange storages.
bool changes_more_than_it_says(const std::string& name);

bool is_random(const boxed_call& x);

/// Whether the number of draws depends on sizes and types only.
bool draws_by_size(const std::string& name);

/// Whether it fills its first argument with numbers drawn one after the other,
/// and looks at nothing of it but size and type.
bool fills_in_order(const std::string& name);

/// Whether it only creates a tensor and calls such an operation on it.
bool makes_and_fills(const std::string& name);

} // namespace smp
