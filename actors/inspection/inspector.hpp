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
  /// Not set if all ranks live in this process.
  supervisor_actor supervisor;
  /// A rank that takes longer counts as silent. (Within half of this time the
  /// rank itself finds out whether its actors answer.)
  std::chrono::milliseconds answer_limit{400};
  /// The same for its stacks: it asks its threads one after the other.
  std::chrono::milliseconds stacks_limit{5500};
};

/// Queries all ranks at once and replies after the deadline with what arrived,
/// so a stuck rank does not delay the others. Sends no second query before an
/// answer: a rank that is stopped for a day must not fill its mailbox.
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

  /// Keys of actors that can owe an answer: rank numbers, and these:
  static constexpr uint64_t the_supervisor = ~uint64_t{0};
  static constexpr uint64_t the_monitor = the_supervisor - 1;

  /// One query of a client.
  struct collection {
    std::set<uint64_t> missing;
    caf::typed_response_promise<run_status> promise;
  };
  using collection_ptr = std::shared_ptr<collection>;

  /// The same for events and stacks.
  struct flight_collection {
    size_t missing = 0;
    std::vector<std::string> answers;
    caf::typed_response_promise<std::vector<std::string>> promise;
  };

  void add(rank_id x, const rank_watch_actor& hdl);

  caf::result<run_status> collect();

  caf::result<std::vector<std::string>> collect(const flight_query& x);

  void ask_rank(uint64_t x);
  void ask_supervisor();
  void ask_monitor();

  /// The answer of `who` has arrived.
  void heard(uint64_t who);

  /// All answers have arrived, or the deadline has passed.
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
  /// The latest answers.
  supervisor_status members;
  stall_status stalls;
};

inspector_actor::behavior_type inspector(inspector_state::pointer self,
                                         inspector_config config);

} // namespace smp
