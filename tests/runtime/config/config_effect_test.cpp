#include "tests/support/catch.hpp"

#include "tests/support/config_text.hpp"

#include <algorithm>
#include <string>
#include <vector>

// Keys that would do nothing are refused: docs/config.md, "What is refused".

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

/// The last line of `lines` is about replicas, of which there is one.
broken lone_replica(const std::string& lines, const std::string& key,
                    const std::string& value) {
  auto place = 3 + std::ranges::count(lines, '\n');
  return {"something about replicas where there is one",
          with("microb", lines),
          "run.toml:" + std::to_string(place) + ": ",
          {"smp." + key + " = " + value
             + " has no effect with smp.ranks = 2, which hold one replica of "
               "the model; write smp.ranks = 4 or more, or leave it out",
           "smp.pipeline_parallel_degree: run.toml:2)"}};
}

std::vector<broken> of_models_data_and_runs() {
  return {
    {"option of another optimizer",
     and_also("[optimizer]\nmomentum = 0.9"),
     "run.toml:17: ",
     {"optimizer.momentum has no effect",
      "optimizer.type = \"adamw\" (the default)", "\"sgd\""}},
    {"path without a file to read",
     with("type = \"text\"", "type = \"synthetic\""),
     "run.toml:10: ",
     {"data.path has no effect with data.type = \"synthetic\" (run.toml:9)"}},
    {"gradient of a step that never comes",
     and_also("dump_gradients = [1, 101]"),
     "run.toml:16: ",
     {"train.dump_gradients = [1, 101] goes beyond train.steps = 100"}},
    {"size of another model",
     with("type = \"gpt\"", "type = \"gpt\"\nexperts = 8"),
     "run.toml:7: ",
     {"model.experts has no effect with model.type = \"gpt\"", "\"moe\""}},
    {"size of another variant",
     with("type = \"gpt\"", "type = \"gpt\"\nwindow = 8"),
     "run.toml:7: ",
     {"model.window has no effect with model.variant = \"gpt-2\" (the "
      "default)",
      "\"gpt-3\""}},
    {"text for a model without text",
     with("type = \"gpt\"", "type = \"ncf\"") + "",
     "run.toml:9: ",
     {"data.type = \"text\" has no tensors for model.type = \"ncf\"",
      "\"synthetic\" or \"safetensors\""}},
    {"evaluation without held-out data",
     with("type = \"text\"", "type = \"synthetic\"\nheld_out = 0.5"),
     "run.toml:10: ",
     {"data.held_out has no effect with data.type = \"synthetic\"",
      "\"safetensors\""}},
    {"fixed batch for positions of unknown number",
     with("type = \"text\"", "type = \"safetensors\""),
     "run.toml:5: ",
     {"model.sequence_length is missing"}},
    {"averages that nothing uses",
     and_also("eval_steps = 0\n[optimizer]\nema_decay = 0.9"),
     "run.toml:18: ",
     {"optimizer.ema_decay = 0.9 has no effect, as nothing uses the averages",
      "write train.save_model = true"}},
    {"interval of no evaluation",
     and_also("eval_interval = 5\neval_steps = 0"),
     "run.toml:16: ",
     {"train.eval_interval = 5", "train.eval_steps = 0"}},
    {"names of no file",
     and_also("init_prefix = \"module.\""),
     "run.toml:16: ",
     {"train.init_prefix = \"module.\"", "train.init_from"}},
  };
}

/// Each step takes the whole file.
std::vector<broken> of_a_fixed_batch() {
  return {
    {"evaluation with what each step takes",
     with("batch_size", "held_out = 0.5"),
     "run.toml:12: ",
     {"data.held_out = 0.5 has no effect without data.batch_size, as each step "
      "takes the whole file; write how many samples"},
     {"--data.type=safetensors"}},
    {"order of what each step takes",
     with("batch_size", "shuffle_seed = 2"),
     "run.toml:12: ",
     {"data.shuffle_seed = 2 has no effect without data.batch_size"},
     {"--data.type=safetensors"}},
    {"evaluations of what each step takes",
     with("batch_size", "") + "eval_interval = 5\n",
     "run.toml:16: ",
     {"train.eval_interval = 5 has no effect without data.batch_size"},
     {"--data.type=safetensors"}},
    {"length of evaluations of what each step takes",
     with("batch_size", "") + "eval_steps = 5\n",
     "run.toml:16: ",
     {"train.eval_steps = 5 has no effect without data.batch_size"},
     {"--data.type=safetensors"}},
  };
}

