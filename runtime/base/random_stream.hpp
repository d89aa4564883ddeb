#pragma once

#include <ATen/core/MT19937RNGEngine.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

namespace smp {

// -- seeds (R23) --------------------------------------------------------------
// Dropout must draw the same numbers however microbatches are interleaved and
// modules are placed. So the step body of each microbatch has a random stream
// of its own, and so has each module call in it. All seeds are derived: a rank
// that runs a call needs to know nothing but which call it is.
//
// Mixing: splitmix64 is the step and finaliser of Steele, Lea, Flood (2014). A
// sequence of numbers is mixed by h = splitmix64(h + x) for each.

/// Starts from h = splitmix64(seed).
/// @returns the seed of the step body of a microbatch, for
/// `torch::manual_seed`, which takes only the low 32 bits; these are as well
/// mixed as the high ones
uint64_t microbatch_seed(uint64_t seed, uint64_t step, uint64_t data_rank,
                         uint64_t microbatch) noexcept;

/// A module's number in a path: FNV-1a of its first name. Never 0.
uint64_t path_of_module(std::string_view name) noexcept;

/// Names a call within its microbatch; the step body has path 0.
/// @param caller path of the call, or step body, that makes this call
/// @param number how often that caller has called the module before
uint64_t path_of_call(uint64_t caller, uint64_t module,
                      uint64_t number) noexcept;

/// @param microbatch the seed of the microbatch
/// @returns the seed of the stream of a call, for `random_stream::derived`
uint64_t call_seed(uint64_t microbatch, uint64_t path) noexcept;

// -- streams ------------------------------------------------------------------

/// The generators of a language, from which modules may draw as from LibTorch's
/// own. Any thread may call.
class language_generators {
public:
  using state = std::shared_ptr<const void>;

  virtual ~language_generators() = default;

  virtual state now() = 0;
  virtual void put_back(const state& x) = 0;
  virtual void seed(uint64_t x) = 0;

  /// Puts back what a trace found, and remembers whether it drew.
  virtual void end_trace(const state& found) = 0;
};

/// State of LibTorch's CPU generator as a value, and of that of the calling
/// rank's device, if it has one: kernels there draw by seed and offset. Also
/// that of a language, while it is included.
class random_stream {
public:
  /// Null: none from now on.
  static void include(language_generators* x) noexcept;

  /// The state after `torch::manual_seed(seed)`.
  explicit random_stream(uint64_t seed);

  /// A stream seeded by all 64 bits: `torch::manual_seed` takes 32, and a step
  /// may have more streams than 32 bits can distinguish. Word pairs of the
  /// state are splitmix64's sequence from `seed`, low half first.
  static random_stream derived(uint64_t seed) noexcept;

  /// @returns a copy of the state of the process's default CPU generator.
  static random_stream of_default();

  /// Exchanges this state with that of the process's default CPU generator.
  /// Called under the execution token.
  void swap_with_default();

  /// Saves the state of the default generator, which continues
  /// with `derived(seed)`.
  void replace_default(uint64_t seed);

  /// Restores the saved state of the default generator.
  void restore_default() const;

  /// Equal streams give equal numbers from here on.
  bool operator==(const random_stream& other) const noexcept;

  /// For a stream that is overwritten before any draw: seeding it would cost
  /// more than everything else.
  struct empty {};
  explicit random_stream(empty) noexcept {
    // nop
  }

private:
  struct counted {
    uint64_t seed = 0;
    uint64_t offset = 0;

    bool operator==(const counted&) const = default;
  };

  static counted of_device();
  static void set_device(counted x);

  at::mt19937_data_pod engine_;
  /// Normal numbers come in pairs; the generator keeps the second one.
  std::optional<float> next_float_normal_;
  std::optional<double> next_double_normal_;
  counted device_;
  /// Of the included ones; null: the state after seeding them as this one.
  language_generators::state included_;
};

/// Those of the process, which traces watch; null: there are none.
language_generators* watched_generators() noexcept;

/// @param x outlives all traces
void watch_generators(language_generators* x) noexcept;

} // namespace smp
