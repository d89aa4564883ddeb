#pragma once

// The stages of communication of one rank without CAF in sight.

#include "actors/comm/comm_router.hpp"
#include "actors/protocol/actor_host.hpp"
#include "actors/protocol/comm_status.hpp"
#include "transport/credits.hpp"
#include "transport/forwarding_fabric.hpp"

#include <memory>
#include <utility>
#include <vector>

namespace smp {

/// A fabric through which all messages of a rank pass on their way to and from
/// the one that moves bytes: the stages of communication see each, and decide
/// by which path its tensors travel (docs/internals/communication.md).
class comm_fabric final : public forwarding_fabric, public credit_fabric {
public:
  /// @throws error (unsupported) if there is a device path and `inner` does not
  /// let receivers choose, (transport) if there is no memory for arenas
  comm_fabric(std::shared_ptr<fabric> inner, std::shared_ptr<actor_host> host,
              const comm_options& options);
  ~comm_fabric() override;

  /// Tells on which machine each rank is, by any numbers: those of one are a
  /// node, unless `comm_options` says otherwise. Before `start`.
  void place(std::vector<uint64_t> machine_of_rank);

  void send(rank_id to, message x, sent_callback done) override;

  void stop(std::chrono::milliseconds limit) override;

  uint64_t queued_to(rank_id x) const override;

  /// What all stages did and hold, read beside their actors: it never waits.
  comm_report status() const;

private:
  void on_message(rank_id from, message x) override;
  void on_peer_lost(const failure& x) override;

  /// On any thread. Only for `impl`.
  void hear(rank_id from, message x) {
    listener().on_message(from, std::move(x));
  }

  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
