// A model, a step and an optimizer of your own, on two pipeline ranks:
//   train_own_model --ranks 2

#include "smp/smp.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

struct net_impl : torch::nn::Module {
  net_impl() {
    register_module("body", body);
    register_module("head", head);
  }
  torch::Tensor forward(torch::Tensor x) {
    return head(body->forward(x));
  }

  // A Sequential stays as it is; of other members only the type changes.
  torch::nn::Sequential body{torch::nn::Linear(32, 1024),   torch::nn::GELU(),
                             torch::nn::Linear(1024, 1024), torch::nn::GELU(),
                             torch::nn::Linear(1024, 1024), torch::nn::GELU()};
  smp::submodule<torch::nn::Linear> head{1024, 10};
};
TORCH_MODULE_IMPL(net, net_impl);

int main(int argc, char** argv) {
  smp::init(argc, argv); // --ranks 2: starts itself as two processes
  smp::session session{{.pipeline_parallel_degree = 2, .microbatches = 4}};
  torch::manual_seed(1); // every rank makes the same model
  smp::distributed_model model{net{}};

  std::vector<torch::Tensor> weights, biases;
  for (auto& p : model->parameters())
    (p.dim() > 1 ? weights : biases).push_back(p);
  using options = torch::optim::AdamWOptions;
  torch::optim::AdamW adamw({{weights}, {biases}}, options(1e-3));
  auto& of_biases = adamw.param_groups()[1].options();
  static_cast<options&>(of_biases).weight_decay(0);
  smp::distributed_optimizer optimizer{adamw};

  auto train_step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = torch::nn::functional::cross_entropy(model(x), y);
    model.backward(loss); // instead of loss.backward()
    return loss;
  });

  for (int i = 1; i <= 50; ++i) {
    auto x = torch::randn({64, 32});
    auto y = x.slice(1, 0, 10).argmax(1); // which of the first ten is largest
    optimizer.zero_grad();
    auto loss = train_step(x, y).reduce_mean().item<double>();
    auto norm = smp::clip_grad_norm_(model, 1.0); // over all ranks
    optimizer.step();
    if (session.rank() == 0 && i % 10 == 0)
      fmt::print("step {}: loss {:.3f}, norm {:.2f}\n", i, loss, norm);
  }
}
