#pragma once

#include "actors/protocol/comm_status.hpp"
#include "transport/fabric.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace smp {

/// A tensor that does not ride in the first message.
struct comm_tensor {
  /// Unique on the rank that sends it, never 0.
  uint64_t id = 0;
  /// In its message.
  size_t position = 0;
  uint64_t nbytes = 0;
  uint8_t dtype = 0;
  device_ref device;
  /// What decided about its path.
  comm_rule rule = comm_rule::device_path;
  /// Of the send arena, until the tensor lies there.
  std::shared_ptr<std::byte> block = {};
};

/// What moves from stage to stage: a message to or from another rank. One
/// thread has it at a time.
struct comm_message {
  comm_message() = default;

  /// Whoever waits for its end hears of it, even if a stage dropped it.
  ~comm_message() {
    finish({error_code::cancelled, no_rank, {}, "the fabric was stopped"});
  }

  comm_message(const comm_message&) = delete;
  comm_message& operator=(const comm_message&) = delete;

  /// It left, or never will: its tensors go before their owner hears of it.
  void finish(const failure& why) {
    content = {};
    if (auto f = std::exchange(done, nullptr))
      f(why);
  }

  /// Of the rank that sends it; 0 for one that arrived.
  uint64_t number = 0;
  rank_id peer;
  message content;
  std::vector<comm_tensor> tensors;
  uint64_t bytes = 0;
  fabric::sent_callback done;
  std::chrono::steady_clock::time_point since = {};
};

using comm_message_ptr = std::shared_ptr<comm_message>;

/// The receiver's choice about a tensor that was sent to it.
struct comm_placed {
  rank_id by;
  uint64_t tensor = 0;
  bool as_marked = false;
};

} // namespace smp
