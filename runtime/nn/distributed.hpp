#pragma once

// Modules of torch::nn that tensor-parallel ranks share without being told
// (paper, appendix "smp.nn module"). In one process they are those of
// torch::nn.

#include "runtime/intercept/submodule.hpp"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstddef>
#include <utility>

namespace smp::nn {

/// A submodule of class H that is shared where it can be; else the print of the
/// partition says why not.
template <class H>
class distributed : public submodule<H> {
public:
  /// @param xs as of an H
  template <class... Ts>
  requires std::is_constructible_v<submodule<H>, Ts...>
  explicit(sizeof...(Ts) == 1) distributed(Ts&&... xs)
    : submodule<H>(std::forward<Ts>(xs)...) {
    this->get()->smp_hook.sharing = true;
  }

  distributed(std::nullptr_t) : submodule<H>(nullptr) {
    // nop
  }
};

/// nn.Linear: (in, out)
using distributed_linear = distributed<torch::nn::Linear>;
/// nn.Embedding: (rows, channels)
using distributed_embedding = distributed<torch::nn::Embedding>;
/// nn.LayerNorm: (LayerNormOptions)
using distributed_layer_norm = distributed<torch::nn::LayerNorm>;

} // namespace smp::nn
