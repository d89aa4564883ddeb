#include "tests/support/catch.hpp"

#include "runtime/train/trainable.hpp"
#include "tests/support/torch/two_ranks.hpp"
#include "tests/support/torch/verify_jobs.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

// Modules hand on what a module inside of them made, which uses that itself, as
// the first self-attention of a T5 does with its biases of positions: whoever
// has it from another rank has a part of its gradient.

using namespace smp;
using namespace smp::test;

namespace {

constexpr int64_t width = 8; // of the batches of `model_case`

/// Hidden states [B, width], a bias [B, width], and that bias once more.
using three_tensors = std::tuple<Tensor, Tensor, Tensor>;

struct bias_maker_impl : torch::nn::Module {
  bias_maker_impl() {
    register_module("fc", fc);
  }

  three_tensors forward(Tensor x) {
    auto bias = fc(x);
    return {x + bias, bias, bias};
  }

  torch::nn::Linear fc{width, width};
};
TORCH_MODULE_IMPL(bias_maker, bias_maker_impl);

struct bias_lister_impl : torch::nn::Module {
  bias_lister_impl() {
    register_module("fc", fc);
  }

  /// Adds the bias to a list. @returns hidden states
  Tensor forward(Tensor x, std::vector<Tensor>& found) {
    found.push_back(fc(x));
    return x + found.back();
  }

  torch::nn::Linear fc{width, width};
};
TORCH_MODULE_IMPL(bias_lister, bias_lister_impl);

/// Any code over what makes a bias.
struct bias_user_impl : torch::nn::Module {
  using code = three_tensors (*)(bias_user_impl&, Tensor);

  bias_user_impl(uint32_t rank_of_makers, code f) : f(f) {
    partition_scope there{rank_of_makers};
    maker = submodule<bias_maker>();
    lister = submodule<bias_lister>();
    register_module("maker", maker);
    register_module("lister", lister);
  }

  three_tensors forward(Tensor x) {
    return f(*this, x);
  }

  submodule<bias_maker> maker = nullptr;
  submodule<bias_lister> lister = nullptr;
  code f;
};
TORCH_MODULE_IMPL(bias_user, bias_user_impl);

/// Hands on all that it gets.
struct bias_outer_impl : torch::nn::Module {
  bias_outer_impl(uint32_t rank_of_inner, uint32_t rank_of_makers,
                  bias_user_impl::code f) {
    partition_scope there{rank_of_inner};
    inner = submodule<bias_user>(rank_of_makers, f);
    register_module("inner", inner);
  }

  three_tensors forward(Tensor x) {
    return inner(x);
  }

  submodule<bias_user> inner = nullptr;
};
TORCH_MODULE_IMPL(bias_outer, bias_outer_impl);

struct bias_net_impl : torch::nn::Module {
  /// @param ranks a bit each: of the outer module, of the inner one, and of
  /// what makes the bias
  bias_net_impl(uint32_t ranks, bias_user_impl::code f) {
    partition_scope there{ranks & 1};
    outer = submodule<bias_outer>((ranks >> 1) & 1, (ranks >> 2) & 1, f);
    register_module("outer", outer);
    register_module("last", last);
  }

  Tensor forward(Tensor x) {
    auto [y, bias, again] = outer(x);
    return last(torch::tanh(y) * bias + again);
  }

  submodule<bias_outer> outer = nullptr;
  submodule<torch::nn::Linear> last{width, width}; // on rank 0
};
TORCH_MODULE_IMPL(bias_net, bias_net_impl);

// -- what the inner module does -----------------------------------------------

three_tensors hand_on(bias_user_impl& self, Tensor x) {
  auto [y, bias, again] = self.maker(x);
  return {torch::tanh(y), bias, again};
}

three_tensors use(bias_user_impl& self, Tensor x) {
  auto [y, bias, again] = self.maker(x);
  return {torch::tanh(y * bias), bias, again};
}

three_tensors change(bias_user_impl& self, Tensor x) {
  auto [y, bias, again] = self.maker(x);
  bias.add_(1);
  return {torch::tanh(y), bias, again};
}

three_tensors take_from_list(bias_user_impl& self, Tensor x) {
  std::vector<Tensor> found;
  auto y = self.lister(x, found);
  return {torch::tanh(y), found.at(0), found.at(0)};
}

/// @param compared gradients of results in each microbatch
/// @param checkpointed modules
void compare(bias_user_impl::code f, uint64_t compared,
             const std::vector<std::string>& checkpointed = {}) {
  for (uint32_t ranks = 1; ranks < 8; ++ranks) {
    INFO("ranks " << (ranks & 1) << ", " << ((ranks >> 1) & 1) << ", "
                  << ((ranks >> 2) & 1));
    auto x = model_case("dropout", 2, "interleaved", 2);
    x.config.smp.activation_checkpointing.modules = checkpointed;
    x.job.make_model = [ranks, f]() -> std::unique_ptr<trainable> {
      torch::manual_seed(5);
      bias_net model{ranks, f};
      auto loss = [model](const batch& inputs) mutable {
        return torch::nn::functional::mse_loss(model(inputs.at(0)),
                                               inputs.at(1));
      };
      return std::make_unique<nn_trainable>(model.ptr(), loss);
    };
    auto summary = run_case(x);
    auto text = to_text(summary);
    INFO(text);
    CHECK(text.starts_with("equal: 2 steps"));
    CHECK(summary.result_gradients == 2 * 2 * compared);
  }
}

} // namespace

TEST_CASE("a result that its module uses itself is compared with all its uses",
          "[runtime][verify]") {
  // The hidden states and the bias where that is made, the inner module's own
  // result, and the last one.
  SECTION("as it is") {
    compare(hand_on, 4);
  }
  SECTION("used once more") {
    compare(use, 4);
  }
  SECTION("changed in place: another one, of the inner module") {
    compare(change, 5);
  }
  SECTION("in a list that the call changes, and so not a result of it") {
    compare(take_from_list, 3);
  }
}

TEST_CASE("a result of a checkpointed module gives no false alarm",
          "[runtime][verify][R52]") {
  // What made the bias has no gradients of results.
  compare(hand_on, 2, {"outer.inner.maker"});
}
