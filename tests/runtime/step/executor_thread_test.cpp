#include "tests/support/catch.hpp"

#include "actors/protocol/actor_host.hpp"
#include "runtime/base/here.hpp"
#include "tests/support/torch/two_ranks.hpp"
#include "transport/forwarding_fabric.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pthread.h>

using namespace smp;
using namespace smp::test;

namespace {

/// Looks at what is left of executions on their threads while these serve
/// others.
class looking_fabric final : public forwarding_fabric {
public:
  using forwarding_fabric::forwarding_fabric;

  void send(rank_id to, message x, sent_callback done) override {
    if (x.kind == message_kind::request)
      look();
    forwarding_fabric::send(to, std::move(x), std::move(done));
  }

  void park(pollable_wake_up& x) override {
    look();
    forwarding_fabric::park(x);
  }

  std::atomic<int> looks = 0;
  std::atomic<int> left = 0;

private:
  void look() {
    std::array<char, 16> name = {};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    if (std::string{name.data()} != "smp.executor")
      return;
    ++looks;
    auto& x = here::of_thread();
    left += x.rank || x.call || x.slot || x.observer
            || !at::GradMode::is_enabled()
            || x.interceptors != decltype(x.interceptors){};
  }
};

} // namespace

TEST_CASE("a thread that serves others belongs to no execution",
          "[runtime][R25]") {
  // Until the network's thread has ended, as that ran actors: CAF waits for it.
  auto host = std::make_shared<actor_host>();
  loopback_network net{2, {}};
  std::vector<std::shared_ptr<fabric>> fabrics;
  std::vector<std::shared_ptr<looking_fabric>> looking;
  for (uint64_t r = 0; r < 2; ++r) {
    std::shared_ptr<fabric> inner{std::shared_ptr<void>{}, &net.at(rank_id{r})};
    looking.push_back(std::make_shared<looking_fabric>(std::move(inner)));
    fabrics.push_back(looking.back());
  }
  run_virtual_world(fabrics, host, manual_world(2, 2).config, [](session&) {
    distributed_model model{seeded([] {
      return caller{[](auto& self, Tensor x) { return x * self.weight; },
                    [](auto& self, Tensor x) { return self.there(x); }};
    })};
    step([&](Tensor x) {
      at::NoGradGuard no_grad;
      return model(x);
    })(torch::ones({2, 3}));
  });
  for (auto& x : looking) {
    CHECK(x->looks > 0);
    CHECK(x->left == 0);
  }
}
