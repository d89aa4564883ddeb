#pragma once

#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// What is waited for, for code that decides by it. Texts about waits are for
/// people only, and may be worded anew at any time.
struct wait_subject {
  enum class kind : uint8_t {
    other,
    step_end, // of the user's thread
    exchange,
    collective,
    module, // the answer to a call
    device, // the work that this rank launched
  };

  kind what = kind::other;
  /// Of the exchange, the collective or the module.
  std::string name = {};
  /// The ranks of the collective.
  std::vector<rank_id> group = {};
  /// Of the call of the module.
  phase called = phase::forward;
};

constexpr wait_subject::kind last_of(wait_subject::kind) noexcept {
  return wait_subject::kind::device;
}

} // namespace smp
