#pragma once

#include "transport/collectives/collective_call.hpp"

#include <cstdint>
#include <map>

namespace smp {

/// Messages, and the bytes of their tensors.
struct message_amount {
  uint64_t messages = 0;
  uint64_t bytes = 0;

  message_amount& operator+=(const message_amount& x) noexcept {
    messages += x.messages;
    bytes += x.bytes;
    return *this;
  }

  message_amount& operator-=(const message_amount& x) noexcept {
    messages -= x.messages;
    bytes -= x.bytes;
    return *this;
  }

  bool exceeds(const message_amount& limit) const noexcept {
    return messages > limit.messages || bytes > limit.bytes;
  }
};

/// A receiver keeps the messages of a call that it has not joined yet, and a
/// program may be thousands of calls ahead of another rank. So each rank counts
/// what its peers may have to keep of its own messages, and sends a peer no
/// more than a limit before that peer joins. Not thread-safe.
class sent_ahead {
public:
  /// @param limit for each receiver
  explicit sent_ahead(message_amount limit) : limit_(limit) {
    // nop
  }

  /// @returns whether a message of `bytes` bytes may be sent to `to`; if so, it
  /// is counted.
  bool add(rank_id to, uint64_t bytes);

  /// Takes back what was counted: `to` has joined.
  void remove(rank_id to, const message_amount& x) {
    kept_by_[to] -= x;
  }

  /// The call is over here, and `to`, which was sent `y` of it, was not heard
  /// from.
  void leave(const collective_label& x, rank_id to, const message_amount& y);

  /// `from` was heard from in a call that is over here.
  void joined(const collective_label& x, rank_id from);

  /// The step has ended: no rank keeps messages of it any more.
  void step_over(step_id x);

private:
  const message_amount limit_;
  std::map<rank_id, message_amount> kept_by_;
  /// Of calls that are over here, by receiver.
  std::map<collective_label, std::map<rank_id, message_amount>> left_;
  step_id last_over_;
};

} // namespace smp
