#include "apps/smp-train/partition.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/plan/planner.hpp"

#include <fmt/format.h>

namespace smp::app {

namespace {

void show(const printed_plan& x, const std::string& file, bool terminal) {
  if (!file.empty())
    write_text(file, x.json);
  print_stderr("{}", terminal ? x.text : without_colours(x.text));
}

} // namespace

void partition_tree_file(const partition_command& x, bool terminal) {
  partition_options options;
  options.manual.devices = x.devices;
  if (x.memory_weight)
    options.memory_weight = *x.memory_weight;
  if (x.strategy)
    options.strategy = parse_partition_strategy(*x.strategy);
  show(plan_tree(x.tree, options), x.json, terminal);
}

void partition_config(const partition_command& x, const train_config& config,
                      bool terminal) {
  show(plan_model(config, true), x.json, terminal);
}

} // namespace smp::app
