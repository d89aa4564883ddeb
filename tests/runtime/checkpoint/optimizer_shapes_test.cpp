#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "runtime/files/file_io.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// What an optimizer remembers has the shape of its parameter: updates do not
// look (R51).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

struct line_impl : torch::nn::Module {
  line_impl() {
    register_module("fc", fc);
  }

  Tensor forward(Tensor x) {
    return fc(x);
  }

  submodule<torch::nn::Linear> fc{4, 3};
};
TORCH_MODULE_IMPL(line, line_impl);

/// Calls `f` with the model and its optimizer.
template <class F>
void on_one_rank(F f) {
  run_virtual_world(1, manual_world(1), [&](session&) {
    distributed_model model{seeded([] { return line{}; })};
    torch::optim::AdamW adamw{model->parameters(), 0.1};
    distributed_optimizer optimizer{adamw};
    f(model, optimizer);
  });
}

/// Saves a step after which there is something to remember.
void save(const std::string& dir) {
  on_one_rank([&](auto& model, auto& optimizer) {
    auto train_step = smp::step([&](Tensor x) {
      auto loss = model(x).sum();
      model.backward(loss);
      return loss;
    });
    train_step(torch::ones({2, 4}));
    optimizer.step();
    save_checkpoint(dir, 1, model, {&optimizer});
  });
}

/// Gives a tensor another shape in the manifest.
void reshape(const std::string& folder, const std::string& name,
             std::vector<int64_t> shape) {
  auto path = manifest_path(folder);
  auto x = parse_manifest(read_text(path), path);
  auto i = std::ranges::find(x.tensors, name, &saved_tensor::name);
  REQUIRE(i != x.tensors.end());
  REQUIRE(i->pieces.size() == 1);
  i->pieces[0].begin.assign(shape.size(), 0);
  i->pieces[0].sizes = shape;
  i->shape = std::move(shape);
  write_text(path, to_json(x));
}

/// @returns why a session cannot go on; checks that nothing was changed
std::string refused(const std::string& dir) {
  std::string result;
  auto changed = false;
  on_one_rank([&](auto& model, auto& optimizer) {
    auto before = model->parameters().front().clone();
    result = error_of(
      [&] {
        resume_from_checkpoint(dir, model, {&optimizer});
        model.partition();
      },
      error_code::config);
    changed = !model->parameters().front().equal(before) || model.partitioned();
  });
  CHECK_FALSE(changed);
  return result;
}

} // namespace

TEST_CASE("what an optimizer remembers of another shape is refused by name",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  save(dir.path);
  auto folder = (dir.path / "step-1").string();
  auto wrong = [&](const std::string& field, std::vector<int64_t> shape) {
    reshape(folder, "optimizer0/" + field + "/fc.weight", std::move(shape));
    return refused(dir.path);
  };
  SECTION("as the transposed parameter") {
    CHECK_THAT(
      wrong("exp_avg", {4, 3}),
      ContainsSubstring(
        "cannot load checkpoint " + folder
        + ": what its optimizers remember is of another model: 1 of another "
          "shape ('optimizer0/exp_avg/fc.weight': [4, 3] instead of [3, 4] in "
          "state-0.safetensors); nothing was loaded"));
  }
  SECTION("a count") {
    CHECK_THAT(wrong("exp_avg_sq", {}),
               ContainsSubstring("'optimizer0/exp_avg_sq/fc.weight': [] "
                                 "instead of [3, 4] in state-0.safetensors"));
  }
  SECTION("no count") {
    CHECK_THAT(wrong("step", {1}),
               ContainsSubstring("'optimizer0/step/fc.weight': [1] instead of "
                                 "[] in state-0.safetensors"));
  }
}
