#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/nn/layers.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/train/models/gpt.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

// Slices of query, key and value in one linear are several ranges of an axis,
// of which a replica may have some rows.

using namespace smp;
using namespace smp::test;

namespace {

using numbers_by_name = std::map<std::string, Tensor>;

model_sizes small_gpt() {
  model_sizes x;
  x.vocabulary = 20;
  x.sequence_length = 6;
  x.layers = 2;
  x.heads = 2;
  x.width = 8;
  return x;
}

struct shared_grid {
  uint64_t tensor = 1;
  /// That share the state of the optimizer, if there are several.
  uint64_t replicas = 1;
};

/// What a program carries from one run to the next, instead of a checkpoint.
struct dicts {
  named_tensors model;
  named_tensors optimizer;
};

/// Goes on from what is in the folder, or in `carried`, if anything, and saves
/// the end there.
numbers_by_name train_gpt(const shared_grid& grid, const std::string& optimize,
                          const std::string& dir, int64_t steps,
                          dicts* carried = nullptr) {
  auto [tensor, replicas] = grid;
  numbers_by_name result;
  std::mutex mutex;
  virtual_world_options world;
  world.config.tensor_parallel_degree = tensor;
  world.config.optimize = optimize;
  if (tensor > 1)
    world.config.tensor_parallel_modules = {"transformer.h.*"};
  world.config.ddp = tensor * replicas > 1;
  world.config.shard_optimizer_state = replicas > 1;
  world.config.threads = 1;
  run_virtual_world(tensor * replicas, world, [&](session& s) {
    distributed_model model{seeded([] { return gpt{small_gpt()}; })};
    torch::optim::AdamW adamw{model->parameters(), 0.01};
    distributed_optimizer optimizer{adamw};
    auto from = carried ? std::nullopt
                        : resume_from_checkpoint(dir, model, {&optimizer});
    auto goes_on = carried && !carried->model.empty();
    if (goes_on) {
      model.partition();
      model.load_state_dict(carried->model);
      optimizer.load_state_dict(carried->optimizer);
      // Nothing changes by what a rank has itself.
      optimizer.load_state_dict(optimizer.local_state_dict());
    }
    auto train_step = step([&](Tensor x) {
      auto loss = token_loss(model(x), x);
      model.backward(loss);
      return loss;
    });
    auto done = from ? static_cast<int64_t>(from->step) : goes_on ? steps : 0;
    for (auto i = done; i < done + steps; ++i) {
      optimizer.zero_grad();
      auto x = (torch::arange(4 * 6).view({4, 6}) * 7 + i) % 20;
      train_step(x.chunk(static_cast<int64_t>(dp_size())).at(dp_rank()));
      optimizer.step();
    }
    if (!carried)
      save_checkpoint(dir, static_cast<uint64_t>(done + steps), model,
                      {&optimizer});
    auto state = model.state_dict();
    auto kept = optimizer.state_dict();
    barrier(); // all have read what was carried before
    std::unique_lock guard{mutex};
    if (s.rank() == 0)
      result = {state.begin(), state.end()};
    if (s.rank() == 0 && carried)
      *carried = {state, kept};
  });
  return result;
}

} // namespace

TEST_CASE(
  "a checkpoint of shared layers, or its dicts, goes on alone, and back",
  "[runtime][checkpoint][tensor_parallel][R51]") {
  std::string optimize = GENERATE("speed", "memory");
  auto by_dicts = GENERATE(false, true);
  scratch_dir alone;
  auto expected = train_gpt({}, optimize, alone.path, 4);
  shared_grid one, two{2}, parts{2, 2};
  for (auto& [before, after] :
       {std::pair{two, one}, std::pair{one, two}, std::pair{two, two},
        std::pair{parts, one}, std::pair{one, parts}, std::pair{parts, two},
        std::pair{parts, parts}}) {
    INFO(optimize << ": " << before.tensor << " " << before.replicas << " to "
                  << after.tensor << " " << after.replicas);
    scratch_dir dir;
    dicts carried;
    auto* by = by_dicts ? &carried : nullptr;
    train_gpt(before, optimize, dir.path, 2, by);
    auto found = train_gpt(after, optimize, dir.path, 2, by);
    REQUIRE(found.size() == expected.size());
    for (auto& [name, x] : expected) {
      INFO(name);
      // AdamW divides by the size of gradients, also by that of small ones.
      auto bound = 1e-4 * x.abs().max().item<double>() + 5e-5;
      CHECK((found.at(name) - x).abs().max().item<double>() <= bound);
    }
  }
}

TEST_CASE("what does not fit an optimizer is refused before any of it is taken",
          "[runtime][checkpoint]") {
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.tensor_parallel_modules = {"transformer.h.*"};
  world.config.ddp = true;
  world.config.threads = 1;
  run_virtual_world(2, world, [&](session&) {
    distributed_model model{seeded([] { return gpt{small_gpt()}; })};
    torch::optim::AdamW adamw{model->parameters(), 0.01};
    distributed_optimizer optimizer{adamw};
    auto told = [&](const named_tensors& xs) {
      return error_of([&] { optimizer.load_state_dict(xs); });
    };
    auto require = [](const std::string& text, const std::string& part) {
      if (text.find(part) == text.npos)
        throw std::runtime_error{"'" + part + "' is not in: " + text};
    };
    require(told({}), "after model.partition()");
    model.partition();
    auto bias = std::string{"transformer.h.1.ln_1.bias"};
    auto one = torch::ones({8});
    auto step = torch::tensor(int64_t{3});
    require(told({{bias + "/step", step}, {bias + "/exp_avg", one}}),
            "1 missing ('" + bias + "/exp_avg_sq')");
    require(told({{bias + "/step", step},
                  {bias + "/exp_avg", one},
                  {bias + "/exp_avg_sq", torch::ones({9})}}),
            "exp_avg_sq': [9] instead of [8])");
    require(told({{bias + "/sum", one}, {"none/exp_avg", one}}),
            "2 of no parameter or field of this optimizer");
    if (!optimizer.local_state_dict().empty())
      throw std::runtime_error{"something was taken"};
    require(told({{bias + "/step", step},
                  {bias + "/exp_avg", one},
                  {bias + "/exp_avg_sq", one}})
              + "taken",
            "taken");
    if (optimizer.state_dict().size() != 3)
      throw std::runtime_error{"the state was not taken"};
  });
}
