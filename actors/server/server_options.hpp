#pragma once

#include "actors/protocol/rank_services.hpp"
#include "transport/fabric.hpp"

#include <memory>
#include <vector>

namespace smp {

class execution_token;
class microbatch_sequencer;
class rank_board;
class order_book;
struct user_schedule;

/// Construction parameters of the MODULE SERVER of a rank.
struct server_options {
  rank_id self;
  /// Ranks of the pipeline group by pp_rank, including `self`. The first one
  /// has the PIPELINE SCHEDULER.
  std::vector<rank_id> pipeline;
  /// First ranks of the pipelines that share modules with this one: when a step
  /// fails or diverges from its record here, it does so there too.
  std::vector<rank_id> tied;
  /// Must outlive the server, which sends kinds request, response and control.
  smp::fabric* fabric = nullptr;
  /// Must outlive the server.
  rank_services* services = nullptr;
  /// Shared by all ranks of a process (R26).
  std::shared_ptr<execution_token> token;
  /// Where the actors note what they do, for the stall search. Default: a new
  /// board that nothing reads.
  std::shared_ptr<rank_board> board;
  /// An actor of the user's (actors/schedule/user_schedule.hpp), instead of
  /// `rank_services::make_schedule`.
  std::shared_ptr<const user_schedule> schedule_actor;
  /// Orders microbatches in modules that change state; null: none does.
  std::shared_ptr<microbatch_sequencer> sequencer;
  /// Tells all ranks of each forward phase that ends; if false, does so only
  /// where microbatches pass modules in order.
  bool tells_forwards = false;
  /// How many executions may have returned their token before the device did
  /// what they launched. 0: there is no device.
  uint64_t launch_ahead = 0;
  /// Records and replays steps (R33); null: neither.
  std::shared_ptr<order_book> records;
};

} // namespace smp
