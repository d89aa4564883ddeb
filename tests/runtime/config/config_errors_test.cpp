#include "tests/support/catch.hpp"

#include "tests/support/config_text.hpp"
#include "tests/support/cpu_time.hpp"
#include "tests/support/scratch_dir.hpp"

#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

// -- keys that do not exist ---------------------------------------------------

std::vector<broken> unknown_keys() {
  return {
    {"typing error in a key",
     with("pipeline_p", "pipeline_paralel_degree = 2"),
     "run.toml:2: ",
     {"unknown key smp.pipeline_paralel_degree",
      "did you mean smp.pipeline_parallel_degree?"}},
    {"swapped letters",
     with("microb", "mircobatches = 8"),
     "run.toml:3: ",
     {"smp.mircobatches", "did you mean smp.microbatches?"}},
    {"hyphens",
     with("microb", "micro-batches = 8"),
     "run.toml:3: ",
     {"smp.micro-batches", "did you mean smp.microbatches?"}},
    {"right key, wrong table",
     and_also("microbatches = 8"),
     "run.toml:16: ",
     {"train.microbatches", "did you mean smp.microbatches?"}},
    {"key without table",
     "microbatches = 8\n" + std::string{good},
     "run.toml:1: ",
     {"microbatches", "did you mean smp.microbatches?"}},
    {"name of another system",
     and_also("learning_rate = 1"),
     "run.toml:16: ",
     {"train.learning_rate", "did you mean optimizer.lr?"}},
    {"name of another system in its table",
     with("type = \"gpt\"", "type = \"gpt\"\nhidden_size = 8"),
     "run.toml:7: ",
     {"model.hidden_size", "did you mean model.width?"}},
    {"name of another system for weights",
     and_also("model_name_or_path = \"gpt2\""),
     "run.toml:16: ",
     {"train.model_name_or_path", "did you mean train.init_from?"}},
    {"no similar key",
     with("microb", "colour = 8"),
     "run.toml:3: ",
     {"smp.colour", "keys of [smp]: ", "microbatches, pipeline"}},
    {"typing error in a table",
     with("[data]", "[dtaa]"),
     "run.toml:8: ",
     {"unknown table dtaa", "did you mean [data]?"}},
    {"unknown nested table",
     and_also("[optimizer.scheduler]"),
     "run.toml:16: ",
     {"optimizer.scheduler", "[optimizer.schedule]?"}},
    {"no similar table",
     and_also("[colours]\nred = 1"),
     "run.toml:16: ",
     {"unknown table colours",
      "tables: [smp], [tensor_parallel], [activation_checkpointing], "
      "[smp.schedule], [model]"}},
    {"name that would break the line",
     with("microb", "\"a\\nb\\u001b\" = 8"),
     "run.toml:3: ",
     {"smp.a\\u000Ab\\u001B"}},
  };
}

// -- wrong types --------------------------------------------------------------

std::vector<broken> wrong_types() {
  return {
    {"string for an integer",
     with("microb", "microbatches = \"8\""),
     "run.toml:3: ",
     {"smp.microbatches needs an integer", "the string \"8\"", "1 to 65536"}},
    {"fraction for an integer",
     with("microb", "microbatches = 8.0"),
     "run.toml:3: ",
     {"smp.microbatches needs an integer", "the number 8"}},
    {"integer for a bool",
     with("microb", "auto_partition = 1"),
     "run.toml:3: ",
     {"smp.auto_partition needs true or false", "the integer 1"}},
    {"integer for a string",
     with("microb", "pipeline = 1"),
     "run.toml:3: ",
     {"smp.pipeline needs a string", "\"simple\", \"interleaved\""}},
    {"list for a number",
     and_also("[optimizer]\nlr = [1]"),
     "run.toml:17: ",
     {"optimizer.lr needs a number", "a list"}},
    {"short list",
     and_also("[optimizer]\nbetas = [0.9]"),
     "run.toml:17: ",
     {"optimizer.betas needs a list of two numbers"}},
    {"strings in a list of integers",
     and_also("dump_gradients = [1, \"2\"]"),
     "run.toml:16: ",
     {"train.dump_gradients needs a list of integers", "1 or more"}},
    {"integer for a list",
     and_also("dump_gradients = 1"),
     "run.toml:16: ",
     {"train.dump_gradients needs a list of integers", "the integer 1"}},
    {"date for a number",
     and_also("[optimizer]\nlr = 2020-01-01"),
     "run.toml:17: ",
     {"optimizer.lr needs a number", "a date"}},
    {"table for a key",
     and_also("[smp.seed]"),
     "run.toml:16: ",
     {"smp.seed needs an integer", "a table"}},
    {"key for a table",
     "smp = 3\n" + without("[smp]").substr(1),
     "run.toml:1: ",
     {"smp is a table, got the integer 3", "write [smp]"}},
    {"list of tables",
     with("[model]", "[[model]]"),
     "run.toml:5: ",
     {"model is a table, got a list"}},
  };
}

