#pragma once

#include "actors/protocol/actors.hpp"
#include "transport/wait.hpp"

#include <caf/stateful_actor.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace smp {

struct member_config {
  member me;
  supervisor_actor supervisor;
  /// "127.0.0.1:4711", for texts.
  std::string address;
  std::chrono::milliseconds join_limit{30000};
  std::function<void(const failure&)> on_rank_down;
  /// Ends with the answer of the SUPERVISOR.
  std::shared_ptr<awaited<welcome>> joined;
};

struct member_state {
  static inline const char* name = "smp.member";

  using pointer = member_actor::stateful_pointer<member_state>;

  explicit member_state(pointer self) : self(self) {
    // nop
  }

  /// Introduces this rank.
  void join();

  void on_rank_down(const failure& x);

  void on_supervisor_down();

  pointer self;
  member_config config;
  bool leaving = false;
  std::vector<failure> losses;
};

member_actor::behavior_type member_ear(member_state::pointer self,
                                       member_config config);

} // namespace smp
