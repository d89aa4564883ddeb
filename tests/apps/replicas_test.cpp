// ctest: timeout=300 label=multiprocess processors=2

#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/train_dir.hpp"

#include <ATen/ops/abs.h>
#include <ATen/ops/max.h>

#include <csignal>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;
using namespace std::string_literals;

namespace {

const std::string more = R"([optimizer]
type = "sgd"
lr = 0.1
clip_grad_norm = 1.0

[train]
steps = 4
eval_steps = 2
save_model = true
)";

/// A run of two pipelines of two ranks beside one of one pipeline.
struct grid_dir : train_dir {
  grid_dir() : train_dir(tiny_gpt(4, 2, 4, more)) {
    // nop
  }
};

} // namespace

TEST_CASE_METHOD(grid_dir, "two pipelines train as one with twice the batch",
                 "[apps][replicas]") {
  auto options = GENERATE(
    std::vector<std::string>{}, std::vector{"shard_optimizer_state=true"s},
    std::vector{"shard_optimizer_state=true"s, "shard_gradients=true"s,
                "fast_mode=false"s, "bucket_cap_mb=1"s},
    std::vector{"overlapping_allreduce=false"s, "broadcast_buffers=true"s});
  std::vector<std::string> arguments{"tiny.toml", "--smp.ddp=true", "--ranks",
                                     "4",         "--run-dir",      "grid"};
  for (auto& x : options)
    arguments.push_back("--smp." + x);
  CAPTURE(arguments);
  auto grid = start(arguments);
  auto code = grid.join();
  INFO(grid.output());
  REQUIRE(code == 0);
  auto one = start({"tiny.toml", "--smp.microbatches=4", "--data.batch_size=8",
                    "--run-dir", "one"});
  REQUIRE(one.join() == 0);
  auto a = metrics("grid"), b = metrics("one");
  REQUIRE(a.size() == 4);
  REQUIRE(b.size() == 4);
  for (size_t i = 0; i < a.size(); ++i)
    for (auto key : {"loss", "grad_norm"}) {
      INFO("step " << i + 1 << ", " << key);
      CHECK(a[i][key].get<double>()
            == Catch::Approx(b[i][key].get<double>()).epsilon(1e-4));
    }
  auto mine = smp::read_safetensors((path / "grid/model.safetensors").string());
  auto whole = smp::read_safetensors((path / "one/model.safetensors").string());
  REQUIRE(mine.tensors.size() == whole.tensors.size());
  for (auto& [name, x] : whole.tensors) {
    INFO(name);
    auto* y = mine.find(name);
    REQUIRE(y != nullptr);
    auto bound = 1e-4 * x.abs().max().item<double>() + 1e-6;
    CHECK((*y - x).abs().max().item<double>() <= bound);
  }
}

TEST_CASE_METHOD(grid_dir, "each replica is compared with one process",
                 "[apps][replicas][verify]") {
  std::vector<std::string> arguments{
    "verify",    "tiny.toml", "--smp.ddp=true", "--ranks", "4", "--steps", "3",
    "--run-dir", "run",       "--json",         "out.json"};
  if (GENERATE(false, true))
    for (auto x : {"shard_optimizer_state=true", "shard_gradients=true",
                   "fast_mode=false", "broadcast_buffers=true"})
      arguments.push_back("--smp."s + x);
  CAPTURE(arguments);
  auto p = start(arguments);
  auto code = p.join();
  INFO(p.output());
  CHECK(code == 0);
  CHECK_THAT(p.output(), ContainsSubstring("4 ranks against one process")
                           && ContainsSubstring("equal: 3 steps"));
}

TEST_CASE_METHOD(grid_dir, "numbers of ranks that do not fit are errors",
                 "[apps][replicas]") {
  auto told = [this](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "tiny.toml");
    auto p = start(std::move(arguments));
    CHECK(p.join() == 2);
    return p.output();
  };
  CHECK_THAT(told({"--smp.ddp=true", "--ranks", "3"}),
             ContainsSubstring("smp.ranks = 3 cannot be divided among "
                               "smp.pipeline_parallel_degree = 2")
               && ContainsSubstring("e.g. smp.ranks = 4"));
  CHECK_THAT(
    told({"--smp.ddp=true", "--smp.tensor_parallel_degree=2", "--ranks", "6"}),
    ContainsSubstring("smp.ranks = 6 cannot be divided among "
                      "smp.pipeline_parallel_degree = 2 times "
                      "smp.tensor_parallel_degree = 2")
      && ContainsSubstring("e.g. smp.ranks = 8"));
  CHECK_THAT(told({"--smp.ranks=4"}),
             ContainsSubstring("smp.ranks has no effect with smp.ddp = false"));
}

