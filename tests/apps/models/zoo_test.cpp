// ctest: seconds=76 label=proof processors=2
#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/runs/train_dir.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/script_files.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>

// The models of the zoo as a user trains them: a file named in a config, over
// processes, against the numbers that eager PyTorch made (tests/data/zoo).
// `./dev zoo` does it with each number of ranks and more settings.

using namespace smp;
using namespace smp::test;

namespace {

constexpr const char* config = R"([smp]
pipeline_parallel_degree = {ranks}
microbatches = {microbatches}
pipeline = "{pipeline}"
threads = 1
strategy = "paper"  # a model so small would pay best on one rank
memory_weight = 1.0

[model]
type = "torchscript"
path = "{file}.pt"

[data]
type = "safetensors"
path = "{file}.batch.safetensors"

[optimizer]
type = "sgd"
lr = 0.05

[train]
steps = 3
dump_gradients = [1]
save_model = true
)";

/// Those below `prefix`, without it.
numbers expected(const std::string& file, const std::string& prefix) {
  numbers result;
  for (auto& [name, x] : read_safetensors(file).tensors)
    if (name.starts_with(prefix))
      result.emplace(name.substr(prefix.size()), x);
  return result;
}

struct row {
  std::string model;
  uint64_t ranks;
  uint64_t microbatches;
  std::string pipeline;
  /// smp.static_mode, which replays the last step: TorchScript is compiled in
  /// the first one.
  bool replays = false;
  /// smp.fast_mode, if the configuration sets it.
  std::optional<bool> fast = std::nullopt;
};

void check(const row& x) {
  scratch_dir scratch;
  auto file = source_file("tests/data/zoo/" + x.model);
  auto path = scratch.write(
    "zoo.toml",
    fmt::format(fmt::runtime(config), fmt::arg("ranks", x.ranks),
                fmt::arg("microbatches", x.microbatches),
                fmt::arg("pipeline", x.pipeline), fmt::arg("file", file)));
  auto out = scratch.path / "out";
  std::vector<std::string> arguments{built_program("smp-train"), path,
                                     "--run-dir", out.string()};
  if (x.fast)
    arguments.push_back(fmt::format("--smp.fast_mode={}", *x.fast));
  if (x.replays)
    arguments.insert(arguments.end(),
                     {"--smp.static_mode=true", "--smp.static_steps=1"});
  program train{arguments, scratch.path};
  auto code = train.join();
  INFO(fmt::format("{}, pp {}, {} microbatches, {}: {}", x.model, x.ranks,
                   x.microbatches, x.pipeline, train.output()));
  REQUIRE(code == 0);

  std::vector<double> losses;
  int requests = 0;
  std::ifstream metrics{out / "metrics.jsonl"};
  for (std::string line; std::getline(metrics, line);) {
    auto step = nlohmann::json::parse(line);
    losses.push_back(step["loss"].get<double>());
    // Where calls go on, more steps learn.
    if (x.replays && x.fast == false)
      CHECK(step["static"] == (losses.size() < 3 ? "record" : "replay"));
    requests = step["requests"].get<int>();
  }
  // The model is really split, unless one module is nearly all of it.
  if (x.model != "running_state")
    CHECK(requests > 0);

  auto prefix = fmt::format("{}/", x.microbatches);
  auto wanted = file + ".expected.safetensors";
  CHECK(differences({{"losses", torch::tensor(losses, torch::kDouble)}},
                    {{"losses", expected(wanted, prefix).at("losses")}}, false)
        == std::vector<std::string>{});
  CHECK(differences(all_of(out / "gradients-1.safetensors"),
                    expected(wanted, prefix + "gradient/"), true)
        == std::vector<std::string>{});
  CHECK(differences(all_of(out / "model.safetensors"),
                    expected(wanted, prefix + "after/"), false)
        == std::vector<std::string>{});
}

} // namespace

