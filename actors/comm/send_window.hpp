#pragma once

#include "actors/protocol/comm_message.hpp"

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

namespace smp {

/// Bounds what is under way to each rank: what is behind a fabric stays in the
/// order in which it came there, so only what was kept back can be overtaken by
/// what is more urgent. Thread-safe.
class send_window {
public:
  struct limits {
    /// More at a time do not make it faster.
    uint64_t messages = 8;
    /// One message may be larger.
    uint64_t bytes = uint64_t{128} << 20;
  };

  /// @returns how urgent a message is: smaller is sooner
  using priority = uint8_t (*)(const message&);

  explicit send_window(priority f) : send_window(f, limits{}) {
    // nop
  }

  send_window(priority f, limits x) : priority_(f), limits_(x) {
    // nop
  }

  /// @returns whether `x` may go now; else it is kept until `next` gives it out
  bool enter(const comm_message_ptr& x);

  /// A message that went is over.
  /// @returns whether the caller must now take `next` until there is none:
  /// else another one does, perhaps further up on its own stack
  bool leave(rank_id peer, uint64_t bytes);

  /// @returns the most urgent message that is kept for `peer` and may go now,
  /// the oldest of several, or null
  comm_message_ptr next(rank_id peer);

  /// @returns all that is kept. From now on all may go.
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
