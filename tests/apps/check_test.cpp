// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <torch/types.h>

#include <filesystem>
#include <string>
#include <vector>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

constexpr const char* config = R"([smp]
pipeline_parallel_degree = 2
microbatches = 2

[model]
type = "plugin"
library = "LIBRARY"
name = "net"

[data]
type = "safetensors"
path = "batch.safetensors"

[train]
steps = 1
)";

/// Batches of two and of three tensors.
struct check_dir : train_dir {
  check_dir() : train_dir(with_library(config, "model_that_throws")) {
    smp::named_tensors tensors{{"input0", torch::ones({4, 8})},
                               {"input1", torch::ones({4})}};
    smp::write_safetensors(path / "batch.safetensors", tensors);
    tensors.emplace_back("input2", torch::ones({4}));
    smp::write_safetensors(path / "three.safetensors", tensors);
  }

  /// @returns the exit code of `what` with these settings; `output` gets what
  /// it wrote
  int code_of(const std::string& what, const std::vector<std::string>& settings,
              std::string& output) const {
    std::vector<std::string> arguments{"tiny.toml"};
    if (what != "train")
      arguments.insert(arguments.begin(), what);
    arguments.insert(arguments.end(), settings.begin(), settings.end());
    auto p = start(arguments, threads_as_ranks);
    auto result = p.join();
    output = p.output();
    return result;
  }
};

struct refused {
  std::vector<std::string> settings;
  std::string text;
  std::string checked = {}; // what the check says besides
};

} // namespace

TEST_CASE_METHOD(check_dir, "The check refuses what training would refuse",
                 "[apps][check]") {
  const std::string three = "--data.path=three.safetensors";
  const std::string fast = "--smp.fast_mode=true";
  const auto library = std::filesystem::canonical(
                         built_program("../lib/model_that_throws.so"))
                         .string();
  for (auto& [settings, text, checked] : std::vector<refused>{
         {{}, ""},
         {{three}, "the data has 3 tensors, but forward of this model takes 2"},
         {{three, "--ranks=1"}, "the data has 3 tensors"},
         {{"--data.batch_size=2"}, ""},
         {{"--data.batch_size=4"},
          "batch.safetensors: has 4 rows, 3 of them for training, but a step "
          "takes 4"},
         {{three, "--smp.trace_device=none"}, "the data has 3 tensors"},
         {{fast, "--smp.no_promises=[\"fd\"]"},
          "smp.no_promises: no module is called \"fd\""},
         {{fast, "--smp.no_promises=[\"fd\"]", "--ranks=1"},
          "no module is called \"fd\""},
         {{"--smp.manual_partition={fd = 1}"}, "no module 'fd'"},
         {{"--activation_checkpointing.modules=[\"fd\"]"},
          "activation_checkpointing.modules: no module is called \"fd\""},
         {{"--model.options.fault=made"},
          "model_that_throws.so cannot be created: seven is not a width\n"},
         {{"--model.options.fault=odd"},
          "model_that_throws.so cannot be created: an exception that "
          "does not derive from std::exception\n"},
         {{"--model.options.fault=called"},
          "no such luck",
          "model.name = \"net\" of " + library
            + " fails on the first microbatch: no such luck\n"},
         {{"--model.options.fault=evaluated", "--data.held_out=0.5",
           "--data.batch_size=2"},
          "no such luck",
          "model.name = \"net\" of " + library
            + " fails on the first held-out microbatch, in evaluation mode: no "
              "such luck\n"},
         // A trace, without gradients, fails; a run does not.
         {{"--model.options.fault=traced"}, ""},
         {{"--smp.auto_partition=false", "--smp.default_partition=1"}, ""},
       }) {
    INFO(text);
    std::string output;
    auto trained = code_of("train", settings, output);
    INFO(output);
    CHECK((trained == 0) == text.empty());
    CHECK_THAT(output, ContainsSubstring(text));
    auto code = code_of("check", settings, output);
    INFO(output);
    CHECK(code == (text.empty() ? 0 : 2));
    CHECK_THAT(output, ContainsSubstring(text) && ContainsSubstring(checked));
    CHECK(text.empty() == (output.find("no errors") != std::string::npos));
    if (!text.empty()) // one error, one line
      CHECK(output.find('\n') == output.size() - 1);
  }
}

TEST_CASE_METHOD(check_dir, "A TorchScript file is checked against its data",
                 "[apps][check]") {
  write("script.toml", R"([smp]
microbatches = 2
[model]
type = "torchscript"
path = ")" + source_file("tests/data/zoo/mlp.pt")
                         + R"("
[data]
type = "safetensors"
path = "three.safetensors"
[train]
steps = 1
)");
  CHECK_THAT(run({"check", "script.toml"}, 2),
             ContainsSubstring("takes 2 tensors, but the data has "
                               "3"));
  // What fails is named, not the interpreter that it fails in.
  smp::write_safetensors(path / "rows.safetensors",
                         {{"input0", torch::ones({8, 8})}});
  CHECK_THAT(run({"check", "script.toml",
                  "--model.path=" + source_file("tests/data/script/rows.pt"),
                  "--data.path=rows.safetensors", "--ranks=2"},
                 2),
             ContainsSubstring("the model fails on the first microbatch: ")
               && ContainsSubstring("a batch has 8 rows, but a microbatch 4"));
}
