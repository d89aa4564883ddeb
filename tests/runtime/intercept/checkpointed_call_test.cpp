#include "tests/support/catch.hpp"

#include "runtime/intercept/call_scope.hpp"
#include "runtime/offload/offload_store.hpp"
#include "runtime/offload/offloaded_tensors.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/linear.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Backward of a checkpointed call that cannot be computed again.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

struct net_impl : torch::nn::Module {
  net_impl() {
    register_module("fc", fc);
  }

  Tensor forward(Tensor x) {
    return fc(x);
  }

  submodule<torch::nn::Linear> fc{32, 32};
};
TORCH_MODULE_IMPL(net, net_impl);

/// Takes all, and gives nothing back.
class forgetful_file final : public offload_file {
public:
  int reserve(uint64_t, uint64_t) override {
    return 0;
  }

  int write(const void*, uint64_t, uint64_t) override {
    return 0;
  }

  int read(void*, uint64_t, uint64_t) override {
    return EIO;
  }
};

/// Who gives waits until it is there.
offload_store::options waiting_options() {
  offload_store::options result;
  result.dir = "nowhere";
  result.horizon = 0;
  return result;
}

/// Moves what is kept to such a file.
class forgetting final : public call_interceptor {
public:
  std::unique_ptr<offloaded_tensors>
  keep(const std::vector<at::Tensor>& xs) override {
    return offloaded_tensors::take(*store_, 0, xs);
  }

private:
  std::shared_ptr<offload_store> store_ = offload_store::make(
    std::make_unique<forgetful_file>(), waiting_options());
};

} // namespace

TEST_CASE("arguments that a file lost are not there for a second backward",
          "[runtime][intercept][R52][R57]") {
  std::array<std::string, 2> told;
  run_virtual_world(1, manual_world(1), [&](session&) {
    distributed_model model{seeded([] { return net{}; })};
    set_activation_checkpointing(*model->fc);
    auto run = step([&](Tensor x) {
      constexpr auto place = interceptor::offload;
      auto* before = interceptor_at(static_cast<size_t>(place));
      forgetting file;
      set_interceptor(place, &file);
      auto loss = model(x).sum();
      set_interceptor(place, before);
      for (auto& text : told)
        text = cause_of([&] { model.backward(loss, {}, true); });
      return loss.detach();
    });
    run(torch::ones({64, 32}));
  });
  CHECK_THAT(told[0], ContainsSubstring("cannot read activations back"));
  CHECK_THAT(told[1], ContainsSubstring("what it kept is gone"));
}

TEST_CASE("no session computes a call of an earlier one again",
          "[runtime][intercept][R52]") {
  Tensor kept;
  std::string told;
  run_virtual_world(1, manual_world(1), [&](session&) {
    distributed_model model{seeded([] { return net{}; })};
    set_activation_checkpointing(*model->fc);
    auto run = step([&](Tensor x) { return model(x).sum(); },
                    {.detach_outputs = false});
    kept = run(torch::ones({4, 32})).reduce_sum();
  });
  REQUIRE(kept.requires_grad());
  run_virtual_world(1, manual_world(1), [&](session&) {
    distributed_model model{seeded([] { return net{}; })};
    auto run = step([&](Tensor x) {
      auto loss = model(x).sum();
      told = cause_of([&] { model.backward(kept.sum()); });
      return loss.detach();
    });
    run(torch::ones({4, 32}));
  });
  CHECK_THAT(told, ContainsSubstring("outside of the step and microbatch"));
}
