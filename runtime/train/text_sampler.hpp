#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <random>
#include <string>

namespace smp {

/// Continues a text byte by byte, each drawn from what a model predicts. Has
/// its own generator, so that all ranks that are given the same logits draw the
/// same text (R23).
class text_sampler {
public:
  struct options {
    /// Longest context that the model takes, in tokens.
    uint64_t context = 128;
    /// Logits are divided by it; towards 0 the most likely byte is taken.
    double temperature = 0.8;
    uint64_t seed = 1;
  };

  /// @param prompt what the text begins with, at least one byte
  text_sampler(std::string prompt, options x);

  /// @returns the last bytes as the model's next input, int64 [1, T] with
  ///          T <= context.
  at::Tensor input() const;

  /// Draws the next byte. logits: float [V], V >= 256; tokens that are not
  /// bytes are left out
  void add(const at::Tensor& logits);

  /// @returns what was drawn, without the prompt.
  std::string text() const {
    return bytes_.substr(prompt_size_);
  }

private:
  options options_;
  std::string bytes_;
  size_t prompt_size_;
  std::mt19937_64 engine_;
};

} // namespace smp
