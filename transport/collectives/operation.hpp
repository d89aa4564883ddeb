#pragma once

#include "transport/collectives/collective_message.hpp"
#include "transport/collectives/collective_plan.hpp"
#include "transport/collectives/sent_ahead.hpp"
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
/// thread-safe, except for what a wait may look at.
class collective_operation {
public:
  /// Sends a message. `sent` is called on any thread, and may be empty.
  using sender = std::function<void(rank_id to, message x,
                                    std::function<void(const failure&)> sent)>;

  /// Called, on any thread, when a send is done that the end waits for.
  using wake = std::function<void(const failure&)>;

  /// @param self position in the group
  /// @param unasked limit of bytes to a rank that was not heard from yet
  /// @param ahead shared by all operations of this rank
  collective_operation(collective_call x, uint64_t self, collective_plan plan,
                       uint64_t unasked, sent_ahead& ahead, block_pool& pool,
                       sender send, wake sent);

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

  /// The call is over here. What was sent to ranks not heard from still counts.
  void leave(bool well);

  /// @returns whether all is done: sent, received and summed.
  bool complete() const noexcept {
    return pieces_left_ == 0 && open_sends_ == 0 && kept_.empty();
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
  void count_neighbours();
  void send_input();
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
  void add_up(running_piece& x, segment& s, byte_range range);
  byte_range range_of(const running_piece& x, size_t index) const;
  tensor_ref view(const void* data, uint64_t size,
                  std::shared_ptr<const void> owner) const;

  collective_call call_;
  const uint64_t self_;
  const collective_plan plan_;
  const uint64_t unasked_limit_;
  sent_ahead& ahead_;
  block_pool& pool_;
  const sender send_;
  const wake sent_;
  std::optional<collective_writer> writer_; // once there is a number
  const completion_ptr done_ = std::make_shared<completion>();

  std::map<uint32_t, running_piece> pieces_;
  size_t pieces_left_ = 0;
  size_t open_sends_ = 0;
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
