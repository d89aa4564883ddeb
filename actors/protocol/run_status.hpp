#pragma once

// Status of a run, for clients that observe it from outside. Free of CAF.

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

/// Status of one actor, in terms that fit every kind.
struct actor_status {
  /// "r0.server", "r0.context.3", "supervisor": unique in its run.
  std::string id;
  /// "MODULE SERVER"
  std::string name;
  /// The id of the actor that spawned it; empty: no actor listed here.
  std::string parent;
  /// It answered in time. If not, it or the thread that runs it is stuck.
  bool answers = true;
  /// "EXECUTING"; empty if it has no state.
  std::string state;
  std::string waits_for;
  /// Time in this state; 0: unknown.
  double seconds = 0;
  /// Its contents and counters.
  std::vector<status_item> items;
};

/// What a rank sent and received since its session began.
struct comm_status {
  uint64_t messages_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t messages_received = 0;
  uint64_t bytes_received = 0;
  uint64_t messages_refused = 0;
  /// Counters and contents of the communication stages.
  comm_report stages;

  /// @returns the most bytes the arenas ever held; nothing if there are none
  std::optional<uint64_t> arena_high_water() const {
    if (!stages.device_path)
      return std::nullopt;
    return stages.send_arena.high_water + stages.receive_arena.high_water;
  }
};

/// Activations of a rank that are kept in a file (smp.offload_activations), in
/// bytes.
struct offload_status {
  uint64_t bytes = 0; // now
  uint64_t peak_bytes = 0;
  uint64_t file_bytes = 0; // length of the file
  // Since the session began:
  uint64_t written = 0;
  uint64_t read = 0;
  uint64_t stayed = 0; // kept in memory for lack of room in the file
  double wait_seconds = 0;
};

/// Where a rank computes, and the memory there, in bytes: what its process held
/// when an execution last ended, and the most by then; 0: not known yet.
struct device_status {
  std::string name; // "cuda:0"
  uint64_t memory = 0;
  uint64_t peak_memory = 0;
  uint64_t total_memory = 0; // that the device has
};

/// Status of one rank, as it reports it.
struct rank_status {
  int64_t pid = 0;
  std::string host;
  uint64_t pp_rank = 0;
  uint64_t tp_rank = 0;
  uint64_t rdp_rank = 0;
  /// Complete if its actors answered. If not, the thread that runs them is
  /// blocked, and this is only what its board shows.
  rank_view view;
  step_id step; // the current or last one
  bool in_step = false;
  /// Requests and answers that wait to be served.
  uint64_t queue = 0;
  /// Seconds since the session began. A rank is busy while it executes, in a
  /// step or outside of one.
  double up_seconds = 0;
  double busy_seconds = 0;
  /// Share of the last step in which this rank was idle; unset before one.
  std::optional<double> bubble = {};
  /// Of its process, in bytes.
  uint64_t memory = 0;
  uint64_t peak_memory = 0;
  std::optional<device_status> device = {}; // nothing: the host
  std::optional<offload_status> offload = {};
  comm_status comm;
  std::vector<actor_status> actors;
};

/// Health of a rank, as seen from the process of the SUPERVISOR.
enum class rank_health : uint8_t {
  well,
  joining, // it has not joined yet
  blocked, // it answers, but its actors do not
  silent,  // it does not answer
  stopped, // its kernel reports it as stopped
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

/// Tells whether a run with such a rank progresses as it should.
constexpr bool is_well(rank_health x) noexcept {
  return x == rank_health::well || x == rank_health::joining
         || x == rank_health::left;
}

struct rank_entry {
  rank_id rank;
  rank_health health = rank_health::joining;
  /// Explanation, for a rank that is not well.
  std::string why;
  /// Time since its last answer.
  double seconds = 0;
  /// It answered at least once: `status` is its last answer.
  bool known = false;
  rank_status status;
};

struct run_status {
  /// Of the process that hosts the SUPERVISOR: the launcher, or rank 0.
  int64_t pid = 0;
  std::string host;
  std::vector<rank_entry> ranks; // by rank
  stall_status stalls;
  /// Actors that belong to no rank, such as the SUPERVISOR.
  std::vector<actor_status> actors;
};

} // namespace smp
