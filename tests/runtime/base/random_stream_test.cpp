#include "tests/support/catch.hpp"

#include "runtime/base/random_stream.hpp"
#include "tests/support/torch/random.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <set>
#include <string>

using namespace smp;

namespace {

/// Gives the default generator back as the test found it.
struct restore_default {
  at::Generator gen = at::detail::getDefaultCPUGenerator();
  at::Tensor state = gen.get_state();
  ~restore_default() {
    gen.set_state(state);
  }
};

/// What smp must not disturb, by LibTorch's own means.
at::Tensor libtorch_state() {
  return at::detail::getDefaultCPUGenerator().get_state();
}

void libtorch_seed(uint64_t seed) {
  auto gen = at::detail::getDefaultCPUGenerator();
  gen.set_current_seed(seed);
}

/// All ways to draw that keep something between calls, or draw more or fewer
/// numbers than they return.
std::vector<at::Tensor> draw() {
  return {
    at::randn({3}),
    at::rand({5}),
    at::randn({1}, c10::kDouble),
    at::randn({17}), // at least 16: another kernel than 3
    at::dropout(at::ones({7, 3}), 0.3, true),
    at::randperm(11),
    at::empty({9}).bernoulli_(0.4),
    at::empty({5}).normal_(1, 2),
    at::empty({1}).normal_(),
    at::empty({1}, c10::kDouble).normal_(),
    at::randint(1000, {3}),
    at::empty({3}).exponential_(),
    at::multinomial(at::ones({6}), 4),
    at::randn({3}, c10::kBFloat16),
  };
}

bool same(const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& y) {
  for (size_t i = 0; i < x.size(); ++i)
    if (!at::equal(x[i], y[i]))
      return false;
  return x.size() == y.size();
}

} // namespace

TEST_CASE("a fresh stream draws what manual_seed gives") {
  restore_default guard;
  for (uint64_t seed :
       {uint64_t{0}, uint64_t{1}, uint64_t{0xdeadbeefcafe1234}}) {
    libtorch_seed(seed);
    auto expected = draw();
    libtorch_seed(99);
    random_stream x{seed};
    x.swap_with_default();
    CHECK(same(draw(), expected));
  }
}

TEST_CASE("a stream continues where it stopped, at every point of it") {
  restore_default guard;
  // An odd number of single normal draws leaves the other half of a pair in
  // the generator, of float and of double.
  for (int before = 0; before < 4; ++before) {
    CAPTURE(before);
    libtorch_seed(7);
    auto warm_up = [&] {
      for (int i = 0; i < before; ++i) {
        at::empty({1}).normal_();
        at::empty({1}, c10::kDouble).normal_();
        at::rand({1000});
      }
    };
    warm_up();
    auto expected = draw();
    libtorch_seed(7);
    warm_up();
    auto saved = random_stream::of_default();
    auto again = saved;
    CHECK(again == saved);
    draw(); // moves the default on
    saved.swap_with_default();
    CHECK(same(draw(), expected));
    again.swap_with_default();
    CHECK(same(draw(), expected));
  }
}

TEST_CASE("a swap exchanges the whole state that LibTorch knows") {
  restore_default guard;
  libtorch_seed(5);
  at::empty({1}).normal_();
  at::empty({1}, c10::kDouble).normal_();
  auto outside = libtorch_state();
  random_stream inside{6};
  inside.swap_with_default();
  CHECK_FALSE(at::equal(libtorch_state(), outside));
  draw();
  auto drawn = libtorch_state();
  inside.swap_with_default();
  CHECK(at::equal(libtorch_state(), outside));
  inside.swap_with_default();
  CHECK(at::equal(libtorch_state(), drawn));
}

TEST_CASE("two interleaved streams draw what they draw alone") {
  restore_default guard;
  std::vector<std::vector<at::Tensor>> expected;
  for (uint64_t seed : {21, 22}) {
    libtorch_seed(seed);
    for (int i = 0; i < 3; ++i)
      expected.push_back(draw());
  }
  random_stream streams[] = {random_stream{21}, random_stream{22}};
  for (size_t i = 0; i < 3; ++i) {
    for (size_t k = 0; k < 2; ++k) {
      streams[k].swap_with_default();
      CHECK(same(draw(), expected[3 * k + i]));
      streams[k].swap_with_default();
    }
  }
}

