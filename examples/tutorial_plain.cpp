// The program with which docs/tutorial.md begins: one process, without smp.

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>

struct block_impl : torch::nn::Module {
  block_impl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  torch::Tensor forward(torch::Tensor x) {
    return x + down(torch::gelu(up(norm(x)))); // a skip link
  }

  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({256})};
  torch::nn::Linear up{256, 1024}, down{1024, 256};
};
TORCH_MODULE_IMPL(block, block_impl);

struct net_impl : torch::nn::Module {
  net_impl() {
    for (int i = 0; i < 4; ++i)
      blocks->push_back(block());
    register_module("stem", stem);
    register_module("blocks", blocks);
    register_module("side", side);
    register_module("head", head);
  }
  torch::Tensor forward(torch::Tensor x) {
    auto y = blocks->forward(stem(x));
    return head(y + side(x)); // a branch that passes all blocks
  }

  torch::nn::Sequential blocks;
  torch::nn::Linear stem{32, 256}, side{32, 256}, head{256, 10};
};
TORCH_MODULE_IMPL(net, net_impl);

constexpr int steps = 50, batch = 128, samples = 2048;

/// Which samples a step takes; each epoch has an order of its own.
torch::Tensor rows_of(int step) {
  const int per_epoch = samples / batch;
  auto random = at::make_generator<at::CPUGeneratorImpl>(step / per_epoch);
  return torch::randperm(samples, random).chunk(per_epoch)[step % per_epoch];
}

/// The learning rate: up in ten steps, then down to 0.
double rate_of(int step) {
  return 1e-3 * std::min((step + 1) / 10.0, 1 - double(step) / steps);
}

int main() {
  torch::manual_seed(1);
  net model;
  auto inputs = torch::randn({samples, 32});
  auto classes = inputs.slice(1, 0, 10).argmax(1); // the largest of the first
  torch::optim::AdamW adamw{model->parameters(), 1e-3};

  for (int step = 0; step < steps; ++step) {
    for (auto& group : adamw.param_groups())
      group.options().set_lr(rate_of(step));
    auto rows = rows_of(step);
    auto x = inputs.index_select(0, rows);
    auto y = classes.index_select(0, rows);
    adamw.zero_grad();
    auto loss = torch::nn::functional::cross_entropy(model(x), y);
    loss.backward();
    auto norm = torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5);
    adamw.step();
    if ((step + 1) % 10 == 0)
      std::printf("step %d: loss %.4f, norm %.3f\n", step + 1,
                  loss.item<double>(), norm);
  }
  torch::save(model, "model.pt");
}
