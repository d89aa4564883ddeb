#include "tests/support/catch.hpp"

#include "runtime/base/call_context.hpp"
#include "tests/support/torch/models.hpp"
#include "tests/support/torch/small_models.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>

#include <atomic>

// What surrounds a call travels with it: autocast, grad mode, inference mode,
// random numbers (R23).

using namespace smp;
using namespace smp::test;

namespace {

namespace ac = at::autocast;

/// Autocast on the CPU, without the cache, as in a step body.
struct autocast_scope {
  explicit autocast_scope(c10::ScalarType dtype, bool on = true,
                          bool cache = false) {
    ac::set_autocast_enabled(c10::kCPU, on);
    ac::set_autocast_dtype(c10::kCPU, dtype);
    ac::set_autocast_cache_enabled(cache);
  }
  ~autocast_scope() {
    ac::set_autocast_enabled(c10::kCPU, enabled);
    ac::set_autocast_dtype(c10::kCPU, before);
    ac::set_autocast_cache_enabled(cached);
  }
  bool enabled = ac::is_autocast_enabled(c10::kCPU);
  c10::ScalarType before = ac::get_autocast_dtype(c10::kCPU);
  bool cached = ac::is_autocast_cache_enabled();
};

std::vector<Tensor> batches() {
  std::vector<Tensor> result;
  for (int i = 0; i < 2; ++i)
    result.push_back(
      torch::sin(torch::arange(8 * width * 1.0) * (i + 0.7)).view({8, width}));
  return result;
}

template <template <template <class> class> class Impl>
void check_autocast(c10::ScalarType dtype) {
  for (auto& x : all_placements()) {
    auto y = x;
    y.steps = 2;
    y.context = [dtype] { return std::make_shared<autocast_scope>(dtype); };
    // Gradients of several uses are added in 16 bits, in another order.
    y.tolerance = 2e-2;
    INFO(x.ranks << " ranks, " << x.microbatches << " microbatches, "
                 << x.pipeline);
    CHECK(differences<Impl>(y, batches()) == std::vector<std::string>{});
  }
}

Tensor matmul_weight(function_impl& self, Tensor x) {
  return x.matmul(self.weight.diag());
}

} // namespace

TEST_CASE("a context survives its way over the wire", "[runtime][context]") {
  autocast_scope cast{c10::kHalf};
  c10::InferenceMode inference;
  auto sent = to_payload(call_context::current());
  auto x = from_payload<call_context>(sent, "context");
  CHECK_FALSE(x.grad);
  CHECK(x.inference);
  REQUIRE(x.autocast.size() == 1);
  CHECK(x.autocast[0].device == c10::kCPU);
  CHECK(x.autocast[0].dtype == c10::kHalf);
  for (size_t i = 2; i < sent.bytes.size(); ++i) {
    auto wrong = sent;
    wrong.bytes[i] = std::byte{77}; // no such device type, dtype or number
    CHECK_THROWS_AS(from_payload<call_context>(wrong, "context"), error);
  }
}

TEST_CASE("a scoped context leaves its thread as it was",
          "[runtime][context]") {
  auto grad = GENERATE(false, true);
  at::AutoGradMode mode{grad};
  autocast_scope cast{c10::kHalf, true, true};
  {
    call_context x;
    x.grad = !grad;
    x.inference = grad;
    x.autocast = {{c10::kCPU, c10::kBFloat16}, {c10::kCUDA, c10::kHalf}};
    scoped_context inside{x};
    CHECK(at::GradMode::is_enabled() == x.grad);
    CHECK(c10::InferenceMode::is_enabled() == x.inference);
    CHECK(ac::get_autocast_dtype(c10::kCPU) == c10::kBFloat16);
    CHECK(ac::is_autocast_enabled(c10::kCUDA));
    CHECK_FALSE(ac::is_autocast_cache_enabled());
  }
  {
    scoped_context inside{call_context{}};
    CHECK_FALSE(ac::is_autocast_enabled(c10::kCPU));
  }
  CHECK(at::GradMode::is_enabled() == grad);
  CHECK_FALSE(c10::InferenceMode::is_enabled());
  CHECK(ac::is_autocast_enabled(c10::kCPU));
  CHECK(ac::get_autocast_dtype(c10::kCPU) == c10::kHalf);
  CHECK_FALSE(ac::is_autocast_enabled(c10::kCUDA));
  CHECK(ac::is_autocast_cache_enabled());
}

