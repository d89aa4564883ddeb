#pragma once

#include <cstdint>

namespace smp {

/// Activation checkpointing (R52): how activations are treated. Travels with
/// calls (paper, appendix on requests: "whether activation checkpointing is
/// enabled for the current module").
struct recompute_pass {
  enum class kind : uint8_t {
    only,  // kept for backward
    first, // not kept: will be recomputed
    again, // recomputes in backward; changes no state
  };

  kind what = kind::only;
  /// Which random numbers are drawn; 0: those of the first pass.
  uint64_t numbers = 0;
};

constexpr recompute_pass::kind last_of(recompute_pass::kind) noexcept {
  return recompute_pass::kind::again;
}

template <class Inspector>
bool inspect(Inspector& f, recompute_pass& x) {
  auto object = f.object(x);
  return object.fields(f.field("pass", x.what))
         && (x.what == recompute_pass::kind::only
             || object.fields(f.field("random numbers", x.numbers)));
}

} // namespace smp
