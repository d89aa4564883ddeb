#pragma once

// What the stages of communication answer when they are asked how they are,
// one by one or all together. Free of CAF.

#include "transport/arena.hpp"
#include "transport/ids.hpp"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// The stages that a message passes on its way (paper, appendix G).
enum class comm_stage : uint8_t {
  initiator,
  // device path
  d2d_allocator,
  d2d_send,
  d2d_recv,
  cross_node_progress,
  io_send_watcher,
  io_recv_watcher,
  // host path
  preprocessing,
  requester,
  tracker,
  postprocessing,
};

constexpr comm_stage last_of(comm_stage) noexcept {
  return comm_stage::postprocessing;
}

inline constexpr size_t comm_stages = static_cast<size_t>(last_of(comm_stage{}))
                                      + 1;

/// @returns the stage in capitals, as people write it.
constexpr const char* to_string(comm_stage x) noexcept {
  constexpr const char* names[] = {
    "COMM INITIATOR",  "D2D ALLOCATOR",       "D2D SEND",
    "D2D RECV",        "CROSS-NODE PROGRESS", "IO SEND WATCHER",
    "IO RECV WATCHER", "COMM PREPROCESSING",  "COMM REQUESTER",
    "COMM TRACKER",    "COMM POSTPROCESSING"};
  return names[static_cast<size_t>(x)];
}

/// Why a tensor takes its path: the first rule that holds sends it over the
/// host path.
enum class comm_rule : uint8_t {
  device_path,    // none holds
  host_tensor,    // 1: it lies in host memory
  no_peer_access, // 2: same node, but no link between the devices
  no_rdma,        // 3: other node, but no RDMA
  no_space,       // 4: no space in an arena
};

constexpr comm_rule last_of(comm_rule) noexcept {
  return comm_rule::no_space;
}

inline constexpr size_t comm_rules = static_cast<size_t>(last_of(comm_rule{}))
                                     + 1;

constexpr const char* to_string(comm_rule x) noexcept {
  constexpr const char* names[] = {"device path", "host tensor",
                                   "no peer access", "no RDMA", "no space"};
  return names[static_cast<size_t>(x)];
}

/// What a stage did since the session began.
struct comm_stage_status {
  comm_stage stage = comm_stage::initiator;
  /// Messages for which it had something to do, and their bytes.
  uint64_t handled = 0;
  uint64_t bytes = 0;
  /// Messages on its path for which it had nothing to do.
  uint64_t passed_by = 0;
  /// Messages that are with it.
  uint64_t held = 0;
};

/// What is under way to one rank.
struct comm_peer_status {
  rank_id peer;
  /// Large messages that were given to the fabric and did not leave yet.
  uint64_t open = 0;
  uint64_t open_bytes = 0;
  /// Large messages that wait for room in the window.
  uint64_t queued = 0;
  uint64_t queued_bytes = 0;
};

/// A message under way.
struct comm_message_status {
  uint64_t number = 0;
  rank_id peer;
  uint64_t bytes = 0;
  comm_stage at = comm_stage::initiator;
  std::string waits_for;
  double seconds = 0; // since it was sent
};

struct comm_report {
  rank_id rank;
  /// There are arenas: tensors may take the device path.
  bool device_path = false;
  std::vector<comm_stage_status> stages; // by stage
  /// Tensors of more than `riding_limit` bytes by the rule that decided: sent,
  /// as this rank decided, and received into its arena or not.
  std::array<uint64_t, comm_rules> sent = {};
  std::array<uint64_t, comm_rules> received = {};
  arena_status send_arena;
  arena_status receive_arena;
  std::vector<comm_peer_status> peers;
  /// The oldest messages that did not leave yet.
  std::vector<comm_message_status> oldest;
};

} // namespace smp
