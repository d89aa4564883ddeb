#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "runtime/session/placement.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

// Training in one session, going on in another one, with any grids of ranks:
// together it is what one process computes without a break (R51).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
namespace optim = torch::optim;
namespace fs = std::filesystem;

namespace {

constexpr int64_t words = 40;
constexpr int64_t width = 8;
constexpr int64_t rows = 16; // of all replicas

/// Modules that ranks share and such that they do not, and a tensor of more
/// than a megabyte.
template <template <class> class P>
struct net_impl : torch::nn::Module {
  net_impl() {
    register_module("table", table);
    register_module("up", up);
    register_module("down", down);
    register_module("norm", norm);
    register_module("wide", wide);
    register_module("tail", tail);
    register_module("odd", odd);
  }

  Tensor forward(Tensor x) {
    auto h = table(x);
    h = norm(h + down(torch::relu(up(h))));
    h = h + wide(torch::cat(std::vector<Tensor>(64, h), -1)).narrow(-1, 0, 8);
    return (tail->forward(h).squeeze(-1) + odd(h.mean(-1))).square().mean();
  }

  P<torch::nn::Embedding> table{words, width};
  P<torch::nn::Linear> up{width, 4 * width},
    down{torch::nn::LinearOptions(4 * width, width).bias(false)};
  P<torch::nn::LayerNorm> norm{
    torch::nn::LayerNormOptions(std::vector<int64_t>{width})};
  P<torch::nn::Linear> wide{64 * width, 640};
  torch::nn::Sequential tail{torch::nn::Linear(width, width),
                             torch::nn::Linear(width, 1)};
  P<torch::nn::Linear> odd{3, 3}; // 3 channels
};

struct net_of_smp_impl : net_impl<submodule> {};
TORCH_MODULE_IMPL(net_of_smp, net_of_smp_impl);

using numbers = std::map<std::string, Tensor>;
using parameter_groups = std::vector<optim::OptimizerParamGroup>;
using optimizer_ptr = std::unique_ptr<optim::Optimizer>;
using maker = std::function<optimizer_ptr(parameter_groups)>;

/// Of weights and of all else.
parameter_groups groups_of(const std::vector<Tensor>& xs) {
  std::vector<Tensor> weights, others;
  for (auto& x : xs)
    (x.dim() > 1 ? weights : others).push_back(x);
  return {{weights}, {others}};
}

optimizer_ptr make_adamw(parameter_groups xs) {
  return std::make_unique<optim::AdamW>(xs, optim::AdamWOptions(0.01));
}

Tensor data_of(int64_t step) {
  return (torch::arange(rows * 3).view({rows, 3}) * 7 + 5 * step) % words;
}

/// One process without a break, no line of smp.
numbers train_alone(const maker& make, int64_t steps) {
  auto model = seeded([] { return net_impl<as_is>{}; });
  auto optimizer = make(groups_of(model.parameters()));
  for (int64_t i = 0; i < steps; ++i) {
    optimizer->zero_grad();
    model.forward(data_of(i)).backward();
    optimizer->step();
  }
  numbers result;
  for (auto& p : model.named_parameters())
    result.emplace(p.key(), p.value().detach().clone());
  return result;
}

struct grid {
  uint64_t pipeline = 1;
  uint64_t tensor = 1;
  uint64_t rest = 1;
  bool shards = false; // of the optimizer's state

  uint64_t ranks() const {
    return pipeline * tensor * rest;
  }

