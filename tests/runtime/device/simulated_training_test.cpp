#include "tests/support/catch.hpp"

#include "tests/simulated/backend/operators.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/races.hpp"
#include "tests/support/torch/plain_gpt.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <thread>
#include <vector>

using namespace smp;

namespace {

constexpr int64_t vocabulary = 101, length = 32, layers = 2, heads = 4;
constexpr int64_t width = 64, batch = 4;

const c10::Device first{c10::kPrivateUse1, 0}, second{c10::kPrivateUse1, 1};

/// Delays, poison and the checker.
sim::options strict() {
  sim::options result;
  result.delay_us = 50;
  result.poison = true;
  result.check = true;
  return result;
}

struct device_streams {
  c10::impl::VirtualGuardImpl guard{c10::kPrivateUse1};
  c10::Stream another(c10::Device x) const {
    return guard.getNewStream(x);
  }
};

/// @returns the losses of five steps
std::vector<double> losses(c10::Device device, double dropout = 0) {
  torch::manual_seed(7);
  test::plain_gpt model{vocabulary, length, layers, heads, width, dropout};
  model.to(device);
  torch::optim::AdamW optimizer{model.parameters(),
                                torch::optim::AdamWOptions{1e-2}};
  std::vector<double> result;
  for (auto step = 0; step < 5; ++step) {
    auto text = torch::randint(0, vocabulary, {batch, length + 1}).to(device);
    auto logits = model.forward(text.slice(1, 0, length));
    auto loss = torch::cross_entropy_loss(logits.reshape({-1, vocabulary}),
                                          text.slice(1, 1).reshape({-1}));
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    result.push_back(loss.item<double>());
  }
  return result;
}

/// With one thread, as kernels run: sums of several have other bits.
const std::vector<double>& losses_of_cpu() {
  static const auto result = [] {
    auto before = at::get_num_threads();
    at::set_num_threads(1);
    auto made = losses(c10::kCPU);
    at::set_num_threads(before);
    return made;
  }();
  return result;
}

} // namespace

TEST_CASE("a GPT trains on the simulated device as on the CPU, bit by bit",
          "[device]") {
  sim::changed_options options{strict()};
  sim::forget_races();
  CHECK(losses(first) == losses_of_cpu());
  {
    c10::StreamGuard on{device_streams{}.another(first)};
    CHECK(losses(first) == losses_of_cpu());
  }
  CHECK(losses(second) == losses_of_cpu());
  INFO(sim::last_race());
  CHECK(sim::races_found() == 0);
}

TEST_CASE("the host waits for no kernel of a step that it has seen before",
          "[device]") {
  losses(first);
  sim::reset_counts();
  CHECK(losses(first) == losses_of_cpu());
  auto counts = sim::counts();
  CHECK(counts.waited_for.empty());
  CHECK(counts.by_meta > counts.by_memory);
}

TEST_CASE("backward on the thread that asks for it uses its streams",
          "[device]") {
  sim::changed_options options{strict()};
  sim::forget_races();
  std::vector<double> result;
  std::thread{[&] {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    c10::StreamGuard on{device_streams{}.another(second)};
    result = losses(second);
  }}.join();
  CHECK(result == losses_of_cpu());
  CHECK(sim::races_found() == 0);
}
