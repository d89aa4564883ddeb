#pragma once

#include "actors/protocol/actors.hpp"

#include <caf/stateful_actor.hpp>
#include <caf/typed_response_promise.hpp>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

namespace smp {

struct inspector_config {
  uint64_t world_size = 1;
  /// None where all ranks live in this process.
  supervisor_actor supervisor;
  /// A rank that takes longer counts as silent. (It knows itself within half
  /// of that whether its actors answer.)
  std::chrono::milliseconds answer_limit{400};
};

/// Asks everybody at once and tells after the deadline what came, so that
/// nobody who is stuck holds up the others. Nobody is asked twice before it
/// answered: a rank that is stopped for a day must not fill its mailbox.
struct inspector_state {
  static inline const char* name = "smp.inspector";

  using pointer = inspector_actor::stateful_pointer<inspector_state>;
  using clock = std::chrono::steady_clock;

  explicit inspector_state(pointer self) : self(self) {
    // nop
  }

  struct known_rank {
    rank_watch_actor actor;
    clock::time_point heard;
    bool failed = false; // its process is gone
    rank_entry entry;
  };

  /// Who owes an answer. Ranks have their numbers, and these follow:
  static constexpr uint64_t the_supervisor = ~uint64_t{0};
  static constexpr uint64_t the_monitor = the_supervisor - 1;

  /// One question of a client.
  struct collection {
    std::set<uint64_t> missing;
    caf::typed_response_promise<run_status> promise;
  };
  using collection_ptr = std::shared_ptr<collection>;

  void add(rank_id x, const rank_watch_actor& hdl);

  caf::result<run_status> collect();

  void ask_rank(uint64_t x);
  void ask_supervisor();
  void ask_monitor();

  /// `who` answered.
  void heard(uint64_t who);

  /// All have answered, or it is time.
  void finish(const collection_ptr& x);

  run_status result(const std::set<uint64_t>& missing);
  bool is_stopped(const rank_entry& x) const;
  rank_entry entry_of(rank_id x, bool missing);
  std::vector<actor_status> own_actors(const std::set<uint64_t>& missing) const;

  pointer self;
  inspector_config config;
  std::map<uint64_t, known_rank> ranks;
  stall_monitor_actor monitor;
  std::set<uint64_t> asked; // owe an answer
  std::set<collection_ptr> collections;
  /// The last answers.
  supervisor_status members;
  stall_status stalls;
};

inspector_actor::behavior_type inspector(inspector_state::pointer self,
                                         inspector_config config);

} // namespace smp