TEST_CASE("a module on another rank casts as its caller would",
          "[runtime][context]") {
  auto dtype = GENERATE(c10::kBFloat16, c10::kHalf);
  std::atomic<int> cast = 0, plain = 0, cached = 0;
  auto remote = [&](function_impl& self, Tensor x) {
    auto y = matmul_weight(self, x);
    ++(y.scalar_type() == dtype ? cast : plain);
    cached += ac::is_autocast_cache_enabled();
    return y;
  };
  auto local = [&](caller_impl& self, Tensor x) {
    Tensor a;
    {
      autocast_scope on{dtype};
      a = self.there(x);
      autocast_scope off{dtype, false};
      a = a + self.there(x);
    }
    return a + self.there(x) * self.here;
  };
  auto x = torch::arange(6.0).view({2, 3});
  auto two = run_toy(2, remote, local, x);
  CHECK(cast == 1);
  CHECK(plain == 2);
  CHECK(cached == 0);
  auto one = run_toy(1, remote, local, x);
  CHECK(torch::equal(two.loss, one.loss));
  for (auto& [name, g] : one.gradients)
    CHECK(torch::allclose(g, two.gradients.at(name)));
}

TEST_CASE("autocast around a step gives the numbers of one process",
          "[runtime][context]") {
  SECTION("dropout in nested calls") {
    check_autocast<nested>(c10::kBFloat16);
  }
  SECTION("modules under no_grad") {
    check_autocast<teacher>(c10::kBFloat16);
  }
  SECTION("a weight as an argument, and read elsewhere") {
    check_autocast<weight_argument>(c10::kBFloat16);
  }
  SECTION("float16") {
    check_autocast<reused>(c10::kHalf);
  }
}

TEST_CASE("the copy of a remote parameter stays out of the cache of casts",
          "[runtime][context][R14]") {
  // A cached cast would have no way to the owner, or that of an old step.
  auto local = [](caller_impl& self, Tensor x) {
    autocast_scope on{c10::kBFloat16, true, true};
    auto y = x.matmul(self.there->weight) + (x * 2).matmul(self.there->weight);
    return y.to(torch::kFloat).unsqueeze(1) * self.here + self.there(x);
  };
  auto x = torch::arange(6.0).view({2, 3});
  auto two = run_toy(2, matmul_weight, local, x);
  auto one = run_toy(1, matmul_weight, local, x);
  CHECK(torch::equal(two.loss, one.loss));
  REQUIRE(two.gradients.size() == 2);
  for (auto& [name, g] : one.gradients)
    CHECK(torch::allclose(g, two.gradients.at(name), 1e-2));
}

TEST_CASE("the context around a step holds in its body", "[runtime][context]") {
  std::atomic<int> grads = 0, bodies = 0;
  run_virtual_world(2, manual_world(2, 2), [&](session&) {
    auto remote = [&](function_impl& self, Tensor x) {
      grads += at::GradMode::is_enabled();
      return x * self.weight;
    };
    distributed_model model{seeded([&] {
      return caller{remote, [](caller_impl& self, Tensor x) {
                      return self.there(x * self.here);
                    }};
    })};
    auto run = step([&](Tensor x) {
      ++bodies;
      // Left on by mistake: the next body on this thread must not see it.
      if (ac::is_autocast_enabled(c10::kCPU))
        throw std::runtime_error{"a leaked context"};
      ac::set_autocast_enabled(c10::kCPU, true);
      return model(x);
    });
    torch::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i)
      run(torch::ones({2, 3}));
  });
  CHECK(bodies == 4);
  CHECK(grads == 0);
}

TEST_CASE("inference mode travels, and arguments are still written back",
          "[runtime][context]") {
  std::atomic<int> inference = 0;
  auto remote = [&](function_impl& self, Tensor x) {
    inference += c10::InferenceMode::is_enabled();
    x.add_(1);
    return x * self.weight;
  };
  auto local = [](caller_impl& self, Tensor x) {
    Tensor y;
    {
      c10::InferenceMode on;
      auto h = x * self.here;
      y = self.there(h);
      if (!y.is_inference())
        throw std::runtime_error{"no inference tensor"};
      y = y + h + self.there->weight; // read in this mode, used again below
    }
    return y.clone() + self.there(x * 1) * self.there->weight;
  };
  auto x = torch::arange(6.0).view({2, 3});
  auto two = run_toy(2, remote, local, x);
  CHECK(inference == 1);
  auto one = run_toy(1, remote, local, x);
  CHECK(torch::equal(two.loss, one.loss));
  for (auto& [name, g] : one.gradients)
    CHECK(torch::allclose(g, two.gradients.at(name)));
}
