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

/// What comes of a call before its receiver has joined is kept there, and a
/// program may be thousands of calls ahead of another rank. So each rank counts
/// what of its own others may have to keep, and sends them no more than a limit
/// before they are there. Not thread-safe.
class sent_ahead {
public:
  /// @param limit for each receiver
  explicit sent_ahead(message_amount limit) : limit_(limit) {
    // nop
  }

  /// @returns whether a message of so many bytes may go to `to`, which counts
  /// it.
  bool add(rank_id to, uint64_t bytes);

  /// Takes back what was counted: `to` is there.
  void remove(rank_id to, const message_amount& x) {
    kept_by_[to] -= x;
  }

  /// The call is over here, and `to`, to which so much of it was sent, was not
  /// heard.
  void leave(const collective_label& x, rank_id to, const message_amount& y);

  /// `from` was heard in a call that is over here.
  void joined(const collective_label& x, rank_id from);

  /// Nobody keeps anything of the step any more.
  void step_over(step_id x);

private:
  const message_amount limit_;
  std::map<rank_id, message_amount> kept_by_;
  /// Of calls that are over here, by receiver.
  std::map<collective_label, std::map<rank_id, message_amount>> left_;
  step_id last_over_;
};

} // namespace smp
