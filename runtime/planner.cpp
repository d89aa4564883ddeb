#include "runtime/planner.hpp"

#include "runtime/distributed_model.hpp"
#include "runtime/engine.hpp"
#include "runtime/file_io.hpp"
#include "runtime/model_state.hpp"
#include "runtime/partition_json.hpp"
#include "runtime/split.hpp"
#include "runtime/trainable.hpp"

namespace smp {

printed_plan plan_tree(const std::string& path, partition_options options) {
  auto tree = parse_partition_tree(read_text(path), path);
  options.crossing = tree.crossing();
  auto plan = make_partition(tree.model, options);
  return {print_partition(tree.model, plan, {.colour = true}),
          decision_json(plan)};
}

printed_plan plan_model(const train_config& x) {
  const auto devices = x.smp.pipeline_parallel_degree;
  virtual_world_options world;
  world.config = x.smp;
  world.config.pipeline_parallel_degree = 1;
  printed_plan result;
  run_virtual_world(1, world, [&](session& s) {
    auto whole = make_trainable(x);
    auto data = make_data(x);
    auto model = whole->distribute();
    auto& state = model->state();
    if (state.wants_trace(devices))
      state.trace(
        s.internals().initial_stream(step_id{1}, microbatch_id{0}), [&] {
          whole->rehearse(split(data->training_batch(0), x.smp.microbatches, 0,
                                0));
        });
    auto decision = state.decide(static_cast<uint32_t>(devices));
    result = {decision.text(), plan_json(decision.model, decision.plan)};
  });
  return result;
}

} // namespace smp
