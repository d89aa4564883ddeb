// ctest: seconds=23 label=multiprocess processors=2

#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"
#include "tests/support/torch/numbers.hpp"

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
  check_near(all_of(path / "grid/model.safetensors"),
             all_of(path / "one/model.safetensors"), {1e-4, 1e-6});
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
  CHECK_THAT(run(arguments), ContainsSubstring("4 ranks against one process")
                               && ContainsSubstring("equal: 3 steps"));
}

TEST_CASE_METHOD(grid_dir, "numbers of ranks that do not fit are errors",
                 "[apps][replicas]") {
  auto told = [this](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "tiny.toml");
    auto output = run(std::move(arguments), 2);
    return output;
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

TEST_CASE_METHOD(grid_dir, "shared modules are written whole to files",
                 "[apps][replicas][tensor_parallel]") {
  auto pipeline = GENERATE(1, 2);
  auto optimize = GENERATE("speed"s, "memory"s);
  CAPTURE(pipeline, optimize);
  auto dumps = "--train.dump_gradients=[1, 4]"s;
  auto shared = start(
    {"tiny.toml", "--smp.ddp=true", "--smp.tensor_parallel_degree=2",
     "--tensor_parallel.modules=[\"*\"]", "--smp.optimize=" + optimize,
     fmt::format("--smp.pipeline_parallel_degree={}", pipeline), dumps,
     "--run-dir", "shared"});
  auto code = shared.join();
  INFO(shared.output());
  REQUIRE(code == 0);
  CHECK_THAT(
    shared.output(),
    ContainsSubstring("TransformerLayer shared by 2 ranks for " + optimize));
  auto one = start({"tiny.toml", "--smp.pipeline_parallel_degree=1",
                    "--smp.microbatches=4", "--data.batch_size=8", dumps,
                    "--run-dir", "one"});
  REQUIRE(one.join() == 0);
  // Rounding of three updates is in the later ones.
  for (auto& [file, allowed] : std::map<std::string, closeness>{
         {"gradients-1.safetensors", {}},
         {"gradients-4.safetensors", {1e-3, 1e-6}},
         {"model.safetensors", {1e-4, 1e-6}}}) {
    INFO(file);
    check_near(all_of(path / "shared" / file), all_of(path / "one" / file),
               allowed);
  }
}

TEST_CASE("an export of Hugging Face's GPT-2 is shared as it is",
          "[apps][replicas][tensor_parallel][verify]") {
  train_dir dir{script_defaults(2, 2, 0.1, 2)
                + "\n[tensor_parallel]\nmodules = [\"model.transformer.*\"]\n"};
  for (std::string file : {"pt", "batch.safetensors"})
    std::filesystem::copy_file(source_file("tests/data/zoo/hf_gpt2." + file),
                               dir.path / (file == "pt" ? "model.pt" : file));
  CHECK_THAT(dir.run({"verify", "tiny.toml", "--smp.ddp=true",
                      "--smp.tensor_parallel_degree=2", "--steps", "5",
                      "--run-dir", "run"}),
             ContainsSubstring("4 ranks against one process")
               && ContainsSubstring("equal: 5 steps"));
  CHECK_THAT(
    dir.run({"tiny.toml", "--smp.ddp=true", "--smp.tensor_parallel_degree=2",
             "--run-dir", "trained"}),
    ContainsSubstring("TransformerLayer shared by 2 ranks for memory: "
                      "model.transformer.h.0"));
}

TEST_CASE("ranks that share modules may have the same samples",
          "[apps][replicas][tensor_parallel][verify]") {
  train_dir dir{content_of(source_file("config/models/t5.toml"))};
  CHECK_THAT(
    dir.run({"verify", "tiny.toml", "--model.gated=true", "--smp.ddp=true",
             "--smp.tensor_parallel_degree=2", "--smp.prescaled_batch=true",
             "--tensor_parallel.modules=[\"*\"]", "--steps", "5", "--run-dir",
             "run"}),
    ContainsSubstring("4 ranks against one process")
      && ContainsSubstring("equal: 5 steps"));
}

TEST_CASE("the blocks of other models are shared as a whole",
          "[apps][replicas][tensor_parallel][verify]") {
  struct model {
    std::string name;
    std::string more;
    std::string block;
  };
  auto x = GENERATE(
    // GELU: rounding decides nothing.
    model{"t5", "--model.gated=true", "encoder.block.0"},
    model{"bert", "--model.dropout=0.1", "bert.encoder.layer.0"},
    model{"roberta", "--model.dropout=0.1", "roberta.encoder.layer.0"});
  CAPTURE(x.name);
  train_dir dir{content_of(source_file("config/models/" + x.name + ".toml"))};
  std::vector<std::string> job{"tiny.toml", x.more, "--smp.ddp=true",
                               "--smp.tensor_parallel_degree=2",
                               "--tensor_parallel.modules=[\"*\"]"};
  auto verify = job;
  verify.insert(verify.begin(), "verify");
  verify.insert(verify.end(), {"--steps", "5", "--run-dir", "run"});
  CHECK_THAT(dir.run(verify), ContainsSubstring("4 ranks against one process")
                                && ContainsSubstring("equal: 5 steps"));
  auto check = job;
  check.insert(check.begin(), "check");
  auto output = dir.run(check);
  CHECK_THAT(output,
             ContainsSubstring("TransformerLayer shared by 2 ranks for memory: "
                               + x.block));
  if (x.name == "t5") // with what its attention to the encoder takes
    CHECK_THAT(output, ContainsSubstring(" in a microbatch: decoder.block.0"));
}

TEST_CASE_METHOD(grid_dir,
                 "check and partition know replicas and shared modules",
                 "[apps][replicas][tensor_parallel]") {
  write("shared.toml", content_of(path / "tiny.toml")
                         + "\n[tensor_parallel]\nmodules = "
                           "[\"transformer.h.0\"]\n");
  auto pipeline = GENERATE("2"s, "1"s);
  for (auto command : {"check", "partition"}) {
    auto output = run({command, "shared.toml", "--smp.ddp=true",
                       "--smp.tensor_parallel_degree=2",
                       "--smp.pipeline_parallel_degree=" + pipeline});
    CHECK_THAT(output,
               ContainsSubstring("TransformerLayer shared by 2 ranks for "
                                 "memory: transformer.h.0"));
    // Of 12 * 16 * 16 numbers in linears, 9 * 16 in their biases, which the
    // first rank has, and 4 * 16 in norms. Of 2 * 16 tokens half of 16 numbers
    // both ways at both ends, 9 * 16 both ways in linears; and of those of both
    // ranks 5 for each norm.
    CHECK_THAT(output, ContainsSubstring("each rank holds at most 1712 of 3280 "
                                         "parameters and sends 43.5 kB in a "
                                         "microbatch: transformer.h.0"));
  }
  auto same = start({"check", "shared.toml", "--smp.ddp=true",
                     "--smp.tensor_parallel_degree=2",
                     "--smp.prescaled_batch=true"});
  CHECK(same.join() == 0);
  CHECK_THAT(same.output(),
             ContainsSubstring("ranks that share have the same samples")
               && ContainsSubstring("and sends 21.8 kB in a microbatch"));
  CHECK_THAT(run({"check", "shared.toml", "--smp.ddp=true",
                  "--smp.tensor_parallel_degree=2",
                  "--tensor_parallel.modules=[\"encoder\"]"},
                 2),
             ContainsSubstring("no module is called \"encoder\"; the model has "
                               "transformer"));
}
