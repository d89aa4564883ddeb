#pragma once

#include "actors/comm/comm_ledger.hpp"
#include "actors/comm/comm_router.hpp"
#include "actors/comm/send_window.hpp"
#include "transport/arena.hpp"
#include "transport/block_pool.hpp"
#include "transport/device_ops.hpp"
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

/// What the stages ask of others.
class comm_outside {
public:
  virtual ~comm_outside() = default;

  /// A stage has something to copy for `x`: on its own thread, `handle` is to
  /// be called. Any thread.
  virtual void hand_over(comm_stage to, comm_message_ptr x) = 0;

  /// Gives a message to the fabric; afterwards `left` is to be called.
  /// @param transfers empty: no tensor has a name
  virtual void launch(const comm_message_ptr& x,
                      std::vector<uint64_t> transfers)
    = 0;

  /// A message is complete and lies where it stays.
  virtual void deliver(rank_id from, message x) = 0;
};

/// All stages of communication of a rank: decides the way of each message, and
/// accounts for it. A message for which a stage has nothing to copy goes on on
/// the thread that it came on; on the host path, with tensors in host memory,
/// that is all of them. So a CPU-only rank pays for a few counters.
///
/// No fabric moves the memory of a device: to leave, a tensor is copied to host
/// memory (COMM PREPROCESSING) or into the send arena (D2D SEND, CROSS-NODE
/// PROGRESS), and on the other side to the device there (COMM POSTPROCESSING,
/// D2D RECV, CROSS-NODE PROGRESS). Thread-safe.
class comm_core {
public:
  comm_core(rank_id self, const comm_options& options, comm_outside& outside);

  /// See `comm_router::place`. @pre nothing was sent and nothing arrived
  void place(std::vector<uint64_t> machine_of_rank) {
    router_.place(std::move(machine_of_rank));
  }

  // -- called by the fabric ---------------------------------------------------

  /// COMM INITIATOR. @pre `to` is another rank, or this one has devices
  void send(rank_id to, message x, fabric::sent_callback done);

  /// A message that was launched is over.
  void left(const comm_message_ptr& x, const failure& why);

  /// D2D ALLOCATOR of the receiver: its choice.
  std::shared_ptr<std::byte> place(const arriving_tensor& x);

  /// The choice of another one.
  void placed(const comm_placed& x);

  void arrived(rank_id from, message x);

  /// Forgets what waits for the choice of `x`.
  void peer_lost(rank_id x);

  // -- called by the actors, each for its stage -------------------------------

  /// May wait for a device.
  /// @pre `takes_turns(at)`
  void handle(comm_stage at, comm_message_ptr x);

  /// @returns whether messages are handed over to `x`.
  bool takes_turns(comm_stage x) const noexcept;

  // -- the end ----------------------------------------------------------------

  /// @returns whether all messages left before `deadline`; after `close` there
  /// is nothing to wait for.
  bool drain(comm_ledger::clock::time_point deadline) {
    return !closed_ && ledger_.wait_until_empty(deadline);
  }

  /// Fails what waits for room or a device: `left` will not be called again.
  void close(const failure& why);

  // -- for those who look -----------------------------------------------------

  bool has_device_path() const noexcept {
    return router_.has_device_path();
  }

  /// Messages are delivered by stages as well as by the fabric.
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
  /// A tensor whose receiver did not say yet where it lies.
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
  /// Positions of tensors that lie in the receive arena.
  std::vector<size_t> in_arena(const message& x) const;

  // -- devices ----------------------------------------------------------------

  /// Whether tensors have to be brought to where a fabric can read them.
  bool is_away(const message& x) const noexcept;
  /// Whether tensors belong on a device of this rank.
  bool is_for_devices(const message& x) const noexcept;
  /// @returns why it cannot be sent, or an empty failure; so does `await`
  failure bring_out(comm_message& x);
  /// Waits until the bytes of all tensors are there.
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
  std::map<uint64_t, awaited_tensor> awaited_; // by name
};

} // namespace smp
