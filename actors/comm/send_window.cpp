#include "actors/comm/send_window.hpp"

#include <utility>

namespace smp {

bool send_window::has_room(const line& x, uint64_t bytes) const noexcept {
  auto& open = x.counts;
  return closed_ || open.open == 0
         || (open.open < limits_.messages
             && open.open_bytes + bytes <= limits_.bytes);
}

void send_window::go(line& x, uint64_t bytes) noexcept {
  ++x.counts.open;
  x.counts.open_bytes += bytes;
}

bool send_window::enter(const comm_message_ptr& x) {
  std::lock_guard guard{mutex_};
  auto& to = lines_[x->peer];
  // A message overtakes waiting messages only by its priority.
  if (to.counts.queued == 0 && has_room(to, x->bytes)) {
    go(to, x->bytes);
    return true;
  }
  ++to.counts.queued;
  to.counts.queued_bytes += x->bytes;
  to.kept[priority_(x->content)].push_back(x);
  return false;
}

bool send_window::leave(rank_id peer, uint64_t bytes) {
  std::lock_guard guard{mutex_};
  auto& to = lines_[peer];
  --to.counts.open;
  to.counts.open_bytes -= bytes;
  return to.counts.queued > 0 && !std::exchange(to.taking, true);
}

comm_message_ptr send_window::next(rank_id peer) {
  std::lock_guard guard{mutex_};
  auto& to = lines_[peer];
  if (to.kept.empty()
      || !has_room(to, to.kept.begin()->second.front()->bytes)) {
    to.taking = false;
    return nullptr;
  }
  auto first = to.kept.begin();
  auto result = std::move(first->second.front());
  first->second.pop_front();
  if (first->second.empty())
    to.kept.erase(first);
  --to.counts.queued;
  to.counts.queued_bytes -= result->bytes;
  go(to, result->bytes);
  return result;
}

std::vector<comm_message_ptr> send_window::close() {
  std::vector<comm_message_ptr> result;
  std::lock_guard guard{mutex_};
  closed_ = true;
  for (auto& [peer, to] : lines_) {
    for (auto& [priority, kept] : to.kept)
      for (auto& x : kept)
        result.push_back(std::move(x));
    to.kept.clear();
    to.counts.queued = 0;
    to.counts.queued_bytes = 0;
  }
  return result;
}

uint64_t send_window::queued_to(rank_id peer) const {
  std::lock_guard guard{mutex_};
  auto i = lines_.find(peer);
  return i == lines_.end() ? 0 : i->second.counts.queued;
}

std::vector<comm_peer_status> send_window::status() const {
  std::vector<comm_peer_status> result;
  std::lock_guard guard{mutex_};
  for (auto& [peer, to] : lines_) {
    result.push_back(to.counts);
    result.back().peer = peer;
  }
  return result;
}

} // namespace smp
