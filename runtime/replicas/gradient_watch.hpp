#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace smp {

class model_map;

/// Notices that code other than smp's scaled all gradients of this rank after a
/// step, as torch's `clip_grad_norm_` does: it sees the gradients of one rank
/// only, so that ranks would scale theirs differently.
class gradient_watch {
public:
  /// The first updates are enough to notice what a program always does.
  static constexpr uint64_t watched_updates = 8;

  /// Samples the gradients at the end of a step.
  void note(const model_map& map);

  /// Before smp itself changes gradients.
  void forget() noexcept {
    sums_.clear();
  }

  /// @returns the factor by which all gradients were multiplied since `note`;
  /// nullopt: they were not
  std::optional<double> scaled(const model_map& map) const;

private:
  /// By position in the model's tensors.
  std::map<uint32_t, double> sums_;
};

} // namespace smp
