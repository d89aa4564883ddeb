#pragma once

// Status of the stages of communication, one by one or all together. Free of
// CAF.

#include "transport/ids.hpp"
#include "transport/memory/arena.hpp"

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

/// @returns the name of the stage in capitals, for display.
constexpr const char* to_string(comm_stage x) noexcept {
  constexpr const char* names[] = {
    "COMM INITIATOR",  "D2D ALLOCATOR",       "D2D SEND",
    "D2D RECV",        "CROSS-NODE PROGRESS", "IO SEND WATCHER",
    "IO RECV WATCHER", "COMM PREPROCESSING",  "COMM REQUESTER",
    "COMM TRACKER",    "COMM POSTPROCESSING"};
  return names[static_cast<size_t>(x)];
}

/// Why a tensor takes its path: the first rule that applies sends it over the
/// host path.
enum class comm_rule : uint8_t {
  device_path,    // no rule applies
  host_tensor,    // 1: the tensor is in host memory
  no_peer_access, // 2: same node, but no link between the devices
  no_rdma,        // 3: different nodes, but no RDMA
  no_space,       // 4: no free space in an arena
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
  /// Messages for which it had something to copy, and their bytes.
  uint64_t handled = 0;
  uint64_t bytes = 0;
  /// Messages on its path for which it had nothing to copy.
  uint64_t passed_by = 0;
  /// Messages that it holds now.
  uint64_t held = 0;
};

/// Messages in flight to one rank.
struct comm_peer_status {
  rank_id peer;
  /// Large messages that the fabric accepted and that have not left yet.
  uint64_t open = 0;
  uint64_t open_bytes = 0;
  /// Large messages that wait for room in the send window.
  uint64_t queued = 0;
  uint64_t queued_bytes = 0;
};

/// One message in flight.
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
  /// True if arenas exist, so that tensors may take the device path.
  bool device_path = false;
  std::vector<comm_stage_status> stages; // by stage
  /// Number of tensors above `riding_limit` bytes, by deciding rule: those
  /// sent, as this rank decided, and those received into its arena or not.
  std::array<uint64_t, comm_rules> sent = {};
  std::array<uint64_t, comm_rules> received = {};
  arena_status send_arena;
  arena_status receive_arena;
  std::vector<comm_peer_status> peers;
  /// The oldest messages that have not left yet.
  std::vector<comm_message_status> oldest;
};

} // namespace smp
