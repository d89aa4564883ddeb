#include "tests/support/catch.hpp"

#include "runtime/calls/messages.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <atomic>

// Rules R8 to R17 and R38 to R41: what autograd and aliasing need across
// ranks. Each case compares two ranks with one, where nothing is remote.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

void check_same(const toy_result& a, const toy_result& b) {
  CHECK(torch::allclose(a.loss, b.loss));
  REQUIRE(a.gradients.size() == b.gradients.size());
  for (auto& [name, g] : a.gradients) {
    INFO(name);
    CHECK(torch::allclose(g, b.gradients.at(name)));
  }
}

void check_one_and_two_ranks(function_impl::code remote,
                             caller_impl::code local) {
  auto x = torch::arange(6.0).view({2, 3});
  auto two = run_toy(2, remote, local, x);
  CHECK(two.requests > 0);
  check_same(two, run_toy(1, remote, local, x));
}

Tensor times_weight(function_impl& self, Tensor x) {
  return x * self.weight;
}

std::string refusal_of(function_impl::code remote, caller_impl::code local) {
  return test::error_of([&] {
    run_toy(2, remote, local, torch::ones({2, 3}));
  });
}

} // namespace

TEST_CASE("gradients cross ranks in both directions", "[runtime][autograd]") {
  check_one_and_two_ranks(times_weight, [](caller_impl& self, Tensor x) {
    auto h = x * self.here;
    return self.there(h) + self.there(h * h);
  });
}

TEST_CASE("a module on another rank sees the caller's grad mode",
          "[runtime][autograd][R10]") {
  std::atomic<int> with = 0, without = 0;
  auto remote = [&](function_impl& self, Tensor x) {
    ++(at::GradMode::is_enabled() ? with : without);
    return x * self.weight;
  };
  auto local = [](caller_impl& self, Tensor x) {
    torch::NoGradGuard no_grad;
    auto frozen = self.there(x);
    if (frozen.requires_grad())
      throw std::runtime_error{"a result under no_grad requires grad"};
    at::AutoGradMode on{true};
    return self.there(x) + frozen * self.here;
  };
  auto r = run_toy(2, remote, local, torch::ones({2, 3}));
  CHECK(with == 1);
  CHECK(without == 1);
  CHECK(r.gradients.size() == 2);
}

TEST_CASE("a call has an autograd node only if an output has a gradient",
          "[runtime][autograd][R10]") {
  auto frozen = [](function_impl&, Tensor x) { return x.detach() * 2; };
  auto local = [](caller_impl& self, Tensor x) {
    auto y = self.there(x * self.here);
    if (y.requires_grad() || y.grad_fn())
      throw std::runtime_error{"a node nobody needs"};
    return y;
  };
  auto r = run_toy(2, frozen, local, torch::ones({2, 3}));
  CHECK(r.requests == 1);
  CHECK(r.gradients.empty());
}

TEST_CASE("an input without gradient still trains the module that gets it",
          "[runtime][autograd]") {
  check_one_and_two_ranks(times_weight, [](caller_impl& self, Tensor x) {
    return self.there(x); // no argument requires grad
  });
}

TEST_CASE("backward runs on the thread that may park",
          "[runtime][autograd][R9]") {
  std::atomic<bool> multithreaded = false;
  auto look = [&](Tensor x) {
    multithreaded = multithreaded
                    || c10::AutogradState::get_tls_state()
                         .get_multithreading_enabled();
    return x;
  };
  run_toy(
    2, [&](function_impl& self, Tensor x) { return look(x) * self.weight; },
    [&](caller_impl& self, Tensor x) { return self.there(look(x)); },
    torch::ones({2, 3}));
  CHECK(!multithreaded);
}

