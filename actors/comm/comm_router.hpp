#pragma once

#include "actors/protocol/comm_message.hpp"
#include "transport/device_ops.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace smp {

/// What is between two ranks.
struct comm_link {
  bool same_node = true;
  /// On the same node: one device can write into the memory of the other.
  bool peer_access = false;
  /// On different nodes: the network can.
  bool rdma = false;
};

/// How the stages of a rank are set up.
struct comm_options {
  /// For tests and measurements: takes tensors in host memory for tensors of a
  /// device, and every other rank as reachable from there.
  bool force_device_path = false;
  /// Bytes of the arenas, which are made if there is a device path.
  uint64_t send_arena = 0;
  uint64_t receive_arena = 0;
  /// Ranks on one node, whatever machines they are on, for what is forced; 0:
  /// those of one machine.
  uint64_t ranks_per_node = 0;
  /// Null: this rank has no device.
  std::shared_ptr<device_ops> devices = {};
  /// How long a message may wait for its bytes on a device.
  std::chrono::milliseconds device_patience = std::chrono::minutes{5};
};

/// COMM INITIATOR: decides the path of a tensor by the paper's rules, but for
/// the last one, space, which only the D2D ALLOCATORs of both ranks know. What
/// it decides from is the same for both of them.
class comm_router {
public:
  comm_router(rank_id self, const comm_options& options)
    : self_(self),
      options_(options),
      links_(options.devices ? options.devices->links() : device_links{}) {
    // nop
  }

  /// @returns whether any tensor can take the device path.
  bool has_device_path() const noexcept {
    return options_.force_device_path || links_.peer_access || links_.rdma;
  }

  /// Tells on which machine each rank is, by any numbers; until then all are on
  /// one. All ranks are told the same. @pre nothing was decided
  void place(std::vector<uint64_t> machine_of_rank) {
    machine_of_rank_ = std::move(machine_of_rank);
  }

  comm_link link_to(rank_id peer) const noexcept;

  /// @returns the first of the rules 1 to 3 that holds for a tensor on `device`
  /// to `peer`, or `device_path`.
  comm_rule rule_for(device_ref device, rank_id peer) const noexcept;

private:
  bool same_node(rank_id peer) const noexcept;

  rank_id self_;
  comm_options options_;
  device_links links_;
  std::vector<uint64_t> machine_of_rank_;
};

/// The rules themselves.
comm_rule decide(bool on_device, const comm_link& link) noexcept;

} // namespace smp
