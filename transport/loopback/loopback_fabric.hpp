#pragma once

#include "transport/fabric.hpp"

#include <cstdint>
#include <functional>
#include <memory>

namespace smp {

struct loopback_options {
  /// Decides the order of delivery; the same seed gives the same order of the
  /// same messages.
  uint64_t seed = 1;
  /// Any message in flight may be delivered next; if false, the oldest.
  bool reorder = true;
  /// Nothing moves by itself: `deliver_one` and `run` deliver, on the thread of
  /// the caller. If false, a thread of the network delivers.
  bool stepped = false;
};

/// Ranks that share a process still must not share bytes: an in-place
/// operation of one would change what another saved (R37). This network copies
/// every message when it is delivered, which exposes a sender that changes a
/// tensor before its message has left. It also delivers in any order, loses
/// messages and kills ranks on demand, which no test could ask of a real
/// network.
class loopback_network {
public:
  /// @returns whether to deliver the message; if not, it still counts as sent,
  /// and its receiver counts it as refused.
  using filter = std::function<bool(rank_id from, rank_id to,
                                    const message& x)>;

  explicit loopback_network(uint64_t world_size, loopback_options x = {});

  /// @pre every fabric was stopped or never started
  ~loopback_network();

  loopback_network(const loopback_network&) = delete;
  loopback_network& operator=(const loopback_network&) = delete;

  uint64_t size() const noexcept;

  /// @returns the fabric of rank `x`, which lives as long as the network.
  fabric& at(rank_id x);

  /// Asks `f` about each message from now on, on the delivering thread.
  void set_filter(filter f);

  /// Ends `x.rank` as a crash would: no message reaches or leaves it any more,
  /// and all other ranks are told `x`.
  void kill(const failure& x);

  // -- stepped mode -----------------------------------------------------------

  /// Delivers one message or one loss. @returns false when nothing can be
  bool deliver_one();

  /// Delivers until nothing is in flight, including what deliveries send.
  void run();

private:
  struct impl;
  class rank_fabric;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