// -- out of range -------------------------------------------------------------

std::vector<broken> out_of_range() {
  return {
    {"zero",
     with("microb", "microbatches = 0"),
     "run.toml:3: ",
     {"smp.microbatches = 0 is out of range; allowed: 1 to 65536"}},
    {"negative",
     with("steps", "steps = -1"),
     "run.toml:15: ",
     {"train.steps = -1 is out of range; allowed: 1 or more"}},
    {"weight above one",
     with("microb", "memory_weight = 1.5"),
     "run.toml:3: ",
     {"smp.memory_weight = 1.5 is out of range; allowed: 0 to 1"}},
    {"step zero in a list of steps",
     and_also("dump_gradients = [1, 0]"),
     "run.toml:16: ",
     {"train.dump_gradients = [1, 0] is out of range; allowed: 1 or more"}},
    {"dropout of everything",
     with("type = \"gpt\"", "type = \"gpt\"\ndropout = 1"),
     "run.toml:7: ",
     {"model.dropout = 1.0 is out of range", "less than 1"}},
    {"nan",
     and_also("[optimizer]\nlr = nan"),
     "run.toml:17: ",
     {"optimizer.lr = nan is out of range; allowed: 0 or more"}},
    {"infinite",
     and_also("[optimizer]\nlr = inf"),
     "run.toml:17: ",
     {"optimizer.lr = inf is out of range"}},
    {"beta of one",
     and_also("[optimizer]\nbetas = [0.9, 1]"),
     "run.toml:17: ",
     {"optimizer.betas = [0.9, 1.0] is out of range"}},
    {"clipping at zero",
     and_also("[optimizer]\nclip_grad_norm = 0"),
     "run.toml:17: ",
     {"optimizer.clip_grad_norm", "more than 0"}},
    {"nothing held out",
     with("path", "path = \"x\"\nheld_out = 0"),
     "run.toml:11: ",
     {"data.held_out = 0.0", "more than 0, less than 1"}},
    {"unknown choice",
     with("microb", "pipeline = \"interleavd\""),
     "run.toml:3: ",
     {"smp.pipeline = \"interleavd\" is not known",
      "did you mean \"interleaved\"?", "allowed: \"simple\", \"interleaved\""}},
    {"unknown placement",
     with("microb", "placement_strategy = \"PPT\"\nddp = true"),
     "run.toml:3: ",
     {"smp.placement_strategy", "\"cluster\", \"spread\""}},
    {"unknown model",
     with("type = \"gpt\"", "type = \"gtp\""),
     "run.toml:6: ",
     {"model.type = \"gtp\"", "did you mean \"gpt\"?"}},
  };
}

/// Times that would wrap around where they are counted in smaller units.
std::vector<broken> too_long() {
  return {
    {"silence of fifty days",
     and_also("[transport]\nlink_timeout = 4_294_968"),
     "run.toml:17: ",
     {"transport.link_timeout = 4294968.0 is out of range; allowed: 1 to "
      "86400"}},
    {"a stall of ages",
     and_also("[monitor]\nstall_timeout = 1e10"),
     "run.toml:17: ",
     {"monitor.stall_timeout = 10000000000.0 is out of range; allowed: more "
      "than 0, at most 1000000000"}},
  };
}

// -- missing and double -------------------------------------------------------

std::vector<broken> missing_and_double() {
  return {
    {"missing key",
     without("type = \"gpt\""),
     "run.toml:5: ",
     {"model.type is missing; allowed: \"gpt\""}},
    {"missing path of a text",
     without("path"),
     "run.toml:8: ",
     {"data.path is missing"}},
    {"duplicate key",
     with("microb", "microbatches = 8\nmicrobatches = 4"),
     "run.toml:4: ",
     {"microbatches"}},
    {"duplicate table", and_also("[smp]\nseed = 3"), "run.toml:16: ", {"smp"}},
    {"key and alias",
     with("microb", "partitions = 2"),
     "run.toml:3: ",
     {"smp.partitions sets what smp.pipeline_parallel_degree sets already",
      "run.toml:2"}},
  };
}

