#pragma once

// The communication stages of one rank, in a header that does not include CAF.

#include "actors/board/rank_board.hpp"
#include "actors/comm/comm_router.hpp"
#include "actors/protocol/actor_host.hpp"
#include "actors/protocol/comm_status.hpp"
#include "transport/credits.hpp"
#include "transport/forwarding_fabric.hpp"

#include <memory>
#include <utility>
#include <vector>

namespace smp {

/// A fabric between a rank and the fabric that moves bytes. All messages of the
/// rank pass through it; the communication stages choose the path of the
/// tensors of each (docs/internals/communication.md). To tell whether a message
/// is in flight, each one is counted on the rank's board before it leaves and
/// after its handler returned.
class comm_fabric final : public forwarding_fabric, public credit_fabric {
public:
  /// @throws error (unsupported) if there is a device path and `inner` does not
  /// let receivers place tensors, (transport) if arenas cannot be allocated
  comm_fabric(std::shared_ptr<fabric> inner, std::shared_ptr<actor_host> host,
              std::shared_ptr<rank_board> board,
              const comm_options& options = {});
  ~comm_fabric() override;

  /// Sets the machine of each rank, by any numbers. Each machine is a node,
  /// unless `comm_options` says otherwise. Call before `start`.
  void place(std::vector<uint64_t> machine_of_rank);

  void send(rank_id to, message x, sent_callback done) override;

  void stop(std::chrono::milliseconds limit) override;

  uint64_t queued_to(rank_id x) const override;

  /// What all stages did and hold; does not ask their actors, so never waits.
  comm_report status() const;

private:
  void on_message(rank_id from, message x) override;
  void on_peer_lost(const failure& x) override;

  /// On any thread. Only for `impl`.
  void hear(rank_id from, message x) {
    listener().on_message(from, std::move(x));
    board_->taken(from);
  }

  std::shared_ptr<rank_board> board_;

  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
