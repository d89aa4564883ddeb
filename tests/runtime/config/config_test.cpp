#include "tests/support/catch.hpp"

#include "runtime/step/schedule_policies.hpp"
#include "tests/support/config_text.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

TEST_CASE("a short configuration gets the documented defaults",
          "[runtime][config]") {
  auto x = config_of(good);
  CHECK(x.smp.pipeline_parallel_degree == 2);
  CHECK(x.smp.microbatches == 8);
  CHECK(x.smp.pipeline == "interleaved");
  CHECK_FALSE(x.smp.active_microbatches);
  CHECK(x.smp.auto_partition);
  CHECK(x.smp.strategy == "balanced");
  CHECK(x.smp.optimize == "memory");
  CHECK(x.smp.placement_strategy == "cluster");
  CHECK(x.smp.seed == 1);
  CHECK_FALSE(x.smp.trusted_network);
  CHECK(x.optimizer.type == "adamw");
  CHECK(x.train.dtype == "float32");
  CHECK(x.train.on_nonfinite == "stop");
  CHECK_FALSE(x.train.save_model);
  CHECK(x.data.path == "text.txt");
}

TEST_CASE("every type of value is read from file and command line alike",
          "[runtime][config]") {
  auto x = config_of(and_also(R"(save_model = true
[optimizer]
lr = 1
betas = [0.5, 0.25]
clip_grad_norm = 2.5
schedule = { type = "cosine", warmup_steps = 10 }
[transport]
trusted_network = true
[smp.manual_partition]
"a.b" = 1
c.d = 0
)"));
  CHECK(x.train.save_model);
  CHECK(x.optimizer.lr == 1.0);
  CHECK(x.optimizer.betas == std::array{0.5, 0.25});
  CHECK(x.optimizer.clip_grad_norm == 2.5);
  CHECK(x.optimizer.schedule.type == "cosine");
  CHECK(x.optimizer.schedule.warmup_steps == 10);
  CHECK(x.smp.trusted_network);
  CHECK(x.manual_partition
        == std::map<std::string, uint64_t>{{"a.b", 1}, {"c.d", 0}});
  auto y = config_of(good, {"--train.save_model=true", "--optimizer.lr=1",
                            "--optimizer.betas=[0.5, 0.25]",
                            "--optimizer.clip_grad_norm=2.5",
                            "optimizer.schedule.type=cosine",
                            "--optimizer.schedule.warmup_steps=10",
                            "--transport.trusted_network=true",
                            "--smp.manual_partition={a.b=1, \"c.d\"=0}"});
  CHECK(to_toml(x) == to_toml(y));
}

TEST_CASE("the command line has the last word over the file",
          "[runtime][config]") {
  auto x = config_of(good, {"--smp.partitions=4", "--smp.microbatches=16",
                            "--data.path=\"a b.txt\""});
  CHECK(x.smp.pipeline_parallel_degree == 4);
  CHECK(x.smp.microbatches == 16);
  CHECK(x.data.path == "a b.txt");
}

TEST_CASE(
  "paths in a file are relative to it, on the command line to the "
  "current directory",
  "[runtime][config]") {
  scratch_dir dir;
  auto file = dir.write("sub/run.toml", with("path", "path = \"../a.txt\""));
  auto text = dir.write("a.txt", "text");
  CHECK(load_config(file).data.path == text);
  auto relative = std::filesystem::relative(text).string();
  CHECK(load_config(file, {"--data.path=" + relative}).data.path == text);
  auto errors = read_config(file, {"--data.path=b.txt"}).errors;
  REQUIRE(errors.size() == 1);
  CHECK_THAT(errors[0], ContainsSubstring("command line: data.path"));
  CHECK_THAT(errors[0], ContainsSubstring("b.txt"));
}

TEST_CASE("a file that cannot be read is one clear error",
          "[runtime][config]") {
  scratch_dir dir;
  auto first_error = [&](const std::string& path) {
    auto errors = read_config(path).errors;
    REQUIRE(errors.size() == 1);
    return errors[0];
  };
  auto missing = (dir.path / "none.toml").string();
  CHECK(first_error(missing)
        == missing + ": cannot be read: No such file or directory");
  CHECK_THAT(first_error(dir.path.string()),
             ContainsSubstring("is a directory"));
  auto huge = dir.write("huge.toml", std::string(2 << 20, '#'));
  CHECK_THAT(first_error(huge), ContainsSubstring("larger than 1 MiB"));
}

TEST_CASE("bytes that are not text, and deep nesting, end in an error",
          "[runtime][config]") {
  CHECK(parse(std::string("\x00\xff\xfe[smp]", 8)).errors.size() == 1);
  CHECK(parse("x = " + std::string(200000, '[')).errors.size() == 1);
  CHECK(parse("x = " + std::string(200000, '{')).errors.size() == 1);
  CHECK_FALSE(parse("").errors.empty());
}

TEST_CASE("load_config throws all errors, one per line", "[runtime][config]") {
  scratch_dir dir;
  auto file = dir.write("run.toml", "[smp]\nseeed = 1\nmicrobatches = 0\n");
  try {
    load_config(file);
    FAIL("no error");
  } catch (const error& e) {
    CHECK(e.code() == error_code::config);
    std::string text = e.what();
    CHECK_THAT(text, ContainsSubstring(file + ":2: unknown key smp.seeed"));
    CHECK_THAT(text, ContainsSubstring("\n" + file + ":3: smp.microbatches"));
  }
}

TEST_CASE("a folder is data where samples come from its files, and only there",
          "[runtime][config]") {
  scratch_dir dir;
  std::filesystem::create_directory(dir.path / "train");
  auto of_path = [&](const std::string& path, bool rows) {
    auto text = with("path", "path = \"" + path + "\"");
    const std::string length = "sequence_length = 128\n";
    if (rows)
      text.erase(text.find(length), length.size());
    auto file = dir.write("run.toml", text);
    return rows ? read_config(file,
                              {"--model.type=mlp", "--data.type=safetensors"})
                : read_config(file);
  };
  auto error_of_path = [&](const std::string& path, bool rows) {
    auto errors = of_path(path, rows).errors;
    return errors.size() == 1 ? errors[0] : "other errors";
  };
  auto found = of_path("train", true);
  CHECK(found.errors.empty());
  CHECK(found.config.data.path == (dir.path / "train").string());
  CHECK_THAT(error_of_path("train", false),
             ContainsSubstring("data.path = \"train\" is not a file"));
  CHECK_THAT(error_of_path("no", true),
             ContainsSubstring("data.path = \"no\" is neither a file nor a "
                               "folder"));
  CHECK_THAT(error_of_path("", true),
             ContainsSubstring("data.path = \"\" is not a file"));
}

TEST_CASE(
  "shared settings are equal for equal meaning and different for every "
  "change that all ranks must agree on",
  "[runtime][config]") {
  auto settings = shared_settings(config_of(good));
  CHECK_THAT(settings, ContainsSubstring("smp.active_microbatches = 5\n"));
  // Another order, an alias, comments, and defaults that are written out.
  auto same = config_of(R"(# the same
[train]
steps = 100
[data]
batch_size = 32
sequence_length = 128
path = "text.txt"
type = "text"
[model]
type = "gpt"
sequence_length = 128
[smp]
partitions = 2
active_microbatches = 5
memory_weight = 0.8
microbatches = 8
)");
  CHECK(shared_settings(same) == settings);
  CHECK(shared_settings(config_of(good, {"--smp.threads=3"})) == settings);
  CHECK(shared_settings(config_of(good, {"--transport.trusted_network=true"}))
        == settings);
  CHECK(shared_settings(config_of(good, {"--checkpoint.interrupt_grace=600"}))
        == settings);
  // What it holds is compared instead.
  CHECK(shared_settings(config_of(good, {"--data.path=other.txt"}))
        == settings);
  for (auto change :
       {"--smp.seed=2", "--smp.microbatches=4", "--smp.pipeline=simple",
        "--optimizer.lr=0.1", "--train.steps=99", "--optimizer.betas=[0,0]",
        "--optimizer.clip_grad_norm=1", "--model.tied=true",
        "--train.save_model=true"}) {
    CAPTURE(change);
    CHECK(shared_settings(config_of(good, {change})) != settings);
  }
}

TEST_CASE("what an own program gives its session is shared, too",
          "[runtime][config]") {
  session_config x;
  x.microbatches = 4;
  auto settings = shared_settings(x);
  CHECK_THAT(settings, ContainsSubstring("smp.microbatches = 4\n"));
  CHECK(settings.find("train.") == std::string::npos);
  x.threads = 3;
  x.stall_timeout = 1;
  CHECK(shared_settings(x) == settings);
  x.seed = 2;
  CHECK(shared_settings(x) != settings);
}

TEST_CASE("the effective configuration reads back as itself",
          "[runtime][config]") {
  for (auto& overrides : std::vector<std::vector<std::string>>{
         {},
         {"--smp.pipeline=simple"},
         {"--smp.pipeline=list", "--smp.microbatches=1",
          "--smp.schedule.list=[[0, \"forward\"], [0, \"backward\"]]"},
         {"--smp.pipeline=interleaved_1f1b", "--smp.chunks=2"},
         {"--smp.manual_partition={\"a \\\"b\\\"\" = 1, c.d = 0}"},
         {"--optimizer.type=sgd", "--optimizer.momentum=0.9"},
         {"--data.path=\"C:\\\\a \\\"b\\\"\\t.txt\""},
         {"--smp.active_microbatches=3", "--optimizer.lr=1e-30",
          "--optimizer.weight_decay=0", "--smp.memory_weight=0.3"}}) {
    CAPTURE(overrides);
    auto x = config_of(good, overrides);
    auto text = to_toml(x);
    CAPTURE(text);
    auto y = config_of(text);
    CHECK(to_toml(y) == text);
    CHECK(shared_settings(y) == shared_settings(x));
    CHECK(y.data.path == x.data.path);
    CHECK(y.optimizer.lr == x.optimizer.lr);
  }
}

TEST_CASE(
  "defaults that follow from other keys stay open in the text but "
  "are told",
  "[runtime][config]") {
  auto text = to_toml(config_of(good));
  CHECK_THAT(text, ContainsSubstring("# active_microbatches = 5 "));
  // So more microbatches with "simple" do not conflict with a default.
  CHECK(config_of(text, {"--smp.microbatches=32", "--smp.pipeline=simple"})
          .smp.microbatches
        == 32);
}

TEST_CASE("defaults follow from other keys as rule R2 and the paper say",
          "[runtime][config]") {
  session_config x;
  x.pipeline_parallel_degree = 3;
  x.microbatches = 20;
  CHECK(effective_active_microbatches(x, 20) == 6);
  x.pipeline = "interleaved_1f1b";
  CHECK(effective_active_microbatches(x, 20) == 8);
  x.pipeline = "list";
  CHECK(effective_active_microbatches(x, 20) == 20);
  x.pipeline = "simple";
  CHECK(effective_active_microbatches(x, 20) == 20);
  x.active_microbatches = 25;
  CHECK(effective_active_microbatches(x, 20) == 25);
  x.active_microbatches.reset();
  x.pipeline = "interleaved";
  x.pipeline_parallel_degree = 1;
  CHECK(effective_active_microbatches(x, 20) == 1);
  x.tensor_parallel_degree = 2;
  CHECK(effective_active_microbatches(x, 20) == 4);
  CHECK(effective_memory_weight(x) == 0.8);
  x.optimize = "speed";
  CHECK(effective_memory_weight(x) == 0.2);
  x.memory_weight = 0.5;
  CHECK(effective_memory_weight(x) == 0.5);
}

TEST_CASE("a session's configuration is checked without a file as well",
          "[runtime][config]") {
  auto error_of = [](const std::function<void(session_config&)>& change) {
    session_config x;
    change(x);
    return test::error_of([&] { validate(x); }, error_code::config);
  };
  CHECK(error_of([](auto&) {}) == "no error");
  CHECK(error_of([](auto& x) { x.microbatches = 0; })
        == "smp.microbatches = 0 is out of range; allowed: 1 to 65536");
  CHECK_THAT(error_of([](auto& x) { x.pipeline = "simpel"; }),
             ContainsSubstring("did you mean \"simple\"?"));
  auto conflict = error_of([](auto& x) {
    x.pipeline = "simple";
    x.microbatches = 8;
    x.active_microbatches = 2;
  });
  CHECK_THAT(conflict, ContainsSubstring("smp.active_microbatches = 2"));
  CHECK_THAT(conflict, ContainsSubstring("smp.microbatches = 8"));
  CHECK_THAT(error_of([](auto& x) {
               x.pipeline = "list";
               x.schedule.list = {{microbatch_id{0}, phase::backward}};
             }),
             ContainsSubstring("smp.schedule.list[0] = [0, \"backward\"]"));
  // For the other schedules the bound may be any.
  CHECK(error_of([](auto& x) {
          x.microbatches = 8;
          x.active_microbatches = 1;
        })
        == "no error");
  CHECK_THAT(error_of([](auto& x) { x.default_partition = 1; }),
             ContainsSubstring("smp.default_partition = 1"));
  // Keys of the other tables that are options of a session, and what is not a
  // key.
  CHECK(error_of([](auto& x) { x.link_timeout = 0.5; })
        == "transport.link_timeout = 0.5 is out of range; allowed: 1 to 86400");
  CHECK(error_of([](auto& x) {
          x.activation_checkpointing = {{"a"}, "eech"};
        })
        == "activation_checkpointing.strategy = \"eech\" is unknown; allowed: "
           "\"each\", \"contiguous\", \"group_2\", \"group_3\", ...");
  CHECK(error_of([](auto& x) { x.backward_passes_per_step = 0; })
        == "session_config::backward_passes_per_step = 0 is out of range; "
           "allowed: 1 or more");
}

TEST_CASE("options of a session that need others are refused without them",
          "[runtime][config]") {
  session_config x;
  auto told = [&x] {
    return error_of([&x] { validate(x); }, error_code::config);
  };
  x.activation_checkpointing.strategy = "contiguous";
  CHECK(told()
        == "activation_checkpointing.strategy = \"contiguous\" has no effect "
           "with activation_checkpointing.modules = []; name modules, or leave "
           "it out");
  x.activation_checkpointing.modules = {"a"};
  CHECK(told() == "no error");
  x = {};
  x.ddp = true;
  x.tensor_parallel_modules = {"a"};
  CHECK(told()
        == "tensor_parallel.modules = [\"a\"] has no effect with "
           "smp.tensor_parallel_degree = 1; write smp.tensor_parallel_degree = "
           "2 or more, or leave it out");
  x.tensor_parallel_degree = 2;
  CHECK(told() == "no error");
  x.tensor_parallel_modules = {"a", "!a.b"};
  CHECK(told() == "no error");
  x.tensor_parallel_modules = {"!a.b"};
  x.no_promises = {"!c", "d"};
  CHECK(told()
        == "tensor_parallel.modules begins with \"!a.b\", but names nothing "
           "before it that it could take away; write e.g. [\"*\", \"!a.b\"]\n"
           "smp.no_promises begins with \"!c\", but names nothing before it "
           "that it could take away; write e.g. [\"*\", \"!c\"]");
  x = {};
  x.backward_passes_per_step = 2;
  CHECK(told()
        == "session_config::backward_passes_per_step = 2 has no effect with "
           "smp.ddp = false; it belongs to smp.ddp = true");
  x.ddp = true;
  CHECK(told() == "no error");
  // Code may name the modules whose activations are taken out of memory.
  x = {};
  x.offload_activations = true;
  CHECK(told() == "no error");
}

TEST_CASE("a schedule of the user's own is for one pipeline only",
          "[runtime][config]") {
  session_config x;
  x.pipeline = "actor";
  x.schedule.plugin = built_program("../lib/unusual_schedule.so");
  x.schedule.name = "unusual";
  load_schedule(x);
  CHECK_NOTHROW(validate(x));
  x.pipeline = "1f1b";
  x.schedule = {};
  CHECK(error_of([&] { validate(x); }, error_code::config)
        == "session_config::schedule_actor has no effect with smp.pipeline = "
           "\"1f1b\"; write smp.pipeline = \"actor\", or leave it out");
}

TEST_CASE("what does nothing is refused without a file as well",
          "[runtime][config]") {
  struct row {
    std::function<void(session_config&)> change;
    std::string why; // empty: it does something
  };
  for (auto& [change, why] : std::vector<row>{
         {[](auto& x) {
            x.fast_mode = false;
            x.no_promises = {"a"};
          },
          "smp.no_promises has no effect with smp.fast_mode = false; it "
          "belongs to smp.fast_mode = \"auto\", smp.fast_mode = true"},
         {[](auto& x) { x.no_promises = {"a"}; }, ""},
         {[](auto& x) { x.static_steps = 9; },
          "smp.static_steps has no effect with smp.static_mode = false (the "
          "default); it belongs to smp.static_mode = true"},
         {[](auto& x) { x.static_steps = 5; }, ""}, // the default
         {[](auto& x) {
            x.static_mode = true;
            x.static_steps = 9;
          },
          ""},
         {[](auto& x) { x.placement_strategy = "spread"; },
          "smp.placement_strategy has no effect with smp.ddp = false (the "
          "default); it belongs to smp.ddp = true"},
         {[](auto& x) { x.tensor_parallel_modules = {"a"}; },
          "tensor_parallel.modules has no effect with smp.ddp = false (the "
          "default); it belongs to smp.ddp = true\n"
          "tensor_parallel.modules = [\"a\"] has no effect with "
          "smp.tensor_parallel_degree = 1; write "
          "smp.tensor_parallel_degree = 2 or more, or leave it out"},
         // A program that runs on one rank, too.
         {[](auto& x) {
            x.ddp = true;
            x.bucket_cap_mb = 50;
          },
          ""}}) {
    session_config x;
    change(x);
    auto found = test::error_of([&] { validate(x); }, error_code::config);
    CHECK(found == (why.empty() ? "no error" : why));
    CHECK_NOTHROW(validate(without_idle_keys(x)));
  }
}

TEST_CASE("keys that do nothing get their defaults, and no others",
          "[runtime][config]") {
  session_config x;
  x.auto_partition = false;
  x.strategy = "paper";
  x.no_promises = {"a"};
  x.shard_optimizer_state = true; // without replicas,
  x.shard_gradients = true;       // and so this
  x.static_mode = true;
  x.static_steps = 2;
  auto y = without_idle_keys(x);
  CHECK(y.strategy == "balanced");
  CHECK_FALSE(y.shard_optimizer_state);
  CHECK_FALSE(y.shard_gradients);
  CHECK(y.no_promises == x.no_promises);
  CHECK(y.static_steps == 2);
}

TEST_CASE("a schedule is read as a list of microbatches and phases",
          "[runtime][config]") {
  auto x = config_of(with("microb", R"(microbatches = 2
pipeline = "list"
schedule.list = [[1, "forward"], [0, "forward"],
                 [1, "backward"], [0, "backward"]])"));
  const std::vector<task> wanted{{microbatch_id{1}, phase::forward},
                                 {microbatch_id{0}, phase::forward},
                                 {microbatch_id{1}, phase::backward},
                                 {microbatch_id{0}, phase::backward}};
  CHECK((x.smp.schedule.list == wanted));
}

// -- the finished system's keys -----------------------------------------------

namespace {

constexpr const char* promised_keys[] = {"smp.pipeline_parallel_degree",
                                         "smp.partitions",
                                         "smp.tensor_parallel_degree",
                                         "smp.ddp",
                                         "smp.microbatches",
                                         "smp.pipeline",
                                         "smp.schedule.list",
                                         "smp.schedule.plugin",
                                         "smp.schedule.name",
                                         "smp.schedule.options",
                                         "smp.active_microbatches",
                                         "smp.chunks",
                                         "smp.auto_partition",
                                         "smp.default_partition",
                                         "smp.manual_partition",
                                         "smp.strategy",
                                         "smp.memory_weight",
                                         "smp.optimize",
                                         "smp.placement_strategy",
                                         "smp.static_mode",
                                         "smp.static_steps",
                                         "smp.fast_mode",
                                         "smp.no_promises",
                                         "smp.deterministic_server",
                                         "smp.trace_device",
                                         "smp.times",
                                         "smp.shard_optimizer_state",
                                         "smp.offload_activations",
                                         "smp.activation_loading_horizon",
                                         "smp.fp16_params",
                                         "smp.prescaled_batch",
                                         "smp.seed",
                                         "model.type",
                                         "model.path",
                                         "model.library",
                                         "model.name",
                                         "data.type",
                                         "data.path",
                                         "data.sequence_length",
                                         "data.batch_size",
                                         "data.shuffle_seed",
                                         "optimizer.type",
                                         "optimizer.clip_grad_norm",
                                         "optimizer.loss_scale",
                                         "train.steps",
                                         "train.init_from",
                                         "train.log_interval",
                                         "train.eval_interval",
                                         "train.eval_steps",
                                         "train.sample",
                                         "train.dtype",
                                         "train.dump_gradients",
                                         "train.save_model",
                                         "train.on_nonfinite",
                                         "train.max_restarts",
                                         "train.elastic",
                                         "checkpoint.dir",
                                         "checkpoint.interval",
                                         "checkpoint.keep",
                                         "checkpoint.resume",
                                         "transport.trusted_network",
                                         "monitor.stall_timeout",
                                         "monitor.on_stall"};

} // namespace

TEST_CASE("every key of the finished system is built or refused by name",
          "[runtime][config]") {
  for (auto key : promised_keys) {
    CAPTURE(key);
    for (auto& line : parse("", {std::string{key} + "=1"}).errors)
      CHECK_THAT(line, !ContainsSubstring("unknown"));
  }
}

TEST_CASE("docs/config.md lists exactly the keys that the program knows",
          "[runtime][config]") {
  auto root = std::getenv("SMP_SOURCE_DIR");
  if (root == nullptr)
    FAIL("SMP_SOURCE_DIR is not set: run this test with ctest");
  auto path = std::filesystem::path{root} / "docs/config.md";
  auto page = content_of(path);
  const std::string begin_mark = "<!-- keys: begin -->\n";
  auto begin = page.find(begin_mark);
  auto end = page.find("<!-- keys: end -->");
  REQUIRE(begin != std::string::npos);
  REQUIRE(end != std::string::npos);
  begin += begin_mark.size();
  auto wanted = "\n" + config_reference() + "\n";
  if (std::getenv("SMP_UPDATE_DOCS") != nullptr) {
    std::ofstream{path} << page.replace(begin, end - begin, wanted);
    return;
  }
  // Run this test with SMP_UPDATE_DOCS=1 to bring the page up to date.
  CHECK(page.substr(begin, end - begin) == wanted);
}
