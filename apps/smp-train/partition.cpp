#include "apps/smp-train/partition.hpp"

#include "partition/print.hpp"
#include "runtime/file_io.hpp"
#include "runtime/partition_json.hpp"

#include <fmt/format.h>

namespace smp::app {

void partition_tree_file(const partition_command& x, bool terminal) {
  auto tree = parse_partition_tree(read_text(x.tree), x.tree);
  partition_options options;
  options.manual.devices = x.devices;
  options.crossing = tree.crossing();
  if (x.memory_weight)
    options.memory_weight = *x.memory_weight;
  if (x.strategy)
    options.strategy = parse_partition_strategy(*x.strategy);
  auto plan = make_partition(tree.model, options);
  if (!x.json.empty())
    write_text(x.json, decision_json(plan));
  fmt::print(stderr, "{}",
             print_partition(tree.model, plan, {.colour = terminal}));
}

} // namespace smp::app
