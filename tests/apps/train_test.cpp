// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <nlohmann/json.hpp>
#include <torch/types.h>

#include <cmath>
#include <csignal>
#include <set>
#include <sstream>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace fs = std::filesystem;

namespace {

/// A run that takes a second.
const std::string tiny = tiny_gpt(2, 4, 8, R"([optimizer]
lr = 1e-2
clip_grad_norm = 1.0

[train]
steps = 4
log_interval = 2
eval_steps = 2
sample = 12
save_model = true
)");

struct tiny_run : train_dir {
  tiny_run() : train_dir(tiny) {
    // nop
  }
};

/// The lines of `x` that are not empty.
std::vector<std::string> lines_of(const std::string& x) {
  std::istringstream in{x};
  std::vector<std::string> result;
  for (std::string line; std::getline(in, line);)
    if (!line.empty())
      result.push_back(line);
  return result;
}

} // namespace

// -- command line -------------------------------------------------------------

TEST_CASE_METHOD(tiny_run, "Every command explains itself", "[apps][train]") {
  auto help = start({"--help"});
  CHECK(help.join() == 0);
  for (auto text : {"check", "--ranks", "--run-dir", "--log-level", "--version",
                    "--table.key=value", "130"})
    CHECK_THAT(help.output(), ContainsSubstring(text));
  CHECK_THAT(run({"check", "--help"}), ContainsSubstring("CONFIG"));
  CHECK_THAT(run({"--version"}), ContainsSubstring("smp "));
}

TEST_CASE_METHOD(tiny_run, "A wrong command line is refused with exit code 2",
                 "[apps][train]") {
  struct wrong {
    std::vector<std::string> arguments;
    const char* text;
  };
  for (auto& [arguments, text] : std::vector<wrong>{
         {{}, "CONFIG is missing"},
         {{"check"}, "CONFIG is missing"},
         {{"trian"},
          "'trian' is neither a command nor a file; did you mean smp-train "
          "CONFIG?; commands: check, partition, schedule, keys, verify"},
         {{"train", "tiny.toml"}, "'train' is neither"},
         {{"chekc", "tiny.toml"},
          "'chekc' is neither a command nor a file; "
          "did you mean check?"},
         {{"quickstart", "--ranks", "2"},
          "'quickstart' is neither a command nor a file; commands: check"},
         {{"tiny.toml", "--colour=3"}, "unknown option --colour (see"},
         {{"tiny.toml", "--stepz=3"},
          "unknown option --stepz; did you mean --train.steps? (see"},
         {{"tiny.toml", "--learning-rate", "1"},
          "unknown option --learning-rate; did you mean --optimizer.lr?"},
         {{"tiny.toml", "--run_dir=out"}, "did you mean --run-dir?"},
         {{"tiny.toml", "--nproc-per-node=2"}, "did you mean --ranks?"},
         {{"check", "tiny.toml", "--split"}, "unknown option --split (see"},
         {{"tiny.toml", "--train.steps"}, "--train.steps has no value"},
         {{"tiny.toml", "more.toml"}, "unexpected argument 'more.toml'"},
         {{"tiny.toml", "--ranks", "two"}, "--ranks"},
         {{"tiny.toml", "--log-level", "loud"}, "--log-level"},
         {{"tiny.toml", "--ranks", "2", "--smp.partitions=3"},
          "--ranks and --smp.partitions set the same key"},
         {{"tiny.toml", "--ranks", "2", "--smp.ranks=4", "--smp.ddp=true"},
          "--ranks and --smp.ranks set the same key"},
         {{"tiny.toml", "--train.stepz=3"}, "train.steps"},
         {{"nothing.toml"}, "nothing.toml"},
       }) {
    auto p = start(arguments);
    INFO(text);
    CHECK(p.join() == 2);
    CHECK_THAT(p.output(), ContainsSubstring(text));
    CHECK(lines_of(p.output()).size() == 1);
  }
  CHECK_FALSE(fs::exists(path / "runs"));
}

// -- check --------------------------------------------------------------------

TEST_CASE_METHOD(tiny_run, "A good configuration passes the check",
                 "[apps][train]") {
  CHECK_THAT(run({"check", "tiny.toml"}),
             ContainsSubstring("tiny.toml: no errors"));
  CHECK_FALSE(fs::exists(path / "runs"));
}

TEST_CASE_METHOD(tiny_run, "The check prints one line per error",
                 "[apps][train]") {
  auto output = run({"check", "tiny.toml", "--model.layerz=3",
                     "--smp.microbatches=3", "--train.steps=0"},
                    2);
  auto lines = lines_of(output);
  CHECK(lines.size() == 3);
  for (auto text : {"model.layers", "smp.microbatches", "train.steps"})
    CHECK_THAT(output, ContainsSubstring(text));
}

