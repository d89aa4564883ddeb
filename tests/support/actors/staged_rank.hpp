#pragma once

#include "actors/comm/comm_fabric.hpp"
#include "tests/support/actors/payloads.hpp"
#include "transport/forwarding_fabric.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp::test {

/// Moves nothing: keeps what it is sent until the test lets it leave, and
/// delivers what the test makes up.
class held_fabric : public forwarding_fabric, public placing_fabric {
public:
  struct entry {
    rank_id to;
    message content;
    std::vector<uint64_t> transfers; // empty: sent without marks
    sent_callback done;
  };

  explicit held_fabric(uint64_t self = 0)
    : held_fabric(std::make_shared<loopback_network>(3), self) {
    // nop
  }

  void send(rank_id to, message x, sent_callback done) override {
    send_marked(to, std::move(x), {}, std::move(done));
  }

  void send_marked(rank_id to, message x, std::vector<uint64_t> transfers,
                   sent_callback done) override {
    deepest = std::max(deepest, ++depth_);
    if (refuses)
      done(*refuses);
    else
      held.push_back({to, std::move(x), std::move(transfers), std::move(done)});
    --depth_;
  }

  void place_with(tensor_places& x) override {
    places = &x;
  }

  void register_memory(std::shared_ptr<std::byte> x, uint64_t size) override {
    registered.emplace_back(std::move(x), size);
  }

  void peer_lost(const failure& x) override {
    on_peer_lost(x);
  }

  void arrive(rank_id from, message x) {
    on_message(from, std::move(x));
  }

  void leave(size_t which = 0, const failure& why = {}) {
    auto x = std::move(held.at(which));
    held.erase(held.begin() + static_cast<ptrdiff_t>(which));
    x.content = {};
    x.done(why);
  }

  std::deque<entry> held;
  tensor_places* places = nullptr;
  std::vector<std::pair<std::shared_ptr<std::byte>, uint64_t>> registered;
  /// All sends fail with this, at once.
  std::optional<failure> refuses;
  /// The largest number of sends within each other.
  int deepest = 0;

private:
  held_fabric(const std::shared_ptr<loopback_network>& x, uint64_t self)
    : forwarding_fabric({x, &x->at(rank_id{self})}) {
    // nop
  }

  int depth_ = 0;
};

/// A rank whose stages take their turns when the test says so.
struct staged_rank : fabric_listener {
  explicit staged_rank(const comm_options& options = {}, uint64_t self = 0)
    : below(std::make_shared<held_fabric>(self)),
      stages(below, std::make_shared<rank_board>(rank_id{self}, 3), options,
             [this](comm_stage to, comm_message_ptr x,
                    std::chrono::milliseconds after) {
               if (after.count() > 0)
                 return; // nobody waits for so long here
               path.push_back(to);
               turns.emplace_back(to, std::move(x));
             }) {
    stages.start(std::vector<std::string>(3), *this);
  }

  void on_message(rank_id, message x) override {
    delivered.push_back(std::move(x));
  }

  void on_peer_lost(const failure&) override {
    // nop
  }

  void run() {
    while (!turns.empty()) {
      auto [at, x] = std::move(turns.front());
      turns.pop_front();
      stages.handle(at, std::move(x));
    }
  }

  void send(message x, uint64_t to = 1) {
    stages.send(rank_id{to}, std::move(x),
                [this](const failure& y) { ends.push_back(y); });
  }

  void send(std::vector<tensor_ref> tensors, uint64_t to = 1) {
    send(make_message("x", std::move(tensors)), to);
  }

  uint64_t sent(comm_rule x) const {
    return stages.status().sent[static_cast<size_t>(x)];
  }

  uint64_t received(comm_rule x) const {
    return stages.status().received[static_cast<size_t>(x)];
  }

  /// First: messages that are left at the end tell it too.
  std::vector<failure> ends;
  std::deque<std::pair<comm_stage, comm_message_ptr>> turns;
  std::vector<message> delivered;
  std::vector<comm_stage> path;
  std::shared_ptr<held_fabric> below;
  comm_fabric stages;
};

} // namespace smp::test
