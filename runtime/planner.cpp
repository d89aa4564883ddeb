#include "runtime/planner.hpp"

#include "runtime/file_io.hpp"
#include "runtime/partition_json.hpp"

namespace smp {

printed_plan plan_tree(const std::string& path, partition_options options) {
  auto tree = parse_partition_tree(read_text(path), path);
  options.crossing = tree.crossing();
  auto plan = make_partition(tree.model, options);
  return {print_partition(tree.model, plan, {.colour = true}),
          decision_json(plan)};
}

} // namespace smp
