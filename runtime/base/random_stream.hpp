#pragma once

#include "transport/bytes.hpp"

#include <ATen/core/MT19937RNGEngine.h>

#include <cstdint>
#include <optional>

namespace smp {

/// Dropout must draw the same numbers however microbatches are interleaved and
/// placed, so each microbatch has a stream of its own (R23).
/// Mixing: h = splitmix64(seed), then for each of step, dp_rank and microbatch
/// h = splitmix64(h + x), where splitmix64 is the step and finaliser of
/// Steele, Lea, Flood (2014).
/// @returns a number for `random_stream`; its low 32 bits, the only ones that
///          LibTorch's generator takes, are as well mixed as the high ones
uint64_t microbatch_seed(uint64_t seed, uint64_t step, uint64_t dp_rank,
                         uint64_t microbatch) noexcept;

/// State of LibTorch's CPU generator as a value that can be kept, compared and
/// sent.
class random_stream {
public:
  /// What `torch::manual_seed(seed)` gives.
  explicit random_stream(uint64_t seed = 0);

  /// @returns a copy of the state of the process's default CPU generator.
  static random_stream of_default();

  /// Exchanges this state with that of the process's default CPU generator;
  /// takes under 2 us. Called under the execution token at every switch.
  void swap_with_default();

  /// Equal streams give equal numbers from here on.
  bool operator==(const random_stream& other) const noexcept;

  /// Appends about 2.5 KB.
  void write(byte_writer& out) const;

  /// @throws error (protocol)
  static random_stream read(byte_reader& in);

private:
  at::mt19937_data_pod engine_;
  /// Normal numbers come in pairs; the generator keeps the second one.
  std::optional<float> next_float_normal_;
  std::optional<double> next_double_normal_;
};

} // namespace smp
