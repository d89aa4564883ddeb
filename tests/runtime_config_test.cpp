#include "tests/support/catch.hpp"

#include "runtime/config_file.hpp"
#include "transport/error.hpp"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include <unistd.h>

using namespace smp;

using Catch::Matchers::ContainsSubstring;

namespace {

constexpr const char* good = R"([smp]
pipeline_parallel_degree = 2
microbatches = 8

[model]
type = "gpt"

[data]
type = "text"
path = "text.txt"
sequence_length = 128
batch_size = 32

[train]
steps = 100
)";

/// `good` with the line that begins with `from` replaced.
std::string with(const std::string& from, const std::string& to) {
  std::string text = good;
  auto begin = text.find(from);
  REQUIRE(begin != std::string::npos);
  return text.replace(begin, text.find('\n', begin) - begin, to);
}

std::string without(const std::string& line) {
  return with(line, "");
}

std::string and_also(const std::string& lines) {
  return good + lines + "\n";
}

config_report parse(const std::string& text,
                    const std::vector<std::string>& overrides = {}) {
  return parse_config(text, "run.toml", overrides);
}

train_config config_of(const std::string& text,
                       const std::vector<std::string>& overrides = {}) {
  auto report = parse(text, overrides);
  CAPTURE(report.errors);
  REQUIRE(report.errors.empty());
  return report.config;
}

/// A directory for one test.
struct scratch {
  scratch() {
    std::string name = std::filesystem::temp_directory_path() / "smp-XXXXXX";
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }

  ~scratch() {
    std::filesystem::remove_all(path);
  }

  std::string write(const std::string& name, const std::string& text) const {
    auto file = path / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream{file} << text;
    return file.string();
  }

  std::filesystem::path path;
};

// -- broken configurations ----------------------------------------------------

struct broken {
  const char* what;
  std::string text;
  /// The whole place, as the line begins.
  std::string place;
  /// What the line must say: the key, the nearest name, what is allowed.
  std::vector<std::string> says;
  std::vector<std::string> overrides = {};
};

std::vector<broken> broken_configurations() {
  return {
    // -- keys that do not exist -----------------------------------------------
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
     {"unknown table colours", "tables: [smp], [model]"}},
    // -- wrong types ----------------------------------------------------------
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
    // -- out of range ---------------------------------------------------------
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
     with("microb", "placement_strategy = \"PPT\""),
     "run.toml:3: ",
     {"smp.placement_strategy", "\"cluster\", \"spread\""}},
    {"unknown model",
     with("type = \"gpt\"", "type = \"gtp\""),
     "run.toml:6: ",
     {"model.type = \"gtp\"", "did you mean \"gpt\"?"}},
    // -- not built yet --------------------------------------------------------
    {"planned schedule",
     with("microb", "pipeline = \"1f1b\""),
     "run.toml:3: ",
     {"smp.pipeline = \"1f1b\" is known but not built yet", "\"simple\""}},
    {"planned model",
     with("type = \"gpt\"", "type = \"torchscript\""),
     "run.toml:6: ",
     {"known but not built yet", "allowed: \"gpt\""}},
    {"planned key",
     and_also("dump_gradients = [1]"),
     "run.toml:16: ",
     {"train.dump_gradients is known but not built yet"}},
    {"planned key at its default",
     with("microb", "ddp = false"),
     "run.toml:3: ",
     {"smp.ddp is known but not built yet"}},
    {"settings of the actor system",
     and_also("[caf]\nscheduler.max-threads = 2"),
     "run.toml:16: ",
     {"[caf] is known but not built yet"}},
    // -- missing and double ---------------------------------------------------
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
    // -- no TOML --------------------------------------------------------------
    {"no quotes", with("type = \"gpt\"", "type = gpt"), "run.toml:6: ", {}},
    {"open string", with("type = \"gpt\"", "type = \"gpt"), "run.toml:6: ", {}},
    {"no value", with("microb", "microbatches ="), "run.toml:3: ", {}},
    {"open table", with("[data]", "[data"), "run.toml:8: ", {}},
    {"JSON", "{ \"smp\": {} }", "run.toml:1: ", {}},
    // -- conflicts ------------------------------------------------------------
    {"simple with too few active microbatches",
     with("microb",
          "microbatches = 8\npipeline = \"simple\"\n"
          "active_microbatches = 4"),
     "run.toml:5: ",
     {"smp.active_microbatches = 4", "smp.microbatches = 8", "run.toml:3",
      "at least 8"}},
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
    {"warm-up longer than the run",
     and_also("[optimizer.schedule]\nwarmup_steps = 200"),
     "run.toml:17: ",
     {"optimizer.schedule.warmup_steps = 200", "train.steps = 100"}},
    {"learning rate that rises",
     and_also("[optimizer.schedule]\ntype = \"linear\"\nfinal_lr = 1"),
     "run.toml:18: ",
     {"optimizer.schedule.final_lr", "optimizer.lr"}},
    {"partition that does not exist",
     with("microb", "auto_partition = false\ndefault_partition = 2"),
     "run.toml:4: ",
     {"smp.default_partition = 2", "smp.pipeline_parallel_degree = 2",
      "0 to 1"}},
    {"option of another optimizer",
     and_also("[optimizer]\nmomentum = 0.9"),
     "run.toml:17: ",
     {"optimizer.momentum has no effect",
      "optimizer.type = \"adamw\" (the default)", "\"sgd\""}},
    {"path without a file to read",
     with("type = \"text\"", "type = \"synthetic\""),
     "run.toml:10: ",
     {"data.path has no effect with data.type = \"synthetic\" (run.toml:9)"}},
    {"interval of no evaluation",
     and_also("eval_interval = 5\neval_steps = 0"),
     "run.toml:16: ",
     {"train.eval_interval = 5", "train.eval_steps = 0"}},
    // -- command line ---------------------------------------------------------
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
    {"planned key on the command line",
     good,
     "command line: ",
     {"smp.fast_mode is known but not built yet"},
     {"--smp.fast_mode=true"}},
  };
}

} // namespace

