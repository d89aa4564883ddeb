// ctest: seconds=27 label=multiprocess processors=2

#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <torch/types.h>

#include <filesystem>
#include <string>
#include <vector>

// Precision and loss scale over processes (docs/precision.md).

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

const std::string more = R"([optimizer]
lr = 1e-2
clip_grad_norm = 1.0

[train]
steps = 8
eval_steps = 1
)";

struct precision_run : train_dir {
  precision_run() : train_dir(tiny_gpt(2, 2, 4, more)) {
    // nop
  }

  std::string train(std::vector<std::string> options,
                    const std::string& run_dir, int expected = 0) const {
    options.insert(options.begin(), {"tiny.toml", "--run-dir", run_dir,
                                     // Measured, it would be one rank's.
                                     "--smp.trace_device=none"});
    return run(std::move(options), expected);
  }
};

const std::vector<std::string> four_ranks{"--smp.ddp=true", "--ranks", "4",
                                          "--smp.shard_optimizer_state=true"};

std::vector<std::string> joined(std::vector<std::string> a,
                                const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

} // namespace

TEST_CASE_METHOD(precision_run, "each precision is that of one process",
                 "[apps][precision][verify][R56]") {
  auto options = GENERATE(
    std::vector<std::string>{"--smp.bf16_params=true", "--model.tied=true"},
    std::vector<std::string>{"--smp.fp16_params=true"},
    std::vector<std::string>{"--train.dtype=float16"},
    std::vector<std::string>{"--train.dtype=bfloat16",
                             "--optimizer.loss_scale=1024"},
    std::vector<std::string>{"--optimizer.loss_scale=100"});
  auto grid = GENERATE(std::vector<std::string>{}, four_ranks);
  CAPTURE(options, grid);
  CHECK_THAT(run(joined(joined({"verify", "tiny.toml", "--steps", "5",
                                "--split", "--run-dir", "run"},
                               options),
                        grid)),
             ContainsSubstring("equal: 5 steps"));
}

TEST_CASE(
  "the quickstart in bfloat16 is that of one process on ranks that "
  "share its modules",
  "[apps][precision][verify][R56]") {
  auto modules = GENERATE(as<std::string>{}, R"(["transformer.h"])",
                          R"(["transformer.ln_f"])");
  CAPTURE(modules);
  train_dir dir{""};
  // Few rows: some CPUs multiply bfloat16 a hundred times slower than float32.
  CHECK_THAT(dir.run({"verify", source_file("config/quickstart.toml"),
                      "--data.batch_size=4", "--data.sequence_length=32",
                      "--smp.microbatches=2", "--ranks", "4", "--smp.ddp=true",
                      "--smp.tensor_parallel_degree=2",
                      "--tensor_parallel.modules=" + modules,
                      "--smp.bf16_params=true", "--run-dir", "run"}),
             ContainsSubstring("equal: 3 steps"));
}

TEST_CASE("an exported model trains in half precision",
          "[apps][precision][verify][R56]") {
  train_dir dir{script_defaults(2, 2, 0.1, 3)};
  for (std::string file : {"pt", "batch.safetensors"})
    std::filesystem::copy_file(source_file("tests/data/zoo/hf_gpt2." + file),
                               dir.path / (file == "pt" ? "model.pt" : file));
  CHECK_THAT(dir.run({"verify", "tiny.toml", "--smp.bf16_params=true",
                      "--run-dir", "run"}),
             ContainsSubstring("equal: 3 steps"));
}

TEST_CASE_METHOD(precision_run, "half precision learns, and saves what it has",
                 "[apps][precision][R56]") {
  auto key = GENERATE(as<std::string>{}, "bf16", "fp16");
  train({"--smp." + key + "_params=true", "--train.save_model=true",
         "--train.dump_gradients=[2]", "--train.steps=20"},
        "run");
  auto steps = metrics("run");
  REQUIRE(steps.size() == 20);
  CHECK(steps.back()["loss"].get<double>()
        < steps.front()["loss"].get<double>() - 0.5);
  auto type = key == "bf16" ? torch::kBFloat16 : torch::kHalf;
  auto model = smp::read_safetensors((path / "run/model.safetensors").string());
  CHECK(model.find("transformer.wte.weight")->scalar_type() == type);
  // Without the scale they would not fit float16.
  auto gradients = smp::read_safetensors(
    (path / "run/gradients-2.safetensors").string());
  auto* gradient = gradients.find("transformer.wte.weight");
  CHECK(gradient->scalar_type()
        == (key == "bf16" ? torch::kBFloat16 : torch::kFloat));
  CHECK(gradient->to(torch::kFloat).norm().item<double>()
        <= 1.01 * steps[1]["grad_norm"].get<double>());
  CHECK(steps.back().contains("loss_scale") == (key == "fp16"));
}

TEST_CASE_METHOD(precision_run, "a dynamic scale falls until gradients fit",
                 "[apps][precision][R56]") {
  auto said = train(
    joined({"--train.dtype=float16", "--train.steps=24",
            "--optimizer.dynamic_loss_args.init_scale=4294967296",
            "--optimizer.dynamic_loss_args.scale_window=1000"},
           four_ranks),
    "run");
  auto steps = metrics("run");
  REQUIRE(steps.size() == 24);
  size_t skipped = 0;
  while (skipped < steps.size() && steps[skipped].contains("skipped")) {
    CHECK_THAT(steps[skipped]["skipped"].get<std::string>(),
               ContainsSubstring("gradients are not finite with a loss scale"));
    if (skipped > 0)
      CHECK(steps[skipped]["loss_scale"].get<double>()
            == steps[skipped - 1]["loss_scale"].get<double>() / 2);
    ++skipped;
  }
  CHECK(skipped > 2);
  CHECK(skipped < 22);
  CHECK_THAT(said, ContainsSubstring(
                     fmt::format("{} of 24 steps updated nothing", skipped)));
  CHECK(steps.back()["loss"].get<double>()
        < steps.front()["loss"].get<double>());
}

