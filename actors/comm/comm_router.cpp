#include "actors/comm/comm_router.hpp"

namespace smp {

comm_rule decide(bool on_device, const comm_link& link) noexcept {
  if (!on_device)
    return comm_rule::host_tensor;
  if (link.same_node)
    return link.peer_access ? comm_rule::device_path
                            : comm_rule::no_peer_access;
  return link.rdma ? comm_rule::device_path : comm_rule::no_rdma;
}

bool comm_router::same_node(rank_id peer) const noexcept {
  if (auto n = options_.ranks_per_node; n > 0)
    return peer.value / n == self_.value / n;
  auto& on = machine_of_rank_;
  // The fabric refuses ranks that do not exist.
  if (peer.value >= on.size() || self_.value >= on.size())
    return true;
  return on[peer.value] == on[self_.value];
}

comm_link comm_router::link_to(rank_id peer) const noexcept {
  comm_link result;
  result.same_node = same_node(peer);
  auto forced = options_.force_device_path;
  auto reached = peer.value < reached_by_.size() && reached_by_[peer.value];
  // The fabric copies what a rank sends to itself: no path to choose.
  result.peer_access = result.same_node && peer != self_ && (forced || reached);
  result.rdma = !result.same_node && (forced || rdma_);
  return result;
}

comm_rule comm_router::rule_for(device_ref device,
                                rank_id peer) const noexcept {
  return decide(device != device_ref{} || options_.force_device_path,
                link_to(peer));
}

} // namespace smp
