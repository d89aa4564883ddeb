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

/// A tensor that is too large to travel inside the first message.
struct comm_tensor {
  /// Unique on the sending rank, never 0.
  uint64_t id = 0;
  /// Index in its message.
  size_t position = 0;
  uint64_t nbytes = 0;
  uint8_t dtype = 0;
  device_ref device;
  /// The rule that decided its path.
  comm_rule rule = comm_rule::device_path;
  /// Block of an arena, until the tensor has been copied there.
  std::shared_ptr<std::byte> block = {};
  /// The arena is that of the device.
  bool lends = false;
};

/// What passes from stage to stage: a message to or from another rank. Only one
/// thread owns it at a time.
struct comm_message {
  comm_message() = default;

  /// Calls `done` even if a stage dropped the message.
  ~comm_message() {
    finish({error_code::cancelled, no_rank, {}, "the fabric was stopped"});
  }

  comm_message(const comm_message&) = delete;
  comm_message& operator=(const comm_message&) = delete;

  /// The message left, or never will: frees its tensors before it calls `done`.
  void finish(const failure& why) {
    content = {};
    sources.clear();
    if (auto f = std::exchange(done, nullptr))
      f(why);
  }

  /// Number on the sending rank; 0 for a message that arrived.
  uint64_t number = 0;
  rank_id peer;
  message content;
  std::vector<comm_tensor> tensors;
  /// What a device copies into the tensors of `content`, until it is done.
  std::vector<tensor_ref> sources;
  /// Blocks of the sender's device to be returned when that is done.
  std::vector<uint64_t> borrowed;
  /// A stage began to copy, and goes on at its next turn.
  bool copying = false;
  uint64_t bytes = 0;
  fabric::sent_callback done;
  std::chrono::steady_clock::time_point since = {};
};

using comm_message_ptr = std::shared_ptr<comm_message>;

} // namespace smp