std::vector<broken> of_checkpoints() {
  return {
    {"interval of no checkpoints",
     and_also("[checkpoint]\ninterval = 10"),
     "run.toml:17: ",
     {"checkpoint.interval = 10 has no effect without checkpoint.dir",
      "write where checkpoints go"}},
    {"checkpoint of an interrupt that goes nowhere",
     and_also("[checkpoint]\non_interrupt = false"),
     "run.toml:17: ",
     {"checkpoint.on_interrupt = false has no effect without"}},
    {"signal that saves nothing",
     and_also("[checkpoint]\nsignal = \"SIGUSR2\""),
     "run.toml:17: ",
     {"checkpoint.signal = \"SIGUSR2\" has no effect without"}},
    {"going on with fewer replicas from nowhere",
     and_also("elastic = true\nmax_restarts = 1"),
     "run.toml:16: ",
     {"train.elastic = true has no effect without checkpoint.dir"}},
    {"going on with fewer replicas, never",
     and_also("elastic = true\n[checkpoint]\ndir = \"x\""),
     "run.toml:16: ",
     {"train.elastic = true has no effect with train.max_restarts = 0",
      "write more than 0"}},
  };
}

std::vector<broken> of_ranks_and_steps() {
  return {
    {"placement of ranks of which each has a part of its own",
     with("microb", "placement_strategy = \"cluster\""),
     "run.toml:3: ",
     {"smp.placement_strategy has no effect with smp.ddp = false",
      "it belongs to smp.ddp = true"}},
    lone_replica("ddp = true\nranks = 2\nplacement_strategy = \"spread\"",
                 "placement_strategy", "\"spread\""),
    {"placement of replicas of which each is one rank",
     with("pipeline_parallel",
          "ddp = true\nranks = 4\nplacement_strategy = \"spread\""),
     "run.toml:4: ",
     {"smp.placement_strategy = \"spread\" has no effect with "
      "smp.pipeline_parallel_degree = 1 and smp.tensor_parallel_degree = 1, "
      "which leave one order of the ranks; leave it out"}},
    {"placement of one replica that ranks share",
     with("pipeline_parallel",
          "ddp = true\ntensor_parallel_degree = 2\n"
          "placement_strategy = \"TPD\""),
     "run.toml:4: ",
     {"smp.placement_strategy = \"TPD\" has no effect with "
      "smp.pipeline_parallel_degree = 1 and smp.tensor_parallel_degree = 2",
      "(smp.tensor_parallel_degree: run.toml:3)"}},
    lone_replica("ddp = true\nshard_optimizer_state = true",
                 "shard_optimizer_state", "true"),
    lone_replica("ddp = true\nshard_optimizer_state = true\n"
                 "shard_gradients = true",
                 "shard_gradients", "true"),
    lone_replica("ddp = true\nbucket_cap_mb = 50", "bucket_cap_mb", "50"),
    lone_replica("ddp = true\noverlapping_allreduce = false",
                 "overlapping_allreduce", "false"),
    lone_replica("ddp = true\nbroadcast_buffers = true", "broadcast_buffers",
                 "true"),
  };
}

std::vector<broken> of_modes() {
  return {
    {"modules that wait although all calls do",
     with("microb", "fast_mode = false\nno_promises = [\"a\"]"),
     "run.toml:4: ",
     {"smp.no_promises has no effect with smp.fast_mode = false (run.toml:3); "
      "it belongs to smp.fast_mode = \"auto\", smp.fast_mode = true"}},
    {"a word that is neither on nor off",
     with("microb", "fast_mode = \"on\""),
     "run.toml:3: ",
     {"smp.fast_mode needs true, false or \"auto\", got"}},
    {"a file for what nothing keeps",
     with("microb", "offload_activations = true"),
     "run.toml:3: ",
     {"smp.offload_activations = true has no effect without "
      "activation_checkpointing.modules",
      "name modules"}},
    {"reading ahead of what is in memory",
     with("microb", "activation_loading_horizon = 2"),
     "run.toml:3: ",
     {"smp.activation_loading_horizon has no effect with "
      "smp.offload_activations = false (the default)"}},
    {"a folder for what is in memory",
     with("microb", "offload_dir = \"x\""),
     "run.toml:3: ",
     {"smp.offload_dir has no effect with smp.offload_activations = false"}},
    {"steps to record of a run that records none",
     with("microb", "static_mode = false\nstatic_steps = 5"),
     "run.toml:4: ",
     {"smp.static_steps has no effect with smp.static_mode = false "
      "(run.toml:3); it belongs to smp.static_mode = true"}},
    {"steps to record where one is enough",
     with("microb",
          "static_mode = true\ndeterministic_server = true\n"
          "static_steps = 5"),
     "run.toml:5: ",
     {"smp.static_steps has no effect with smp.deterministic_server = true "
      "(run.toml:4); it belongs to smp.deterministic_server = false"}},
  };
}

