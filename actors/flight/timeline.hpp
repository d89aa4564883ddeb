#pragma once

#include "transport/flight/flight_image.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace smp {

/// A period of a rank's time. Times are those of the rank's clock, in ns.
struct flight_slice {
  enum class kind : uint8_t {
    step,
    activity,  // of the user's thread
    executing, // a request, or the step body, holds the execution token
    execution, // the same from its beginning to its end, with its waits
    waiting,   // of a context, within an execution
    module,    // within an execution; only in traces
    transfer,  // of tensors
    collective,
  };

  kind what = kind::step;
  int64_t begin = 0;
  int64_t end = 0;
  /// It had not ended when the record was read.
  bool open = false;
  uint32_t name = 0;
  uint32_t step = 0;
  uint32_t microbatch = 0;
  phase in = phase::forward;
  uint32_t context = 0;
  uint32_t peer = flight_event::no_peer;
  uint64_t bytes = 0;
  /// Of an execution, or of a wait for an answer; else `number` is 0.
  request_id request;
};

/// A moment at which a request or its answer left or came.
struct flight_moment {
  int64_t time = 0;
  request_id request;
  rank_id peer;
  uint32_t context = 0;
};

/// What a rank did, as periods. Events whose beginning is not in the record
/// are left out.
struct flight_timeline {
  std::vector<flight_slice> slices;
  /// Requests of this rank that left, and their answers that came.
  std::vector<flight_moment> asked, replies;
  /// Requests of other ranks that came, and their answers that left.
  std::vector<flight_moment> arrived, answered;
  /// Bytes, and when.
  std::vector<std::pair<int64_t, uint64_t>> memory;
};

/// @pre the events of `x` are in the order of their times
flight_timeline timeline_of(const flight_log& x);

/// What a slice shows, in a word: "wait", "forward", "transfer" ...
const char* category_of(const flight_slice& x) noexcept;

/// @returns the name of an event or a slice; modules without one by number
std::string name_of(uint32_t name, const flight_log& from);

/// @returns "forward h.3 mb 2", "optimizer"; modules without a name by number.
/// (Perfetto gives each name a colour of its own, whatever its digits are.)
std::string title_of(const flight_slice& x, const flight_log& from);

} // namespace smp