TEST_CASE("a module may write into its argument", "[runtime][autograd][R11]") {
  SECTION("an in-place ReLU as in torch::nn") {
    check_one_and_two_ranks(
      [](function_impl& self, Tensor x) {
        return torch::relu_(x) * self.weight;
      },
      [](caller_impl& self, Tensor x) {
        auto h = (x - 2) * self.here;
        return self.there(h);
      });
  }
  SECTION("and the caller sees what was written") {
    check_one_and_two_ranks(
      [](function_impl& self, Tensor x) {
        x.mul_(self.weight * 3);
        return x.sum(0);
      },
      [](caller_impl& self, Tensor x) {
        auto h = x * self.here;
        auto y = self.there(h);
        return h * y;
      });
  }
  SECTION("also through a view of the caller's tensor") {
    check_one_and_two_ranks(
      [](function_impl& self, Tensor x) {
        x.mul_(self.weight);
        return x + 1;
      },
      [](caller_impl& self, Tensor x) {
        auto h = x * self.here;
        auto y = self.there(h.narrow(0, 0, 1));
        return h.sum() + y.sum();
      });
  }
}

TEST_CASE("a leaf that requires grad is not written by another rank",
          "[runtime][autograd]") {
  auto text = refusal_of(
    [](function_impl&, Tensor x) {
      x.add_(1);
      return x * 1;
    },
    [](caller_impl& self, Tensor x) {
      auto leaf = x.clone().requires_grad_(true);
      return self.there(leaf);
    });
  CHECK_THAT(text, ContainsSubstring("argument 0 in place")
                     && ContainsSubstring("'there'"));
}

TEST_CASE("a result that is an argument comes back as the same tensor",
          "[runtime][autograd]") {
  std::atomic<bool> same = false;
  run_toy(
    2, [](function_impl&, Tensor x) { return x; },
    [&](caller_impl& self, Tensor x) {
      auto h = x * self.here;
      auto y = self.there(h);
      same = y.is_same(h);
      return y;
    },
    torch::ones({2, 3}));
  CHECK(same);
}

namespace {

struct list_user_impl : torch::nn::Module {
  Tensor forward(std::vector<Tensor>& xs, std::optional<Tensor> mask,
                 std::tuple<int64_t, std::string> extra) {
    xs.push_back(xs.front() * static_cast<double>(std::get<0>(extra)));
    auto y = xs.front() + static_cast<double>(std::get<1>(extra).size());
    return mask ? y * *mask : y;
  }
};
TORCH_MODULE_IMPL(list_user, list_user_impl);

struct list_model_impl : torch::nn::Module {
  list_model_impl() {
    partition_scope on_rank_1{1};
    there = submodule<list_user>(std::make_shared<hooked<list_user_impl>>());
    register_module("there", there);
  }
  Tensor forward(Tensor x) {
    std::vector<Tensor> xs{x};
    auto y = there(xs, std::optional<Tensor>{},
                   std::tuple{int64_t{3}, std::string{"ab"}});
    return xs.at(1) * 10 + y; // 30 x + x + 2
  }
  submodule<list_user> there = nullptr;
};
TORCH_MODULE_IMPL(list_model, list_model_impl);

} // namespace

TEST_CASE("containers travel, and what the callee changed comes back",
          "[runtime][autograd][R12]") {
  run_virtual_world(2, manual_world(), [](session& s) {
    distributed_model model{list_model{}};
    auto evaluate = step([&](Tensor x) { return model(x); });
    auto y = evaluate(torch::ones({2})).concat();
    if (!torch::equal(y, torch::full({2}, 33.0)))
      throw std::runtime_error{"wrong on rank " + std::to_string(s.rank())};
  });
}

TEST_CASE("parameters and buffers are known by their bytes",
          "[runtime][autograd]") {
  // Else a result that is a buffer would change under way (R13).
  run_virtual_world(2, manual_world(), [](session& s) {
    distributed_model model{caller{times_weight, caller_impl::code{}}};
    model.partition();
    auto& mine = s.rank() == 0 ? model->here : model->there->weight;
    auto ok = model.state().map().shares_state(mine)
              && model.state().map().shares_state(mine.narrow(0, 1, 1))
              && !model.state().map().shares_state(torch::ones({3}));
    if (!ok)
      throw std::runtime_error{"shares_state"};
  });
}

TEST_CASE("a rank frees the parameters of other ranks", "[runtime][R14]") {
  run_virtual_world(2, manual_world(), [](session& s) {
    distributed_model model{caller{times_weight, caller_impl::code{}}};
    model.partition();
    auto& remote = s.rank() == 0 ? model->there->weight : model->here;
    auto ok = is_placeholder(remote) && remote.storage().nbytes() == 0
              && remote.sizes() == torch::IntArrayRef{3}
              && model.local_parameters().size() == 1;
    if (!ok)
      throw std::runtime_error{"not released"};
    try {
      (void)(remote + 1);
      throw std::runtime_error{"read outside a step"};
    } catch (const error& err) {
      if (std::string{err.what()}.find("outside a step") == std::string::npos)
        throw;
    }
  });
}

