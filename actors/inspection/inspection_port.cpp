#include "actors/inspection/inspection_port.hpp"

#include "transport/bytes.hpp"
#include "transport/gate.hpp"
#include "transport/wake_up.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <poll.h>
#include <sys/socket.h>

namespace smp {

namespace {

using port_clock = std::chrono::steady_clock;

/// A connection that has shown the secret.
class inspection_peer {
public:
  explicit inspection_peer(file_descriptor x) : connection_(std::move(x)) {
    // nop
  }

  int fd() const noexcept {
    return connection_.get();
  }

  /// What it waits for.
  std::optional<inspection_question> asks() const noexcept {
    return asks_;
  }

  short wants() const noexcept {
    return static_cast<short>(POLLIN | (sent_ < out_.size() ? POLLOUT : 0));
  }

  /// @returns false if this connection is over.
  bool go_on(short events) {
    if ((events & (POLLERR | POLLHUP | POLLNVAL)) != 0)
      return false;
    return ((events & POLLIN) == 0 || read()) && write();
  }

  bool answer(const std::vector<std::byte>& x) {
    asks_.reset();
    byte_writer out;
    out.bytes(x);
    out_ = out.take();
    sent_ = 0;
    return write();
  }

private:
  bool read() {
    char x = 0;
    auto got = ::recv(fd(), &x, 1, MSG_DONTWAIT);
    if (got < 0)
      return errno == EINTR || errno == EAGAIN;
    // One request at a time: a peer that does not read answers is not a client.
    if (got == 0 || !is_question(x) || asks_ || sent_ < out_.size())
      return false;
    asks_ = inspection_question{x};
    return true;
  }

  static bool is_question(char x) {
    switch (inspection_question{x}) {
      case inspection_question::status:
      case inspection_question::events:
      case inspection_question::recent:
      case inspection_question::begin_trace:
      case inspection_question::finish_trace:
      case inspection_question::stacks:
        return true;
    }
    return false;
  }

  bool write() {
    while (sent_ < out_.size()) {
      auto n = ::send(fd(), out_.data() + sent_, out_.size() - sent_,
                      MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EINTR)
        continue;
      if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK;
      sent_ += static_cast<size_t>(n);
    }
    return true;
  }

  file_descriptor connection_;
  std::optional<inspection_question> asks_;
  std::vector<std::byte> out_;
  size_t sent_ = 0;
};

} // namespace

struct inspection_port::impl {
  explicit impl(options x) : config(std::move(x)), entrance(gate_options()) {
    thread = std::thread{[this] { run(); }};
  }

  ~impl() {
    stopping = true;
    wake.notify();
    thread.join();
  }

  gate::options gate_options() {
    gate::options x;
    x.address = config.address;
    x.port = config.port;
    x.secret = config.secret;
    x.admit = [this](file_descriptor y) {
      std::lock_guard guard{mutex};
      admitted.push_back(std::move(y));
      wake.notify();
    };
    return x;
  }

  void run() {
    while (!stopping) {
      take_admitted();
      std::vector<pollfd> fds{{wake.fd(), POLLIN, 0}};
      for (auto& x : peers)
        fds.push_back({x.fd(), x.wants(), 0});
      ::poll(fds.data(), fds.size(), time_out());
      while (wake.try_wait()) {
        // nop
      }
      auto i = fds.begin() + 1;
      for (auto x = peers.begin(); x != peers.end(); ++i)
        x = i->revents == 0 || x->go_on(i->revents) ? std::next(x)
                                                    : peers.erase(x);
      answer_all();
    }
  }

  void take_admitted() {
    std::lock_guard guard{mutex};
    for (auto& x : admitted) {
      if (peers.size() >= config.client_limit)
        peers.pop_front();
      peers.emplace_back(std::move(x));
    }
    admitted.clear();
  }

  bool asked() const {
    return std::any_of(peers.begin(), peers.end(),
                       [](auto& x) { return x.asks().has_value(); });
  }

  int time_out() const {
    if (!asked())
      return -1;
    auto left = std::chrono::ceil<std::chrono::milliseconds>(
      next - port_clock::now());
    return static_cast<int>(std::max<int64_t>(left.count(), 0));
  }

  /// All requests of a kind that have arrived by now get the same answer.
  void answer_all() {
    if (stopping || !asked() || port_clock::now() < next)
      return;
    std::map<inspection_question, bytes> answers;
    for (auto& x : peers)
      if (x.asks() && !answers.contains(*x.asks()))
        answers.emplace(*x.asks(), config.collect(*x.asks()));
    next = port_clock::now()
           + std::chrono::duration_cast<port_clock::duration>(
             std::chrono::duration<double>{1 / config.rate_limit});
    for (auto x = peers.begin(); x != peers.end();)
      x = !x->asks() || x->answer(answers.at(*x->asks())) ? std::next(x)
                                                          : peers.erase(x);
  }

  options config;
  pollable_wake_up wake;
  std::atomic<bool> stopping = false;
  std::mutex mutex;
  std::vector<file_descriptor> admitted; // guarded by mutex
  // Used by the thread only.
  std::list<inspection_peer> peers;
  port_clock::time_point next;
  gate entrance;
  std::thread thread;
};

inspection_port::inspection_port(options x)
  : impl_(std::make_unique<impl>(std::move(x))) {
  // nop
}

inspection_port::~inspection_port() = default;

uint16_t inspection_port::port() const noexcept {
  return impl_->entrance.port();
}

} // namespace smp
