#pragma once

#include <ATen/core/MT19937RNGEngine.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace smp {

// -- seeds (R23) --------------------------------------------------------------
// Dropout must draw the same numbers however microbatches are interleaved and
// modules are placed. So the body of a microbatch has a stream of random
// numbers of its own, and so has each call of a module in it. All of them are
// derived: a rank that runs a call needs nothing but to know which call it is.
//
// Mixing: splitmix64 is the step and finaliser of Steele, Lea, Flood (2014). A
// sequence of numbers is mixed by h = splitmix64(h + x) for each.

/// Starts from h = splitmix64(seed).
/// @returns the seed of the step body of a microbatch, for
///          `torch::manual_seed`; its low 32 bits, the only ones that this
///          takes, are as well mixed as the high ones
uint64_t microbatch_seed(uint64_t seed, uint64_t step, uint64_t data_rank,
                         uint64_t microbatch) noexcept;

/// What stands for a module in a path: FNV-1a of its first name. Never 0.
uint64_t path_of_module(std::string_view name) noexcept;

/// Names a call within its microbatch; the step body has path 0.
/// @param caller path of the call, or body, that makes this one
/// @param number how often that called the module before
uint64_t path_of_call(uint64_t caller, uint64_t module,
                      uint64_t number) noexcept;

/// @param microbatch its seed
/// @returns the seed of the stream of a call, for `random_stream::derived`
uint64_t call_seed(uint64_t microbatch, uint64_t path) noexcept;

// -- streams ------------------------------------------------------------------

/// State of LibTorch's CPU generator as a value that can be kept.
class random_stream {
public:
  /// What `torch::manual_seed(seed)` gives.
  explicit random_stream(uint64_t seed);

  /// A stream of which all 64 bits of the seed count: `torch::manual_seed`
  /// takes 32, and a step may have more streams than these tell apart. Word
  /// pairs of the state are splitmix64's sequence from `seed`, low half first.
  static random_stream derived(uint64_t seed) noexcept;

  /// @returns a copy of the state of the process's default CPU generator.
  static random_stream of_default();

  /// Exchanges this state with that of the process's default CPU generator.
  /// Called under the execution token.
  void swap_with_default();

  /// Keeps the state of the default generator, which goes on with
  /// `derived(seed)`.
  void replace_default(uint64_t seed);

  /// Gives the kept state back to the default generator.
  void restore_default() const;

  /// Equal streams give equal numbers from here on.
  bool operator==(const random_stream& other) const noexcept;

  /// Nothing is drawn from it: seeding would cost more than all that is done
  /// with it.
  struct empty {};
  explicit random_stream(empty) noexcept {
    // nop
  }

private:
  at::mt19937_data_pod engine_;
  /// Normal numbers come in pairs; the generator keeps the second one.
  std::optional<float> next_float_normal_;
  std::optional<double> next_double_normal_;
};

} // namespace smp