TEST_CASE("a remote parameter can be read and gets its gradient",
          "[runtime][R14]") {
  SECTION("by code of the caller") {
    check_one_and_two_ranks(times_weight, [](caller_impl& self, Tensor x) {
      return x * self.there->weight * self.here + self.there(x);
    });
  }
  SECTION("as an argument, which costs no bytes") {
    check_one_and_two_ranks(
      [](function_impl& self, Tensor x) { return x * x * self.weight; },
      [](caller_impl& self, Tensor x) {
        return self.there(self.there->weight) + self.there(self.here) + x.sum();
      });
  }
}

TEST_CASE("a remote parameter is not changed in place", "[runtime][R14]") {
  auto text = refusal_of(times_weight, [](caller_impl& self, Tensor x) {
    torch::NoGradGuard no_grad;
    self.there->weight.clamp_(0, 1);
    return self.there(x);
  });
  CHECK_THAT(text,
             ContainsSubstring("there.weight") && ContainsSubstring("rank 1"));
}

TEST_CASE("only model.backward crosses ranks", "[runtime][R16]") {
  SECTION("tensor.backward is refused by name") {
    auto text = refusal_of(times_weight, [](caller_impl& self, Tensor x) {
      self.there(x * self.here).sum().backward();
      return x;
    });
    CHECK_THAT(text, ContainsSubstring("model.backward")
                       && ContainsSubstring("'there'"));
  }
  SECTION("autograd::grad is refused: it would write .grad at the owner") {
    auto text = refusal_of(times_weight, [](caller_impl& self, Tensor x) {
      auto h = x * self.here;
      torch::autograd::grad({self.there(h).sum()}, {h});
      return x;
    });
    CHECK_THAT(text, ContainsSubstring("model.backward"));
  }
}

namespace {

struct chain_impl : torch::nn::Module {
  chain_impl(bool own_loop, bool early) : own_loop(own_loop), early(early) {
    for (int i = 0; i < 4; ++i)
      body->push_back(torch::nn::Linear(3, 3));
    register_module("body", body);
    register_module("head", head);
  }
  Tensor forward(Tensor x) {
    if (!own_loop)
      return head(body->forward(x));
    Tensor kept;
    for (auto& child : *body) {
      x = child.forward(x);
      if (early)
        break;
    }
    return head(x);
  }
  bool own_loop, early;
  torch::nn::Sequential body;
  submodule<torch::nn::Linear> head{3, 1};
};
TORCH_MODULE_IMPL(chain, chain_impl);

/// @returns (requests of rank 0 in one step, output)
std::pair<uint64_t, Tensor> run_chain(uint64_t ranks, bool own_loop,
                                      bool early) {
  std::pair<uint64_t, Tensor> result;
  run_virtual_world(ranks, manual_world(ranks), [&](session& s) {
    distributed_model model{seeded([&] { return chain{own_loop, early}; })};
    if (ranks > 1)
      for (size_t i = 0; i < 3; ++i)
        set_partition(*model->body->ptr(i), 1);
    auto train_step = step([&](Tensor x) {
      auto y = model(x);
      model.backward(y.sum());
      return y;
    });
    auto y = train_step(torch::ones({2, 3})).concat();
    if (s.rank() == 0)
      result = {s.last_step().requests, y};
  });
  return result;
}

} // namespace

TEST_CASE("consecutive children of a Sequential are one request",
          "[runtime][R8]") {
  auto [requests, y] = run_chain(2, false, false);
  CHECK(requests == 2); // forward and backward of children 0 to 2
  CHECK(torch::allclose(y, run_chain(1, false, false).second));
}

TEST_CASE("a loop over a Sequential that a range would fool is refused",
          "[runtime][R8]") {
  auto early = GENERATE(false, true);
  CHECK_THROWS_WITH(run_chain(2, true, early), ContainsSubstring("ModuleList"));
}