TEST_CASE_METHOD(precision_run,
                 "gradients that are not finite end a run before they are used",
                 "[apps][precision][R56]") {
  // No dynamic scale makes them fit.
  std::vector<std::string> options{"--train.dtype=float16",
                                   "--optimizer.loss_scale=4294967296",
                                   "--train.save_model=true"};
  auto said = train(options, "stopped", 5);
  CHECK_THAT(said, ContainsSubstring("step 1: the gradient is not finite"));
  CHECK(metrics("stopped").size() == 1);

  options.push_back("--train.on_nonfinite=skip");
  said = train(joined(options, four_ranks), "skipped");
  CHECK_THAT(said, ContainsSubstring("8 of 8 steps updated nothing"));
  auto steps = metrics("skipped");
  REQUIRE(steps.size() == 8);
  for (auto& x : steps)
    CHECK(x["skipped"] == "the gradient is not finite");
  // Nothing was updated: the model is what it was.
  options.back() = "--optimizer.lr=0";
  options[1] = "--optimizer.loss_scale=1";
  train(joined(options, {"--optimizer.weight_decay=0"}), "untouched");
  auto a = smp::read_safetensors((path / "skipped/model.safetensors").string());
  auto b = smp::read_safetensors(
    (path / "untouched/model.safetensors").string());
  for (auto& [name, x] : b.tensors) {
    INFO(name);
    CHECK(a.find(name)->equal(x));
  }
}

TEST_CASE_METHOD(precision_run, "losses that are not finite are skipped",
                 "[apps][precision][R56]") {
  auto said = train(joined({"--optimizer.type=sgd", "--optimizer.lr=1e30",
                            "--train.on_nonfinite=skip"},
                           four_ranks),
                    "run");
  auto steps = metrics("run");
  REQUIRE(steps.size() == 8);
  CHECK_FALSE(steps[0].contains("skipped"));
  CHECK(steps[7].contains("skipped"));
  CHECK_THAT(said, ContainsSubstring("steps updated nothing")
                     && ContainsSubstring(" nan ")
                     && !ContainsSubstring("-nan"));
}

TEST_CASE_METHOD(precision_run,
                 "a run in half precision goes on to the last bit",
                 "[apps][precision][checkpoint][R51][R56]") {
  auto shards = GENERATE("false", "true");
  std::vector<std::string> options{
    "--smp.fp16_params=true",
    "--smp.ddp=true",
    "--ranks",
    "4",
    "--smp.shard_optimizer_state=" + std::string{shards},
    "--smp.deterministic_server=true",
    "--optimizer.dynamic_loss_args.scale_window=3",
    "--checkpoint.interval=4"};
  train(joined(options, {"--checkpoint.dir=whole"}), "whole-run");
  // The schedule of the rate is a constant: it ends where it ends.
  train(joined(options, {"--checkpoint.dir=parts", "--train.steps=4"}), "one");
  train(joined(options, {"--checkpoint.dir=parts"}), "two");
  auto whole = metrics("whole-run"), rest = metrics("two");
  REQUIRE(rest.size() == 4);
  for (size_t i = 0; i < 4; ++i)
    for (auto key : {"loss", "grad_norm", "loss_scale"}) {
      CAPTURE(i, key);
      CHECK(rest[i][key] == whole[i + 4][key]);
    }
  // Scales changed, or the case says nothing of them.
  CHECK(whole[0]["loss_scale"] != whole[7]["loss_scale"]);
  // Another grid, and a type that is not that of the checkpoint.
  train({"--smp.fp16_params=true", "--ranks", "1", "--data.batch_size=8",
         "--checkpoint.dir=parts", "--train.steps=10"},
        "other");
  CHECK(metrics("other").size() == 2);
  CHECK(metrics("other")[0]["loss"].get<double>()
        < whole[7]["loss"].get<double>() + 0.5);
  auto said = train({"--ranks", "1", "--data.batch_size=8",
                     "--checkpoint.dir=parts", "--train.steps=12"},
                    "refused", 2);
  CHECK_THAT(said, ContainsSubstring("F16 instead of F32")
                     && ContainsSubstring("smp.fp16_params"));
}

TEST_CASE_METHOD(precision_run, "averages of weights are evaluated and saved",
                 "[apps][precision][checkpoint][R56]") {
  std::vector<std::string> options{
    "--optimizer.ema_decay=0.9", "--train.save_model=true",
    "--smp.deterministic_server=true", "--checkpoint.interval=4"};
  options = joined(options, four_ranks);
  train(joined(options, {"--checkpoint.dir=whole"}), "whole-run");
  train(joined(options, {"--checkpoint.dir=parts", "--train.steps=4"}), "one");
  train(joined(options, {"--checkpoint.dir=parts"}), "two");
  auto file = [this](const std::string& name) {
    return smp::read_safetensors((path / name).string());
  };
  auto whole = file("whole-run/model-ema.safetensors");
  auto parts = file("two/model-ema.safetensors");
  auto weights = file("whole-run/model.safetensors");
  REQUIRE(whole.tensors.size() == weights.tensors.size());
  for (auto& [name, x] : whole.tensors) {
    INFO(name);
    CHECK(parts.find(name)->equal(x));
    CHECK_FALSE(weights.find(name)->equal(x));
  }
}
