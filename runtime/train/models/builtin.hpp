#pragma once

// The models that smp brings along, as a configuration names them.

#include "runtime/config/config_file.hpp"
#include "runtime/train/models/model_sizes.hpp"

#include <memory>

namespace smp {

class trainable;

/// Batches, where B is the size of the (micro)batch and brackets mark optional
/// tensors:
/// - "gpt", "moe": tokens, targets: [B, T] int64
/// - "bert", "roberta": tokens [, mask [, segments]], labels: [B, T] int64,
///   the mask 0 at padding, labels -100 where nothing is to be predicted
/// - "t5": tokens [, mask [, decoder tokens]], labels: [B, S] int64 and [B, T]
///   for the last two; decoder tokens follow from labels
/// - "ncf": users, items: [B] int64, labels: [B] float32, 0 to 1
/// - "mlp": vectors: [B, inputs] float32, classes: [B] int64
/// @throws error (config) naming a size that makes no sense, or `model.type`
/// if there is no such model
std::unique_ptr<trainable> make_builtin(const train_config& config);

/// @returns the sizes that a configuration gives its model
model_sizes sizes_of(const train_config& config);

} // namespace smp
