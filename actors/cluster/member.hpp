#pragma once

#include "actors/cluster/neighbour_processes.hpp"
#include "actors/protocol/actors.hpp"
#include "actors/stalls/stall_judge.hpp"
#include "transport/wait.hpp"

#include <caf/stateful_actor.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp {

struct member_config {
  /// Its `stalls` say when a SUPERVISOR that does not answer is one.
  member me;
  supervisor_actor supervisor;
  /// "127.0.0.1:4711", for texts.
  std::string address;
  std::chrono::milliseconds join_limit{30000};
  std::function<void(const failure&)> on_rank_down;
  /// Hears of that; none: the SUPERVISOR is not watched.
  rank_watch_actor watch;
  /// Rank 0, which tells of stalls else, may be what is stalled.
  bool says_silence = false;
  /// See `membership::options`.
  std::function<std::vector<rank_id>()> stopped_here;
  /// Ends with the answer of the SUPERVISOR.
  std::shared_ptr<awaited<welcome>> joined;
};

struct member_state {
  static inline const char* name = "smp.member";

  using pointer = member_actor::stateful_pointer<member_state>;

  explicit member_state(pointer self) : self(self) {
    // nop
  }

  /// Introduces this rank.
  void join();

  /// Until all have joined, tells the SUPERVISOR which ranks on this machine a
  /// signal stopped or let go on: they may be those that all wait for.
  void look_for_stops();

  void on_rank_down(const failure& x);

  void on_supervisor_down();

  /// Asks the SUPERVISOR whether it is there, again and again: it watches all
  /// ranks, but a process that is stopped keeps its connections, and nobody
  /// else would find out that the one which watches does not. While it is
  /// silent, this rank looks after its neighbours itself.
  void look();
  void on_silence(std::chrono::duration<double> x);

  pointer self;
  member_config config;
  bool leaving = false;
  /// The SUPERVISOR owes an answer since then.
  std::optional<std::chrono::steady_clock::time_point> asked;
  bool told = false;
  std::set<rank_id> stopped;
  neighbour_processes neighbours;
  std::vector<failure> losses;
};

member_actor::behavior_type member_ear(member_state::pointer self,
                                       member_config config);

} // namespace smp