TEST_CASE("streams are equal as long as nothing was drawn") {
  restore_default guard;
  random_stream x{3};
  CHECK(x == random_stream{3});
  CHECK_FALSE(x == random_stream{4});
  x.swap_with_default();
  x.swap_with_default();
  CHECK(x == random_stream{3});
  x.swap_with_default();
  at::rand({1});
  x.swap_with_default();
  CHECK_FALSE(x == random_stream{3});
  // A cached normal number is state as well: the engine does not move when it
  // is drawn.
  x.swap_with_default();
  at::empty({1}).normal_();
  auto with_cache = random_stream::of_default();
  at::empty({1}).normal_();
  CHECK_FALSE(random_stream::of_default() == with_cache);
}

TEST_CASE("a stream that was put in place of another one gives it back") {
  restore_default guard;
  libtorch_seed(5);
  at::empty({1}).normal_();
  at::empty({1}, c10::kDouble).normal_();
  auto outside = libtorch_state();
  random_stream kept{random_stream::empty{}};
  kept.replace_default(0x123456789abcdef0);
  CHECK(random_stream::of_default()
        == random_stream::derived(0x123456789abcdef0));
  draw();
  kept.restore_default();
  CHECK(at::equal(libtorch_state(), outside));
}

TEST_CASE("all bits of a seed count in a derived stream") {
  restore_default guard;
  std::vector<std::vector<at::Tensor>> seen;
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32,
                        uint64_t{1} << 63, ~uint64_t{0}}) {
    auto x = random_stream::derived(seed);
    x.swap_with_default();
    seen.push_back(draw());
    x.swap_with_default();
  }
  for (size_t i = 0; i < seen.size(); ++i)
    for (size_t k = 0; k < i; ++k)
      for (size_t n = 0; n < 2; ++n) // randn and rand
        CHECK_FALSE(at::equal(seen[i][n], seen[k][n]));
  // By the public ways of LibTorch, from the words of the documentation.
  test::seed_generator(uint64_t{1} << 32);
  CHECK(same(draw(), seen[2]));
}

TEST_CASE("derived streams of neighbouring calls are independent") {
  restore_default guard;
  constexpr int64_t streams = 64;
  constexpr int64_t length = 4096;
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < streams; ++i) {
    auto x = random_stream::derived(
      call_seed(7, path_of_call(0, 9, static_cast<uint64_t>(i))));
    x.swap_with_default();
    rows.push_back(at::rand({length}, c10::kDouble) - 0.5);
    x.swap_with_default();
  }
  auto all = at::stack(rows) * std::sqrt(12.0);
  // Uniform numbers of variance 1: means and products of two streams have a
  // deviation of 1/64; 2080 of them stay below 5 of these.
  auto bound = 5.0 / std::sqrt(static_cast<double>(length));
  CHECK(all.mean(1).abs().max().item<double>() < bound);
  auto products = all.mm(all.t()) / length;
  CHECK((products - at::eye(streams, c10::kDouble)).abs().max().item<double>()
        < bound);
}

TEST_CASE("a swap takes under 2 microseconds") {
  restore_default guard;
  random_stream x{1};
  auto best = std::chrono::nanoseconds::max();
  for (int round = 0; round < 50; ++round) {
    auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i)
      x.swap_with_default();
    best = std::min<std::chrono::nanoseconds>(
      best, (std::chrono::steady_clock::now() - start) / 100);
  }
  INFO("best of 50: " << best.count() << " ns");
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__)                    \
  && !defined(__SANITIZE_THREAD__)
  CHECK(best.count() < 2000);
#endif
}

TEST_CASE("microbatches get different seeds, also in their low 32 bits") {
  std::set<uint32_t> low;
  size_t n = 0;
  for (uint64_t seed : {0, 1, 2})
    for (uint64_t step = 0; step < 20; ++step)
      for (uint64_t dp = 0; dp < 8; ++dp)
        for (uint64_t mb = 0; mb < 16; ++mb, ++n)
          low.insert(
            static_cast<uint32_t>(microbatch_seed(seed, step, dp, mb)));
  // 7680 draws of 32 bits: 0.007 equal pairs expected.
  CHECK(low.size() == n);
  // The arguments are not interchangeable.
  CHECK(microbatch_seed(1, 2, 3, 4) != microbatch_seed(2, 1, 3, 4));
  CHECK(microbatch_seed(1, 2, 3, 4) != microbatch_seed(1, 3, 2, 4));
  CHECK(microbatch_seed(1, 2, 3, 4) != microbatch_seed(1, 2, 4, 3));
}

