#pragma once

// Two processes with a UCX fabric between them and nothing above it.

#include "transport/files/file_descriptor.hpp"
#include "transport/ucx/ucx_fabric.hpp"
#include "transport/wake_up.hpp"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace smp::bench {

/// Pins the process to one core, if it has that. Otherwise both ends of a pair
/// share a core at some times and not at others, which changes the cost of a
/// wake-up.
inline void stay_on(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  ::sched_setaffinity(0, sizeof cores, &cores);
}

/// Envelope of the messages: what the other side should do.
enum class order : uint8_t { echo, count, quit };

struct listener : fabric_listener {
  explicit listener(std::function<void(message)> f) : handle(std::move(f)) {
    // nop
  }

  void on_message(rank_id, message x) override {
    handle(std::move(x));
  }

  void on_peer_lost(const failure& x) override {
    std::fprintf(stderr, "%s\n", x.describe().c_str());
    std::_Exit(3);
  }

  std::function<void(message)> handle;
};

/// @returns a message with one tensor of `size` bytes, at most 64 MB
inline message make_message(order what, uint64_t size) {
  static const auto block = std::make_shared<std::vector<char>>(64 << 20, 'x');
  message result;
  result.body.bytes = {static_cast<std::byte>(what)};
  if (size > 0)
    result.body.tensors.push_back(
      {{0, {}, {static_cast<int64_t>(size)}, {}}, block->data(), size, block});
  return result;
}

/// Counts what arrives, for the main thread to wait for.
class counter {
public:
  void add() {
    std::lock_guard guard{mutex_};
    ++value_;
    changed_.notify_one();
  }

  uint64_t value() {
    std::lock_guard guard{mutex_};
    return value_;
  }

  void wait(uint64_t x, std::chrono::seconds limit = std::chrono::seconds{60}) {
    std::unique_lock guard{mutex_};
    if (!changed_.wait_for(guard, limit, [&] { return value_ >= x; })) {
      std::fprintf(stderr, "no answer\n");
      std::_Exit(3);
    }
  }

private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t value_ = 0;
};

/// Forks the other process, which echoes or counts. Make all pairs before this
/// process starts its first thread: the first use of a pair's fabric does.
class fabric_pair {
public:
  /// Wraps the fabric, in both processes.
  using wrap = std::function<std::shared_ptr<fabric>(std::shared_ptr<fabric>)>;

  explicit fabric_pair(const ucx_options& options, wrap around = {})
    : options_(options), around_(std::move(around)) {
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0)
      std::exit(1);
    mine_.reset(sockets[0]);
    file_descriptor others{sockets[1]};
    std::fflush(stdout);
    other_ = ::fork();
    if (other_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      stay_on(1);
      serve(others.get());
      std::_Exit(0);
    }
  }

  ~fabric_pair() {
    if (!fabric_) {
      // The pair was never used.
      ::kill(other_, SIGKILL);
      ::waitpid(other_, nullptr, 0);
      return;
    }
    sends().send(rank_id{1}, make_message(order::quit, 0));
    sends().stop(std::chrono::seconds{5});
    ::waitpid(other_, nullptr, 0);
  }

  fabric_pair(const fabric_pair&) = delete;
  fabric_pair& operator=(const fabric_pair&) = delete;

  /// The fabric itself, with nothing around it.
  ucx_fabric& ucx() {
    sends();
    return *ucx_;
  }

  fabric& sends() {
    if (!fabric_) {
      make(0);
      auto address = swap_addresses(mine_.get(), fabric_->address());
      fabric_->start({{}, address}, listener_);
    }
    return *fabric_;
  }

  /// @param parked the thread waits in the fabric, as one that calls a module
  /// of another rank does; if false, another thread has to wake it
  /// @returns the times of `count` round trips after a warm-up, in seconds
  std::vector<double> round_trips(uint64_t size, int count,
                                  bool parked = false) {
    using clock = std::chrono::steady_clock;
    std::vector<double> result;
    parked_ = parked;
    for (int i = 0; i < count + count / 5; ++i) {
      auto before = answers_.value();
      auto begin = clock::now();
      sends().send(rank_id{1}, make_message(order::echo, size));
      if (parked)
        sends().park(answered_);
      else
        answers_.wait(before + 1);
      std::chrono::duration<double> spent = clock::now() - begin;
      if (i >= count / 5)
        result.push_back(spent.count());
    }
    return result;
  }

private:
  /// Sends `mine` to the other process and returns that one's address.
  static std::string swap_addresses(int socket, const std::string& mine) {
    char buffer[4096];
    if (::send(socket, mine.data(), mine.size(), 0) < 0)
      std::exit(1);
    auto size = ::recv(socket, buffer, sizeof buffer, 0);
    if (size <= 0)
      std::exit(1);
    return {buffer, static_cast<size_t>(size)};
  }

  void make(uint64_t rank) {
    ucx_ = std::make_shared<ucx_fabric>(rank_id{rank}, 2, options_);
    fabric_ = around_ ? around_(ucx_) : ucx_;
  }

  /// Echoes or counts until told to quit.
  void serve(int socket) {
    make(1);
    auto address = swap_addresses(socket, fabric_->address());
    counter quit;
    listener l{[&](message x) {
      auto what = static_cast<order>(x.body.bytes.at(0));
      if (what == order::quit)
        quit.add();
      else if (what == order::echo)
        fabric_->send(rank_id{0}, make_message(what, tensor_bytes(x.body)));
    }};
    fabric_->start({address, {}}, l);
    // Serves while the other process measures; it dies with that one.
    quit.wait(1, std::chrono::hours{1});
    fabric_->stop(std::chrono::seconds{5});
    fabric_ = {};
  }

  ucx_options options_;
  wrap around_;
  file_descriptor mine_;
  counter answers_;
  pollable_wake_up answered_;
  std::atomic<bool> parked_ = false;
  listener listener_{[this](message) {
    if (parked_)
      answered_.notify();
    else
      answers_.add();
  }};
  pid_t other_ = 0;
  std::shared_ptr<ucx_fabric> ucx_;
  std::shared_ptr<fabric> fabric_;
};

/// Sends `count` messages, four of them in flight at a time.
/// @returns bytes per second
inline double stream(fabric& f, uint64_t size, int count) {
  counter sent;
  auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    if (i >= 4)
      sent.wait(static_cast<uint64_t>(i) - 3);
    f.send(rank_id{1}, make_message(order::count, size),
           [&](const failure&) { sent.add(); });
  }
  sent.wait(static_cast<uint64_t>(count));
  std::chrono::duration<double> spent = std::chrono::steady_clock::now()
                                        - begin;
  return static_cast<double>(size) * count / spent.count();
}

} // namespace smp::bench
