// ctest: seconds=12 label=proof
#include "tests/support/catch.hpp"

#include "tests/support/torch/models.hpp"

#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <optional>
#include <random>
#include <string>
#include <tuple>

// 1,000 random programs over modules on other ranks end like one process, with
// promises, by default and without: chains, several inputs and outputs,
// residuals, views, in-place changes, branches on values, unused results, calls
// of calls. The batch says which program a microbatch runs.

using namespace smp;
using namespace smp::test;
using torch::nn::Linear;

namespace {

int64_t width = 8;

/// Tensors of four rows are too large to ride in a message (4 KB) meanwhile.
struct wide_rows {
  wide_rows() {
    width = 144;
  }
  ~wide_rows() {
    width = 8;
  }
};

template <template <class> class P>
struct block : torch::nn::Module {
  block() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  Tensor forward(Tensor x) {
    return x + down(at::gelu(up(norm(x))));
  }
  torch::nn::LayerNorm norm{
    torch::nn::LayerNormOptions(std::vector<int64_t>{width})};
  Linear up{width, width}, down{width, width};
};

template <template <class> class P>
struct two_inputs : torch::nn::Module {
  two_inputs() {
    register_module("fc", fc);
  }
  /// Uses the second one or not, as the numbers in the first one want.
  Tensor forward(Tensor x, Tensor y, bool always) {
    auto h = fc(x);
    return always || x.sum().template item<double>() > 0 ? h + y * 2 : h * 2;
  }
  Linear fc{width, width};
};

/// Never looks at its second input.
template <template <class> class P>
struct ignores : torch::nn::Module {
  ignores() {
    register_module("fc", fc);
  }
  Tensor forward(Tensor x, Tensor) {
    return torch::tanh(fc(x));
  }
  Linear fc{width, width};
};

template <template <class> class P>
struct two_outputs : torch::nn::Module {
  two_outputs() {
    register_module("fc", fc);
  }
  std::tuple<Tensor, Tensor> forward(Tensor x) {
    return {x > 0, torch::tanh(fc(x)) * 1.5};
  }
  Linear fc{width, width};
};

/// Writes to what it is given: its caller sees that.
template <template <class> class P>
struct writes : torch::nn::Module {
  writes() {
    register_module("fc", fc);
  }
  Tensor forward(Tensor x) {
    x.mul_(0.5);
    return fc(x);
  }
  Linear fc{width, width};
};

template <template <class> class P>
struct draws : torch::nn::Module {
  draws() {
    register_module("drop", drop);
  }
  Tensor forward(Tensor x) {
    return drop(x);
  }
  torch::nn::Dropout drop{0.3};
};

/// Calls modules of other ranks itself.
template <template <class> class P>
struct calls : torch::nn::Module {
  calls() {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
  }
  Tensor forward(Tensor x) {
    return x + third(second(torch::tanh(first(x))));
  }
  P<Linear> first{width, width}, second{width, width};
  P<torch::nn::ModuleHolder<block<P>>> third;
};

/// As many rows as the numbers want.
template <template <class> class P>
struct picks : torch::nn::Module {
  Tensor forward(Tensor x) {
    return x.index({x.select(1, 0) > 0}) * 2;
  }
};

/// Its numbers say which type its result has, and whether it has a gradient: a
/// promise that does not hold.
template <template <class> class P>
struct turns : torch::nn::Module {
  turns() {
    register_module("fc", fc);
  }
  /// The name tells kinds of calls apart, and nothing else.
  Tensor forward(Tensor x, std::string) {
    auto y = torch::tanh(fc(x));
    auto sum = x.sum().template item<double>();
    return sum > 1 ? y.to(torch::kFloat) : sum < -1 ? y.detach() : y;
  }
  Linear fc{width, width};
};

/// Calls such a one on another rank.
template <template <class> class P>
struct calls_turns : torch::nn::Module {
  calls_turns() {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
  }
  Tensor forward(Tensor x, std::string kind) {
    auto y = second(torch::tanh(first(x)), kind);
    return x + third(y.to(torch::kDouble));
  }
  P<Linear> first{width, width};
  P<torch::nn::ModuleHolder<turns<P>>> second;
  P<Linear> third{width, width};
};

#define SMP_MODULE(member) register_module(#member, member)

template <template <class> class P>
struct programs : torch::nn::Module {
  /// Of statements.
  static constexpr uint32_t kinds = 23;