TEST_CASE("microbatch seeds are those of the documented mixing") {
  // Published outputs of splitmix64 started at 0 are the finalised multiples
  // of the golden ratio; the first and only step from 0 gives the first one.
  constexpr uint64_t first = 0xe220a8397b1dcdaf;
  auto splitmix64 = [](uint64_t x) {
    auto z = x + 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  };
  REQUIRE(splitmix64(0) == first);
  CHECK(microbatch_seed(0, 0, 0, 0)
        == splitmix64(splitmix64(splitmix64(first))));
  CHECK(microbatch_seed(5, 6, 7, 8)
        == splitmix64(splitmix64(splitmix64(splitmix64(5) + 6) + 7) + 8));
}

TEST_CASE("paths and seeds of calls are those of the documented mixing") {
  using test::called;
  auto path_of = [](const std::vector<called>& chain) {
    uint64_t path = 0;
    for (auto& [module, number] : chain)
      path = path_of_call(path, path_of_module(module), number);
    return path;
  };
  for (auto& chain : std::vector<std::vector<called>>{
         {},
         {{"", 0}},
         {{"encoder.layer.3", 0}},
         {{"encoder.layer.3", 1}},
         {{"encoder.layer.3", 1}, {"encoder.layer.3.drop", 0}}})
    CHECK(call_seed(microbatch_seed(1, 2, 3, 4), path_of(chain))
          == test::seed_of_call(test::body_seed(1, 2, 3, 4), chain));
}

TEST_CASE("no two calls of a step have the same stream") {
  std::set<uint64_t> seen;
  size_t n = 0;
  for (uint64_t mb = 0; mb < 16; ++mb)
    for (uint64_t layer = 0; layer < 48; ++layer)
      for (uint64_t number = 0; number < 4; ++number) {
        auto outer = path_of_call(
          0, path_of_module("h." + std::to_string(layer)), number);
        for (auto* inner : {"attn", "mlp"}) {
          ++n;
          seen.insert(call_seed(microbatch_seed(1, 1, 0, mb),
                                path_of_call(outer, path_of_module(inner), 0)));
        }
      }
  CHECK(seen.size() == n);
  // Neither who calls whom nor how often is interchangeable.
  CHECK(path_of_call(1, 2, 3) != path_of_call(1, 3, 2));
  CHECK(path_of_call(path_of_call(0, 1, 0), 2, 0)
        != path_of_call(path_of_call(0, 2, 0), 1, 0));
}

// -- generators of a language -------------------------------------------------

namespace {

/// One whose state is a number.
struct one_generator final : language_generators {
  one_generator() {
    random_stream::include(this);
  }

  ~one_generator() override {
    random_stream::include(nullptr);
  }

  state now() override {
    return std::make_shared<const uint64_t>(at);
  }

  void put_back(const state& x) override {
    at = *static_cast<const uint64_t*>(x.get());
  }

  void seed(uint64_t x) override {
    at = x;
  }

  void end_trace(const state& found) override {
    put_back(found);
  }

  uint64_t at = 7;
};

} // namespace

TEST_CASE("generators of a language go along with the default generator") {
  restore_default guard;
  one_generator g;
  auto stream = random_stream::derived(5);
  stream.swap_with_default();
  CHECK(g.at == 5);
  g.at = 6; // draws
  SECTION("swapped out and in again") {
    stream.swap_with_default();
    CHECK(g.at == 7);
    stream.swap_with_default();
    CHECK(g.at == 6);
  }
  SECTION("replaced and restored") {
    random_stream inner{random_stream::empty{}};
    inner.replace_default(9);
    CHECK(g.at == 9);
    inner.restore_default();
    CHECK(g.at == 6);
  }
  SECTION("copied") {
    auto copy = random_stream::of_default();
    g.at = 8;
    copy.swap_with_default();
    CHECK(g.at == 6);
  }
  stream.swap_with_default();
  CHECK(g.at == 7);
}