TEST_CASE_METHOD(tiny_run, "The check reads the data", "[apps][train]") {
  CHECK_THAT(run({"check", "tiny.toml", "--data.path=nowhere.txt"}, 2),
             ContainsSubstring("nowhere.txt"));
  write("short.txt", "too short for one sequence");
  CHECK_THAT(run({"check", "tiny.toml", "--data.path=short.txt"}, 2),
             ContainsSubstring("needs at least 17"));
}

TEST_CASE("The quickstart passes the check", "[apps][train]") {
  program p{{built_program("smp-train"), "check",
             source_file("config/quickstart.toml")}};
  CHECK(p.join() == 0);
}

// -- runs ---------------------------------------------------------------------

TEST_CASE_METHOD(tiny_run,
                 "A run whose ranks take turns is told how they need not",
                 "[apps][train]") {
  // Measured, a model so small would stay on one rank.
  std::vector<std::string> words{"tiny.toml", "--smp.trace_device=none"};
  auto output = run(words);
  CHECK_THAT(output, !ContainsSubstring("take turns"));
  words.insert(words.end(), {"--smp.microbatches=1", "--train.steps=1"});
  auto one = start(words);
  REQUIRE(one.join() == 0);
  CHECK_THAT(one.output(), ContainsSubstring("in 1 microbatch, interleaved"));
  CHECK_THAT(one.output(),
             ContainsSubstring("note: with one microbatch the ranks of a "
                               "pipeline take turns; with\n"
                               "      smp.microbatches = 4 the predicted "
                               "bubble is "));
  words.insert(words.end(), {"--smp.pipeline_parallel_degree=1"});
  CHECK_THAT(run(words), !ContainsSubstring("take turns"));
}

TEST_CASE_METHOD(tiny_run, "A run leaves metrics, logs and the model",
                 "[apps][train]") {
  auto output = run({"tiny.toml",
                     // Measured, a model so small would stay on one rank.
                     "--smp.trace_device=none", "--run-dir", "out"});
  // Two of the loss's own bytes of the sample may be anything.
  for (auto text :
       {"smp-train tiny.toml on 2 ranks", "partition", "2/4", "4/4", "held out",
        "unigram entropy", "bubble", "requests", "peak on rank 1",
        "out/metrics.jsonl", "sample of 12 characters"})
    CHECK_THAT(output, ContainsSubstring(text));
  // A pipe is not a terminal.
  CHECK(output.find('\r') == std::string::npos);
  CHECK(output.find('\x1b') == std::string::npos);

  auto steps = metrics("out");
  REQUIRE(steps.size() == 4);
  for (size_t i = 0; i < steps.size(); ++i) {
    auto& x = steps[i];
    std::set<std::string> keys;
    for (auto& item : x.items())
      keys.insert(item.key());
    std::set<std::string> expected{
      "step",         "loss",         "lr",
      "grad_norm",    "step_seconds", "samples_per_second",
      "bubble_ratio", "requests",     "bytes_sent"};
    if (i == 3) // the run evaluates at its end
      expected.insert("held_out_loss");
    CHECK(keys == expected);
    CHECK(x["step"] == i + 1);
    CHECK(x["loss"].get<double>() > 0);
    CHECK(x["lr"] == 1e-2);
    CHECK(x["bubble_ratio"].get<double>() < 1);
    // Each of 4 microbatches asks rank 1 at least once, there and back.
    CHECK(x["requests"].get<int>() >= 8);
    CHECK(x["bytes_sent"].get<int>() > 0);
    CHECK(x["samples_per_second"].get<double>()
            * x["step_seconds"].get<double>()
          == Catch::Approx(8));
  }

  for (auto name : {"out/log-0.txt", "out/log-1.txt"})
    CHECK(fs::file_size(path / name) > 0);
  auto model = smp::read_safetensors(path / "out/model.safetensors");
  CHECK(model.tensors.size() == 2 * 12 + 5);
  REQUIRE(model.find("transformer.h.1.attn.c_attn.weight") != nullptr);
  CHECK(model.find("transformer.wte.weight")->sizes()
        == torch::IntArrayRef{256, 16});
}

