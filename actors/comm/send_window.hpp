#pragma once

#include "actors/protocol/comm_message.hpp"

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

namespace smp {

/// Bounds the messages in flight to each rank. A fabric keeps the order in
/// which it got its messages, so an urgent message can overtake only those that
/// are still held back here. Thread-safe.
class send_window {
public:
  struct limits {
    /// More messages in flight do not raise the throughput.
    uint64_t messages = 8;
    /// A single message may exceed this.
    uint64_t bytes = uint64_t{128} << 20;
  };

  /// @returns the priority of a message: smaller goes sooner
  using priority = uint8_t (*)(const message&);

  explicit send_window(priority f) : send_window(f, limits{}) {
    // nop
  }

  send_window(priority f, limits x) : priority_(f), limits_(x) {
    // nop
  }

  /// @returns whether `x` may go now; if not, `next` returns it later
  bool enter(const comm_message_ptr& x);

  /// A message that went is over.
  /// @returns whether the caller must now call `next` until it returns null; if
  /// not, another caller does that, perhaps further up on the same stack
  bool leave(rank_id peer, uint64_t bytes);

  /// @returns the most urgent message kept for `peer` that may go now, the
  /// oldest of several, or null
  comm_message_ptr next(rank_id peer);

  /// @returns all kept messages. From now on `enter` lets everything go.
  std::vector<comm_message_ptr> close();

  uint64_t queued_to(rank_id peer) const;

  std::vector<comm_peer_status> status() const;

private:
  struct line {
    comm_peer_status counts;
    std::map<uint8_t, std::deque<comm_message_ptr>> kept; // by priority
    bool taking = false;
  };

  bool has_room(const line& x, uint64_t bytes) const noexcept;
  static void go(line& x, uint64_t bytes) noexcept;

  priority priority_;
  limits limits_;
  mutable std::mutex mutex_;
  std::map<rank_id, line> lines_;
  bool closed_ = false;
};

} // namespace smp