// -- no TOML ------------------------------------------------------------------

std::vector<broken> no_toml() {
  return {
    {"no quotes", with("type = \"gpt\"", "type = gpt"), "run.toml:6: ", {}},
    {"open string", with("type = \"gpt\"", "type = \"gpt"), "run.toml:6: ", {}},
    {"no value", with("microb", "microbatches ="), "run.toml:3: ", {}},
    {"open table", with("[data]", "[data"), "run.toml:8: ", {}},
    {"JSON", "{ \"smp\": {} }", "run.toml:1: ", {}},
  };
}

// -- conflicts ----------------------------------------------------------------

std::vector<broken> conflicts_of_schedules() {
  return {
    {"simple with too few active microbatches",
     with("microb",
          "microbatches = 8\npipeline = \"simple\"\n"
          "active_microbatches = 4"),
     "run.toml:5: ",
     {"smp.active_microbatches = 4", "smp.microbatches = 8", "run.toml:3",
      "at least 8"}},
    {"list that turns around too early",
     with("microb",
          "microbatches = 1\npipeline = \"list\"\n"
          "schedule.list = [[0, \"backward\"], [0, \"forward\"]]"),
     "run.toml:5: ",
     {"smp.schedule.list[0] = [0, \"backward\"]", "must come first"}},
    {"list that says something twice",
     with("microb",
          "microbatches = 2\npipeline = \"list\"\n"
          "schedule.list = [[0, \"forward\"], [0, \"forward\"]]"),
     "run.toml:5: ",
     {"smp.schedule.list[1] = [0, \"forward\"]", "twice"}},
    {"list that lacks a task",
     with("microb",
          "microbatches = 1\npipeline = \"list\"\n"
          "schedule.list = [[0, \"forward\"]]"),
     "run.toml:5: ",
     {"smp.schedule.list lacks [0, \"backward\"]"}},
    {"list of something else",
     with("microb",
          "microbatches = 1\npipeline = \"list\"\n"
          "schedule.list = [0, 1]"),
     "run.toml:5: ",
     {"smp.schedule.list needs a list of [microbatch"}},
    {"no list",
     with("microb", "microbatches = 1\npipeline = \"list\""),
     "run.toml:",
     {"smp.schedule.list is missing"}},
    {"list for another schedule",
     with("microb",
          "microbatches = 1\n"
          "schedule.list = [[0, \"forward\"], [0, \"backward\"]]"),
     "run.toml:4: ",
     {"smp.schedule.list has no effect", "smp.pipeline = \"interleaved\""}},
    {"nothing to interleave",
     with("microb", "pipeline = \"interleaved_1f1b\""),
     "run.toml:3: ",
     {"smp.chunks = 1", "\"1f1b\""}},
    {"chunks with the paper's strategy",
     with("microb", "chunks = 2\nstrategy = \"paper\""),
     "run.toml:3: ",
     {"smp.chunks = 2", "run.toml:4"}},
  };
}

std::vector<broken> conflicts_of_sizes() {
  return {
    {"batch that cannot be divided",
     with("batch_size", "batch_size = 30"),
     "run.toml:12: ",
     {"data.batch_size = 30", "smp.microbatches = 8", "run.toml:3", "32"}},
    {"width that cannot be divided",
     with("type = \"gpt\"", "type = \"gpt\"\nheads = 3\nwidth = 64"),
     "run.toml:8: ",
     {"model.width = 64", "model.heads = 3", "run.toml:7", "66"}},
    {"sequence longer than the model takes",
     with("type = \"gpt\"", "type = \"gpt\"\nsequence_length = 64"),
     "run.toml:7: ",
     {"model.sequence_length = 64", "data.sequence_length = 128"}},
    {"vocabulary smaller than a byte",
     with("type = \"gpt\"", "type = \"gpt\"\nvocabulary = 128"),
     "run.toml:7: ",
     {"model.vocabulary = 128", "data.type = \"text\"", "256"}},
    {"learning rate that rises",
     and_also("[optimizer.schedule]\ntype = \"linear\"\nfinal_lr = 1"),
     "run.toml:18: ",
     {"optimizer.schedule.final_lr", "optimizer.lr"}},
    {"partition that does not exist",
     with("microb", "auto_partition = false\ndefault_partition = 2"),
     "run.toml:4: ",
     {"smp.default_partition = 2", "smp.pipeline_parallel_degree = 2",
      "0 to 1"}},
    {"module on a partition that does not exist",
     with("microb", "manual_partition = { a = 1, \"b.c\" = 2 }"),
     "run.toml:3: ",
     {"smp.manual_partition = {\"a\" = 1, \"b.c\" = 2} has a device beyond "
      "smp.pipeline_parallel_degree = 2",
      "0 to 1", "run.toml:2"}},
    {"module without a device",
     with("microb", "manual_partition = { a = \"1\" }"),
     "run.toml:3: ",
     {"smp.manual_partition needs a table of integers, got a table"}},
    {"modules without devices",
     with("microb", "manual_partition = [\"a\"]"),
     "run.toml:3: ",
     {"smp.manual_partition needs a table of integers, got a list"}},
  };
}