TEST_CASE_METHOD(tiny_run, "Numbers of ranks and kinds of ranks agree",
                 "[apps][train]") {
  struct kind {
    const char* name;
    std::vector<std::string> arguments;
    std::map<std::string, std::string> environment = {};
  };
  std::vector<std::vector<nlohmann::json>> all;
  std::vector<smp::safetensors_file> models;
  for (auto& [name, arguments, environment] : std::vector<kind>{
         {"one", {"--ranks", "1"}},
         {"two", {"--ranks", "2"}},
         {"threads", {}, threads_as_ranks},
       }) {
    auto full = arguments;
    full.insert(full.begin(), {"tiny.toml", "--run-dir", name});
    auto p = start(full, environment);
    INFO(p.output());
    REQUIRE(p.join() == 0);
    all.push_back(metrics(name));
    models.push_back(smp::read_safetensors(path / name / "model.safetensors"));
    CHECK(fs::file_size(path / name / "log-0.txt") > 0);
  }
  for (size_t run = 1; run < all.size(); ++run) {
    for (size_t i = 0; i < 4; ++i)
      for (auto key : {"loss", "grad_norm"})
        CHECK(all[run][i][key].get<double>()
              == Catch::Approx(all[0][i][key].get<double>()).epsilon(1e-3));
    REQUIRE(models[run].tensors.size() == models[0].tensors.size());
    for (size_t i = 0; i < models[0].tensors.size(); ++i)
      CHECK(models[run].tensors[i].first == models[0].tensors[i].first);
  }
}

TEST_CASE_METHOD(tiny_run, "A run without a directory gets a new one",
                 "[apps][train]") {
  auto output = run({"tiny.toml", "--train.steps=1", "--log-level=warn"});
  std::vector<fs::path> made;
  for (auto& entry : fs::directory_iterator{path / "runs"})
    made.push_back(entry.path().filename());
  REQUIRE(made.size() == 1);
  CHECK_THAT(made[0].string(), Catch::Matchers::EndsWith("-tiny"));
  CHECK(metrics("runs/" + made[0].string()).size() == 1);
  // Warnings and worse only: no table, but what came out.
  CHECK(output.find("grad norm") == std::string::npos);
  CHECK_THAT(output, ContainsSubstring("done after 1 of 1 steps"));
}

TEST_CASE_METHOD(tiny_run,
                 "A rank with another configuration is refused with the key "
                 "and both values",
                 "[apps][train]") {
  auto rank = [this](const char* number, std::vector<std::string> settings) {
    settings.insert(settings.begin(), {"tiny.toml", "--run-dir", "out"});
    return start(settings, {{"RANK", number},
                            {"WORLD_SIZE", "2"},
                            {"TORCHELASTIC_RUN_ID", path.filename()},
                            {"SMP_RENDEZVOUS_DIR", path}});
  };
  auto first = rank("0", {});
  auto second = rank("1", {"--optimizer.lr=0.5", "--smp.threads=3"});
  CHECK(first.join() == 2);
  CHECK(second.join() == 2);
  for (auto* p : {&first, &second}) {
    auto text = p->output();
    INFO(text);
    CHECK_THAT(text, ContainsSubstring("has another configuration than rank"));
    CHECK((text.find("optimizer.lr = 0.5 against 0.01") != text.npos
           || text.find("optimizer.lr = 0.01 against 0.5") != text.npos));
    CHECK(text.find("threads") == text.npos);
  }
}

TEST_CASE_METHOD(tiny_run,
                 "A rank without work is a warning, and so is a key without "
                 "effect that can be meant",
                 "[apps][train]") {
  auto [level, warns] = GENERATE(table<std::string, bool>(
    {{"info", true}, {"warn", true}, {"error", false}}));
  auto output = run({"tiny.toml", "--train.steps=1", "--run-dir", "out",
                     "--log-level", level, "--smp.auto_partition=false",
                     "--optimizer.schedule.warmup_steps=2"});
  for (auto* text : {"warning: device 1 stays idle: nothing is placed there",
                     "warning: command line: optimizer.schedule.warmup_steps = "
                     "2 and train.steps = 1: the learning rate never reaches "
                     "optimizer.lr (train.steps: command line)"}) {
    auto at = output.find(text);
    CHECK((at != std::string::npos) == warns);
    if (warns)
      CHECK(output.find(text, at + 1) == std::string::npos);
  }
}

TEST_CASE_METHOD(tiny_run, "A loss that is not finite ends with exit code 5",
                 "[apps][train]") {
  CHECK_THAT(run({"tiny.toml", "--run-dir", "out", "--optimizer.type=sgd",
                  "--optimizer.lr=1e30"},
                 5),
             ContainsSubstring(": the loss is "));
  CHECK(metrics("out").back()["loss"].is_null());
  CHECK_FALSE(fs::exists(path / "out/model.safetensors"));
}

TEST_CASE_METHOD(tiny_run, "Ctrl-C ends a run cleanly with exit code 130",
                 "[apps][train]") {
  auto p = start({"tiny.toml", "--run-dir", "out", "--train.steps=1000000"});
  REQUIRE(p.wait_for(" 2/1000000"));
  p.signal(SIGINT);
  CHECK(p.join() == 130);
  CHECK_THAT(p.output(), ContainsSubstring("interrupted after "));
  auto steps = metrics("out");
  CHECK(steps.size() >= 2);
  CHECK(steps.back()["step"] == steps.size());
  CHECK(fs::exists(path / "out/model.safetensors"));
}