std::vector<broken> of_partitions() {
  return {
    {"strategy of no partition",
     with("microb", "auto_partition = false\nstrategy = \"paper\""),
     "run.toml:4: ",
     {"smp.strategy has no effect with smp.auto_partition = false "
      "(run.toml:3); it belongs to smp.auto_partition = true"}},
    {"weight of no partition",
     with("microb", "auto_partition = false\nmemory_weight = 0.5"),
     "run.toml:4: ",
     {"smp.memory_weight has no effect with smp.auto_partition = false "
      "(run.toml:3); it belongs to smp.auto_partition = true"}},
    {"what no partition is to balance, and no shared layers are for",
     with("microb", "auto_partition = false\noptimize = \"speed\""),
     "run.toml:4: ",
     {"smp.optimize = \"speed\" has no effect with smp.auto_partition = false; "
      "nothing is balanced, and no layers are shared; leave it out",
      "(smp.auto_partition: run.toml:3)"}},
    {"trace for no partition",
     with("microb", "auto_partition = false\ntrace_device = \"gpu\""),
     "run.toml:4: ",
     {"smp.trace_device = \"gpu\" has no effect with smp.auto_partition = "
      "false; nothing is measured; leave it out (smp.auto_partition: "
      "run.toml:3)"}},
    {"weight by its name and by its number",
     with("microb", "optimize = \"speed\"\nmemory_weight = 0.5"),
     "run.toml:3: ",
     {"smp.optimize = \"speed\" has no effect with smp.memory_weight = 0.5",
      "keep one of them", "(smp.memory_weight: run.toml:4)"}},
  };
}

} // namespace

TEST_CASE("each key without effect is one error with place and remedy",
          "[runtime][config]") {
  for (auto& part :
       {of_models_data_and_runs(), of_a_fixed_batch(), of_checkpoints(),
        of_ranks_and_steps(), of_modes(), of_partitions()})
    for (auto& x : part)
      check_refusal(x);
}

TEST_CASE("a key that depends on another one is taken where it has an effect",
          "[runtime][config]") {
  for (auto& overrides : std::vector<std::vector<std::string>>{
         {"--smp.fast_mode=true", "--smp.no_promises=[\"a\"]"},
         {"--smp.fast_mode=auto", "--smp.no_promises=[\"a\"]"},
         {"--smp.fast_mode=\"auto\""},
         {"--smp.fast_mode=false"},
         {"--smp.no_promises=[\"a\"]"},
         {"--smp.static_mode=true", "--smp.static_steps=2"},
         {"--smp.deterministic_server=true", "--smp.static_mode=true"},
         {"--smp.auto_partition=false", "--smp.trace_device=none"},
         {"--smp.optimize=speed"},
         {"--smp.memory_weight=0.5"},
         {"--smp.auto_partition=false", "--smp.optimize=speed",
          "--smp.ddp=true", "--smp.tensor_parallel_degree=2"},
         {"--smp.pipeline_parallel_degree=1", "--smp.ddp=true", "--smp.ranks=4",
          "--smp.tensor_parallel_degree=2", "--smp.placement_strategy=spread"},
         {"--smp.ddp=true"},
         {"--smp.ddp=true", "--smp.ranks=2", "--smp.bucket_cap_mb=25"},
         {"--smp.ddp=true", "--smp.ranks=4", "--smp.placement_strategy=spread",
          "--smp.shard_optimizer_state=true", "--smp.shard_gradients=true",
          "--smp.bucket_cap_mb=50", "--smp.overlapping_allreduce=false",
          "--smp.broadcast_buffers=true"},
         {"--smp.ddp=true", "--smp.tensor_parallel_degree=2",
          "--smp.placement_strategy=TPD", "--smp.broadcast_buffers=true"},
         {"--transport.trusted_network=true"},
         {"--checkpoint.interrupt_grace=600"},
         {"--optimizer.loss_scale=dynamic",
          "--optimizer.dynamic_loss_args.scale_window=10"},
         {"--optimizer.loss_scale=128"},
         {"--smp.fp16_params=true",
          "--optimizer.dynamic_loss_args.init_scale=8"},
         {"--smp.trace_device=gpu"}}) {
    CAPTURE(overrides);
    auto x = config_of(good, overrides);
    // Also where all defaults are written out.
    CHECK(to_toml(config_of(to_toml(x))) == to_toml(x));
  }
}

