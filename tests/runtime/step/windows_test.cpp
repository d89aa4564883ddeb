// ctest: label=threads processors=2
#include "tests/support/catch.hpp"

#include "tests/support/assertion_lock.hpp"
#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/two_ranks.hpp"
#include "transport/forwarding_fabric.hpp"
#include "transport/ucx/ucx_fabric.hpp"

#include <ATen/ops/linear.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// What is sent to a rank that takes nothing waits for its window or its
// credits, until that rank takes something: the step goes on then, with the
// same numbers.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t features = 64;
constexpr uint64_t parts = 16; // microbatches
constexpr int64_t rows = 64;   // of a microbatch: 16 KB of activations

struct model_impl : torch::nn::Module {
  model_impl() {
    register_module("first", first);
    register_module("here", here);
    register_module("last", last);
  }

  /// x: [rows, features]
  Tensor forward(Tensor x) {
    return last(torch::tanh(here(torch::tanh(first(x))))).square().mean();
  }

  submodule<torch::nn::Linear> first{features, features};
  torch::nn::Linear here{features, features};
  submodule<torch::nn::Linear> last{features, features};
};
TORCH_MODULE_IMPL(model, model_impl);

/// @returns how many messages wait at `x` for room in a window.
uint64_t queued_at(const rank_runtime& x) {
  uint64_t result = 0;
  for (auto& peer : x.communication().peers)
    result += peer.queued;
  return result;
}

/// Reads nothing, once told so, until messages of its peer wait for room.
class sleeping_fabric final : public forwarding_fabric {
public:
  explicit sleeping_fabric(std::shared_ptr<ucx_fabric> inner)
    : forwarding_fabric(std::move(inner)) {
    // nop
  }

  /// The next message finds it asleep.
  void fall_asleep(std::shared_ptr<rank_runtime> peer) {
    peer_ = std::move(peer);
    woken_by_ = 0;
    asleep_ = true;
  }

  /// What waited at its peer when it woke up.
  uint64_t woken_by() const {
    return woken_by_;
  }

private:
  void on_message(rank_id from, message x) override {
    using clock = std::chrono::steady_clock;
    if (x.kind == message_kind::request && asleep_.exchange(false))
      for (auto end = clock::now() + std::chrono::seconds{30};
           woken_by_ == 0 && clock::now() < end; std::this_thread::yield())
        woken_by_ = queued_at(*peer_);
    listener().on_message(from, std::move(x));
  }

  std::shared_ptr<rank_runtime> peer_; // written while nothing is sent
  std::atomic<bool> asleep_ = false;
  std::atomic<uint64_t> woken_by_ = 0;
};

/// One process computes the step: losses by microbatch, then gradients.
std::vector<Tensor> plain_numbers(const std::map<std::string, Tensor>& state,
                                  const Tensor& x) {
  std::vector<std::string> names;
  std::map<std::string, Tensor> p;
  for (auto& [name, t] : state) {
    names.push_back(name);
    p[name] = t.detach().clone().set_requires_grad(true);
  }
  auto apply = [&](const std::string& name, const Tensor& y) {
    return at::linear(y, p.at(name + ".weight"), p.at(name + ".bias"));
  };
  std::vector<Tensor> result;
  for (auto& part : x.chunk(parts)) {
    auto y = apply("here", torch::tanh(apply("first", part)));
    auto loss = apply("last", torch::tanh(y)).square().mean();
    (loss / static_cast<double>(parts)).backward();
    result.push_back(loss.detach());
  }
  for (auto& name : names)
    result.push_back(p.at(name).grad());
  return result;
}

/// Three steps; `begin` runs before each, on rank 0.
/// @returns how many tensors differ from those of one process
int run_steps(const std::shared_ptr<actor_host>& host,
              const std::vector<std::shared_ptr<fabric>>& fabrics,
              const session_config& config,
              const std::function<void(session&)>& begin,
              const std::function<void(session&)>& end) {
  int different = 0;
  run_virtual_world(fabrics, host, config, [&](session& s) {
    distributed_model m{seeded([] { return model{}; })};
    set_partition(*m->first, 1);
    set_partition(*m->last, 1);
    m.partition();
    auto train_step = step([&](Tensor x) {
      auto loss = m(x);
      m.backward(loss);
      return loss;
    });
    auto x = torch::sin(torch::arange(parts * rows * features * 1.0f))
               .view({parts * rows, features});
    for (int i = 0; i < 3; ++i) {
      for (auto& p : m.local_parameters())
        p.mutable_grad() = Tensor{};
      auto dict = m.state_dict();
      pp_barrier();
      if (s.rank() == 0)
        begin(s);
      auto seen = train_step(x + i).outputs();
      auto gradients = m.gradients();
      check_nothing_left(s);
      if (s.rank() != 0)
        continue;
      end(s);
      std::map<std::string, Tensor> sorted{gradients.begin(), gradients.end()};
      for (auto& [name, t] : sorted)
        seen.push_back(t);
      auto expected = plain_numbers({dict.begin(), dict.end()}, x + i);
      different += seen.size() != expected.size();
      for (size_t k = 0; k < std::min(seen.size(), expected.size()); ++k)
        different += !torch::allclose(seen[k], expected[k], 1e-5, 1e-7);
    }
  });
  return different;
}

} // namespace

TEST_CASE("a step goes on when exhausted credits return",
          "[runtime][credits]") {
  auto config = manual_world(2, parts).config;
  config.active_microbatches = parts;
  config.fast_mode = GENERATE(false, true);
  auto host = std::make_shared<actor_host>();
  auto sleeper = std::make_shared<sleeping_fabric>(
    std::make_shared<ucx_fabric>(rank_id{1}, 2));
  CHECK(run_steps(
          host, {std::make_shared<ucx_fabric>(rank_id{0}, 2), sleeper}, config,
          [&](session& s) { sleeper->fall_asleep(s.shared_internals()); },
          [&](session& s) {
            assertion_lock guard; // this is a rank's thread
            CHECK(sleeper->woken_by() > 0);
            CHECK(queued_at(s.internals()) == 0);
          })
        == 0);
  sleeper->fall_asleep({}); // it would keep the rank
}
