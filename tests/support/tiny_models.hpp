#pragma once

#include "runtime/config/config_file.hpp"

#include <string>

namespace smp::test {

/// A built-in model so small that a step takes milliseconds, on synthetic data,
/// for virtual ranks.
/// @param model `model.type`, or "gpt-3" for a variant with a window
inline train_config tiny_model(const std::string& model) {
  train_config x;
  x.smp.microbatches = 2;
  x.model.type = model;
  x.model.layers = 4;
  x.model.heads = 2;
  x.model.width = 16;
  x.model.vocabulary = 24;
  x.model.users = 12;
  x.model.items = 10;
  x.model.inputs = 8;
  x.model.outputs = 4;
  if (model == "gpt-3") {
    x.model.type = "gpt";
    x.model.variant = "gpt-3";
    x.model.window = 3;
  }
  x.data.type = "synthetic";
  x.data.sequence_length = 8;
  x.data.batch_size = 8;
  x.optimizer.lr = 1e-2;
  x.train.steps = 2;
  x.train.eval_steps = 0;
  x.threads_as_ranks = true;
  return x;
}

} // namespace smp::test
