#pragma once

#include "transport/inspect.hpp"

#include <cstdint>

namespace smp {

/// What a client outside the run asks of each rank: its events, or where its
/// threads are.
struct flight_query {
  enum class kind : uint8_t {
    last,         // the last events that it keeps
    begin_trace,  // to keep all from now on, for a minute; answers with nothing
    finish_trace, // those, and no more
    stacks,       // of its threads, now: a `process_stacks`
  };

  kind what = kind::last;
  /// Events of one rank in the answer.
  uint64_t limit = 0;
};

constexpr flight_query::kind last_of(flight_query::kind) noexcept {
  return flight_query::kind::stacks;
}

template <class Inspector>
bool inspect(Inspector& f, flight_query& x) {
  return f.object(x).fields(f.field("what", x.what), f.field("limit", x.limit));
}

} // namespace smp
