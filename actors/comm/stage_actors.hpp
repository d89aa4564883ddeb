#pragma once

#include "actors/comm/comm_fabric.hpp"
#include "actors/protocol/actors.hpp"

#include <array>
#include <chrono>
#include <memory>

namespace smp {

/// The actors of all stages of a rank. With a device path, those that copy have
/// threads of their own, where nothing else may run.
class stage_actors {
public:
  /// @param of outlives the actors
  stage_actors(std::shared_ptr<actor_host> host, comm_fabric& of);

  ~stage_actors();

  /// @param after how long to keep `x` first
  void hand_over(comm_stage to, comm_message_ptr x,
                 std::chrono::milliseconds after);

  /// After this, the stages make no more calls, and drop what they get.
  void end();

  const comm_stage_actor& at(comm_stage x) const {
    return all_[static_cast<size_t>(x)];
  }

private:
  std::shared_ptr<actor_host> host_;
  std::array<comm_stage_actor, comm_stages> all_;
  bool ended_ = false;
};

} // namespace smp
