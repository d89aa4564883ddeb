#pragma once

// Masks of attention: bool, and say what is seen, or numbers that are added to
// scores. Broadcast to [B, heads, tokens, tokens].

#include <ATen/ops/ones.h>

#include <limits>

namespace smp::nn {

/// @returns [tokens, tokens] bool: each token and those before it
inline at::Tensor causal_mask(int64_t tokens) {
  return at::ones({tokens, tokens}, at::kBool).tril();
}

/// What is not seen has no weight. @param seen bool
inline at::Tensor hide(const at::Tensor& scores, const at::Tensor& seen) {
  return scores.masked_fill(seen.logical_not(),
                            -std::numeric_limits<double>::infinity());
}

/// @param mask undefined: all is seen
inline at::Tensor masked(const at::Tensor& scores, const at::Tensor& mask) {
  if (!mask.defined())
    return scores;
  return mask.scalar_type() == at::kBool ? hide(scores, mask) : scores + mask;
}

/// @param seen bool @param mask undefined: all is seen
/// @returns what both say
inline at::Tensor both_masks(const at::Tensor& seen, const at::Tensor& mask) {
  if (!mask.defined())
    return seen;
  return mask.scalar_type() == at::kBool ? mask.logical_and(seen)
                                         : hide(mask, seen);
}

} // namespace smp::nn