  template <template <template <class> class> class M>
  using part = P<torch::nn::ModuleHolder<M<P>>>;

  programs() {
    SMP_MODULE(fc0), SMP_MODULE(fc1), SMP_MODULE(fc2), SMP_MODULE(fc3);
    SMP_MODULE(block0), SMP_MODULE(block1), SMP_MODULE(two), SMP_MODULE(other);
    SMP_MODULE(pair), SMP_MODULE(mask), SMP_MODULE(changes), SMP_MODULE(drop);
    SMP_MODULE(nest0), SMP_MODULE(nest1), SMP_MODULE(rows);
    register_parameter("here", here);
    to(torch::kDouble);
  }

  Tensor forward(Tensor x) {
    run r{*this, x[0][0].template item<double>()};
    for (auto n = 3 + r.below(12); n > 0; --n) {
      r.go_on(r.below(kinds));
      r.squash();
    }
    return r.loss();
  }

  /// A program on its way, and the tensors that it has.
  struct run {
    run(programs& of, double seed)
      : of(of),
        random(static_cast<uint32_t>(seed)),
        noise(torch::sin(torch::arange(4 * width, torch::kDouble) * seed)
                .view({4, width})),
        v{noise * of.here, torch::cos(noise) + of.here} {
      // nop
    }

    uint64_t below(uint32_t n) {
      return random() % n;
    }

    Tensor& pick() {
      auto back = std::min<size_t>(v.size(), 4);
      return v[v.size() - 1 - below(static_cast<uint32_t>(back))];
    }

    void go_on(uint64_t what) {
      if (what < 8)
        call(what);
      else if (what < 15)
        compute(what);
      else
        do_what_is_rare(what);
    }

    /// Numbers stay where comparing them makes sense.
    void squash() {
      if (below(4) == 0)
        v.push_back(torch::tanh(v.back()));
    }

    Tensor line(Tensor y) {
      switch (below(6)) {
        case 0:
          return of.fc0(y);
        case 1:
          return of.fc1(y);
        case 2:
          return of.fc2(y);
        case 3:
          return of.fc3(y);
        case 4:
          return of.block0(y);
        default:
          return of.block1(y);
      }
    }

    void call(uint64_t what) {
      switch (what) {
        case 3: {
          auto y = pick();
          for (auto k = 1 + below(4); k > 0; --k)
            y = line(y);
          v.push_back(y);
          break;
        }
        case 4: {
          auto a = pick(), b = pick();
          v.push_back(of.two(a, b, below(2) == 0));
          break;
        }
        case 5: {
          auto a = pick(), b = pick();
          v.push_back(of.other(a, b));
          break;
        }
        case 6: {
          auto y = std::get<1>(of.pair(pick()));
          v.push_back(below(2) ? y : y * 0.5);
          break;
        }
        case 7: {
          auto [where, y] = of.mask(pick());
          v.push_back(torch::where(where, y, pick()));
          break;
        }
        default:
          v.push_back(line(pick()));
      }
    }

    /// What the code of the caller does with results.
    void compute(uint64_t what) {
      switch (what) {
        case 8:
        case 9: {
          auto a = pick();
          v.push_back(a + pick());
          break;
        }
        case 10: {
          auto& a = pick();
          if (a.dim() == 2 && a.size(0) == 4)
            v.push_back(a * noise);
          break;
        }
        case 11: {
          auto& a = pick();
          v.push_back(a.sum().template item<double>() > 0 ? a.sin() : line(a));
          break;
        }
        case 12: {
          auto a = pick();
          v.push_back(torch::cat({a.slice(0, 0, 2), pick().slice(0, 2, 4)}));
          break;
        }
        case 13:
          v.push_back(pick().reshape({width, 4}).t().reshape({4, width}));
          break;
        default:
          v.push_back(pick().detach());
      }
    }

