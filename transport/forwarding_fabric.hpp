#pragma once

#include "transport/fabric.hpp"

#include <memory>
#include <utility>

namespace smp {

/// A fabric around another one, for code that observes or changes some of the
/// traffic: all else is forwarded as it is, in both directions.
class forwarding_fabric : public fabric, protected fabric_listener {
public:
  explicit forwarding_fabric(std::shared_ptr<fabric> inner)
    : inner_(std::move(inner)) {
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

protected:
  fabric& inner() const noexcept {
    return *inner_;
  }

  /// @pre it was started
  fabric_listener& listener() const noexcept {
    return *listener_;
  }

  // -- fabric_listener --------------------------------------------------------

  void on_message(rank_id from, message x) override {
    listener_->on_message(from, std::move(x));
  }

  void on_peer_lost(const failure& x) override {
    listener_->on_peer_lost(x);
  }

private:
  std::shared_ptr<fabric> inner_;
  fabric_listener* listener_ = nullptr;
};

} // namespace smp
