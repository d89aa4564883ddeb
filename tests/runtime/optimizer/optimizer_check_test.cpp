#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/stderr_to.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/functional/embedding.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

// Optimizers that cannot update the model (R60), replicas that leave, and
// mistakes of programs after which nothing, or not what should, is trained.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

using optimizer_ptr = std::unique_ptr<torch::optim::Optimizer>;

using maker_of_any = std::function<optimizer_ptr(std::vector<Tensor>)>;

struct grid {
  uint64_t pipeline = 1;
  uint64_t replicas = 1;
  bool shards = false;
  uint64_t tensor = 1;
};

session_config config_of(const grid& x) {
  session_config result;
  result.pipeline_parallel_degree = x.pipeline;
  result.tensor_parallel_degree = x.tensor;
  result.ddp = x.replicas > 1;
  result.shard_optimizer_state = x.shards;
  result.auto_partition = false;
  result.threads = 1;
  return result;
}

struct checked_net_impl : torch::nn::Module {
  checked_net_impl() {
    register_module("first", first);
    {
      partition_scope on_last{1};
      second = submodule<torch::nn::Linear>(3, 3);
    }
    register_module("second", second);
    register_buffer("mask", mask);
  }

  Tensor forward(Tensor x) {
    return second(first(x)) * mask;
  }

  torch::nn::Linear first{3, 3};
  submodule<torch::nn::Linear> second = nullptr;
  Tensor mask = torch::ones({3});
};
TORCH_MODULE_IMPL(checked_net, checked_net_impl);

using maker = std::function<optimizer_ptr(checked_net_impl&, uint64_t rank)>;

/// @returns by rank, what the first two steps of a wrong optimizer say, and
/// then one without it: nothing
std::vector<std::string> errors_of(const grid& x, const maker& make) {
  auto ranks = x.pipeline * x.replicas;
  std::vector<std::string> result(3 * ranks);
  virtual_world_options world;
  world.config = config_of(x);
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([] { return checked_net{}; })};
    if (x.pipeline == 1)
      model->second->smp_hook.pinned = 0;
    auto train_step = training_step(model, sum_of);
    auto attempt = [&](size_t i) {
      try {
        train_step(torch::ones({2, 3}));
      } catch (const error& e) {
        result[i * ranks + s.rank()] = e.what();
      }
    };
    {
      auto inner = make(*model, s.rank());
      distributed_optimizer optimizer{*inner};
      attempt(0);
      attempt(1);
    }
    attempt(2);
  });
  return result;
}

/// All ranks say the same, as long as the optimizer is there.
void check_told(const grid& x, const maker& make,
                const std::vector<std::string>& texts) {
  CAPTURE(x.pipeline, x.replicas, x.shards);
  auto told = errors_of(x, make);
  auto ranks = told.size() / 3;
  for (size_t i = 0; i < told.size(); ++i) {
    if (i >= 2 * ranks) {
      CHECK(told[i].empty());
      continue;
    }
    CHECK(told[i] == told[0]);
    for (auto& text : texts)
      CHECK_THAT(told[i], ContainsSubstring(text));
  }
}

optimizer_ptr sgd(std::vector<Tensor> xs, double lr = 0.1) {
  return std::make_unique<torch::optim::SGD>(std::move(xs), lr);
}

} // namespace

TEST_CASE("an optimizer over what is not a parameter of the model is refused",
          "[runtime][optimizer][R60]") {
  auto x = GENERATE(grid{}, grid{2, 1}, grid{1, 2}, grid{2, 2, true});
  check_told(
    x,
    [](auto& model, uint64_t) {
      auto all = model.parameters();
      all.push_back(torch::zeros({5, 7}, torch::requires_grad()));
      return sgd(all);
    },
    {"group 0", "not a parameter of the distributed model", "Float [5, 7]"});
  check_told(x,
             [](auto&, uint64_t) {
               // Of another model that is the same.
               return sgd(checked_net {} -> parameters());
             },
             {"not a parameter of the distributed model", "number 0"});
  auto alone = grid{1, x.replicas};
  check_told(alone, [](auto& model, uint64_t) { return sgd({model.mask}); },
             {"not a parameter of the distributed model", "its buffer 'mask'"});
}

