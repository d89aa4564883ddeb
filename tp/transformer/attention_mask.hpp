#pragma once

// Attention masks: bool, true where visible, or numbers that are added to the
// scores. They broadcast to [B, heads, tokens, tokens].

#include "transport/error.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>

#include <limits>
#include <string>

namespace smp::nn {

/// @returns [tokens, tokens] bool: a token sees itself and those before it
inline at::Tensor causal_mask(int64_t tokens, at::Device device) {
  return at::ones({tokens, tokens}, at::TensorOptions{at::kBool}.device(device))
    .tril();
}

/// @param most limit of tokens; 0: any number
/// @throws error (user_code) for more
inline void check_causal_mask_size(int64_t tokens, int64_t most) {
  if (most > 0 && tokens > most)
    throw error{error_code::user_code, "a sequence of " + std::to_string(tokens)
                                         + " tokens, but causal_mask_size is "
                                         + std::to_string(most)};
}

/// Gives scores that are not visible no weight. @param seen bool
inline at::Tensor hide(const at::Tensor& scores, const at::Tensor& seen) {
  return scores.masked_fill(seen.logical_not(),
                            -std::numeric_limits<double>::infinity());
}

/// @param mask undefined: all is visible
inline at::Tensor masked(const at::Tensor& scores, const at::Tensor& mask) {
  if (!mask.defined())
    return scores;
  return mask.scalar_type() == at::kBool ? hide(scores, mask) : scores + mask;
}

/// @param seen bool @param mask undefined: all is visible
/// @returns both combined: what either hides is hidden
inline at::Tensor both_masks(const at::Tensor& seen, const at::Tensor& mask) {
  if (!mask.defined())
    return seen;
  return mask.scalar_type() == at::kBool ? mask.logical_and(seen)
                                         : hide(mask, seen);
}

} // namespace smp::nn
