#include "tests/support/catch.hpp"

#include "tests/simulated/backend/operators.hpp"
#include "tests/simulated/driver/races.hpp"
#include "tests/support/torch/near.hpp"
#include "tests/support/torch/plain_gpt.hpp"
#include "tests/support/torch/simulated.hpp"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <sstream>
#include <thread>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t vocabulary = 101, length = 32, layers = 2, heads = 4;
constexpr int64_t width = 64, batch = 4;

const auto first = sim_device(0), second = sim_device(1);

/// @returns the losses of five steps
std::vector<double> losses(c10::Device device, double dropout = 0) {
  torch::manual_seed(7);
  plain_gpt model{vocabulary, length, layers, heads, width, dropout};
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

const std::vector<double>& losses_of_cpu() {
  static const auto result = losses(c10::kCPU);
  return result;
}

} // namespace

TEST_CASE("a GPT trains on the simulated device as on the CPU, bit by bit",
          "[device]") {
  sim::changed_options changed{strict_devices()};
  sim::forget_races();
  CHECK(losses(first) == losses_of_cpu());
  {
    c10::StreamGuard on{new_sim_stream(0)};
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
  sim::changed_options changed{strict_devices()};
  sim::forget_races();
  std::vector<double> result;
  std::thread{[&] {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    c10::StreamGuard on{new_sim_stream(1)};
    result = losses(second);
  }}.join();
  CHECK(result == losses_of_cpu());
  CHECK(sim::races_found() == 0);
}

TEST_CASE("a graph over two devices has the gradients of one", "[device]") {
  sim::changed_options changed{strict_devices(100)};
  sim::forget_races();
  auto gradient = [](c10::Device a, c10::Device b) {
    torch::manual_seed(3);
    torch::nn::Linear one{16, 16}, two{16, 4};
    one->to(a);
    two->to(b);
    auto x = torch::randn({8, 16}).to(a);
    two(torch::gelu(one(x)).to(b)).pow(2).mean().backward();
    return one->weight.grad().cpu();
  };
  CHECK(at::equal(gradient(first, second), gradient(c10::kCPU, c10::kCPU)));
  CHECK(sim::races_found() == 0);
}

TEST_CASE("microbatches on streams of their own need an order of gradients",
          "[device]") {
  sim::changed_options changed{strict_devices(100)};
  auto add_gradients = [](bool in_order) {
    torch::manual_seed(3);
    torch::nn::Linear model{16, 16};
    model->to(first);
    auto x = torch::randn({4, 8, 16}).to(first);
    c10::Event before{c10::kPrivateUse1};
    before.record(c10::impl::VirtualGuardImpl{first.type()}.getStream(first));
    for (auto i = 0; i < 4; ++i)
      std::thread{[&] {
        c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
        auto stream = new_sim_stream(0);
        c10::StreamGuard on{stream};
        before.block(stream);
        model(x[i]).pow(2).sum().backward();
        if (in_order)
          before.record(stream);
      }}.join();
    sim::wait_device(0);
  };
  sim::forget_races();
  add_gradients(true);
  CHECK(sim::races_found() == 0);
  add_gradients(false);
  CHECK(sim::races_found() > 0);
  sim::forget_races();
}

TEST_CASE("layers that Torch takes apart on a device agree with the CPU",
          "[device]") {
  auto run = [](c10::Device device) {
    torch::manual_seed(3);
    torch::nn::Sequential convolution{
      torch::nn::Conv2d{torch::nn::Conv2dOptions(3, 8, 3).padding(1)},
      torch::nn::BatchNorm2d{8}, torch::nn::MaxPool2d{2}, torch::nn::Flatten{},
      torch::nn::Linear{8 * 16, 5}};
    torch::nn::LSTM lstm{5, 6};
    torch::nn::GRU gru{6, 3};
    convolution->to(device);
    lstm->to(device);
    gru->to(device);
    auto x = torch::randn({4, 3, 8, 8}).to(device);
    auto y = convolution->forward(x).unsqueeze(1);
    y = std::get<0>(gru(std::get<0>(lstm(y))));
    y.pow(2).mean().backward();
    return std::vector{
      y.detach().cpu(), convolution->parameters()[0].grad().cpu(),
      lstm->parameters()[0].grad().cpu(), gru->parameters()[0].grad().cpu()};
  };
  auto expected = run(c10::kCPU), got = run(first);
  for (size_t i = 0; i < expected.size(); ++i)
    check_near(got[i], expected[i]);
}

TEST_CASE("a TorchScript module trains where it is moved or loaded",
          "[device]") {
  torch::manual_seed(11);
  torch::jit::Module small{"small"};
  small.register_parameter("table", torch::randn({50, 16}), false);
  small.register_parameter("w", torch::randn({16, 16}), false);
  small.define(R"(
    def forward(self, x):
      h = torch.embedding(self.table, x)
      for i in range(3):
        h = torch.gelu(torch.matmul(h, self.w)) * 0.5
        if bool(h.sum() > 1e9):
          h = h * 0.
      return torch.log_softmax(h.mean(1), -1)
  )");
  std::stringstream file;
  small.save(file);
  auto text = torch::randint(0, 50, {4, 7});
  auto gradient = [&](c10::Device device, bool load_there) {
    file.seekg(0);
    auto loaded = load_there ? torch::jit::load(file, device)
                             : torch::jit::load(file);
    loaded.to(device);
    auto w = loaded.attr("w").toTensor().requires_grad_();
    for (auto i = 0; i < 3; ++i) // the executor changes its plan
      loaded.forward({text.to(device)}).toTensor().pow(2).sum().backward();
    return w.grad().cpu();
  };
  auto expected = gradient(c10::kCPU, false);
  check_near(gradient(first, false), expected);
  check_near(gradient(second, true), expected);
}
