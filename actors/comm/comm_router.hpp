#pragma once

#include "actors/protocol/comm_message.hpp"
#include "transport/device_ops.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace smp {

/// The connection between two ranks.
struct comm_link {
  bool same_node = true;
  /// On the same node: one device can access the memory of the other.
  bool peer_access = false;
  /// On different nodes: the network can access device memory (RDMA).
  bool rdma = false;
};

/// Configuration of the stages of a rank.
struct comm_options {
  /// For tests and benchmarks: treats tensors in host memory as device tensors,
  /// and every other rank as reachable by the device path.
  bool force_device_path = false;
  /// Sizes in bytes of the arenas, which exist only with a device path.
  uint64_t send_arena = 0;
  uint64_t receive_arena = 0;
  /// In bytes, of the arena on a device that shares memory.
  uint64_t device_arena = 0;
  /// Ranks per node, whatever machines they are on, for use with
  /// `force_device_path`; 0: a node is a machine.
  uint64_t ranks_per_node = 0;
  /// Null: this rank has no device.
  std::shared_ptr<device_ops> devices = {};
  /// How long a message may wait for a device to finish its tensors.
  std::chrono::milliseconds device_patience = std::chrono::minutes{5};
};

/// COMM INITIATOR: chooses the path of a tensor by rules 1 to 3 of the paper.
/// Rule 4, free space, is checked later by the D2D ALLOCATORs of both ranks.
/// Both ranks decide from the same inputs.
class comm_router {
public:
  comm_router(rank_id self, const comm_options& options)
    : self_(self),
      options_(options),
      rdma_(options.devices && options.devices->rdma()) {
    // nop
  }

  /// @returns whether fabrics move tensors of the device path, from arenas in
  /// host memory: there is RDMA, or tests do as if.
  bool has_fabric_arenas() const noexcept {
    return options_.force_device_path || rdma_;
  }

  /// Sets the machine of each rank, as arbitrary numbers, the same on all
  /// ranks; until then all are on one machine. @pre no path was chosen yet
  void place(std::vector<uint64_t> machine_of_rank) {
    machine_of_rank_ = std::move(machine_of_rank);
  }

  /// Sets whose devices can read the arena of this rank's device, by rank;
  /// until then none can. @pre no device tensor was sent yet
  void reached_by(std::vector<bool> x) {
    reached_by_ = std::move(x);
  }

  comm_link link_to(rank_id peer) const noexcept;

  /// @returns the first of rules 1 to 3 that applies to a tensor on `device`
  /// sent to `peer`, or `device_path`.
  comm_rule rule_for(device_ref device, rank_id peer) const noexcept;

private:
  bool same_node(rank_id peer) const noexcept;

  rank_id self_;
  comm_options options_;
  bool rdma_;
  std::vector<uint64_t> machine_of_rank_;
  std::vector<bool> reached_by_;
};

/// The rules themselves.
comm_rule decide(bool on_device, const comm_link& link) noexcept;

} // namespace smp
