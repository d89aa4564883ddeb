#pragma once

#include "transport/error.hpp"
#include "transport/ids.hpp"
#include "transport/tensor_ref.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace smp {

class pollable_wake_up;

/// The component that handles a message on the other side.
enum class message_kind : uint8_t {
  request,    // MODULE SERVER: run a module (actors/protocol/wire.hpp)
  response,   // MODULE SERVER: the answer
  control,    // MODULE SERVER: ends of microbatches and steps
  exchange,   // transport/exchange.hpp: matched by name
  object,     // runtime/calls/object_store.hpp: fetch, fetched, release
  collective, // transport/collectives/collectives.hpp
  returned,   // actors/comm/device_arenas.hpp: blocks that were lent
};

constexpr message_kind last_of(message_kind) noexcept {
  return message_kind::returned;
}

/// One self-describing message: an envelope and the tensors it refers to, as
/// one transfer (R38: nothing about it is known to the receiver before).
struct message {
  message_kind kind = message_kind::request;
  payload body;
};

/// Why nothing more can be sent to `x`, which said goodbye.
/// @param lost the rank whose loss made it leave: the first cause, which counts
inline failure left_the_run(rank_id x, std::optional<rank_id> lost) {
  if (!lost)
    return {error_code::rank_down, x, {}, "left the run"};
  return {error_code::rank_down,
          *lost,
          {},
          "lost, says rank " + std::to_string(x.value)
            + ", which left the run for this"};
}

/// What a fabric has moved since it was made.
struct fabric_stats {
  uint64_t messages_sent = 0;
  uint64_t bytes_sent = 0; // envelopes and tensors
  uint64_t messages_received = 0;
  uint64_t bytes_received = 0;
  /// Dropped, because no rank of the run sends such messages.
  uint64_t messages_refused = 0;
};

/// Receives what arrives. Called on a thread of the fabric, or on one that is
/// parked in it, one call at a time per rank; must not block.
class fabric_listener {
public:
  virtual ~fabric_listener() = default;

  virtual void on_message(rank_id from, message x) = 0;

  /// `x.rank` is lost. Called once per rank; nothing from it arrives after.
  virtual void on_peer_lost(const failure& x) = 0;
};

/// Moves messages between ranks in no guaranteed order, and never blocks the
/// caller. The communication stages of the paper (section 6) are built on top,
/// as a fabric around another one (actors/comm/comm_fabric.hpp).
class fabric {
public:
  /// Called once when the message has left: its tensors may then change or be
  /// freed. Gets an empty failure, or why the message could not be sent. Called
  /// on any thread, also inside `send`; must not block.
  using sent_callback = std::function<void(const failure&)>;

  virtual ~fabric() = default;

  virtual rank_id self() const = 0;

  /// @returns what the other ranks need to reach this one (opaque bytes).
  virtual std::string address() const = 0;

  /// Connects to the other ranks and begins to accept messages.
  /// @param addresses one per rank, own one included
  /// @param listener outlives this fabric's `stop`
  virtual void start(const std::vector<std::string>& addresses,
                     fabric_listener& listener)
    = 0;

  /// Sends to another rank or to `self()`. Returns at once; thread-safe.
  /// A message to a lost rank is reported through `done` as `rank_down`.
  virtual void send(rank_id to, message x, sent_callback done = {}) = 0;

  /// Parks the calling thread until `x` is notified, and consumes the
  /// notification. Meanwhile the fabric may call its listener on this thread,
  /// so that a message the thread waits for costs no change of threads. Returns
  /// before this fabric is destroyed.
  virtual void park(pollable_wake_up& x) = 0;

  /// Reports that a rank is dead (launcher, control plane): fails what is in
  /// flight to it and calls `on_peer_lost` unless that was known. Thread-safe.
  virtual void peer_lost(const failure& x) = 0;

  /// Sends what is queued, for at most `limit`, then stops; afterwards no
  /// callback of the listener runs. Losses of peers are not reported any more.
  virtual void stop(std::chrono::milliseconds limit) = 0;

  virtual fabric_stats stats() const = 0;
};

} // namespace smp