  session_config config() const {
    session_config x;
    x.pipeline_parallel_degree = pipeline;
    x.tensor_parallel_degree = tensor;
    if (tensor > 1)
      x.tensor_parallel_modules = {"*"};
    x.ddp = tensor * rest > 1;
    x.shard_optimizer_state = shards;
    x.microbatches = 2;
    x.threads = 1;
    return x;
  }
};

/// Goes on from what is in the folder, if anything, and saves the end.
/// @returns the state
numbers train(const grid& x, const std::string& dir, const maker& make,
              int64_t steps) {
  numbers result;
  std::mutex mutex;
  virtual_world_options world;
  world.config = x.config();
  world.reorder = true;
  run_virtual_world(x.ranks(), world, [&](session& s) {
    distributed_model model{seeded([] { return net_of_smp{}; })};
    place_in_turn(model);
    auto inner = make(groups_of(model->parameters()));
    distributed_optimizer optimizer{*inner};
    auto from = resume_from_checkpoint(dir, model, {&optimizer});
    auto step = smp::step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    int64_t done = from ? static_cast<int64_t>(from->step) : 0;
    for (int64_t i = done; i < done + steps; ++i) {
      optimizer.zero_grad();
      step(data_of(i).chunk(static_cast<int64_t>(dp_size())).at(dp_rank()));
      optimizer.step();
    }
    save_checkpoint(dir, static_cast<uint64_t>(done + steps), model,
                    {&optimizer});
    auto state = model.state_dict();
    std::unique_lock guard{mutex};
    if (s.rank() == 0)
      result = {state.begin(), state.end()};
  });
  return result;
}

void check_close(const numbers& found, const numbers& expected) {
  REQUIRE(found.size() == expected.size());
  for (auto& [name, x] : expected) {
    INFO(name);
    auto bound = 1e-4 * x.abs().max().item<double>() + 1e-6;
    CHECK((found.at(name) - x).abs().max().item<double>() <= bound);
  }
}

} // namespace

TEST_CASE("a session goes on like one that never stopped, with every optimizer",
          "[runtime][checkpoint][R51]") {
  const std::vector<maker> makers{
    make_adamw,
    [](parameter_groups xs) {
      return std::make_unique<optim::SGD>(
        xs, optim::SGDOptions(0.05).momentum(0.9));
    },
    [](parameter_groups xs) {
      return std::make_unique<optim::Adam>(
        xs, optim::AdamOptions(0.01).amsgrad(true));
    },
    [](parameter_groups xs) {
      return std::make_unique<optim::Adagrad>(
        xs, optim::AdagradOptions(0.05).lr_decay(0.1));
    },
    [](parameter_groups xs) {
      return std::make_unique<optim::RMSprop>(
        xs, optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
    }};
  for (size_t i = 0; i < makers.size(); ++i) {
    INFO("optimizer " << i);
    scratch_dir dir;
    train({.pipeline = 2}, dir.path, makers[i], 3);
    check_close(train({.pipeline = 2}, dir.path, makers[i], 3),
                train_alone(makers[i], 6));
  }
}

TEST_CASE("a checkpoint goes on in another grid",
          "[runtime][checkpoint][R51]") {
  const std::vector<std::pair<grid, grid>> changes{
    {{.pipeline = 2}, {.pipeline = 1}},
    {{.pipeline = 2}, {.pipeline = 4}},
    {{.pipeline = 1}, {.rest = 2}},
    {{.pipeline = 2, .rest = 2}, {.pipeline = 2}},
    {{.tensor = 2}, {.pipeline = 1}},
    {{.pipeline = 2}, {.tensor = 2}},
    {{.tensor = 2}, {.tensor = 4}},
    {{.tensor = 4}, {.pipeline = 2, .tensor = 2}},
    {{.pipeline = 2, .tensor = 2, .rest = 2}, {.pipeline = 2, .rest = 2}},
    {{.rest = 2, .shards = true}, {.pipeline = 1}},
    {{.pipeline = 2}, {.rest = 4, .shards = true}},
    {{.pipeline = 2, .tensor = 2, .rest = 2, .shards = true},
     {.pipeline = 2, .rest = 2, .shards = true}}};
  for (auto make : {maker{make_adamw}, maker{[](parameter_groups xs) {
                      return std::make_unique<optim::Adagrad>(
                        xs, optim::AdagradOptions(0.05));
                    }}}) {
    auto expected = train_alone(make, 4);
    for (auto& [from, to] : changes) {
      INFO(from.pipeline << " " << from.tensor << " " << from.rest << " to "
                         << to.pipeline << " " << to.tensor << " " << to.rest);
      scratch_dir dir;
      train(from, dir.path, make, 2);
      check_close(train(to, dir.path, make, 2), expected);
    }
  }
}

namespace {

const saved_tensor& find(const checkpoint_manifest& x, tensor_role role,
                         const std::string& name) {
  for (auto& y : x.tensors)
    if (y.role == role && y.name == name)
      return y;
  throw std::runtime_error{"no tensor " + name};
}

} // namespace

TEST_CASE("each tensor is written once, by those who own it",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  train({.pipeline = 2, .tensor = 2, .rest = 2}, dir.path, make_adamw, 1);
  auto path = (dir.path / "step-1/manifest.json").string();
  auto x = parse_manifest(content_of(path), path);
  CHECK(x.pipeline == 2);
  CHECK(x.tensor == 2);
  CHECK(x.ranks == 8);
  auto& wide = find(x, tensor_role::parameter, "wide.weight");
  CHECK(wide.shape == std::vector<int64_t>{640, 64 * width});
  CHECK(wide.pieces.size() == 2);
  for (auto* name : {"wide.weight", "norm.weight"})
    for (auto* field : {"exp_avg", "exp_avg_sq", "step"}) {
      auto& y = find(x, tensor_role::optimizer,
                     std::string{"optimizer0/"} + field + "/" + name);
      auto cut = std::string{name} == "wide.weight"
                 && std::string{field} != "step";
      CHECK(y.pieces.size() == (cut ? 2u : 1u));
    }
  CHECK(x.optimizers.at(0).members.at("norm.weight") == 1);
  CHECK(x.optimizers.at(0).members.at("wide.weight") == 0);
}

namespace {

/// @returns which modules rank 1 owns after a resume and the partition
std::vector<std::string> owned(const std::string& dir, uint64_t ranks,
                               std::optional<uint32_t> pin = {}) {
  std::vector<std::string> result;
  auto world = manual_world(ranks);
  world.config.auto_partition = true;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([] { return net_of_smp{}; })};
    if (pin)
      set_partition(*model->up, *pin);
    auto inner = make_adamw(groups_of(model->parameters()));
    distributed_optimizer optimizer{*inner};
    resume_from_checkpoint(dir, model, {&optimizer});
    model.partition();
    if (s.rank() == 1)
      result = model.local_module_names();
  });
  return result;
}

} // namespace

