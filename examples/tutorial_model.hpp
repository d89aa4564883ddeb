#pragma once

// The model of docs/tutorial.md, for the program and for smp-train.

#include "smp/smp.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace tutorial {

struct block_impl : torch::nn::Module {
  block_impl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  torch::Tensor forward(torch::Tensor x) {
    return x + down(torch::gelu(up(norm(x)))); // a skip link
  }

  smp::submodule<torch::nn::LayerNorm> norm{torch::nn::LayerNormOptions({256})};
  smp::submodule<torch::nn::Linear> up{256, 1024}, down{1024, 256};
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
  smp::submodule<torch::nn::Linear> stem{32, 256}, side{32, 256}, head{256, 10};
};
TORCH_MODULE_IMPL(net, net_impl);

} // namespace tutorial
