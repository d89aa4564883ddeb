#include "transport/loopback/loopback_fabric.hpp"

#include "transport/memory/block_pool.hpp"
#include "transport/placing_fabric.hpp"
#include "transport/refuse_waits.hpp"
#include "transport/wake_up.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace smp {

namespace {

/// A message in flight, or the report of a loss if `lost` is set.
struct event {
  rank_id from;
  rank_id to;
  message content;
  std::vector<uint64_t> transfers;
  fabric::sent_callback done;
  failure lost;
};

/// @returns the name of tensor `i`, if the receiver chooses its place; else 0.
uint64_t transfer_of(const event& x, size_t i) {
  auto apart = x.content.body.tensors[i].nbytes > riding_limit;
  return apart && i < x.transfers.size() ? x.transfers[i] : 0;
}

/// @param places null: the receiver is not asked
/// @param as_marked gets the positions of tensors placed as `places` said
message copy_of(const event& e, tensor_places* places,
                std::set<size_t>& as_marked) {
  // Fresh memory each time, so that memory checkers see a use after free.
  block_pool pool{0};
  auto result = e.content;
  for (size_t i = 0; i < result.body.tensors.size(); ++i) {
    auto& t = result.body.tensors[i];
    std::shared_ptr<std::byte> block;
    if (auto name = transfer_of(e, i); name != 0 && places != nullptr)
      block = places->place({e.from, name, t.nbytes});
    if (block)
      as_marked.insert(i);
    else
      block = pool.take(t.nbytes);
    if (t.nbytes > 0)
      std::memcpy(block.get(), t.data, t.nbytes);
    t.data = block.get();
    t.owner = std::move(block);
  }
  return result;
}

uint64_t size_of(const message& x) {
  return x.body.bytes.size() + tensor_bytes(x.body);
}

/// Callbacks to call when no lock is held.
using pending_calls = std::vector<std::pair<fabric::sent_callback, failure>>;

void call_all(pending_calls& xs) {
  for (auto& [done, why] : xs)
    if (done)
      done(why);
}

} // namespace

// -- one rank -----------------------------------------------------------------

class loopback_network::rank_fabric : public fabric, public placing_fabric {
public:
  rank_fabric(impl& network, rank_id self) : network_(network), self_(self) {
    // nop
  }

  rank_id self() const override {
    return self_;
  }

  std::string address() const override {
    return "loopback:" + std::to_string(self_.value);
  }

  void start(const std::vector<std::string>& addresses,
             fabric_listener& listener) override;

  void send(rank_id to, message x, sent_callback done) override {
    send_marked(to, std::move(x), {}, std::move(done));
  }

  void place_with(tensor_places& x) override;

  void send_marked(rank_id to, message x, std::vector<uint64_t> transfers,
                   sent_callback done) override;

  void register_memory(std::shared_ptr<std::byte>, uint64_t) override {
    // All memory of the process serves equally well.
  }

  void peer_lost(const failure& x) override;

  void park(pollable_wake_up& x) override {
    x.wait();
  }

  void stop(std::chrono::milliseconds limit) override;

  fabric_stats stats() const override;

private:
  impl& network_;
  rank_id self_;
};

// -- the network --------------------------------------------------------------

struct loopback_network::impl {
  struct rank_state {
    std::unique_ptr<rank_fabric> fabric;
    fabric_listener* listener = nullptr;
    tensor_places* places = nullptr;
    bool stopped = false;
    std::map<rank_id, failure> lost;
    /// Lost by this rank, or by one that left and said so.
    std::optional<rank_id> first_lost;
    fabric_stats stats;
  };

  explicit impl(loopback_options x) : options(x), random(x.seed) {
    // nop
  }

  bool deliverable(const event& x) {
    return ranks[x.to.value].listener != nullptr;
  }

  /// Takes the next event out. @pre `mutex` is held
  std::optional<event> pick() {
    auto count = events.size();
    // Not std::uniform_int_distribution: the order must be the same with any
    // standard library.
    auto first = options.reorder && count > 0 ? random() % count : 0;
    for (size_t i = 0; i < count; ++i) {
      auto index = (first + i) % count;
      if (!deliverable(events[index]))
        continue;
      auto result = std::move(events[index]);
      if (options.reorder) {
        // The remaining events have no order to keep.
        if (index + 1 != count)
          events[index] = std::move(events.back());
        events.pop_back();
      } else {
        events.erase(events.begin() + static_cast<ptrdiff_t>(index));
      }
      return result;
    }
    return std::nullopt;
  }

  /// Removes messages that match, with the reason for their senders.
  /// @pre `mutex` is held
  template <class Predicate>
  pending_calls purge(Predicate matches, const failure& why) {
    pending_calls result;
    std::erase_if(events, [&](event& x) {
      if (!matches(x))
        return false;
      result.emplace_back(std::move(x.done), why);
      return true;
    });
    return result;
  }