TEST_CASE("what goes on with as many pipeline ranks has the same partition",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  train({.pipeline = 2}, dir.path, make_adamw, 1); // placed in turn
  std::vector<std::string> in_turn;
  run_virtual_world(2, manual_world(), [&](session& s) {
    distributed_model model{seeded([] { return net_of_smp{}; })};
    place_in_turn(model);
    model.partition();
    if (s.rank() == 1)
      in_turn = model.local_module_names();
  });
  REQUIRE(in_turn.size() > 2);
  CHECK(owned(dir.path, 2) == in_turn);
  auto pin = std::ranges::find(in_turn, "up") == in_turn.end() ? 0u : 1u;
  CHECK(owned(dir.path, 2, pin) == in_turn);
  CHECK(owned(dir.path, 2, 1 - pin) != in_turn); // the user's word counts
  CHECK(owned(dir.path, 3) != in_turn);
}

// -- what is random, and what replicas do not share ---------------------------

namespace {

struct noisy_impl : torch::nn::Module {
  noisy_impl() {
    register_module("in", in);
    register_module("norm", norm);
    register_module("drop", drop);
    register_module("out", out);
  }

  Tensor forward(Tensor x) {
    return out(drop(torch::relu(norm(in(x))))).square().mean();
  }

  submodule<torch::nn::Linear> in{6, 32};
  submodule<torch::nn::BatchNorm1d> norm{32};
  submodule<torch::nn::Dropout> drop{0.4};
  submodule<torch::nn::Linear> out{32, 2};
};
TORCH_MODULE_IMPL(noisy, noisy_impl);

/// What all ranks had at the end, by rank and name.
using ends = std::map<std::string, Tensor>;

/// Trains on numbers that each rank draws, and evaluates in between.
/// @param stop after so many steps, and save; 0: do not
ends train_noisy(const std::string& dir, int64_t stop, int64_t steps) {
  ends result;
  std::mutex mutex;
  virtual_world_options world;
  world.config.pipeline_parallel_degree = 2;
  world.config.ddp = true;
  world.config.microbatches = 2;
  world.config.threads = 1;
  world.config.deterministic_server = true;
  run_virtual_world(4, world, [&](session& s) {
    distributed_model model{seeded([] { return noisy{}; })};
    place_in_turn(model);
    optim::SGD sgd{model->parameters(), optim::SGDOptions(0.1).momentum(0.9)};
    distributed_optimizer optimizer{sgd};
    auto from = resume_from_checkpoint(dir, model, {&optimizer});
    if (from && from->user_content.at("place") != "here")
      throw std::runtime_error{"user content is lost"};
    auto step = smp::step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    auto look = smp::step([&](Tensor x) {
      at::NoGradGuard no_grad;
      return model(x);
    });
    int64_t done = from ? static_cast<int64_t>(from->step) : 0;
    for (int64_t i = done; i < steps; ++i) {
      optimizer.zero_grad();
      auto x = torch::sin(torch::arange(48.0).view({8, 6})
                          * static_cast<double>(i + 1 + 3 * dp_rank()));
      step(x);
      optimizer.step();
      if (i % 2 == 0)
        look(x); // draws for dropout as well
      if (i + 1 == stop) {
        save_checkpoint(dir, static_cast<uint64_t>(stop), model, {&optimizer},
                        {.user_content = {{"place", "here"}}});
        break;
      }
    }
    std::unique_lock guard{mutex};
    for (auto& [name, x] : model.local_state_dict())
      result.emplace(std::to_string(s.rank()) + " " + name, x);
  });
  return result;
}

} // namespace

