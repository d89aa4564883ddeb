#include "runtime/model/traced_code.hpp"

#include "runtime/model/script_code.hpp"
#include "runtime/model/script_walk.hpp"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <optional>
#include <string_view>

namespace smp {

namespace {

namespace jit = torch::jit;

/// What an operation that depends on the mode does in training.
struct moded_operation {
  std::string_view kind;
  size_t mode; // the input that says it
  const char* in_training;
};

constexpr moded_operation moded[] = {
  {"aten::dropout", 2, "dropout drops nothing"},
  {"smp::dropout", 2, "dropout drops nothing"}, // rewritten
  {"aten::feature_dropout", 2, "dropout drops nothing"},
  {"aten::batch_norm", 5, "batch norm uses the statistics of the file"},
};

std::optional<bool> constant_bool(const jit::Value& x) {
  auto constant = jit::toIValue(&x);
  return constant && constant->isBool() ? std::optional{constant->toBool()}
                                        : std::nullopt;
}

/// A dropout of 0 is the same in both modes.
bool differs_by_mode(const jit::Node& x, const moded_operation& what) {
  if (what.kind == "aten::batch_norm")
    return true;
  auto p = jit::toIValue(x.input(1));
  return !(p && p->isDouble() && p->toDouble() == 0);
}

} // namespace

std::string warning_of_evaluation(const walked_model& x) {
  const char* found = nullptr;
  bool trains = false;
  for (auto& cls : classes_of(x))
    for_each_method(*cls, [&](const std::string&, jit::Graph& graph) {
      for_each_node(*graph.block(), [&](jit::Node& node) {
        std::string_view kind = node.kind().toQualString();
        auto what = std::ranges::find(moded, kind, &moded_operation::kind);
        if (what == std::end(moded))
          return;
        // Without a number the mode of the module decides.
        auto mode = constant_bool(*node.input(what->mode));
        if (mode == false && differs_by_mode(node, *what) && !found)
          found = what->in_training;
        trains = trains || mode != false;
      });
    });
  if (!found || trains)
    return {};
  return std::string{"the file was traced in evaluation mode, so in training "}
         + found
         + "; export it after model.train() (docs/torchscript.md), unless this "
           "is meant";
}

bool fixes_size(const jit::Graph& x, int64_t size) {
  auto is_size = [size](const jit::Value* y) {
    auto constant = jit::toIValue(y);
    return constant && constant->isInt() && constant->toInt() == size;
  };
  bool result = false;
  auto& graph = const_cast<jit::Graph&>(x); // to visit it
  for_each_node(*graph.block(), [&](jit::Node& node) {
    if (node.kind() == c10::prim::ListConstruct)
      result = result || std::ranges::any_of(node.inputs(), is_size);
    if (node.kind() != c10::prim::Constant)
      return;
    auto constant = jit::toIValue(node.output());
    if (constant && constant->isIntList())
      for (auto y : constant->toIntVector())
        result = result || y == size;
  });
  return result;
}

bool has_mixed_types(const walked_model& x) {
  return std::ranges::any_of(x.tensors, [](const walked_tensor& t) {
    return !t.is_attribute && t.tensor.defined() && t.tensor.is_floating_point()
           && t.tensor.scalar_type() != c10::ScalarType::Float;
  });
}

} // namespace smp
