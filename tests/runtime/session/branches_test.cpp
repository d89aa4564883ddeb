// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "tests/support/runs/own_ranks.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

// Peers whose microbatches take different branches (R31).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr int64_t width = 8;

/// Any code over shared modules, on any rank of the pipeline.
template <template <class> class P>
struct branching_impl : torch::nn::Module {
  using code = std::function<Tensor(branching_impl&, Tensor)>;

  explicit branching_impl(code f) : f(std::move(f)) {
    register_module("up", up);
    register_module("left", left);
    register_module("right", right);
    register_module("tail", tail);
  }

  Tensor forward(Tensor x) {
    return f(*this, x);
  }

  P<torch::nn::Linear> up{width, width}, left{width, width},
    right{width, width}, tail{width, width};
  code f;
};

struct shared_impl : branching_impl<submodule> {
  using branching_impl<submodule>::branching_impl;
};
TORCH_MODULE_IMPL(shared, shared_impl);

bool takes_branch(const Tensor& x) {
  return x.sum().item<double>() > 0;
}

/// One code for both kinds of models.
struct program {
  shared_impl::code shared;
  branching_impl<as_is>::code alone;

  template <class F>
  program(F f) : shared(f), alone(f) {
    // nop
  }
};

/// [4, width] of each of so many ranks. In microbatch 1 of rank 1 it takes the
/// other branch.
Tensor data_of(uint64_t rank, uint64_t replicas, bool bad) {
  auto rows = static_cast<int64_t>(4 * replicas);
  auto all = torch::sin(torch::arange(rows * width).view({rows, width}) + 1.0)
               .abs();
  auto mine = all.chunk(static_cast<int64_t>(replicas)).at(rank).clone();
  if (bad && rank == 1)
    mine.slice(0, 2, 4).neg_();
  return mine;
}

struct outcome {
  std::vector<failure> failures; // of all ranks, in any order
  std::vector<double> losses;    // of later steps, on each pp_rank 0
  bool changed = false;          // they are others than those before
};

session_config config_of(uint64_t pipeline, uint64_t peers) {
  session_config x;
  x.pipeline_parallel_degree = pipeline;
  x.tensor_parallel_degree = peers;
  x.tensor_parallel_modules = {"*"};
  x.ddp = true;
  x.microbatches = 2;
  x.threads = 1;
  return x;
}

/// A step that is fine, one that is not, and once more the first.
outcome run(const session_config& config, const program& f) {
  outcome result;
  std::mutex mutex;
  virtual_world_options world;
  world.config = config;
  world.reorder = true;
  auto peers = config.tensor_parallel_degree;
  run_virtual_world(
    peers * config.pipeline_parallel_degree, world, [&](session& s) {
      distributed_model model{seeded([&] { return shared{f.shared}; })};
      auto train_step = training_step(model, mean_square_of);
      auto once = [&](bool bad) {
        return train_step(data_of(dp_rank(), peers, bad))
          .reduce_mean()
          .item<double>();
      };
      auto before = once(false);
      try {
        once(true);
      } catch (const error& e) {
        std::unique_lock guard{mutex};
        result.failures.push_back(e.cause());
      }
      auto after = once(false);
      std::unique_lock guard{mutex};
      result.changed = result.changed || after != before;
      if (s.pp_rank() == 0)
        result.losses.push_back(after);
    });
  return result;
}

void check_refused(const session_config& config, const program& f,
                   const std::string& text) {
  auto x = run(config, f);
  auto peers = config.tensor_parallel_degree;
  REQUIRE(x.failures.size() == peers * config.pipeline_parallel_degree);
  for (auto& y : x.failures) {
    INFO(y.describe());
    CHECK(y == x.failures.front());
    CHECK(y.code == error_code::user_code);
    CHECK_THAT(y.text,
               ContainsSubstring("in microbatch 1, " + text
                                 + ": ranks that share modules have to call "
                                   "them equally often"));
  }
  // The session goes on, with the numbers of one process.
  double expected = 0;
  auto model = seeded([&] { return branching_impl<as_is>{f.alone}; });
  for (uint64_t i = 0; i < peers; ++i)
    expected += model.forward(data_of(i, peers, false))
                  .square()
                  .mean()
                  .item<double>()
                / static_cast<double>(peers);
  double mine = 0;
  for (auto loss : x.losses)
    mine += loss / static_cast<double>(peers);
  CHECK(mine == Catch::Approx(expected).epsilon(1e-5));
  CHECK_FALSE(x.changed);
}

