#pragma once

#include "actors/protocol/comm_message.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace smp {

/// Messages that go on when a device has finished their tensors. Nobody waits
/// for one, so neither does a message wait for another one. Thread-safe.
class device_waits : public std::enable_shared_from_this<device_waits> {
public:
  using clock = std::chrono::steady_clock;

  /// Called for a message whose tensors are all there; it must not wait.
  using continuation = std::function<void(comm_stage, comm_message_ptr)>;

  /// A message that waits for too long, or for a device that has failed.
  struct overdue {
    comm_stage at = comm_stage::initiator;
    comm_message_ptr what;
    size_t tensor = 0; // the first one that is not ready
  };

  struct looked {
    std::vector<overdue> late;
    bool failed = false; // the device, for all of them
    /// Others wait, so look again.
    bool again = false;
  };

  explicit device_waits(continuation f) : go_on_(std::move(f)) {
    // nop
  }

  /// Keeps `x` until all its tensors are ready, for which it then goes on at
  /// `at`. @pre one of them is not
  /// @returns whether the caller has to `look` later: nobody else will
  bool add(comm_stage at, const comm_message_ptr& x);

  /// Takes out those that have waited since before `then`, or all if the device
  /// has failed. It asks the device, as nobody tells then.
  looked look(clock::time_point then);

  /// Keeps tensors that a device may still read or write, for good.
  void abandon(std::vector<tensor_ref> xs);

  /// Drops all messages, also those that are added from now on.
  void close();

private:
  struct entry {
    comm_stage at = comm_stage::initiator;
    comm_message_ptr what;
    std::vector<bool> missing; // by tensor
    clock::time_point since = {};
  };

  bool has_failed();
  void reached(uint64_t number, size_t tensor);

  continuation go_on_;
  std::mutex mutex_;
  std::map<uint64_t, entry> entries_;
  std::vector<std::vector<tensor_ref>> abandoned_;
  uint64_t next_ = 0;
  bool looking_ = false;
  bool closed_ = false;
};

} // namespace smp