TEST_CASE("random numbers and buffers of replicas go on to the last bit",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  auto none = (dir.path / "none").string();
  auto some = (dir.path / "some").string();
  auto expected = train_noisy(none, 0, 6);
  train_noisy(some, 3, 6);
  auto found = train_noisy(some, 0, 6);
  REQUIRE(found.size() == expected.size());
  for (auto& [name, x] : expected) {
    INFO(name);
    REQUIRE(found.contains(name));
    CHECK(found.at(name).equal(x));
  }
}

// -- refusals -----------------------------------------------------------------

namespace {

/// A checkpoint of two ranks, and what becomes of a session that is to go on
/// from it.
struct refusal : scratch_dir {
  refusal() {
    train({.pipeline = 2}, path, make_adamw, 1);
    train({.pipeline = 2}, path, make_adamw, 1);
    folder = path / "step-2";
  }

  /// @returns the error of each of two ranks, which must be one; checks that
  /// nothing was changed
  template <class Model>
  std::string why(const maker& make = make_adamw, size_t groups = 2) const {
    std::vector<std::string> told(2);
    run_virtual_world(2, manual_world(), [&](session& s) {
      distributed_model model{seeded([] { return Model{}; })};
      auto all = groups_of(model->parameters());
      all.erase(all.begin() + static_cast<std::ptrdiff_t>(groups), all.end());
      auto inner = make(all);
      distributed_optimizer optimizer{*inner};
      auto before = model->parameters().front().clone();
      told.at(s.rank()) = error_of(
        [&] {
          resume_from_checkpoint(path, model, {&optimizer});
          model.partition();
        },
        error_code::config);
      auto same = model->parameters().front().equal(before)
                  && !model.partitioned();
      if (!same)
        told.at(s.rank()) += ", but something was changed";
    });
    CHECK(told[0] == told[1]);
    CHECK_THAT(told[0], !ContainsSubstring("something was changed"));
    return told[0];
  }

  std::string why_damaged() const {
    auto text = why<net_of_smp>();
    CHECK_THAT(text, ContainsSubstring("; without this folder, "
                                       + (path / "step-1").string()
                                       + " is the newest"));
    return text;
  }

  fs::path folder;
};

struct other_net_impl : net_impl<submodule> {
  other_net_impl() {
    register_module("extra", extra);
    replace_module("odd", torch::nn::Linear(3, 2));
  }
  submodule<torch::nn::Linear> extra{2, 2};
};
TORCH_MODULE_IMPL(other_net, other_net_impl);

struct half_net_impl : net_impl<submodule> {
  half_net_impl() {
    up->to(torch::kHalf);
  }
};
TORCH_MODULE_IMPL(half_net, half_net_impl);

} // namespace