TEST_CASE("what comes after the last step is a warning, as trials are short",
          "[runtime][config]") {
  struct row {
    std::vector<std::string> overrides;
    const char* says;
  };
  // `good` has 100 steps.
  for (auto& x : std::vector<row>{
         {{"--optimizer.schedule.warmup_steps=101"},
          "command line: optimizer.schedule.warmup_steps = 101 and "
          "train.steps = 100: the learning rate never reaches optimizer.lr "
          "(train.steps: run.toml:15)"},
         {{"--train.eval_interval=101"},
          "command line: train.eval_interval = 101 and train.steps = 100: "
          "only the end of the run is evaluated (train.steps: "
          "run.toml:15)"},
         {{"--smp.static_mode=true", "--train.steps=5"},
          "command line: smp.static_steps = 5 and train.steps = 5: all steps "
          "are recorded and none is replayed"},
         {{"--optimizer.schedule.warmup_steps=100"}, ""},
         {{"--train.eval_interval=100"}, ""},
         {{"--smp.static_mode=true", "--train.steps=6"}, ""},
         {{"--smp.static_mode=true", "--smp.deterministic_server=true",
           "--train.steps=2"},
          ""},
         {{"--optimizer.ema_decay=0.9"}, ""}, // evaluated at the end
         {{"--optimizer.ema_decay=0.9", "--train.eval_steps=0",
           "--checkpoint.dir=x"},
          ""}}) {
    CAPTURE(x.overrides);
    auto report = parse(good, x.overrides);
    CHECK(report.errors == std::vector<std::string>{});
    CHECK(report.warnings
          == (*x.says ? std::vector<std::string>{x.says}
                      : std::vector<std::string>{}));
  }
}

TEST_CASE("samples of the user's have an order and a held-out part",
          "[runtime][config]") {
  auto x = config_of(without("sequence_length"),
                     {"--model.type=mlp", "--data.type=safetensors",
                      "--data.shuffle_seed=2", "--data.held_out=0.5",
                      "--train.eval_interval=5", "--train.eval_steps=3"});
  CHECK(to_toml(config_of(to_toml(x))) == to_toml(x));
}

TEST_CASE("how many replicas there are, another launcher may have said",
          "[runtime][config]") {
  std::vector<std::string> spread{"--smp.ddp=true",
                                  "--smp.placement_strategy=spread"};
  auto started = [&](std::optional<uint64_t> world) {
    return parse_config(good, "run.toml", spread, world);
  };
  CHECK(started(4).errors.empty());
  CHECK(started(4).config.ranks == 4);
  CHECK(started(2).errors.size() == 1);
  CHECK(started({}).errors.size() == 1);
  spread.push_back("--smp.ranks=2");
  CHECK(started(4).errors.size() == 1);
  spread = {};
  CHECK(started(3).errors.empty()); // without replicas the session tells
}

TEST_CASE("keys that are gone are unknown, and lead to what there is",
          "[runtime][config]") {
  auto told = [](const std::string& setting) {
    return parse(good, {"--" + setting}).errors.at(0);
  };
  CHECK_THAT(told("smp.tp_size=2"),
             ContainsSubstring("; did you mean smp.tensor_parallel_degree?"));
  CHECK_THAT(told("train.colour=1"), ContainsSubstring("; keys of [train]: "));
  for (auto gone :
       {"smp.schedule.timeout", "smp.trace_execution_times",
        "smp.trace_memory_usage", "transport.type",
        "transport.force_device_path", "transport.force_ranks_per_node",
        "transport.send_arena", "transport.receive_arena", "monitor.address"})
    CHECK_THAT(told(std::string{gone} + "=1"),
               ContainsSubstring(std::string{"unknown key "} + gone + ";"));
  CHECK_THAT(told("smp.trace_execution_times=1"),
             ContainsSubstring("; did you mean smp.trace_device?"));
  CHECK_THAT(told("caf.scheduler=1"), ContainsSubstring("unknown key caf."));
}