const program skips{[](auto& m, Tensor x) {
  auto h = m.up(x);
  if (takes_branch(x))
    h = m.left(h);
  return m.tail(h);
}};

const program chooses{[](auto& m, Tensor x) {
  auto h = m.up(x);
  return m.tail(takes_branch(x) ? m.left(h) : m.right(h));
}};

} // namespace

TEST_CASE("peers that skip a shared module get an error with the counts",
          "[runtime][tensor_parallel][R31]") {
  check_refused(config_of(1, 2), skips,
                "'left', forward, was called once by rank 0 and never by rank "
                "1; 'tail', forward, was called once by rank 1 and never by "
                "rank 0");
}

TEST_CASE("peers that choose different shared modules get an error",
          "[runtime][tensor_parallel][R31]") {
  check_refused(config_of(1, 2), chooses,
                "'left', forward, was called once by rank 0 and never by rank "
                "1; 'right', forward, was called once by rank 1 and never by "
                "rank 0");
}

TEST_CASE(
  "a peer that calls a shared module once more gets an error when the "
  "other has ended its step",
  "[runtime][tensor_parallel][R31]") {
  check_refused(
    config_of(1, 2),
    [](auto& m, Tensor x) {
      auto h = m.tail(x.detach());
      at::NoGradGuard no_grad;
      if (takes_branch(x))
        m.tail(h);
      return h;
    },
    "'tail', forward, was called twice by rank 0 and once by "
    "rank 1; 'tail', backward, was called once by rank 1 and "
    "never by rank 0");
}

TEST_CASE("a peer whose backward does not reach a shared module gets an error",
          "[runtime][tensor_parallel][R31]") {
  // Rank 1 has nothing to give back to 'tail', and then not to 'up'.
  check_refused(
    config_of(1, 2),
    [](auto& m, Tensor x) {
      auto h = m.up(x);
      return m.tail(takes_branch(x) ? h : h.detach());
    },
    "'tail', backward, was called once by ranks 0 and 1, but not in the same "
    "way: by different callers, or of inputs of which some require grad");
}

TEST_CASE("one of four peers is named", "[runtime][tensor_parallel][R31]") {
  check_refused(config_of(1, 4), skips,
                "'left', forward, was called once by ranks 0, 2 and 3 and "
                "never by rank 1; 'tail', forward, was called once by rank 1 "
                "and never by ranks 0, 2 and 3");
}

TEST_CASE("pipelines whose branches differ get an error, whatever calls go on",
          "[runtime][tensor_parallel][R31]") {
  auto config = config_of(2, 2);
  config.fast_mode = GENERATE(true, false);
  auto x = run(config, skips);
  REQUIRE(x.failures.size() == 4);
  for (auto& y : x.failures) {
    INFO(y.describe());
    CHECK(y == x.failures.front());
    CHECK(y.code == error_code::user_code);
    CHECK_THAT(y.text, ContainsSubstring("in microbatch 1, ")
                         && ContainsSubstring("'left', forward, was called "
                                              "once by rank"));
  }
}

// -- real processes -----------------------------------------------------------

TEST_CASE("rank of a run with branches", "[.rank]") {
  auto config = config_of(1, 2);
  session s{config};
  distributed_model model{seeded([&] { return shared{skips.shared}; })};
  auto train_step = training_step(model, mean_square_of);
  train_step(data_of(dp_rank(), 2, false));
  std::string told;
  try {
    train_step(data_of(dp_rank(), 2, true));
  } catch (const error& e) {
    told = e.what();
  }
  train_step(data_of(dp_rank(), 2, false));
  std::ofstream{std::getenv("TEST_DIR") + ("/" + std::to_string(s.rank()))}
    << told;
}

TEST_CASE("processes whose branches differ get the error, and go on",
          "[runtime][tensor_parallel][R31]") {
  scratch_dir dir;
  require_case(dir, "rank of a run with branches", 2);
  for (std::string rank : {"0", "1"})
    CHECK_THAT(dir.read(rank),
               ContainsSubstring("'left', forward, was called once by "
                                 "rank 0 and never by rank 1"));
}
