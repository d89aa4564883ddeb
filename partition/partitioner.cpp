#include "partition/partitioner.hpp"

#include "partition/reasons.hpp"
#include "partition/search/balanced.hpp"
#include "partition/search/chunked.hpp"
#include "partition/search/paper.hpp"

#include "transport/error.hpp"

namespace smp {

partition_strategy parse_partition_strategy(std::string_view name) {
  if (name == "paper")
    return partition_strategy::paper;
  if (name == "balanced")
    return partition_strategy::balanced;
  throw error{error_code::config,
              "smp.strategy = \"" + std::string{name}
                + "\" is not known; allowed: \"paper\", \"balanced\""};
}

partition_plan make_partition(const model_info& model,
                              const partition_options& options) {
  module_tree tree{model};
  cost_table costs{model, tree, options.memory_weight};
  partition_problem problem{model, tree, costs, options.manual.devices,
                            fixed_devices(model, tree, options.manual)};
  auto paper = paper_partition(problem);
  partition_plan result{options, tree, costs, {}, {}, {}, {}, {}, {}, {}, {}};
  result.node_device = paper.devices;
  result.paper = score(problem, paper.devices, options.crossing);
  assignment node_chunk(tree.size());
  if (options.chunks > 1) {
    auto x = chunked_partition(problem, options.crossing, options.chunks);
    result.node_device = std::move(x.devices);
    node_chunk = std::move(x.chunks);
    paper.idle.clear();
  } else if (options.strategy == partition_strategy::balanced) {
    result.node_device = balanced_partition(problem, options.crossing,
                                            paper.devices);
    paper.idle.clear();
  }
  result.score = score(problem, result.node_device, options.crossing);
  for (auto x : loads(problem, result.node_device))
    result.loads.push_back(costs.share(x));
  for (size_t i = 0; i < model.size(); ++i) {
    auto node = tree.node_of(module_id{i});
    result.module_device.push_back(result.node_device[node]);
    result.module_chunk.push_back(node_chunk[node]);
  }
  auto why = explain(model, problem, result.node_device, paper.idle);
  result.warnings = std::move(why.warnings);
  result.reasons = std::move(why.reasons);
  return result;
}

} // namespace smp