// -- command line -------------------------------------------------------------

std::vector<broken> on_the_command_line() {
  return {
    {"typing error on the command line",
     good,
     "command line: ",
     {"smp.microbatch", "did you mean smp.microbatches?"},
     {"--smp.microbatch=4"}},
    {"wrong type on the command line",
     good,
     "command line: ",
     {"smp.microbatches needs an integer", "the string \"four\""},
     {"--smp.microbatches=four"}},
    {"out of range on the command line",
     good,
     "command line: ",
     {"smp.microbatches = 0", "1 to 65536"},
     {"--smp.microbatches=0"}},
    {"negative on the command line",
     good,
     "command line: ",
     {"smp.seed = -1", "0 or more"},
     {"--smp.seed=-1"}},
    {"no value on the command line",
     good,
     "command line: ",
     {"--train.save_model", "--table.key=value"},
     {"--train.save_model"}},
    {"twice on the command line",
     good,
     "command line: ",
     {"smp.seed sets what smp.seed sets already"},
     {"--smp.seed=1", "--smp.seed=2"}},
    {"conflict of file and command line",
     good,
     "run.toml:12: ",
     {"data.batch_size = 32", "smp.microbatches = 5", "command line"},
     {"--smp.microbatches=5"}},
  };
}

std::vector<broken> conflicts_on_the_command_line() {
  return {
    {"the same batch for ranks that share nothing",
     good,
     "command line: ",
     {"smp.prescaled_batch = true has no effect with "
      "smp.tensor_parallel_degree = 1"},
     {"--smp.ddp=true", "--smp.prescaled_batch=true"}},
    {"a degree without replicas",
     good,
     "command line: ",
     {"smp.tensor_parallel_degree has no effect with smp.ddp = false"},
     {"--smp.tensor_parallel_degree=2"}},
    {"gradients that no replica has",
     good,
     "command line: ",
     {"train.dump_gradients", "smp.shard_gradients = true"},
     {"--smp.ddp=true", "--smp.ranks=4", "--smp.shard_optimizer_state=true",
      "--smp.shard_gradients=true", "--train.dump_gradients=[1]"}},
    {"modules that nobody shares",
     good,
     "command line: ",
     {"tensor_parallel.modules", "smp.tensor_parallel_degree = 1"},
     {"--smp.ddp=true", "--tensor_parallel.modules=[\"a\"]"}},
    {"a class registered as nothing",
     good,
     "command line: ",
     {"tensor_parallel.register has \"a.B=Linear\"",
      "\"my_package.layers.MyLinear as Linear\""},
     {"--smp.ddp=true", "--smp.tensor_parallel_degree=2",
      "--tensor_parallel.register=[\"a.B=Linear\"]"}},
    {"no strategy of activation checkpointing",
     good,
     "command line: ",
     {"activation_checkpointing.strategy = \"group_0\" is unknown",
      "\"contiguous\""},
     {"--activation_checkpointing.strategy=group_0"}},
    {"a list of modules that begins with what it takes away",
     good,
     "command line: ",
     {"activation_checkpointing.modules begins with \"!a.*\", but names "
      "nothing before it that it could take away; write e.g. [\"*\", "
      "\"!a.*\"]"},
     {"--activation_checkpointing.modules=[\"!a.*\", \"b\"]"}},
  };
}