TEST_CASE("replicas whose optimizers differ are told how",
          "[runtime][optimizer][R60]") {
  auto x = GENERATE(grid{1, 2}, grid{1, 2, true}, grid{2, 2, true});
  auto last = x.pipeline * x.replicas - 1;
  auto other = "rank " + std::to_string(last);
  auto first = "than on rank " + std::to_string(x.pipeline - 1);
  check_told(x,
             [&](auto& model, uint64_t rank) {
               auto all = model.parameters();
               if (rank == last)
                 std::swap(all[2], all[3]);
               return sgd(all);
             },
             {other, first, "group 0 has 'second.bias' as number ",
              "and not 'second.weight'"});
  check_told(x,
             [&](auto& model, uint64_t rank) {
               auto all = model.parameters();
               if (rank == last)
                 all.pop_back();
               return sgd(all);
             },
             {other, first, "has nothing as number ", "and not 'second.bias'"});
  check_told(x,
             [&](auto& model, uint64_t rank) {
               return sgd(model.parameters(), rank == last ? 0.2 : 0.1);
             },
             {other, first, "group 0 has lr = 0.2, and not 0.1"});
  check_told(x,
             [&](auto& model, uint64_t rank) {
               auto result = sgd(model.parameters());
               if (rank == last)
                 result->add_param_group({std::vector<Tensor>{}});
               return result;
             },
             {other, first, "it has 2 groups, and not 1"});
}

TEST_CASE(
  "an optimizer over a part of the model, and several of them, are fine",
  "[runtime][optimizer][R60]") {
  grid x{2, 2, true};
  auto told = errors_of(
    x, [](auto& model, uint64_t) { return sgd(model.second->parameters()); });
  for (auto& text : told)
    CHECK(text.empty());
}

TEST_CASE("a replica that leaves before the others is named, and the way out",
          "[runtime][replicas]") {
  auto x = GENERATE(grid{1, 2}, grid{1, 3}, grid{2, 2, true},
                    grid{1, 2, false, 2});
  CAPTURE(x.pipeline, x.replicas, x.tensor);
  auto of_replica = x.pipeline * x.tensor;
  auto ranks = of_replica * x.replicas;
  std::vector<std::string> told(ranks);
  virtual_world_options world;
  world.config = config_of(x);
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([] { return checked_net{}; })};
    if (x.pipeline == 1)
      model->second->smp_hook.pinned = 0;
    auto train_step = training_step(model, sum_of);
    // The last replica has fewer batches.
    auto n = rdp_rank() + 1 == x.replicas ? 2 : 4;
    for (int i = 0; i < n; ++i)
      try {
        train_step(torch::ones({2, 3}));
      } catch (const error& e) {
        if (e.code() == error_code::config && i >= 2)
          told[s.rank()] = e.what();
      }
  });
  for (size_t i = 0; i < ranks; ++i) {
    INFO("rank " << i);
    if (i / of_replica + 1 == x.replicas) {
      CHECK(told[i].empty());
      continue;
    }
    auto of_last = [&](uint64_t stage) {
      auto who = ranks - of_replica + stage;
      return ContainsSubstring("rank " + std::to_string(who)
                               + ": left the run");
    };
    CHECK_THAT(told[i], of_last(0) || of_last(x.pipeline - 1));
    CHECK_THAT(
      told[i],
      ContainsSubstring(x.tensor > 1
                          ? "with skip(), all ranks that share modules together"
                          : "with skip() ("));
  }
}

// -- sparse gradients ---------------------------------------------------------

namespace {

struct sparse_words_impl : torch::nn::Module {
  explicit sparse_words_impl(bool known)
    : known_to_be_sparse(known),
      words(torch::nn::EmbeddingOptions{5, 3}.sparse(known)) {
    register_module("words", words);
    {
      partition_scope on_last{1};
      head = submodule<torch::nn::Linear>(3, 1);
    }
    register_module("head", head);
  }

  Tensor forward(Tensor x) {
    // Only the gradient shows that these are sparse.
    auto y = known_to_be_sparse
               ? words(x)
               : torch::embedding(words->weight, x, -1, false, true);
    return head(y);
  }

  bool known_to_be_sparse;
  torch::nn::Embedding words;
  submodule<torch::nn::Linear> head = nullptr;
};
TORCH_MODULE_IMPL(sparse_words, sparse_words_impl);

/// Trains two steps, which has to change the words. @returns the error
std::string trained_sparsely(bool known, const maker_of_any& make) {
  return error_of([&] {
    run_virtual_world(2, manual_world(), [&](session& s) {
      distributed_model model{seeded([&] { return sparse_words{known}; })};
      auto inner = make(model->parameters());
      distributed_optimizer optimizer{*inner};
      auto train_step = training_step(model, square_sum_of);
      auto before = model->words->weight.detach().clone();
      for (int i = 0; i < 2; ++i) {
        optimizer.zero_grad();
        train_step(torch::tensor({1, 2}));
        optimizer.step();
      }
      if (s.rank() == 0 && torch::equal(before[1], model->words->weight[1]))
        throw std::runtime_error{"nothing was trained"};
    });
  });
}

} // namespace

