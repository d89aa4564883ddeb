#pragma once

#include "actors/protocol/rank_services.hpp"
#include "transport/fabric.hpp"

#include <memory>
#include <vector>

namespace smp {

class execution_token;
class microbatch_sequencer;
class rank_board;
class record_book;
struct user_schedule;

/// What the MODULE SERVER of a rank is built from.
struct server_options {
  rank_id self;
  /// Ranks of the pipeline group by pp_rank; `self` among them. The first one
  /// has the PIPELINE SCHEDULER.
  std::vector<rank_id> pipeline;
  /// First ranks of the pipelines that share modules with this one: a step that
  /// fails here fails there, and one that diverges from its record does so.
  std::vector<rank_id> tied;
  /// Outlives the server, which sends kinds request, response and control.
  smp::fabric* fabric = nullptr;
  /// Outlives the server.
  rank_services* services = nullptr;
  /// All ranks of one process share it (R26).
  std::shared_ptr<execution_token> token;
  /// Where the actors note what they do, for the search for stalls.
  /// Default: a new one, which nobody reads.
  std::shared_ptr<rank_board> board;
  /// An actor of the user's (actors/schedule/user_schedule.hpp), instead of
  /// `rank_services::make_schedule`.
  std::shared_ptr<const user_schedule> schedule_actor;
  /// Orders the microbatches in modules that change state; null: none is.
  std::shared_ptr<microbatch_sequencer> sequencer;
  /// All ranks hear of each forward phase that is over; else only where
  /// microbatches keep their order.
  bool tells_forwards = false;
  /// Records steps and replays them (R33); null: neither.
  std::shared_ptr<record_book> records;
};

} // namespace smp