    void do_what_is_rare(uint64_t what) {
      switch (what) {
        case 15: {
          torch::NoGradGuard off;
          v.push_back(line(pick()));
          break;
        }
        case 16:
          line(pick()); // nobody wants it
          break;
        case 17: { // in place, before anybody else has it
          auto y = of.fc0(pick());
          y.add_(noise);
          y.slice(0, 0, 2).mul_(0.5);
          v.push_back(line(y));
          break;
        }
        case 18: {
          auto y = of.fc1(pick());
          y.view({2, 2 * width}).select(1, 3).zero_();
          v.push_back(y);
          break;
        }
        case 19: {
          auto y = pick() * 1.0;
          auto z = of.changes(y);
          v.push_back(below(2) ? y : z);
          break;
        }
        case 20:
          v.push_back(of.drop(pick()));
          break;
        case 21:
          v.push_back(below(2) ? of.nest0(pick()) : of.nest1(pick()));
          break;
        default:
          v.push_back(line(of.rows(pick())).sum(0, true).expand({4, width}));
      }
    }

    Tensor loss() {
      auto result = (torch::tanh(v.back()) * noise).sum();
      for (auto k = below(3); k > 0; --k)
        result = result + torch::tanh(pick()).pow(2).mean();
      return result * 1e-3;
    }

    programs& of;
    std::mt19937 random;
    Tensor noise;
    std::vector<Tensor> v;
  };

  P<Linear> fc0{width, width}, fc1{width, width}, fc2{width, width},
    fc3{width, width};
  part<block> block0, block1;
  part<two_inputs> two;
  part<ignores> other;
  part<two_outputs> pair, mask;
  part<writes> changes;
  part<draws> drop;
  part<calls> nest0, nest1;
  part<picks> rows;
  Tensor here = torch::full({1}, 1.25);
};

/// The same, with calls whose promises do not hold. A kind of call breaks one
/// at most, so every twenty programs have kinds of their own.
template <template <class> class P>
struct turning_programs : programs<P> {
  turning_programs() {
    this->register_module("turn", turn);
    this->register_module("nest", nest);
    this->to(torch::kDouble);
  }

  Tensor forward(Tensor x) {
    auto seed = x[0][0].template item<double>();
    auto kind = std::to_string(static_cast<int>(seed) / 20);
    typename programs<P>::run r{*this, seed};
    for (auto n = 3 + r.below(12); n > 0; --n) {
      auto what = r.below(programs<P>::kinds + 3);
      if (what < programs<P>::kinds)
        r.go_on(what);
      else if (what == programs<P>::kinds)
        r.v.push_back(nest(r.pick(), kind));
      else
        r.v.push_back(turn(r.pick(), kind).to(torch::kDouble));
      r.squash();
    }
    return r.loss();
  }

