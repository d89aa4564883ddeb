#include "actors/comm/comm_ledger.hpp"

#include <algorithm>
#include <string>

namespace smp {

namespace {

/// Number of messages in flight that a report lists; more would not be read.
constexpr size_t told = 16;

std::string wait_of(comm_stage at, rank_id peer) {
  auto who = "rank " + std::to_string(peer.value);
  switch (at) {
    case comm_stage::requester:
      return "room in the window of " + who;
    case comm_stage::tracker:
    case comm_stage::io_send_watcher:
      return who + " to take its bytes";
    default:
      return std::string{"the "} + to_string(at);
  }
}

} // namespace

void comm_ledger::enter(const comm_message& x, comm_stage where) {
  std::lock_guard guard{mutex_};
  entries_.emplace_hint(entries_.end(), x.number,
                        entry{x.peer, x.bytes, where, x.since});
}

void comm_ledger::move(uint64_t number, comm_stage to) {
  std::lock_guard guard{mutex_};
  if (auto i = entries_.find(number); i != entries_.end())
    i->second.at = to;
}

void comm_ledger::leave(uint64_t number) {
  std::lock_guard guard{mutex_};
  if (entries_.erase(number) > 0 && entries_.empty())
    emptied_.notify_all();
}

bool comm_ledger::wait_until_empty(clock::time_point deadline) {
  std::unique_lock guard{mutex_};
  return emptied_.wait_until(guard, deadline,
                             [this] { return entries_.empty(); });
}

comm_stage_status comm_ledger::count(comm_stage x) const {
  auto& y = counts_[static_cast<size_t>(x)];
  auto here = [x](auto& e) { return e.second.at == x; };
  auto held = std::count_if(entries_.begin(), entries_.end(), here);
  return {x, y.handled, y.bytes, y.passed_by, static_cast<uint64_t>(held)};
}

comm_stage_status comm_ledger::status_of(comm_stage x) const {
  std::lock_guard guard{mutex_};
  return count(x);
}

void comm_ledger::write(comm_report& x) const {
  for (size_t i = 0; i < comm_rules; ++i) {
    x.sent[i] = sent_[i];
    x.received[i] = received_[i];
  }
  auto now = clock::now();
  std::lock_guard guard{mutex_};
  for (size_t i = 0; i < comm_stages; ++i)
    x.stages.push_back(count(static_cast<comm_stage>(i)));
  for (auto& [number, e] : entries_) {
    if (x.oldest.size() == told)
      break;
    std::chrono::duration<double> age = now - e.since;
    x.oldest.push_back(
      {number, e.peer, e.bytes, e.at, wait_of(e.at, e.peer), age.count()});
  }
}

} // namespace smp
