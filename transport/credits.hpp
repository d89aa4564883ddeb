#pragma once

#include "transport/ids.hpp"

#include <cstdint>

namespace smp {

/// A fabric that bounds what is in flight to one rank, and queues the rest
/// until that rank takes some of it.
class credit_fabric {
public:
  virtual ~credit_fabric() = default;

  /// @returns how many sends to `x` wait for credits. Any thread.
  virtual uint64_t queued_to(rank_id x) const = 0;
};

} // namespace smp
