#pragma once

#include "transport/ids.hpp"

#include <cstdint>

namespace smp {

/// What happened on a rank. The values are part of the format of files: append
/// only.
enum class flight_kind : uint8_t {
  none,
  step_begins,
  step_ends,
  /// The schedule lets a microbatch begin a phase.
  admitted,
  /// A request left for `peer`.
  asked,
  /// A request of another rank came.
  arrived,
  /// A request begins to execute in `context`.
  executes,
  /// `context` waits for what `origin`, `number` or, without a number, `name`
  /// says; of `peer`, if that is a rank.
  parked,
  /// `context` executes again.
  resumed,
  /// The execution of a request ended.
  ended,
  /// The answer to a request left for `peer`.
  answered,
  /// The answer to a request of this rank came.
  reply,
  /// The transfer `number` to `peer`, of tensors, began. (Messages without
  /// large tensors are no transfers.)
  transfer_begins,
  transfer_ends,
  /// A message with large tensors came from `peer`.
  tensors_arrived,
  /// The collective `number`, called `name`.
  collective_begins,
  collective_ends,
  /// The user's thread: the optimizer, a checkpoint, a wait, as `name` says.
  activity_begins,
  activity_ends,
  /// Only in traces: `context` calls a module of this rank.
  module_begins,
  module_ends,
  /// Only in traces: the memory of the rank, `amount` bytes.
  memory,
  /// The step failed.
  failed,
};

constexpr flight_kind last_of(flight_kind) noexcept {
  return flight_kind::failed;
}

/// One event. Fields that a kind does not name are 0.
struct flight_event {
  static constexpr uint32_t no_peer = ~uint32_t{0};

  /// Nanoseconds of the machine's monotonic clock.
  int64_t time = 0;
  /// Of the request: its `request_id`; of other kinds their own number.
  uint64_t number = 0;
  uint64_t amount = 0; // bytes
  uint32_t origin = 0;
  uint32_t step = 0;
  /// A module, or a text that the record knows (`flight_record::name`).
  uint32_t name = 0;
  uint32_t microbatch = 0;
  uint32_t context = 0;
  uint32_t peer = no_peer;
  flight_kind kind = flight_kind::none;
  phase what = phase::forward;
  uint16_t reserved = 0;
  uint32_t reserved_too = 0;

  request_id request() const noexcept {
    return {rank_id{origin}, number};
  }
};

static_assert(sizeof(flight_event) == 56);

/// Names from here on are texts, those below are modules.
inline constexpr uint32_t first_text_name = uint32_t{1} << 31;

/// A text for which there was no room.
inline constexpr uint32_t unknown_name = ~uint32_t{0};

} // namespace smp