TEST_CASE("an export of Hugging Face's GPT-2 is shared as it is",
          "[apps][replicas][tensor_parallel][verify]") {
  train_dir dir{script_defaults(2, 2, 0.1, 2)
                + "\n[tensor_parallel]\nmodules = [\"model.transformer.*\"]\n"};
  for (std::string file : {"pt", "batch.safetensors"})
    std::filesystem::copy_file(source_file("tests/data/zoo/hf_gpt2." + file),
                               dir.path / (file == "pt" ? "model.pt" : file));
  auto p = dir.start({"verify", "tiny.toml", "--smp.ddp=true",
                      "--smp.tensor_parallel_degree=2", "--run-dir", "run"});
  auto code = p.join();
  INFO(p.output());
  CHECK(code == 0);
  CHECK_THAT(p.output(), ContainsSubstring("4 ranks against one process")
                           && ContainsSubstring("equal: 3 steps"));
  auto trained = dir.start({"tiny.toml", "--smp.ddp=true",
                            "--smp.tensor_parallel_degree=2", "--run-dir",
                            "trained"});
  CHECK(trained.join() == 0);
  CHECK_THAT(trained.output(),
             ContainsSubstring("TransformerLayer shared by 2 ranks for memory: "
                               "model.transformer.h.0"));
}

TEST_CASE("ranks that share modules may have the same samples",
          "[apps][replicas][tensor_parallel][verify]") {
  train_dir dir{content_of(source_file("config/models/t5.toml"))};
  auto p = dir.start({"verify", "tiny.toml", "--model.gated=true",
                      "--smp.ddp=true", "--smp.tensor_parallel_degree=2",
                      "--smp.prescaled_batch=true",
                      "--tensor_parallel.modules=[\"*\"]", "--run-dir", "run"});
  auto code = p.join();
  INFO(p.output());
  CHECK(code == 0);
  CHECK_THAT(p.output(), ContainsSubstring("4 ranks against one process")
                           && ContainsSubstring("equal: 3 steps"));
}

TEST_CASE("the blocks of a T5 are shared as a whole",
          "[apps][replicas][tensor_parallel][verify]") {
  train_dir dir{content_of(source_file("config/models/t5.toml"))};
  // GELU: rounding decides nothing.
  auto p = dir.start({"verify", "tiny.toml", "--model.gated=true",
                      "--smp.ddp=true", "--smp.tensor_parallel_degree=2",
                      "--tensor_parallel.modules=[\"*\"]", "--run-dir", "run"});
  auto code = p.join();
  INFO(p.output());
  CHECK(code == 0);
  CHECK_THAT(p.output(), ContainsSubstring("4 ranks against one process")
                           && ContainsSubstring("equal: 3 steps"));
}

TEST_CASE_METHOD(grid_dir,
                 "check and partition know replicas and shared modules",
                 "[apps][replicas][tensor_parallel]") {
  write("shared.toml", content_of(path / "tiny.toml")
                         + "\n[tensor_parallel]\nmodules = "
                           "[\"transformer.h.0\"]\n");
  for (auto command : {"check", "partition"}) {
    auto p = start({command, "shared.toml", "--smp.ddp=true",
                    "--smp.tensor_parallel_degree=2"});
    auto code = p.join();
    INFO(p.output());
    CHECK(code == 0);
    CHECK_THAT(p.output(),
               ContainsSubstring("TransformerLayer shared by 2 ranks for "
                                 "memory: transformer.h.0"));
  }
  auto same = start({"check", "shared.toml", "--smp.ddp=true",
                     "--smp.tensor_parallel_degree=2",
                     "--smp.prescaled_batch=true"});
  CHECK(same.join() == 0);
  CHECK_THAT(same.output(),
             ContainsSubstring("ranks that share have the same samples"));
  auto wrong = start({"check", "shared.toml", "--smp.ddp=true",
                      "--smp.tensor_parallel_degree=2",
                      "--tensor_parallel.modules=[\"encoder\"]"});
  CHECK(wrong.join() == 2);
  CHECK_THAT(wrong.output(), ContainsSubstring("no module is called"));
}
