#pragma once

#include "actors/comm/comm_ledger.hpp"
#include "actors/comm/comm_router.hpp"
#include "actors/comm/send_window.hpp"
#include "transport/device_ops.hpp"
#include "transport/memory/arena.hpp"
#include "transport/memory/block_pool.hpp"
#include "transport/placing_fabric.hpp"

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace smp {

/// What the stages call on their environment.
class comm_outside {
public:
  virtual ~comm_outside() = default;

  /// A stage has something to copy for `x`: calls `handle` on the thread of
  /// that stage, later. Called on any thread.
  virtual void hand_over(comm_stage to, comm_message_ptr x) = 0;

  /// Passes a message to the fabric, and later calls `left`.
  /// @param transfers empty: no tensor has an id
  virtual void launch(const comm_message_ptr& x,
                      std::vector<uint64_t> transfers)
    = 0;

  /// A message is complete, and its tensors are where they will stay.
  virtual void deliver(rank_id from, message x) = 0;
};

/// All communication stages of a rank: chooses the path of each message and
/// accounts for it. A message for which a stage has nothing to copy continues
/// on the thread it is on. That is true of every message on the host path with
/// tensors in host memory, so a CPU-only rank pays for a few counters.
///
/// No fabric reads or writes device memory. To leave, a tensor is copied to
/// host memory (COMM PREPROCESSING) or into the send arena (D2D SEND,
/// CROSS-NODE PROGRESS); the receiver copies it to its device (COMM
/// POSTPROCESSING, D2D RECV, CROSS-NODE PROGRESS). Thread-safe.
class comm_core {
public:
  comm_core(rank_id self, const comm_options& options, comm_outside& outside);

  /// See `comm_router::place`. @pre nothing was sent or received yet
  void place(std::vector<uint64_t> machine_of_rank) {
    router_.place(std::move(machine_of_rank));
  }

  // -- called by the fabric ---------------------------------------------------

  /// COMM INITIATOR. @pre `to` is another rank, or this rank has devices
  void send(rank_id to, message x, fabric::sent_callback done);

  /// The fabric is done with a message that was launched.
  void left(const comm_message_ptr& x, const failure& why);

  /// D2D ALLOCATOR of the receiver: where an arriving tensor goes.
  std::shared_ptr<std::byte> place(const arriving_tensor& x);

  /// The decision of another rank about a tensor sent to it.
  void placed(const comm_placed& x);

  void arrived(rank_id from, message x);

  /// Forgets the tensors that wait for a decision of `x`.
  void peer_lost(rank_id x);

  // -- called by the actors, each for its stage -------------------------------

  /// Copies the tensors of `x`; may wait for a device.
  /// @pre `takes_turns(at)`
  void handle(comm_stage at, comm_message_ptr x);

  /// @returns whether messages are handed over to the actor of `x`.
  bool takes_turns(comm_stage x) const noexcept;

  // -- the end ----------------------------------------------------------------

  /// @returns whether all messages left before `deadline`; false after `close`,
  /// when there is nothing to wait for.
  bool drain(comm_ledger::clock::time_point deadline) {
    return !closed_ && ledger_.wait_until_empty(deadline);
  }

  /// Fails messages that wait for room or a device; `left` is not called again.
  void close(const failure& why);

  // -- for those who look -----------------------------------------------------

  bool has_device_path() const noexcept {
    return router_.has_device_path();
  }

  /// True if stages deliver messages as well as the fabric.
  bool delivers_in_turns() const noexcept {
    return has_device_path() || has_devices_;
  }

  const std::optional<arena>& send_arena() const noexcept {
    return send_arena_;
  }

  const std::optional<arena>& receive_arena() const noexcept {
    return receive_arena_;
  }

  uint64_t queued_to(rank_id x) const {
    return window_.queued_to(x);
  }

  comm_stage_status status_of(comm_stage x) const {
    return ledger_.status_of(x);
  }

  comm_report status() const;

private:
  /// A tensor whose receiver has not decided yet where it goes.
  struct awaited_tensor {
    comm_message_ptr of;
    size_t index;
  };

  comm_message_ptr make(rank_id to, message x, fabric::sent_callback done);

  // -- host path --------------------------------------------------------------

  void take_host_path(const comm_message_ptr& x);
  void request(const comm_message_ptr& x);

  // -- device path ------------------------------------------------------------

  void allocate(comm_message_ptr x);
  bool is_crowded() const;
  /// Indices of the tensors that are in the receive arena.
  std::vector<size_t> in_arena(const message& x) const;

  // -- devices ----------------------------------------------------------------

  /// Whether tensors must be copied to where a fabric can read them.
  bool is_away(const message& x) const noexcept;
  /// Whether tensors belong on a device of this rank.
  bool is_for_devices(const message& x) const noexcept;
  /// @returns why `x` cannot be sent, or an empty failure; `await` also
  failure bring_out(comm_message& x);
  /// Waits until the contents of all tensors have been computed.
  failure await(comm_message& x) const;
  void bring_in(message& x);

  // -- both -------------------------------------------------------------------

  void begin(const comm_message_ptr& x);
  void launch(const comm_message_ptr& x);

  const rank_id self_;
  comm_router router_; // constant from the first message on
  comm_outside& outside_;
  const bool has_devices_;
  const std::shared_ptr<device_ops> devices_; // never null
  const std::chrono::milliseconds device_patience_;
  std::atomic<bool> closed_ = false;
  comm_ledger ledger_;
  send_window window_;
  std::optional<arena> send_arena_;
  std::optional<arena> receive_arena_;
  block_pool pool_;
  std::atomic<uint64_t> next_ = 1;
  std::mutex awaited_mutex_;
  std::map<uint64_t, awaited_tensor> awaited_; // by tensor id
};

} // namespace smp
