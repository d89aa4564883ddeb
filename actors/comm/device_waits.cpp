#include "actors/comm/device_waits.hpp"

#include "transport/device_ops.hpp"

#include <algorithm>
#include <utility>

namespace smp {

bool device_waits::add(comm_stage at, const comm_message_ptr& x) {
  std::vector<std::shared_ptr<device_event>> events;
  entry made{at, x, {}, clock::now()};
  for (auto& t : x->content.body.tensors) {
    events.push_back(t.ready);
    made.missing.push_back(t.ready != nullptr);
  }
  uint64_t number = 0;
  bool look = false;
  {
    std::lock_guard guard{mutex_};
    if (closed_)
      return false; // whoever sent it hears that when the last owner drops it
    number = next_++;
    entries_.emplace(number, std::move(made));
    look = !std::exchange(looking_, true);
  }
  // The message may go on, and end, within the last of these.
  for (size_t i = 0; i < events.size(); ++i)
    if (events[i])
      events[i]->then([weak = weak_from_this(), number, i] {
        if (auto self = weak.lock())
          self->reached(number, i);
      });
  return look;
}

void device_waits::reached(uint64_t number, size_t tensor) {
  // Held while the message is handed over: after `close`, none is.
  std::lock_guard guard{mutex_};
  auto i = entries_.find(number);
  if (i == entries_.end())
    return;
  auto& missing = i->second.missing;
  missing[tensor] = false;
  if (std::find(missing.begin(), missing.end(), true) != missing.end())
    return;
  auto done = std::move(i->second);
  entries_.erase(i);
  go_on_(done.at, std::move(done.what));
}

/// Without the mutex, for which threads of the device may wait.
bool device_waits::has_failed() {
  std::shared_ptr<device_event> any;
  {
    std::lock_guard guard{mutex_};
    if (entries_.empty())
      return false;
    auto& x = entries_.begin()->second;
    auto first = std::find(x.missing.begin(), x.missing.end(), true);
    any = x.what->content.body
            .tensors[static_cast<size_t>(first - x.missing.begin())]
            .ready;
  }
  return any && any->failed();
}

device_waits::looked device_waits::look(clock::time_point then) {
  looked result;
  result.failed = has_failed();
  std::lock_guard guard{mutex_};
  for (auto i = entries_.begin(); i != entries_.end();) {
    auto& [number, x] = *i;
    if (x.since > then && !result.failed) {
      ++i;
      continue;
    }
    auto first = std::find(x.missing.begin(), x.missing.end(), true);
    result.late.push_back({x.at, std::move(x.what),
                           static_cast<size_t>(first - x.missing.begin())});
    i = entries_.erase(i);
  }
  result.again = looking_ = !entries_.empty();
  return result;
}

void device_waits::abandon(std::vector<tensor_ref> xs) {
  std::lock_guard guard{mutex_};
  abandoned_.push_back(std::move(xs));
}

void device_waits::close() {
  std::map<uint64_t, entry> gone;
  std::lock_guard guard{mutex_};
  closed_ = true;
  gone.swap(entries_);
}

} // namespace smp
