#pragma once

#include "actors/board/rank_board.hpp"
#include "transport/credits.hpp"
#include "transport/fabric.hpp"

#include <memory>
#include <utility>

namespace smp {

/// Whether a message is on its way can be told only if each is counted before
/// it leaves and after it was dealt with, whatever fabric is between. This
/// counts on a `rank_board`.
class counting_fabric final : public fabric, private fabric_listener {
public:
  counting_fabric(std::shared_ptr<fabric> inner,
                  std::shared_ptr<rank_board> board)
    : inner_(std::move(inner)), board_(std::move(board)) {
    // nop
  }

  rank_id self() const override {
    return inner_->self();
  }

  std::string address() const override {
    return inner_->address();
  }

  void start(const std::vector<std::string>& addresses,
             fabric_listener& listener) override {
    listener_ = &listener;
    inner_->start(addresses, *this);
  }

  void send(rank_id to, message x, sent_callback done) override {
    board_->sent(to);
    inner_->send(to, std::move(x), std::move(done));
  }

  void park(pollable_wake_up& x) override {
    inner_->park(x);
  }

  void peer_lost(const failure& x) override {
    inner_->peer_lost(x);
  }

  void stop(std::chrono::milliseconds limit) override {
    inner_->stop(limit);
  }

  fabric_stats stats() const override {
    return inner_->stats();
  }

  /// @returns how many sends to `x` wait until it takes earlier ones.
  uint64_t queued_to(rank_id x) const {
    auto credits = dynamic_cast<const credit_fabric*>(inner_.get());
    return credits != nullptr ? credits->queued_to(x) : 0;
  }

private:
  void on_message(rank_id from, message x) override {
    listener_->on_message(from, std::move(x));
    board_->taken(from);
  }

  void on_peer_lost(const failure& x) override {
    listener_->on_peer_lost(x);
  }

  std::shared_ptr<fabric> inner_;
  std::shared_ptr<rank_board> board_;
  fabric_listener* listener_ = nullptr;
};

} // namespace smp
