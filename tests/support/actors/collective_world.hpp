#pragma once

#include "tests/support/actors/cluster.hpp"
#include "tests/support/error_of.hpp"
#include "transport/collectives/collectives.hpp"

#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace smp::test {

/// Several ranks of this process with their collectives, over one kind of
/// fabric: "loopback" (which reorders), "shm" or "tcp".
class collective_world {
public:
  explicit collective_world(const std::string& kind, uint64_t size,
                            collective_limits limits = {},
                            loopback_options options = {})
    : network{size, options} {
    std::vector<std::string> addresses;
    for (uint64_t i = 0; i < size; ++i) {
      all.push_back(rank_id{i});
      if (kind != "loopback")
        owned_.push_back(std::make_unique<ucx_fabric>(
          rank_id{i}, size, cluster::options_for(kind)));
      auto& x = kind == "loopback" ? network.at(rank_id{i}) : *owned_[i];
      ranks_.push_back(std::make_unique<rank>(x, limits));
      addresses.push_back(x.address());
    }
    for (auto& x : ranks_)
      x->messages.start(addresses, *x);
  }

  ~collective_world() {
    for (auto& x : ranks_)
      x->messages.stop(std::chrono::seconds{5});
  }

  collective_world(const collective_world&) = delete;
  collective_world& operator=(const collective_world&) = delete;

  /// Spreads the ranks over machines, by any numbers; before the first call.
  void place(const std::vector<uint64_t>& machine_of_rank) {
    for (auto& x : ranks_)
      x->sums.place(machine_of_rank);
  }

  collectives& at(uint64_t x) {
    return ranks_[x]->sums;
  }

  fabric& fabric_of(uint64_t x) {
    return ranks_[x]->messages;
  }

  /// Runs `f(rank)` on one thread per rank and joins them.
  /// @returns what they expected in vain, and what they threw
  std::vector<std::string> on_all(const std::function<void(uint64_t)>& f) {
    std::vector<std::thread> threads;
    for (uint64_t i = 0; i < all.size(); ++i)
      threads.emplace_back([this, &f, i] {
        try {
          f(i);
        } catch (const std::exception& e) {
          expect(false, "rank " + std::to_string(i) + ": " + e.what());
        }
      });
    for (auto& t : threads)
      t.join();
    return std::exchange(unexpected_, {});
  }

  /// For the threads of `on_all`: Catch2's assertions are not thread-safe.
  void expect(bool x, const std::string& what) {
    std::lock_guard guard{mutex_};
    if (!x)
      unexpected_.push_back(what);
  }

  loopback_network network;
  std::vector<rank_id> all;

private:
  struct rank : fabric_listener {
    rank(fabric& x, collective_limits limits) : messages{x}, sums{x, limits} {
      // nop
    }

    void on_message(rank_id from, message x) override {
      sums.deliver(from, std::move(x));
    }

    void on_peer_lost(const failure& x) override {
      sums.peer_lost(x);
    }

    fabric& messages;
    collectives sums;
  };

  std::mutex mutex_;
  std::vector<std::string> unexpected_;
  std::vector<std::unique_ptr<ucx_fabric>> owned_;
  std::vector<std::unique_ptr<rank>> ranks_;
};

/// Memory of a call, by which a test fills and reads it.
template <class T>
struct call_buffers {
  std::vector<T> input;
  std::vector<T> output;

  static std::shared_ptr<call_buffers> make(size_t given, size_t taken) {
    auto result = std::make_shared<call_buffers>();
    result->input.resize(given);
    result->output.resize(taken);
    return result;
  }
};

/// @returns `x` with the memory of `buffers`.
template <class T>
collective_call with(collective_call x,
                     const std::shared_ptr<call_buffers<T>>& buffers) {
  x.input = buffers->input.data();
  x.output = buffers->output.data();
  x.owner = buffers;
  return x;
}

inline void await(const started_collective& x) {
  waiter::current().wait(x.done, x.why);
}

/// @returns how it failed, or an empty failure.
inline failure failure_of(const started_collective& x) {
  return failure_of([&x] { await(x); });
}

/// Delivers messages of a stepped network until a call ends. Sums and copies of
/// some size have a thread of their own, whose messages come up at any time.
/// @returns how it failed, or an empty failure.
inline failure ended(collective_world& w, const started_collective& x) {
  auto deadline = inbox::clock::now() + patience;
  while (!x.done->done()) {
    if (inbox::clock::now() >= deadline)
      throw std::runtime_error{"does not end: " + x.why.what};
    w.network.run();
    std::this_thread::yield();
  }
  return failure_of(x);
}

} // namespace smp::test