  /// @returns the failure of sends by `who` to a rank that was stopped
  /// @pre `mutex` is held
  failure gone(rank_state& who, rank_id stopped) {
    auto& lost = ranks[stopped.value].first_lost;
    if (!who.first_lost)
      who.first_lost = lost;
    return left_the_run(stopped, lost);
  }

  /// Removes the messages of others to `who`, which is stopped: they are not
  /// cancelled, but have lost their receiver. @pre `mutex` is held
  pending_calls purge_incoming(rank_id who) {
    pending_calls result;
    std::erase_if(events, [&](event& x) {
      if (x.to != who)
        return false;
      if (!x.lost)
        result.emplace_back(std::move(x.done), gone(ranks[x.from.value], who));
      return true;
    });
    return result;
  }

  /// @pre `mutex` is held
  pending_calls lose(rank_id who, const failure& x) {
    auto& state = ranks[who.value];
    if (who == x.rank || state.stopped || !state.lost.emplace(x.rank, x).second)
      return {};
    if (!state.first_lost)
      state.first_lost = x.rank;
    auto result = purge(
      [&](const event& y) {
        return !y.lost
               && ((y.from == who && y.to == x.rank)
                   || (y.from == x.rank && y.to == who));
      },
      x);
    events.push_back({x.rank, who, {}, {}, {}, x});
    return result;
  }

  /// Delivers `x` without the lock. @pre `guard` holds `mutex`
  void deliver(std::unique_lock<std::mutex>& guard, event x) {
    auto listener = ranks[x.to.value].listener;
    auto places = ranks[x.to.value].places;
    auto asking = ranks[x.from.value].places;
    auto asked = filter_;
    busy_from = x.from;
    busy_to = x.to;
    guard.unlock();
    if (x.lost) {
      listener->on_peer_lost(x.lost);
    } else {
      std::set<size_t> as_marked;
      auto copy = copy_of(x, places, as_marked);
      auto wanted = !asked || asked(x.from, x.to, copy);
      guard.lock();
      auto& stats = ranks[x.to.value].stats;
      if (wanted) {
        ++stats.messages_received;
        stats.bytes_received += size_of(copy);
      } else {
        ++stats.messages_refused;
      }
      guard.unlock();
      for (size_t i = 0; i < x.content.body.tensors.size(); ++i)
        if (auto name = transfer_of(x, i); name != 0 && asking != nullptr)
          asking->placed(x.to, name, as_marked.count(i) > 0);
      // Release the sender's tensors before its callback says so.
      x.content = {};
      if (x.done)
        x.done({});
      if (wanted)
        listener->on_message(x.from, std::move(copy));
    }
    guard.lock();
    busy_from.reset();
    busy_to.reset();
    changed.notify_all();
  }

  /// Delivers one event. @returns false when there is none
  bool step() {
    std::unique_lock guard{mutex};
    auto next = pick();
    if (next)
      deliver(guard, std::move(*next));
    return next.has_value();
  }

  void deliver_all() {
    refuse_waits("the thread that delivers messages");
    std::unique_lock guard{mutex};
    while (!ending) {
      if (auto next = pick())
        deliver(guard, std::move(*next));
      else
        changed.wait(guard);
    }
  }

  const loopback_options options;
  std::mutex mutex;
  std::condition_variable changed;
  std::mt19937_64 random;
  std::vector<rank_state> ranks;
  std::deque<event> events;
  filter filter_;
  /// Of the event that is being delivered.
  std::optional<rank_id> busy_from;
  std::optional<rank_id> busy_to;
  bool ending = false;
  std::thread thread;
};

void loopback_network::rank_fabric::start(
  const std::vector<std::string>& addresses, fabric_listener& listener) {
  std::lock_guard guard{network_.mutex};
  if (addresses.size() != network_.ranks.size())
    throw error{error_code::transport,
                "loopback: " + std::to_string(addresses.size())
                  + " addresses for " + std::to_string(network_.ranks.size())
                  + " ranks"};
  network_.ranks[self_.value].listener = &listener;
  network_.changed.notify_all();
}

void loopback_network::rank_fabric::place_with(tensor_places& x) {
  std::lock_guard guard{network_.mutex};
  network_.ranks[self_.value].places = &x;
}