namespace {

/// One row for each model that eager PyTorch has numbers of.
const std::vector<row>& all_rows() {
  static const std::vector<row> result{
    {"arguments", 2, 4, "interleaved"},
    {"bert", 4, 4, "simple"},
    {"branch", 2, 4, "interleaved"},
    {"changed_list", 2, 4, "1f1b"},
    {"convnet", 2, 4, "interleaved"},
    {"early_exit", 2, 4, "interleaved"},
    {"encoder_decoder", 2, 4, "1f1b"},
    {"experts", 4, 1, "simple"},
    {"frozen_trunk", 2, 4, "interleaved"},
    {"gpt", 4, 4, "1f1b"},
    {"hf_albert", 2, 4, "interleaved"},
    {"hf_bert", 2, 4, "simple"},
    {"hf_gpt2", 2, 4, "interleaved"},
    {"hf_llama", 4, 4, "interleaved"},
    {"hf_roberta", 4, 4, "interleaved"},
    {"hf_t5", 4, 4, "interleaved"},
    {"in_place", 2, 4, "simple"},
    {"methods", 2, 1, "interleaved"},
    {"mlp", 2, 4, "interleaved"},
    {"packed", 2, 4, "1f1b"},
    {"recurrent", 2, 4, "interleaved"},
    {"reused", 4, 4, "interleaved"},
    {"running_state", 2, 4, "interleaved"},
    {"skip_link", 4, 4, "interleaved"},
    {"t5", 2, 4, "simple"},
    {"teacher", 2, 4, "interleaved"},
    {"tied_lm", 2, 4, "interleaved"},
    {"two_towers", 4, 4, "simple"},
    {"unused_output", 2, 4, "interleaved"},
    {"weight_as_argument", 4, 4, "interleaved"},
  };
  return result;
}

/// The rows `part`, `part` + 4, ...: a test case each, to run side by side.
void check_part(size_t part) {
  auto& rows = all_rows();
  for (auto i = part; i < rows.size(); i += 4)
    check(rows[i]);
}

} // namespace

TEST_CASE("smp-train gives PyTorch's numbers for the zoo, first quarter",
          "[apps][zoo]") {
  check_part(0);
}

TEST_CASE("smp-train gives PyTorch's numbers for the zoo, second quarter",
          "[apps][zoo]") {
  check_part(1);
}

TEST_CASE("smp-train gives PyTorch's numbers for the zoo, third quarter",
          "[apps][zoo]") {
  check_part(2);
}

TEST_CASE("smp-train gives PyTorch's numbers for the zoo, last quarter",
          "[apps][zoo]") {
  check_part(3);
}

TEST_CASE("every model of the zoo that PyTorch has numbers of is trained",
          "[apps][zoo]") {
  std::vector<std::string> trained, files;
  for (auto& x : all_rows())
    trained.push_back(x.model);
  const std::string end = ".expected.safetensors";
  for (auto& file :
       std::filesystem::directory_iterator{source_file("tests/data/zoo")})
    if (auto name = file.path().filename().string(); name.ends_with(end))
      files.push_back(name.substr(0, name.size() - end.size()));
  std::sort(files.begin(), files.end());
  CHECK(trained == files);
}

TEST_CASE("replayed steps of TorchScript models have PyTorch's numbers",
          "[apps][zoo][static][R33]") {
  auto fast = GENERATE(as<std::optional<bool>>{}, std::nullopt, false, true);
  auto model = GENERATE(as<std::string>{}, "gpt", "hf_llama", "hf_t5", "branch",
                        "running_state", "methods");
  check({model, 2, 4, "interleaved", true, fast});
}

// Every size threshold of the code lies below: 4 KB (tensors that are read by
// their owner only, and those packed into one message), 64 KB (results that
// travel at once), 1 MB (large allocations), 16 MB (chunks of a transfer). No
// key stands here that the README does not set.
TEST_CASE("a TorchScript file of ordinary size trains with default settings",
          "[apps][zoo]") {
  constexpr int64_t width = 2100; // weights of 17.6 MB
  constexpr int64_t rows = 256;   // activations of 2.1 MB
  constexpr double rate = 0.05;
  auto ranks = GENERATE(2, 4);
  auto microbatches = GENERATE(1, 2);
  scratch_dir scratch;
  auto file = (scratch.path / "model.pt").string();
  script_chain(5, width, 5).save(file);
  torch::manual_seed(3);
  auto input = torch::randn({rows * microbatches, width});
  write_safetensors((scratch.path / "batch.safetensors").string(),
                    {{"input0", input}});
  auto path = scratch.write("default.toml",
                            script_defaults(ranks, microbatches, rate, 2));
  auto out = scratch.path / "out";
  program{{built_program("smp-train"), path, "--run-dir", out.string()},
          scratch.path}
    .finish();
  // -- the same in one process, by torch::jit alone ---------------------------
  auto plain = torch::jit::load(file);
  for (int step = 0; step < 2; ++step) {
    for (auto& x : input.chunk(microbatches))
      (plain.forward({x}).toTensor() / microbatches).backward();
    torch::NoGradGuard no_grad;
    for (const auto& p : plain.parameters()) {
      p.sub_(p.grad(), rate);
      p.mutable_grad() = torch::Tensor{};
    }
  }
  numbers wanted;
  for (const auto& p : plain.named_parameters())
    wanted.emplace(p.name, p.value);
  CHECK(differences(all_of(out / "model.safetensors"), wanted, false)
        == std::vector<std::string>{});
}
