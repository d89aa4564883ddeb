#pragma once

// The communication stages of one rank, in a header that does not include CAF.

#include "actors/board/rank_board.hpp"
#include "actors/comm/comm_ledger.hpp"
#include "actors/comm/comm_router.hpp"
#include "actors/comm/device_arenas.hpp"
#include "actors/comm/device_waits.hpp"
#include "actors/comm/host_copies.hpp"
#include "actors/protocol/actor_host.hpp"
#include "actors/protocol/comm_message.hpp"
#include "actors/protocol/comm_status.hpp"
#include "transport/credits.hpp"
#include "transport/device_ops.hpp"
#include "transport/forwarding_fabric.hpp"
#include "transport/memory/arena.hpp"
#include "transport/memory/block_pool.hpp"
#include "transport/placing_fabric.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace smp {

class stage_actors;
struct server_handle;

/// A fabric between a rank and the fabric that moves bytes. All messages of the
/// rank pass through it: it chooses the path of the tensors of each, bounds how
/// many are in flight to each rank, and accounts for them
/// (docs/internals/communication.md). A message for which a stage has nothing
/// to copy continues on the thread it is on. That is true of every message on
/// the host path with tensors in host memory, so a CPU-only rank pays for a few
/// counters. To tell whether a message is in flight, each one is counted on the
/// rank's board before it leaves and after its handler returned.
///
/// No fabric reads or writes device memory. To leave, a tensor is copied to
/// host memory (COMM PREPROCESSING), into the arena of the device (D2D SEND),
/// or into that for the network (CROSS-NODE PROGRESS); the receiver copies it
/// to its device (COMM POSTPROCESSING, D2D RECV, CROSS-NODE PROGRESS).
/// Thread-safe.
class comm_fabric final : public forwarding_fabric,
                          public credit_fabric,
                          private tensor_places {
public:
  /// A stage has something to copy for a message: calls `handle` on the thread
  /// of that stage, later, but not before that time has passed. Called on any
  /// thread.
  using hand_over = std::function<void(comm_stage, comm_message_ptr,
                                       std::chrono::milliseconds)>;

  /// Each stage is an actor.
  /// @throws error (unsupported) if there is a device path and `inner` does not
  /// let receivers place tensors, (transport) if arenas cannot be allocated
  comm_fabric(std::shared_ptr<fabric> inner, std::shared_ptr<actor_host> host,
              std::shared_ptr<rank_board> board,
              const comm_options& options = {});

  /// The caller gives the stages their turns; throws the same.
  comm_fabric(std::shared_ptr<fabric> inner, std::shared_ptr<rank_board> board,
              const comm_options& options, hand_over f);

  ~comm_fabric() override;

  /// Sets the machine of each rank, by any numbers. Each machine is a node,
  /// unless `comm_options` says otherwise. Call before `start`.
  void place(std::vector<uint64_t> machine_of_rank) {
    router_.place(std::move(machine_of_rank));
  }

  /// From now on the MODULE SERVER gets what is for it: requests, responses and
  /// control messages. The rest, and without a SERVER all, is for the listener.
  /// Call before `start`; `stop` lets go of it.
  void serve(std::shared_ptr<const server_handle> x) {
    server_ = std::move(x);
  }

  // -- at the start, on a device ----------------------------------------------

  /// @returns what ranks of this machine need to `open_arenas`; empty if the
  /// device of this rank shares no memory
  const std::string& arena_handle() const noexcept {
    return arenas_.handle();
  }

  /// @param handles by rank
  /// @returns whose arenas the device of this rank can read
  std::vector<bool> open_arenas(std::vector<std::string> handles);

  /// Sets whose devices can read the arena of this rank's: their tensors take
  /// the device path. @pre no device tensor was sent yet
  void reached_by(std::vector<bool> x) {
    router_.reached_by(std::move(x));
  }

  /// COMM INITIATOR
  void send(rank_id to, message x, sent_callback done) override;

  void stop(std::chrono::milliseconds limit) override;

  /// Also counts what went from device to device.
  fabric_stats stats() const override;

  /// Counts messages that wait for room in the window, here or below.
  uint64_t queued_to(rank_id x) const override;

  /// What all stages did and hold; does not ask their actors, so never waits.
  comm_report status() const;

  // -- called by the stages, each on its thread -------------------------------

  /// Copies the tensors of `x`, or goes on when a device has copied them.
  /// @param x null: looks for messages that wait for a device for too long
  /// @pre `takes_turns(at)`
  void handle(comm_stage at, comm_message_ptr x);

  /// @returns whether messages are handed over to `x`.
  bool takes_turns(comm_stage x) const noexcept;

  comm_stage_status status_of(comm_stage x) const {
    return ledger_.status_of(x);
  }

private:
  /// A tensor whose receiver has not decided yet where it goes.
  struct awaited_tensor {
    comm_message_ptr of;
    size_t index;
  };

  /// The window of a rank. A fabric keeps the order in which it got its
  /// messages, so an urgent message can overtake only those that are still held
  /// back here.
  struct line {
    comm_peer_status counts;
    std::map<uint8_t, std::deque<comm_message_ptr>> kept; // by priority
    bool taking = false;
  };

  // -- fabric_listener --------------------------------------------------------

  void on_message(rank_id from, message x) override;
  void on_peer_lost(const failure& x) override;

  // -- tensor_places ----------------------------------------------------------

  /// D2D ALLOCATOR of the receiver: where an arriving tensor goes.
  std::shared_ptr<std::byte> place(const arriving_tensor& x) override;

  /// The decision of another rank about a tensor sent to it.
  void placed(rank_id by, uint64_t transfer, bool as_marked) override;

  // -- this rank sends --------------------------------------------------------

  comm_message_ptr make(rank_id to, message x, sent_callback done);
  void take_host_path(const comm_message_ptr& x);
  void request(const comm_message_ptr& x);
  void allocate(comm_message_ptr x);
  void begin(const comm_message_ptr& x);
  void launch(const comm_message_ptr& x);
  /// @returns the names of its tensors that wait for a decision; 0: none
  std::vector<uint64_t> await_places(const comm_message_ptr& x);
  void note(flight_kind kind, const comm_message& x);
  /// The fabric below is done with a message that was launched.
  void left(const comm_message_ptr& x, const failure& why);

  // -- the window -------------------------------------------------------------

  /// @pre `window_mutex_` is held
  bool has_room(const line& x, uint64_t bytes) const noexcept;
  /// @returns whether `x` may go now; if not, `next` returns it later
  bool enter(const comm_message_ptr& x);
  /// A message that went is over.
  /// @returns whether the caller must now call `next` until it returns null; if
  /// not, another caller does that, perhaps further up on the same stack
  bool leave(rank_id peer, uint64_t bytes);
  /// @returns the most urgent message kept for `peer` that may go now, the
  /// oldest of several, or null
  comm_message_ptr next(rank_id peer);
  /// Fails all messages that wait for room; from now on there is room for all.
  void close(const failure& why);

  // -- this rank receives -----------------------------------------------------

  void deliver(rank_id from, message x);
  bool has_placed(const message& x) const noexcept;
  bool is_crowded() const;

  // -- devices ----------------------------------------------------------------

  void prepare_device_path(const comm_options& options);
  /// Whether tensors must be copied to where a fabric can read them.
  bool is_away(const message& x) const noexcept;
  /// Whether tensors belong on a device of this rank.
  bool is_for_devices(const message& x) const noexcept;
  void turn(comm_stage to, comm_message_ptr x);
  /// Starts to copy what a device has; `bring_rest` copies the others, whose
  /// contents are there by then.
  /// @returns why `x` cannot be sent, or an empty failure
  failure bring_out(comm_message& x);
  failure bring_rest(comm_message& x);
  void bring(comm_message& x, size_t position, std::shared_ptr<std::byte> to,
             device_ref where);
  static void replace(comm_message& x, size_t position, tensor_ref copy);
  /// Starts to copy what belongs on a device, or leaves a crowded arena.
  /// @returns what its sender did wrong, or an empty failure
  failure bring_in(comm_message& x);
  /// @returns where `x` of that sender is copied to; nothing: it stays where it
  /// is, and if its `home` says that it belongs on a device, nobody can read it
  std::optional<tensor_ref> copy_of(tensor_ref& x, rank_id sender);
  /// @returns nothing if there is no memory, or if a device has failed. For the
  /// one of this rank the sender is not to blame.
  std::optional<tensor_ref> copy_to(tensor_ref& x, device_ref where,
                                    rank_id sender);
  /// Of a copy that a device did not begin: the one of this rank if it has
  /// failed, else that of `other`.
  failure why_not_copied(const error& e, rank_id other) const;
  void take_back(rank_id by, const message& x);
  /// @returns whether `x` goes on later, at `at`
  bool awaits_device(comm_stage at, const comm_message_ptr& x);
  void look_for_late(comm_stage at);
  void give_up(comm_message& x, size_t tensor, bool failed);
  void go_on(comm_stage at, comm_message_ptr x);

  const std::shared_ptr<rank_board> board_;
  std::shared_ptr<const server_handle> server_;
  placing_fabric* const placing_; // null: `inner` is none
  comm_router router_;            // constant from the first message on
  const bool has_devices_;
  const std::shared_ptr<device_ops> devices_; // never null
  const std::chrono::milliseconds device_patience_;
  device_arenas arenas_;
  host_copies host_copies_;
  std::atomic<uint64_t> lent_bytes_ = 0;
  std::atomic<uint64_t> borrowed_bytes_ = 0;
  comm_ledger ledger_;
  std::optional<arena> send_arena_;
  std::optional<arena> receive_arena_;
  block_pool pool_;
  std::atomic<uint64_t> next_ = 1;
  mutable std::mutex window_mutex_;
  std::map<rank_id, line> lines_;    // guarded by window_mutex_
  std::atomic<bool> closed_ = false; // set under window_mutex_
  std::mutex awaited_mutex_;
  std::map<uint64_t, awaited_tensor> awaited_; // by tensor id
  std::mutex delivery_;
  std::set<rank_id> lost_; // guarded by delivery_
  hand_over hand_over_;
  const std::shared_ptr<device_waits> waits_;
  /// Last member: they call everything above until they end.
  std::unique_ptr<stage_actors> actors_; // null: the caller gives turns
};

} // namespace smp
