#pragma once

#include "transport/credits.hpp"
#include "transport/fabric.hpp"
#include "transport/files/run_secret.hpp"
#include "transport/placing_fabric.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace smp {

/// Settings of UCX. An environment variable UCX_* of the user overrides what is
/// set here, except for `trusted_network`.
struct ucx_options {
  /// UCX transports, e.g. "tcp,self". The first one that reaches a rank carries
  /// its messages.
  std::string transports = "posix,cma,tcp,self";
  /// UCX over tcp does not authenticate peers: without this, it is bound to the
  /// loopback interface.
  bool trusted_network = false;
  /// The interface that tcp uses, where the network is trusted.
  std::string interface = "lo";
  /// Begins each message; the same on all ranks of a run. A message without it
  /// is from another run or a stranger, and is dropped and counted (R44).
  run_token token = {};
  /// How long a thread that waits for messages spins before it sleeps. Takes a
  /// core of each rank.
  std::chrono::microseconds spin{0};
  /// How often UCX asks whether a silent rank still lives.
  std::chrono::milliseconds keepalive{500};
  /// A rank is lost after this long without a sign of life over tcp.
  std::chrono::milliseconds silence{15000};
  /// Priority of small messages that wait to leave: 0 goes first, up to 2. Not
  /// set: they leave in order.
  std::function<uint8_t(const message&)> priority;
  /// Bytes of received blocks that are kept for the next receive.
  uint64_t pool_limit = uint64_t{256} << 20;
};

/// Moves messages between processes by UCX active messages.
///
/// A tensor should cross processes with one copy and no waiting thread. So a
/// message is one active message where it fits: the description in its header,
/// the tensor as a rendezvous that the receiver pulls straight from the
/// sender's memory (cma), into a block that it chooses when the description
/// arrives. One thread per rank sleeps until UCX has something to do; a sender
/// posts on its own thread while the other one sleeps, and never waits for it.
///
/// Set UCX_MEM_MMAP_HOOK_MODE=none before the process starts, else loading UCX
/// takes 0.4 s (R27).
class ucx_fabric : public fabric, public credit_fabric, public placing_fabric {
public:
  /// @throws error of code `transport` when UCX cannot be set up
  ucx_fabric(rank_id self, uint64_t world_size, ucx_options options = {});

  /// Stops without waiting for what is queued.
  ~ucx_fabric() override;

  rank_id self() const override;
  std::string address() const override;
  void start(const std::vector<std::string>& addresses,
             fabric_listener& listener) override;
  void send(rank_id to, message x, sent_callback done = {}) override;
  void park(pollable_wake_up& x) override;
  void peer_lost(const failure& x) override;

  /// All ranks should have finished talking to each other: a rank that stops
  /// first is not a loss to the others, but it no longer answers.
  void stop(std::chrono::milliseconds limit) override;

  fabric_stats stats() const override;

  uint64_t queued_to(rank_id x) const override;

  void place_with(tensor_places& x) override;
  void send_marked(rank_id to, message x, std::vector<uint64_t> transfers,
                   sent_callback done) override;
  void register_memory(std::shared_ptr<std::byte> x, uint64_t size) override;

  /// @returns the UCX transports to rank `x`, e.g. "posix cma"; empty before
  /// `start` and for `self()`.
  std::string transports_to(rank_id x) const;

private:
  class engine;
  std::unique_ptr<engine> engine_;
};

} // namespace smp