TEST_CASE("each broken configuration gives one error with place and remedy",
          "[runtime][config]") {
  auto begin = std::chrono::steady_clock::now();
  auto configurations = broken_configurations();
  CHECK(configurations.size() >= 40);
  for (auto& x : configurations) {
    CAPTURE(x.what);
    auto errors = parse(x.text, x.overrides).errors;
    CAPTURE(errors);
    // A table under a wrong name also leaves its required keys missing.
    REQUIRE_FALSE(errors.empty());
    std::erase_if(errors, [&](const std::string& line) {
      return !line.starts_with(x.place);
    });
    REQUIRE(errors.size() == 1);
    CHECK(errors[0].find('\n') == std::string::npos);
    for (auto& text : x.says)
      CHECK_THAT(errors[0], ContainsSubstring(text));
  }
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds{2});
}

TEST_CASE("all errors of a configuration are found at once",
          "[runtime][config]") {
  auto errors = parse(R"([smp]
microbatches = 0
colour = 1
pipeline = "list"
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
  CHECK(x.transport.type == "ucx");
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
)"));
  CHECK(x.train.save_model);
  CHECK(x.optimizer.lr == 1.0);
  CHECK(x.optimizer.betas == std::array{0.5, 0.25});
  CHECK(x.optimizer.clip_grad_norm == 2.5);
  CHECK(x.optimizer.schedule.type == "cosine");
  CHECK(x.optimizer.schedule.warmup_steps == 10);
  CHECK(x.smp.trusted_network);
  auto y = config_of(good, {"--train.save_model=true", "--optimizer.lr=1",
                            "--optimizer.betas=[0.5, 0.25]",
                            "--optimizer.clip_grad_norm=2.5",
                            "optimizer.schedule.type=cosine",
                            "--optimizer.schedule.warmup_steps=10",
                            "--transport.trusted_network=true"});
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
  scratch dir;
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
  scratch dir;
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

TEST_CASE("bytes that are no text, and deep nesting, end in an error",
          "[runtime][config]") {
  CHECK(parse(std::string("\x00\xff\xfe[smp]", 8)).errors.size() == 1);
  CHECK(parse("x = " + std::string(200000, '[')).errors.size() == 1);
  CHECK(parse("x = " + std::string(200000, '{')).errors.size() == 1);
  CHECK_FALSE(parse("").errors.empty());
}

TEST_CASE("load_config throws all errors, one per line", "[runtime][config]") {
  scratch dir;
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

TEST_CASE(
  "the hash is equal for equal meaning and different for every "
  "change that all ranks must agree on",
  "[runtime][config]") {
  auto hash = config_hash(config_of(good));
  CHECK(hash.size() == 16);
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
active_microbatches = 4
memory_weight = 0.8
microbatches = 8
)");
  CHECK(config_hash(same) == hash);
  CHECK(config_hash(config_of(good, {"--smp.threads=3"})) == hash);
  CHECK(config_hash(config_of(good, {"--transport.trusted_network=true"}))
        == hash);
  for (auto change :
       {"--smp.seed=2", "--smp.microbatches=4", "--smp.pipeline=simple",
        "--optimizer.lr=0.1", "--train.steps=99", "--optimizer.betas=[0,0]",
        "--optimizer.clip_grad_norm=1", "--model.tied=true",
        "--data.path=other.txt", "--train.save_model=true"}) {
    CAPTURE(change);
    CHECK(config_hash(config_of(good, {change})) != hash);
  }
}

TEST_CASE("the effective configuration reads back as itself",
          "[runtime][config]") {
  for (auto& overrides : std::vector<std::vector<std::string>>{
         {},
         {"--smp.pipeline=simple"},
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
    CHECK(config_hash(y) == config_hash(x));
    CHECK(y.data.path == x.data.path);
    CHECK(y.optimizer.lr == x.optimizer.lr);
  }
}

TEST_CASE(
  "defaults that follow from other keys stay open in the text but "
  "are told",
  "[runtime][config]") {
  auto text = to_toml(config_of(good));
  CHECK_THAT(text, ContainsSubstring("# active_microbatches = 4 "));
  // So more microbatches with "simple" are no conflict with a default.
  CHECK(config_of(text, {"--smp.microbatches=32", "--smp.pipeline=simple"})
          .smp.microbatches
        == 32);
}

TEST_CASE("defaults follow from other keys as rule R2 and the paper say",
          "[runtime][config]") {
  session_config x;
  x.pipeline_parallel_degree = 3;
  x.microbatches = 20;
  CHECK(effective_active_microbatches(x) == 5);
  x.pipeline = "simple";
  CHECK(effective_active_microbatches(x) == 20);
  x.active_microbatches = 25;
  CHECK(effective_active_microbatches(x) == 25);
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
    try {
      validate(x);
    } catch (const error& e) {
      CHECK(e.code() == error_code::config);
      return std::string{e.what()};
    }
    return std::string{};
  };
  CHECK(error_of([](auto&) {}).empty());
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
  // For the other schedules the bound may be any.
  CHECK(error_of([](auto& x) {
          x.microbatches = 8;
          x.active_microbatches = 1;
        }).empty());
  CHECK_THAT(error_of([](auto& x) { x.default_partition = 1; }),
             ContainsSubstring("smp.default_partition = 1"));
}

// -- the finished system's keys -----------------------------------------------

TEST_CASE(
  "every key of the finished system is either built or refused by "
  "name",
  "[runtime][config]") {
  for (auto key : {"smp.pipeline_parallel_degree",
                   "smp.partitions",
                   "smp.tensor_parallel_degree",
                   "smp.ddp",
                   "smp.microbatches",
                   "smp.pipeline",
                   "smp.schedule.list",
                   "smp.schedule.plugin",
                   "smp.schedule.name",
                   "smp.schedule.timeout",
                   "smp.active_microbatches",
                   "smp.chunks",
                   "smp.auto_partition",
                   "smp.default_partition",
                   "smp.strategy",
                   "smp.memory_weight",
                   "smp.optimize",
                   "smp.placement_strategy",
                   "smp.static_mode",
                   "smp.static_steps",
                   "smp.static_fallback",
                   "smp.fast_mode",
                   "smp.no_promises",
                   "smp.deterministic_server",
                   "smp.trace_device",
                   "smp.trace_execution_times",
                   "smp.trace_memory_usage",
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
                   "train.log_interval",
                   "train.eval_interval",
                   "train.eval_steps",
                   "train.sample",
                   "train.dtype",
                   "train.dump_gradients",
                   "train.save_model",
                   "train.on_nonfinite",
                   "train.max_restarts",
                   "checkpoint.dir",
                   "checkpoint.interval",
                   "checkpoint.keep",
                   "checkpoint.resume",
                   "transport.type",
                   "transport.trusted_network",
                   "monitor.address",
                   "monitor.prometheus",
                   "monitor.web",
                   "monitor.trace",
                   "monitor.stall_timeout",
                   "monitor.on_stall",
                   "caf.anything"}) {
    CAPTURE(key);
    for (auto& line : parse("", {std::string{key} + "=1"}).errors)
      CHECK_THAT(line, !ContainsSubstring("unknown"));
  }
}

TEST_CASE("docs/config.md lists exactly the keys that the program knows",
          "[runtime][config]") {
  auto root = std::getenv("SMP_SOURCE_DIR");
  if (root == nullptr)
    SKIP("SMP_SOURCE_DIR is not set");
  auto path = std::filesystem::path{root} / "docs/config.md";
  std::ifstream file{path};
  std::string page{std::istreambuf_iterator<char>{file}, {}};
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
