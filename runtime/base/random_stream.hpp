#pragma once

#include "transport/bytes.hpp"

#include <ATen/core/MT19937RNGEngine.h>

#include <cstdint>
#include <optional>
#include <utility>

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
  explicit random_stream(uint64_t seed);

  random_stream() : random_stream(0) {
    // nop
  }

  /// @returns a copy of the state of the process's default CPU generator.
  static random_stream of_default();

  /// Exchanges this state with that of the process's default CPU generator;
  /// takes under 2 us. Called under the execution token at every switch.
  void swap_with_default();

  /// Equal streams give equal numbers from here on.
  bool operator==(const random_stream& other) const noexcept;

  /// About 2.5 KB; all streams have the same length (R33).
  template <class Inspector>
  friend bool inspect(Inspector& f, random_stream& x) {
    auto& engine = x.engine_;
    auto left = [&] { return static_cast<uint16_t>(engine.left_); };
    auto set_left = [&](uint16_t y) {
      engine.left_ = y;
      return true;
    };
    auto next = [&] { return static_cast<uint16_t>(engine.next_); };
    auto set_next = [&](uint16_t y) {
      engine.next_ = y;
      return is_reachable(engine.left_, engine.next_);
    };
    return f.object(x).fields(
      f.field("seed", engine.seed_), f.field("left", left, set_left),
      f.field("next", next, set_next), f.field("state", engine.state_),
      normal_field(f, "normal float", x.next_float_normal_),
      normal_field(f, "normal double", x.next_double_normal_));
  }

private:
  /// Whether the engine of LibTorch stays inside of its state with these.
  static bool is_reachable(int left, uint32_t next) noexcept;

  /// A number is written even where there is none.
  template <class Inspector, class T>
  static auto normal_field(Inspector& f, const char* name,
                           std::optional<T>& x) {
    auto get = [&x] { return std::pair{x.has_value(), x.value_or(0)}; };
    auto set = [&x](std::pair<bool, T> y) {
      x = y.first ? std::optional{y.second} : std::nullopt;
      return true;
    };
    return f.field(name, get, set);
  }

  at::mt19937_data_pod engine_;
  /// Normal numbers come in pairs; the generator keeps the second one.
  std::optional<float> next_float_normal_;
  std::optional<double> next_double_normal_;
};

} // namespace smp
