#pragma once

// Data without a file for each built-in model: something that the model can
// learn, so that a falling loss shows that training works.

#include "runtime/config/config_file.hpp"
#include "runtime/data/data.hpp"

#include <memory>

namespace smp {

/// Batches are functions of (data.shuffle_seed, step), as in every source.
/// - "gpt", "moe": {tokens, targets}, both [B, T] int64: the next token is this
///   one plus a stride drawn for the sequence, modulo the vocabulary
/// - "bert", "roberta": {tokens, labels}, both [B, T] int64: sequences that
///   count up; about one token in seven is replaced by the vocabulary's last
///   (the mask), and only these have a label; all others have -100
/// - "t5": {tokens, labels}, both [B, T] int64: the labels are the tokens
/// - "ncf": {users, items, labels}, [B] int64, int64, float32: even users like
///   even items, odd ones odd
/// - "mlp": {vectors, classes}, [B, inputs] float32 and [B] int64: the class
///   is the largest of the first numbers
/// @throws error (config) naming the key that leaves nothing to learn
std::unique_ptr<data_source> make_synthetic(const train_config& x);

} // namespace smp
