#pragma once

// What a run answers to who looks at it from outside. Free of CAF.

#include "actors/protocol/comm_status.hpp"
#include "actors/protocol/rank_view.hpp"
#include "actors/protocol/status.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp {

struct status_item {
  std::string name;
  std::string value;
};

/// One actor, in words that fit every kind.
struct actor_status {
  /// "r0.server", "r0.context.3", "supervisor": unique in its run.
  std::string id;
  /// "MODULE SERVER"
  std::string name;
  /// The id of the actor that made it; empty: none of these.
  std::string parent;
  /// It did so in time. Else it is stuck, or the thread that runs it.
  bool answers = true;
  /// "EXECUTING"; empty if it has none.
  std::string state;
  std::string waits_for;
  /// In this state for so long; 0: not known.
  double seconds = 0;
  /// What it holds and counts.
  std::vector<status_item> items;
};

/// What a rank moved since its session began.
struct comm_status {
  uint64_t messages_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t messages_received = 0;
  uint64_t bytes_received = 0;
  uint64_t messages_refused = 0;
  /// What the stages did and hold.
  comm_report stages;

  /// @returns the most bytes that the arenas ever held; nothing without them
  std::optional<uint64_t> arena_high_water() const {
    if (!stages.device_path)
      return std::nullopt;
    return stages.send_arena.high_water + stages.receive_arena.high_water;
  }
};

/// Activations of a rank that are in a file (smp.offload_activations), in
/// bytes.
struct offload_status {
  uint64_t bytes = 0; // now
  uint64_t peak_bytes = 0;
  uint64_t file_bytes = 0; // length of the file
  // Since the session began:
  uint64_t written = 0;
  uint64_t read = 0;
  uint64_t stayed = 0; // for which there was no room
  double wait_seconds = 0;
};

/// What one rank tells of itself.
struct rank_status {
  int64_t pid = 0;
  std::string host;
  uint64_t pp_rank = 0;
  /// Complete if its actors answered. Else the thread that runs them is
  /// blocked, and this is what stands on its board.
  rank_view view;
  step_id step; // the one that runs or ran last
  bool in_step = false;
  /// Requests and answers that wait for their turn.
  uint64_t queue = 0;
  /// Since the session began; in seconds. Busy is who executes, in a step or
  /// outside of one.
  double up_seconds = 0;
  double busy_seconds = 0;
  /// Share of the last step in which nothing executed here; none before.
  std::optional<double> bubble = {};
  /// Of its process, in bytes.
  uint64_t memory = 0;
  uint64_t peak_memory = 0;
  std::optional<offload_status> offload = {};
  comm_status comm;
  std::vector<actor_status> actors;
};

/// How a rank does, as seen from the SUPERVISOR's process.
enum class rank_health : uint8_t {
  well,
  joining, // it did not come yet
  blocked, // it answers, but its actors do not
  silent,  // it does not answer
  stopped, // so its kernel says
  lost,    // its process ended, or its connection broke
  left,    // it said goodbye
};

constexpr rank_health last_of(rank_health) noexcept {
  return rank_health::left;
}

/// @returns "well", "stopped" ...
constexpr const char* to_string(rank_health x) noexcept {
  switch (x) {
    case rank_health::well:
      return "well";
    case rank_health::joining:
      return "joining";
    case rank_health::blocked:
      return "blocked";
    case rank_health::silent:
      return "silent";
    case rank_health::stopped:
      return "stopped";
    case rank_health::lost:
      return "lost";
    case rank_health::left:
      return "left";
  }
  return "unknown";
}

/// Tells whether a run goes on as it should with such a rank.
constexpr bool is_well(rank_health x) noexcept {
  return x == rank_health::well || x == rank_health::joining
         || x == rank_health::left;
}

struct rank_entry {
  rank_id rank;
  rank_health health = rank_health::joining;
  /// In words, for a rank that is not well.
  std::string why;
  /// Since it answered last.
  double seconds = 0;
  /// It answered at least once: this is what it said last.
  bool known = false;
  rank_status status;
};

struct run_status {
  /// Of the process that hosts the SUPERVISOR: the launcher, or rank 0.
  int64_t pid = 0;
  std::string host;
  std::vector<rank_entry> ranks; // by rank
  stall_status stalls;
  /// Those of no rank, such as the SUPERVISOR.
  std::vector<actor_status> actors;
};

} // namespace smp