  P<torch::nn::ModuleHolder<turns<P>>> turn;
  P<torch::nn::ModuleHolder<calls_turns<P>>> nest;
};

constexpr std::optional<bool> as_by_default;

/// How a record is made and followed.
struct mode {
  bool replay = false; // `smp.static_mode`
  bool fixed_order = false;
  std::optional<bool> fast = as_by_default;
};

const char* text_of(std::optional<bool> fast) {
  return !fast ? "by default" : *fast ? "fast" : "blocking";
}

/// Runs one step of programs again and again, and compares.
/// @returns whether the last step followed the record to its end
bool check_replay(const mode& how, uint64_t ranks, uint64_t microbatches,
                  uint32_t first_seed) {
  auto m = static_cast<int64_t>(microbatches);
  auto batch = torch::arange(m).add(static_cast<double>(first_seed));
  model_options x;
  x.ranks = ranks;
  x.microbatches = microbatches;
  x.fast = how.fast;
  x.replay = how.replay;
  x.fixed_order = how.fixed_order;
  x.seed = first_seed;
  x.steps = 6;
  x.tolerance = 1e-9;
  x.absolute = 1e-12;
  INFO(fmt::format("microbatch k: program {} + k, ranks {}, {}{}{}", first_seed,
                   ranks, text_of(how.fast), how.replay ? ", static" : "",
                   how.fixed_order ? ", fixed order" : ""));
  std::vector<Tensor> batches(6, batch.to(torch::kDouble).view({m, 1}));
  auto steps = run_ranks<programs>(x, batches);
  REQUIRE(differences<programs>(x, batches, steps)
          == std::vector<std::string>{});
  REQUIRE(steps.back().stats.replayed != steps.back().stats.fell_back);
  return !steps.back().stats.fell_back;
}

/// Runs as many programs in steps of `microbatches`, and compares.
/// @returns how many steps ran again
template <template <template <class> class> class Impl>
int check_programs(int count, uint64_t ranks, uint64_t microbatches,
                   std::optional<bool> fast, uint32_t first_seed,
                   double tolerance = 1e-9) {
  auto m = static_cast<int64_t>(microbatches);
  std::vector<Tensor> batches;
  auto seed = static_cast<double>(first_seed);
  for (int i = 0; i < count; i += static_cast<int>(m)) {
    auto batch = torch::zeros({m, 1}, torch::kDouble);
    for (int64_t k = 0; k < m; ++k)
      batch[k][0] = seed++;
    batches.push_back(batch);
  }
  model_options x;
  x.ranks = ranks;
  x.microbatches = microbatches;
  x.fast = fast;
  x.seed = first_seed;
  x.steps = static_cast<int>(batches.size());
  x.tolerance = tolerance;
  x.absolute = tolerance * 1e-3;
  INFO(fmt::format("step i, microbatch k: program {} + {} i + k, ranks {}, {}",
                   first_seed, m, ranks, text_of(fast)));
  auto steps = run_ranks<Impl>(x, batches);
  REQUIRE(differences<Impl>(x, batches, steps) == std::vector<std::string>{});
  int again = 0;
  for (auto& y : steps)
    again += !y.stats.ran_again.empty();
  return again;
}

} // namespace

TEST_CASE("random programs with promises end like one process",
          "[runtime][fast][R38]") {
  check_programs<programs>(280, 3, 4, true, 1);
  check_programs<programs>(200, 3, 1, true, 601);
}

TEST_CASE("random programs end like one process by default",
          "[runtime][fast][auto][R38]") {
  auto again = check_programs<programs>(200, 3, 2, as_by_default, 401);
  again += check_programs<programs>(100, 2, 3, as_by_default, 801);
  again += check_programs<programs>(100, 4, 2, as_by_default, 901);
  CHECK(again == 0); // what was promised holds
}

TEST_CASE("random programs whose promises break end like one process",
          "[runtime][fast][auto][R38][R42]") {
  // Some numbers are floats on their way.
  constexpr auto tolerance = 1e-6;
  auto again = check_programs<turning_programs>(60, 3, 3, as_by_default, 1000,
                                                tolerance);
  CHECK(again > 1);
  again = check_programs<turning_programs>(60, 4, 3, as_by_default, 1060,
                                           tolerance);
  CHECK(again > 1);
}

TEST_CASE("random programs are replayed like one process in every mode",
          "[runtime][fast][auto][static][deterministic][R33]") {
  // Random numbers that a branch looks at make some of them diverge.
  constexpr uint32_t count = 30;
  const mode modes[] = {{.replay = true, .fast = true},
                        {.replay = true, .fast = false},
                        {.replay = true, .fast = as_by_default},
                        {.fixed_order = true, .fast = false},
                        {.fixed_order = true, .fast = as_by_default},
                        {.replay = true, .fixed_order = true}};
  uint32_t followed = 0;
  for (uint32_t i = 0; i < count; ++i)
    followed += check_replay(modes[i / 5], 2 + i % 3, 1 + i % 4, 1 + 4 * i);
  CAPTURE(followed);
  CHECK(followed > count / 2);
}

TEST_CASE("the same random programs without promises end like one process",
          "[runtime][fast][R38]") {
  check_programs<programs>(200, 3, 4, false, 1);
}

TEST_CASE("random programs over larger tensors end like one process",
          "[runtime][fast][auto][static][R33][R38]") {
  const wide_rows wide;
  CHECK(check_programs<programs>(60, 3, 3, as_by_default, 1200) == 0);
  check_programs<programs>(40, 4, 2, true, 1300);
  check_programs<programs>(40, 3, 4, false, 1400);
  check_replay({.replay = true}, 3, 3, 1500);
}