TEST_CASE_METHOD(refusal, "a checkpoint of another model is refused by name",
                 "[runtime][checkpoint]") {
  auto text = why<other_net>();
  CHECK_THAT(text,
             ContainsSubstring("cannot load checkpoint " + folder.string())
               && ContainsSubstring("2 missing ('extra.weight', 'extra.bias')")
               && ContainsSubstring("'odd.weight': [3, 3] instead of [2, 3]")
               && ContainsSubstring("nothing was loaded"));
  CHECK_THAT(why<half_net>(),
             ContainsSubstring("'up.weight': F32 instead of F16"));
}

TEST_CASE_METHOD(refusal,
                 "a checkpoint of another optimizer is refused by name",
                 "[runtime][checkpoint]") {
  CHECK_THAT(why<net_of_smp>([](parameter_groups xs) {
               return std::make_unique<optim::SGD>(xs, optim::SGDOptions(0.1));
             }),
             ContainsSubstring("is of the optimizer AdamW, this one is SGD"));
  CHECK_THAT(why<net_of_smp>(make_adamw, 1),
             ContainsSubstring("has 2 groups, this one 1"));
  CHECK_THAT(why<net_of_smp>([](parameter_groups xs) {
               parameter_groups swapped{xs[1], xs[0]};
               return make_adamw(swapped);
             }),
             ContainsSubstring("is in group 0 of the optimizer, there in "
                               "group 1"));
}

TEST_CASE_METHOD(refusal, "damaged files are refused by name",
                 "[runtime][checkpoint]") {
  auto file = folder / "state-1.safetensors";
  auto whole = content_of(file);
  auto write = [&](const std::string& x) {
    std::ofstream{file, std::ios::binary} << x;
  };
  auto told = [&] {
    auto text = why_damaged();
    CHECK_THAT(text, ContainsSubstring("cannot read " + file.string()));
    return text;
  };
  write(whole.substr(0, whole.size() - 1));
  CHECK_THAT(told(), ContainsSubstring("bytes, but"));
  write("");
  CHECK_THAT(told(), ContainsSubstring("it has 0 bytes, but"));
  auto flipped = whole;
  flipped.back() = static_cast<char>(flipped.back() ^ 4);
  write(flipped);
  CHECK_THAT(told(), ContainsSubstring("their checksum differs"));
  auto header = whole;
  header[20] = static_cast<char>(header[20] ^ 1);
  write(header);
  told();
  fs::remove(file);
  CHECK_THAT(told(), ContainsSubstring("No such file"));
}

TEST_CASE_METHOD(refusal, "a damaged manifest is refused by name",
                 "[runtime][checkpoint]") {
  auto file = folder / "manifest.json";
  auto whole = content_of(file);
  for (auto& text :
       {std::string{}, whole.substr(0, whole.size() / 2),
        std::string{whole}.replace(whole.find("exp_avg"), 3, "EXP")}) {
    std::ofstream{file, std::ios::binary} << text;
    CHECK_THAT(why_damaged(),
               ContainsSubstring("cannot read " + file.string()));
  }
}

TEST_CASE("a checkpoint that one rank cannot write is none, and all hear of it",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  train({.pipeline = 2}, dir.path, make_adamw, 1);
  // Another's folder is where rank 1 writes its file.
  std::vector<std::string> early(2), told(2);
  run_virtual_world(2, manual_world(), [&](session& s) {
    distributed_model model{seeded([] { return net_of_smp{}; })};
    place_in_turn(model);
    optim::SGD sgd{model->parameters(), 0.1};
    distributed_optimizer optimizer{sgd};
    early.at(s.rank()) = error_of(
      [&] { save_checkpoint(dir.path, 2, model, {}); });
    model.partition();
    if (s.rank() == 0)
      fs::create_directories(dir.path / "step-2/state-1.safetensors/full");
    barrier();
    told.at(s.rank()) = error_of(
      [&] { save_checkpoint(dir.path, 2, model, {&optimizer}); },
      error_code::config);
  });
  CHECK(told[0] == told[1]);
  CHECK_THAT(early[1], ContainsSubstring("before the partition"));
  CHECK_THAT(told[0], ContainsSubstring("rank 1") && ContainsSubstring("step-2")
                        && ContainsSubstring("state-1.safetensors: rename"));
  CHECK(newest_checkpoint(dir.path)->step == 1);
}
