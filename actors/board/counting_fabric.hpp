#pragma once

#include "actors/board/rank_board.hpp"
#include "transport/credits.hpp"
#include "transport/forwarding_fabric.hpp"

#include <memory>
#include <utility>

namespace smp {

/// To tell whether a message is in flight, each one must be counted before it
/// leaves and after its handler returns, whatever fabric is in between. This
/// class keeps these counts on a `rank_board`.
class counting_fabric final : public forwarding_fabric {
public:
  counting_fabric(std::shared_ptr<fabric> inner,
                  std::shared_ptr<rank_board> board)
    : forwarding_fabric(std::move(inner)), board_(std::move(board)) {
    // nop
  }

  void send(rank_id to, message x, sent_callback done) override {
    board_->sent(to);
    inner().send(to, std::move(x), std::move(done));
  }

  /// @returns how many sends to `x` are queued until `x` takes earlier ones.
  uint64_t queued_to(rank_id x) const {
    auto credits = dynamic_cast<const credit_fabric*>(&inner());
    return credits != nullptr ? credits->queued_to(x) : 0;
  }

private:
  void on_message(rank_id from, message x) override {
    listener().on_message(from, std::move(x));
    board_->taken(from);
  }

  std::shared_ptr<rank_board> board_;
};

} // namespace smp
