#pragma once

#include "runtime/model/module_walk.hpp"
#include "tp/transformer/transformer_layer_options.hpp"

#include <cstdint>
#include <string>
#include <string_view>

namespace smp {

/// Tells whether TorchScript modules of this class are transformer layers:
/// those of Hugging Face's GPT-2, BERT and RoBERTa.
bool is_script_layer(std::string_view type);

struct script_layer {
  transformer_layer_options options;
  /// Why tensor-parallel ranks cannot share its code; empty: they can.
  std::string doubt;
};

/// What a traced transformer layer computes, read from its code: the names of
/// classes promise nothing about what was traced. Its code, and that of all
/// modules below it, is followed from the arguments to the result, which must
/// be the formula of such a layer.
script_layer read_script_layer(const walked_model& model, uint32_t module);

} // namespace smp
