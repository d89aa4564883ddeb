#pragma once

// Sizes of the built-in models, and what several of them are made of.

#include "runtime/intercept/submodule.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/nn/options/normalization.h>

#include <cstdint>

namespace smp {

/// Sizes of a built-in model, which reads those that it has: docs/config.md
/// says which, under the same names.
struct model_sizes {
  int64_t vocabulary = 256;
  /// Longest sequence: rows of the table of positions.
  int64_t sequence_length = 128;
  /// Blocks, in a `t5` of the encoder; `mlp`, `ncf`: Linear layers.
  int64_t layers = 4;
  int64_t decoder_layers = 4;
  int64_t heads = 4;
  /// Of the vector of one token, or between two layers.
  int64_t width = 256;
  /// 0: `width` / `heads`.
  int64_t head_size = 0;
  /// Width inside the feed-forward half of a block; 0: 4 times `width`.
  int64_t feed_forward = 0;
  /// Different segments ("token types").
  int64_t segments = 2;
  double norm_eps = 1e-5;
  /// GPT-3: every second block, from the second on, is banded: a token sees the
  /// last `window` tokens, itself included. 0: GPT-2, it sees all earlier ones.
  int64_t window = 0;
  /// Number of biases by distance; the last one stands for `relative_distance`
  /// tokens and more.
  int64_t relative_buckets = 32;
  int64_t relative_distance = 128;
  /// T5 1.1: the feed-forward part multiplies a GELU with a second Linear.
  bool gated = false;
  int64_t experts = 4;
  int64_t users = 256;
  int64_t items = 256;
  int64_t inputs = 32;
  int64_t outputs = 10;
  /// Probability.
  double dropout = 0;
  /// The last layer uses the embedding's weight.
  bool tied = false;
  /// The last layer also computes the loss, so that tensor-parallel ranks can
  /// shard it by vocabulary.
  bool loss_in_head = false;
};

/// @throws error (config) naming the first size that makes no transformer
void require_transformer(const model_sizes& x);

/// @returns the width inside the feed-forward half of a block
int64_t inner_width(const model_sizes& x);

torch::nn::LayerNormOptions norm_options(const model_sizes& x);

/// @param std of the initial weights; a bias begins at 0
submodule<torch::nn::Linear> make_linear(int64_t in, int64_t out, double std,
                                         bool bias = true);

} // namespace smp