void loopback_network::rank_fabric::send_marked(rank_id to, message x,
                                                std::vector<uint64_t> transfers,
                                                sent_callback done) {
  failure why;
  {
    std::lock_guard guard{network_.mutex};
    auto& me = network_.ranks[self_.value];
    if (std::any_of(x.body.tensors.begin(), x.body.tensors.end(),
                    [](auto& t) { return t.device != device_ref{}; }))
      why = {error_code::unsupported,
             self_,
             {},
             "the loopback fabric moves tensors in host memory only"};
    else if (to.value >= network_.ranks.size())
      why = {error_code::transport,
             self_,
             {},
             "there is no rank " + std::to_string(to.value)};
    else if (me.stopped)
      why = {error_code::cancelled, self_, {}, "the fabric was stopped"};
    else if (auto i = me.lost.find(to); i != me.lost.end())
      why = i->second;
    else if (network_.ranks[to.value].stopped)
      why = network_.gone(me, to);
    if (!why) {
      ++me.stats.messages_sent;
      me.stats.bytes_sent += size_of(x);
      network_.events.push_back(
        {self_, to, std::move(x), std::move(transfers), std::move(done), {}});
      network_.changed.notify_all();
      return;
    }
  }
  if (done)
    done(why);
}

void loopback_network::rank_fabric::peer_lost(const failure& x) {
  pending_calls calls;
  {
    std::lock_guard guard{network_.mutex};
    calls = network_.lose(self_, x);
    network_.changed.notify_all();
  }
  call_all(calls);
}

void loopback_network::rank_fabric::stop(std::chrono::milliseconds limit) {
  auto deadline = std::chrono::steady_clock::now() + limit;
  pending_calls calls;
  {
    std::unique_lock guard{network_.mutex};
    auto& me = network_.ranks[self_.value];
    if (me.stopped)
      return;
    auto drained = [this] {
      return network_.busy_from != self_
             && std::none_of(
               network_.events.begin(), network_.events.end(),
               [this](auto& x) { return x.from == self_ && !x.lost; });
    };
    if (network_.options.stepped) {
      guard.unlock();
      for (bool more = true; more;) {
        guard.lock();
        more = !drained();
        guard.unlock();
        more = more && network_.step();
      }
      guard.lock();
    } else {
      network_.changed.wait_until(guard, deadline, drained);
    }
    me.stopped = true;
    me.listener = nullptr;
    me.places = nullptr;
    calls = network_.purge(
      [this](const event& x) { return x.from == self_ && !x.lost; },
      {error_code::cancelled, self_, {}, "the fabric was stopped"});
    for (auto& call : network_.purge_incoming(self_))
      calls.push_back(std::move(call));
    // Only a callback that is still running can reach the listener.
    network_.changed.wait(guard, [this] {
      return network_.busy_to != self_ && network_.busy_from != self_;
    });
  }
  call_all(calls);
}

fabric_stats loopback_network::rank_fabric::stats() const {
  std::lock_guard guard{network_.mutex};
  return network_.ranks[self_.value].stats;
}

// -- public -------------------------------------------------------------------

loopback_network::loopback_network(uint64_t world_size, loopback_options x)
  : impl_(std::make_unique<impl>(x)) {
  impl_->ranks.resize(world_size);
  for (uint64_t i = 0; i < world_size; ++i)
    impl_->ranks[i].fabric = std::make_unique<rank_fabric>(*impl_, rank_id{i});
  if (!x.stepped)
    impl_->thread = std::thread{[this] { impl_->deliver_all(); }};
}

loopback_network::~loopback_network() {
  if (!impl_->thread.joinable())
    return;
  {
    std::lock_guard guard{impl_->mutex};
    impl_->ending = true;
    impl_->changed.notify_all();
  }
  impl_->thread.join();
}

uint64_t loopback_network::size() const noexcept {
  return impl_->ranks.size();
}

fabric& loopback_network::at(rank_id x) {
  return *impl_->ranks.at(x.value).fabric;
}

void loopback_network::set_filter(filter f) {
  std::lock_guard guard{impl_->mutex};
  impl_->filter_ = std::move(f);
}

void loopback_network::kill(const failure& x) {
  pending_calls calls;
  {
    std::lock_guard guard{impl_->mutex};
    auto& dead = impl_->ranks.at(x.rank.value);
    dead.stopped = true;
    dead.listener = nullptr;
    dead.places = nullptr;
    for (uint64_t i = 0; i < impl_->ranks.size(); ++i)
      for (auto& call : impl_->lose(rank_id{i}, x))
        calls.push_back(std::move(call));
    // Messages that the dead rank sent to itself.
    for (auto& call : impl_->purge(
           [&](const event& y) { return y.to == x.rank && !y.lost; }, x))
      calls.push_back(std::move(call));
    impl_->changed.notify_all();
  }
  call_all(calls);
}

bool loopback_network::deliver_one() {
  return impl_->step();
}

void loopback_network::run() {
  while (impl_->step()) {
    // nop
  }
}

} // namespace smp
