#include "runtime/calls/reached_arguments.hpp"

#include "runtime/calls/backward_node.hpp"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <map>
#include <set>
#include <utility>

namespace smp {

namespace ag = torch::autograd;

std::vector<std::vector<uint32_t>>
reached_arguments(const std::vector<ag::Edge>& outputs,
                  const std::vector<at::Tensor>& leaves) {
  std::map<const at::TensorImpl*, uint32_t> positions;
  for (uint32_t i = 0; i < leaves.size(); ++i)
    if (leaves[i].defined())
      positions.emplace(leaves[i].unsafeGetTensorImpl(), i);
  std::vector<std::vector<uint32_t>> result(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].is_valid() || positions.empty())
      continue;
    std::set<uint32_t> found;
    std::set<std::pair<ag::Node*, uint32_t>> seen;
    std::vector<ag::Edge> open{outputs[i]};
    while (!open.empty()) {
      auto x = open.back();
      open.pop_back();
      auto* node = x.function.get();
      auto* remote = dynamic_cast<backward_node*>(node);
      // Only remote calls know which of their arguments an output depends on.
      if (!seen.emplace(node, remote ? x.input_nr : 0).second)
        continue;
      if (auto* leaf = dynamic_cast<ag::AccumulateGrad*>(node)) {
        auto at = positions.find(leaf->variable.unsafeGetTensorImpl());
        if (at != positions.end())
          found.insert(at->second);
        continue;
      }
      auto visit = [&](const ag::Edge& y) {
        if (y.is_valid())
          open.push_back(y);
      };
      if (remote)
        for (auto k : remote->reached(x.input_nr))
          visit(remote->next_edge(k));
      else
        for (auto& y : node->next_edges())
          visit(y);
    }
    result[i].assign(found.begin(), found.end());
  }
  return result;
}

} // namespace smp
