#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/train/trainable.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/verify_jobs.hpp"

using namespace smp;
using namespace smp::test;

namespace {

/// Values that no run of `x` begins with by itself.
named_tensors other_values(train_config x) {
  x.smp.seed += 1;
  auto model = make_trainable(x);
  named_tensors result;
  for (auto& tensors : {model->named_parameters(), model->named_buffers()})
    for (auto& [name, y] : tensors)
      result.emplace_back(name, y.detach());
  return result;
}

} // namespace

TEST_CASE("ranks and one process begin with the weights of a file",
          "[runtime][verify][R56]") {
  // The ranks' optimizers have the file's float32 weights then.
  auto half = GENERATE(false, true);
  CAPTURE(half);
  scratch_dir dir;
  auto x = gpt_case(2, "interleaved", 2);
  x.config.model.tied = true;
  x.config.smp.bf16_params = half;
  x.config.train.init_from = dir.path / "weights.safetensors";
  auto values = other_values(x.config);
  if (half) { // and may call the tensors otherwise
    x.config.train.init_prefix = "module.";
    for (auto& [name, value] : values)
      name.insert(0, "module.");
  }
  write_safetensors(x.config.train.init_from, values);
  CHECK(to_text(run_case(x)).starts_with("equal: 2 steps"));
}
