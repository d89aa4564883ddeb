// A mixture of experts, spread over tensor-parallel ranks, top-2:
//   mixture_of_experts --ranks 2
//
// Each rank holds some of the experts and runs samples of its own; a token goes
// to the ranks that hold its experts, and their results come back. With any
// number of ranks that divides the experts, the losses are the same.

#include "smp/smp.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <vector>

constexpr int64_t experts = 8;
constexpr int64_t top_k = 2;
constexpr int64_t width = 64;
constexpr int64_t batch = 256;

struct mixture_impl : torch::nn::Module {
  mixture_impl() {
    register_module("router", router);
    // Of parameters created here, each rank keeps its part of the experts.
    smp::nn::parameter_creation_scope cut{*this, /*dim=*/0};
    auto make = [&](const char* name, int64_t in, int64_t out) {
      return register_parameter(name, torch::randn({experts, in, out})
                                        / std::sqrt(double(in)));
    };
    wi = make("wi", width, 4 * width);
    wo = make("wo", 4 * width, width);
  }

  /// x: [N, width], tokens of this rank @returns [N, width]
  torch::Tensor forward(torch::Tensor x) {
    // The chosen experts, by token: [N, top_k]
    auto [scores, chosen] = router(x).softmax(-1).topk(top_k);
    // The tokens, sorted by expert: first those for rank 0, then for rank 1.
    auto order = chosen.flatten().argsort(/*stable=*/true, 0, false);
    auto token = order.div(top_k, "floor");
    auto load = chosen.flatten().bincount({}, experts); // [experts]

    // How many tokens each rank has for each of the experts here.
    const auto here = wi.size(0);
    const auto ranks = experts / here;
    auto loads = smp::nn::scatter_and_merge_for_tp(load.view({ranks, here}), 0,
                                                   0)
                   .view({ranks, here});
    auto count = [](const torch::Tensor& t) {
      auto y = t.sum(1).contiguous();
      return std::vector<int64_t>(y.data_ptr<int64_t>(),
                                  y.data_ptr<int64_t>() + y.numel());
    };
    auto given = count(load.view({ranks, here}));
    auto taken = count(loads);
    auto in = smp::nn::exchange_rows_for_tp(x.index_select(0, token), given,
                                            taken);

    // They arrive by rank, and within a rank by expert.
    auto expert = torch::arange(here).repeat({ranks}).repeat_interleave(
      loads.flatten());
    auto out = torch::zeros_like(in);
    for (int64_t e = 0; e < here; ++e) {
      auto rows = expert.eq(e).nonzero().flatten();
      auto y = in.index_select(0, rows).matmul(wi[e]).relu().matmul(wo[e]);
      out = out.index_copy(0, rows, y);
    }

    auto back = smp::nn::exchange_rows_for_tp(out, taken, given);
    auto weight = scores.flatten().index_select(0, order).unsqueeze(1);
    return x + torch::zeros_like(x).index_add(0, token, back * weight);
  }

  smp::submodule<torch::nn::Linear> router{
    torch::nn::LinearOptions(width, experts).bias(false)};
  torch::Tensor wi, wo; // [experts of this rank, in, out]
};
TORCH_MODULE_IMPL(mixture, mixture_impl);

struct net_impl : torch::nn::Module {
  net_impl() {
    register_module("in", in);
    register_module("first", first);
    register_module("second", second);
    register_module("head", head);
  }

  /// x: [N, 16] @returns logits [N, 10]
  torch::Tensor forward(torch::Tensor x) {
    return head(second(first(in(x).tanh())));
  }

  smp::submodule<torch::nn::Linear> in{16, width};
  smp::submodule<mixture> first, second;
  smp::submodule<torch::nn::Linear> head{width, 10};
};
TORCH_MODULE_IMPL(net, net_impl);

int main(int argc, char** argv) {
  smp::init(argc, argv); // --ranks 2: starts itself as two processes
  const uint64_t ranks = argc > 2 ? std::stoul(argv[2]) : 1;
  smp::session session{
    {.microbatches = 2, .ddp = ranks > 1, .tensor_parallel_degree = ranks}};
  torch::manual_seed(1); // every rank makes the same model
  smp::distributed_model model{net{}};
  torch::optim::Adam adam{model->parameters(), 1e-3};
  smp::distributed_optimizer optimizer{adam};

  auto train_step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = torch::nn::functional::cross_entropy(model(x), y);
    model.backward(loss);
    return loss;
  });

  for (int i = 1; i <= 50; ++i) {
    auto x = torch::randn({batch, 16}); // the same on all ranks
    auto y = x.slice(1, 0, 10).argmax(1);
    auto mine = [&](const torch::Tensor& t) {
      return t.chunk(smp::dp_size())[smp::dp_rank()];
    };
    optimizer.zero_grad();
    auto loss = train_step(mine(x), mine(y)).reduce_mean();
    auto mean = smp::allreduce(loss, smp::comm_group::dp, smp::reduce_op::mean);
    optimizer.step();
    if (session.rank() == 0 && i % 10 == 0)
      fmt::print("step {}: loss {:.4f}\n", i, mean.item<double>());
  }
}
