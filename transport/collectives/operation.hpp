#pragma once

#include "transport/collectives/collective_message.hpp"
#include "transport/collectives/collective_plan.hpp"
#include "transport/collectives/sent_ahead.hpp"
#include "transport/device_ops.hpp"
#include "transport/memory/block_pool.hpp"
#include "transport/wait.hpp"

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// One collective on one rank: carries out its plan as messages arrive. Not
/// thread-safe, except for what a wait may look at. On a device it only begins
/// copies and sums, and messages wait for them on their way.
class collective_operation {
public:
  /// Sends a message. `sent` is called on any thread, and may be empty.
  using sender = std::function<void(rank_id to, message x,
                                    std::function<void(const failure&)> sent)>;

  /// Called, on any thread, when a send is done that the end waits for.
  using wake = std::function<void(const failure&)>;

  /// The device has begun something that the end waits for, and for which
  /// `read` has to stay.
  using work = std::function<void(std::shared_ptr<device_event> done,
                                  std::vector<tensor_ref> read)>;

  /// What all operations of a rank share.
  struct surroundings {
    uint64_t unasked; // limit of bytes to a rank that was not heard from yet
    sent_ahead& ahead;
    block_pool& pool;
    device_ops* devices; // null: none
  };

  struct callbacks {
    sender send;
    wake sent;
    work begun;
  };

  /// @param self position in the group
  /// @throws error (transport) if the device has no memory for it
  collective_operation(collective_call x, uint64_t self, collective_plan plan,
                       const surroundings& around, callbacks tell);

  // -- steps ------------------------------------------------------------------

  /// Assigns the call its number; called once, before all else.
  const collective_label& set_number(uint64_t x);

  /// Sends what may be sent, and tells the peers that this rank has joined.
  void begin();

  /// Handles a message from rank `from` (a position).
  /// @throws error (protocol) for a message that does not fit the plan
  void take(uint64_t from, const collective_message& x);

  /// One of its sends is done.
  void sent_one();

  /// Something that the device has begun is done, or it has failed.
  void worked_once(const device_event& done);

  /// The call is over here. What was sent to ranks not heard from still counts.
  void leave(bool well);

  /// @returns whether all is done: sent, received and summed.
  bool complete() const noexcept {
    return pieces_left_ == 0 && open_sends_ == 0 && kept_.empty()
           && open_work_ == 0;
  }

  bool on_device() const noexcept {
    return call_.what.on_device;
  }

  /// @returns that the device has failed, if it has
  failure look_at_device();

  /// @returns what the device refused; empty: nothing
  const failure& broken() const noexcept {
    return broken_;
  }

  const collective_call& call() const noexcept {
    return call_;
  }

  const collective_writer& writer() const noexcept {
    return *writer_;
  }

  uint64_t self() const noexcept {
    return self_;
  }

  const completion_ptr& done() const noexcept {
    return done_;
  }

  // -- any thread -------------------------------------------------------------

  /// @returns what the call still waits for, and from which rank.
  std::pair<std::string, std::optional<rank_id>> missing() const;

  /// @returns the ranks that the call waits for and that have not joined.
  std::vector<rank_id> absent() const;

private:
  struct segment {
    std::vector<tensor_ref> given; // by source
    size_t missing = 0;            // sources, without this rank
  };

  struct running_piece {
    collective_plan::piece plan;
    std::byte* memory = nullptr;
    std::shared_ptr<const void> owner;
    std::vector<segment> segments;
    size_t left = 0;
  };

  /// A message that may not be sent yet.
  struct kept_send {
    uint64_t to;
    message content;
    bool counted;
  };

  void prepare(const collective_plan::piece& x);
  std::shared_ptr<std::byte> take_memory(uint64_t size);
  void count_neighbours();
  void send_input();
  tensor_ref copy_of_input(byte_range range);
  void send_segments(uint64_t to, uint32_t piece, tensor_ref bytes,
                     uint64_t offset, bool counted);
  void give(uint64_t to, message x, bool counted);
  bool may_send(uint64_t to, uint64_t bytes);
  void say_joined(uint64_t to);
  bool is_told_by_all() const noexcept;
  void joined(uint64_t from);
  void take_segment(uint64_t from, const piece_segment& where,
                    const tensor_ref& bytes);
  void finish(running_piece& x, size_t index);
  std::shared_ptr<device_event> add_up(running_piece& x, const segment& s,
                                       byte_range range);
  void break_off(const std::string& why);
  std::shared_ptr<device_event> put(const combination& x, std::byte* to,
                                    const std::vector<const void*>& inputs);
  byte_range range_of(const running_piece& x, size_t index) const;
  tensor_ref view(const void* data, uint64_t size,
                  std::shared_ptr<const void> owner,
                  std::shared_ptr<device_event> ready = {}) const;

  collective_call call_;
  const uint64_t self_;
  const collective_plan plan_;
  const surroundings around_;
  const callbacks tell_;
  std::optional<collective_writer> writer_; // once there is a number
  const completion_ptr done_ = std::make_shared<completion>();

  std::map<uint32_t, running_piece> pieces_;
  size_t pieces_left_ = 0;
  size_t open_sends_ = 0;
  std::atomic<size_t> open_work_ = 0; // of the device
  failure broken_;
  std::vector<kept_send> kept_;
  /// What was sent to a rank before it was heard from, by position.
  std::vector<message_amount> unasked_;
  std::vector<bool> told_;    // ranks that were sent something
  std::vector<bool> to_tell_; // ranks that the plan involves
  /// Whether a rank was heard from, and how many segments it still owes.
  std::vector<std::atomic<bool>> heard_;
  std::vector<std::atomic<uint64_t>> owed_;
};

} // namespace smp