TEST_CASE(
  "an optimizer that takes no sparse gradients is refused by the "
  "parameter's name, and the advice leads to training",
  "[runtime][optimizer]") {
  using namespace torch::optim;
  auto known = GENERATE(true, false);
  CAPTURE(known);
  auto adamw = [](std::vector<Tensor> xs) -> optimizer_ptr {
    return std::make_unique<AdamW>(std::move(xs), 0.1);
  };
  CHECK_THAT(trained_sparsely(known, adamw),
             ContainsSubstring("parameter 'words.weight' has sparse gradients, "
                               "and AdamW takes none: make its Embedding with "
                               "sparse = false"));
  auto decaying = [](std::vector<Tensor> xs) -> optimizer_ptr {
    return std::make_unique<SGD>(std::move(xs),
                                 SGDOptions{0.1}.weight_decay(0.1));
  };
  CHECK_THAT(trained_sparsely(known, decaying),
             ContainsSubstring("SGD takes none with a weight decay"));
  auto plain = [](std::vector<Tensor> xs) { return sgd(std::move(xs)); };
  CHECK(trained_sparsely(known, plain) == "no error");
  auto adagrad = [](std::vector<Tensor> xs) -> optimizer_ptr {
    return std::make_unique<Adagrad>(std::move(xs), 0.1);
  };
  CHECK(trained_sparsely(known, adagrad) == "no error");
}

// -- mistakes of programs -----------------------------------------------------

namespace {

enum class mistake { none, no_backward, one_rank_updates, torch_clips };

struct told_of {
  std::string on_stderr;
  std::string error;
};

told_of told_of_mistake(mistake what) {
  scratch_dir dir;
  told_of result;
  auto run = [&] {
    run_virtual_world(2, manual_world(), [&](session& s) {
      distributed_model model{seeded([] { return checked_net{}; })};
      auto inner = sgd(model->parameters());
      distributed_optimizer optimizer{*inner};
      auto train_step = step([&](Tensor x) {
        auto loss = model(x).square().sum();
        if (what != mistake::no_backward)
          model.backward(loss);
        return loss;
      });
      for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        train_step(torch::ones({2, 3}));
        if (what == mistake::torch_clips)
          torch::nn::utils::clip_grad_norm_(model->parameters(), 0.01);
        clip_grad_norm_(model, what == mistake::none ? 0.01 : 1e9);
        if (what != mistake::one_rank_updates || s.rank() == 0)
          optimizer.step();
      }
    });
  };
  {
    stderr_to file{dir.path / "stderr"};
    result.error = error_of(run);
  }
  result.on_stderr = content_of(dir.path / "stderr");
  return result;
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t result = 0;
  for (auto i = text.find(part); i != text.npos; i = text.find(part, i + 1))
    ++result;
  return result;
}

} // namespace

TEST_CASE("mistakes after which nothing is trained are told once",
          "[runtime][optimizer]") {
  auto nothing = told_of_mistake(mistake::none);
  CHECK(nothing.on_stderr.empty());
  CHECK(nothing.error == "no error");

  auto no_backward = told_of_mistake(mistake::no_backward);
  CHECK(count_of(no_backward.on_stderr,
                 "optimizer.step() on rank 0 finds no gradient, so it changes "
                 "nothing: no step called model.backward(loss)")
        == 1);
  CHECK(no_backward.error == "no error");

  auto one_rank = told_of_mistake(mistake::one_rank_updates);
  CHECK_THAT(one_rank.error,
             ContainsSubstring("rank 0 called optimizer.step() 1 times before "
                               "step 2, rank 1 0 times"));

  auto clipped = told_of_mistake(mistake::torch_clips);
  CHECK(count_of(clipped.on_stderr,
                 "torch's clip_grad_norm_ sees those of one "
                 "rank only")
        == 2); // once per rank
  CHECK(clipped.error == "no error");
}

namespace {

/// Calls two modules, of which it registers one.
struct forgetful_impl : torch::nn::Module {
  forgetful_impl() {
    register_module("known", known);
  }

  Tensor forward(Tensor x) {
    return known(forgotten(x));
  }

  submodule<torch::nn::Linear> known{3, 3};
  submodule<torch::nn::Linear> forgotten{3, 3};
};
TORCH_MODULE_IMPL(forgetful, forgetful_impl);

} // namespace

TEST_CASE("a module that is called but not registered is told once",
          "[runtime][optimizer]") {
  scratch_dir dir;
  {
    stderr_to file{dir.path / "stderr"};
    auto world = manual_world();
    world.config.auto_partition = true;
    run_virtual_world(2, world, [&](session&) {
      distributed_model model{seeded([] { return forgetful{}; })};
      auto train_step = training_step(model, square_sum_of);
      for (int i = 0; i < 2; ++i)
        train_step(torch::ones({2, 3}));
    });
  }
  auto told = content_of(dir.path / "stderr");
  CAPTURE(told);
  CHECK(count_of(told,
                 "the step calls a torch::nn::LinearImpl that is not part "
                 "of the model, so smp does not train its parameters: "
                 "register_module")
        == 1);
}