std::vector<broken> conflicts_of_types() {
  return {
    {"parameters of two types",
     good,
     "command line: ",
     {"smp.bf16_params = true cannot go with smp.fp16_params = true"},
     {"--smp.bf16_params=true", "--smp.fp16_params=true"}},
    {"activations of another type than the parameters",
     good,
     "command line: ",
     {"train.dtype = \"float16\"", "smp.bf16_params = true"},
     {"--smp.bf16_params=true", "--train.dtype=float16"}},
    {"no loss scale",
     good,
     "command line: ",
     {"optimizer.loss_scale = 0.0 is out of range; allowed: more than 0, at "
      "most 4294967296, or \"dynamic\""},
     {"--optimizer.loss_scale=0"}},
    {"another word for a loss scale",
     good,
     "command line: ",
     {"optimizer.loss_scale needs a number or \"dynamic\", got the string "
      "\"auto\""},
     {"--optimizer.loss_scale=auto"}},
    {"a dynamic scale's option for a fixed one",
     good,
     "command line: ",
     {"optimizer.dynamic_loss_args.scale_window = 10 has no effect with "
      "optimizer.loss_scale = 8.0"},
     {"--optimizer.loss_scale=8",
      "--optimizer.dynamic_loss_args.scale_window=10"}},
    {"a smallest scale above the first",
     good,
     "command line: ",
     {"optimizer.dynamic_loss_args.min_scale = 4.0", "init_scale = 2.0"},
     {"--train.dtype=float16", "--optimizer.dynamic_loss_args.min_scale=4",
      "--optimizer.dynamic_loss_args.init_scale=2"}},
    {"a strategy for nothing",
     good,
     "command line: ",
     {"activation_checkpointing.strategy = \"group_2\" has no effect with "
      "activation_checkpointing.modules = []"},
     {"--activation_checkpointing.strategy=group_2"}},
  };
}

} // namespace

TEST_CASE("each broken configuration gives one error with place and remedy",
          "[runtime][config]") {
  auto begin = cpu_seconds();
  std::vector<broken> configurations;
  for (auto& part : {unknown_keys(), wrong_types(), out_of_range(), too_long(),
                     missing_and_double(), no_toml(), conflicts_of_schedules(),
                     conflicts_of_sizes(), on_the_command_line(),
                     conflicts_on_the_command_line(), conflicts_of_types()})
    configurations.insert(configurations.end(), part.begin(), part.end());
  CHECK(configurations.size() >= 40);
  for (auto& x : configurations)
    check_refusal(x);
  CHECK(cpu_seconds() - begin < 2 * slow_build);
}

TEST_CASE("all errors of a configuration are found at once",
          "[runtime][config]") {
  auto errors = parse(R"([smp]
microbatches = 0
colour = 1
pipeline = "gpipe"
[model]
type = "gpt"
heads = 3
[data]
type = "text"
sequence_length = "128"
batch_size = 32
)",
                      {"--train.stepps=3"})
                  .errors;
  CAPTURE(errors);
  REQUIRE(errors.size() == 8);
  CHECK_THAT(errors[0], ContainsSubstring("run.toml: train.steps is missing"));
  CHECK_THAT(errors[1], ContainsSubstring("run.toml:2: smp.microbatches"));
  CHECK_THAT(errors[2], ContainsSubstring("run.toml:3: unknown key"));
  CHECK_THAT(errors[3], ContainsSubstring("run.toml:4: smp.pipeline"));
  CHECK_THAT(errors[4], ContainsSubstring("run.toml:7: model.width = 256"));
  CHECK_THAT(errors[5], ContainsSubstring("run.toml:8: data.path"));
  CHECK_THAT(errors[6], ContainsSubstring("run.toml:10: data.sequence"));
  CHECK_THAT(errors[7], ContainsSubstring("command line: unknown key"));
}

TEST_CASE("a list of paths is read as one path is", "[runtime][config]") {
  scratch_dir dir;
  auto text = dir.write("a.txt", "text");
  auto libraries = [&](const std::string& xs) {
    return read_config(
      dir.write("sub/script.toml",
                "[model]\ntype = \"torchscript\"\npath = \"../a.txt\"\n"
                "operator_libraries = "
                  + xs
                  + "\n[data]\ntype = \"safetensors\"\npath = \"../a.txt\"\n"
                    "[train]\nsteps = 1\n"));
  };
  CHECK(libraries("[\"../a.txt\"]").config.model.operator_libraries
        == std::vector{text});
  auto errors = libraries("[\"../a.txt\", \"b.so\"]").errors;
  REQUIRE(errors.size() == 1);
  CHECK_THAT(errors[0],
             ContainsSubstring("script.toml:4: model.operator_libraries = "
                               "\"b.so\" is not a file"));
}
