#include "transport/gate.hpp"

#include "transport/error.hpp"
#include "transport/wake_up.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

namespace smp {

namespace {

using gate_clock = std::chrono::steady_clock;

constexpr std::string_view hello_mark = "smpgate1";
constexpr size_t nonce_size = 32;
constexpr size_t proof_size = std::tuple_size_v<run_secret::proof>;
constexpr size_t hello_size = hello_mark.size() + nonce_size;
constexpr size_t answer_size = nonce_size + proof_size;

/// Both sides' random bytes: neither can use an old proof.
using nonces = std::array<std::byte, 2 * nonce_size>;

[[noreturn]] void gate_fail(std::string text) {
  throw error{error_code::transport, std::move(text)};
}

// -- listening ----------------------------------------------------------------

struct free_addresses {
  void operator()(addrinfo* x) const {
    ::freeaddrinfo(x);
  }
};

file_descriptor listen_at(const std::string& address, uint16_t port) {
  auto where = address + ':' + std::to_string(port);
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICSERV | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* raw = nullptr;
  if (auto status = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(),
                                  &hints, &raw))
    gate_fail(where + ": " + ::gai_strerror(status));
  std::unique_ptr<addrinfo, free_addresses> found{raw};
  file_descriptor result{
    ::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
  // A run may begin at the port of one that just ended.
  int yes = 1;
  if (!result
      || ::setsockopt(result.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes))
           != 0
      || ::bind(result.get(), found->ai_addr, found->ai_addrlen) != 0
      || ::listen(result.get(), SOMAXCONN) != 0)
    gate_fail(where + ": " + std::strerror(errno));
  return result;
}

uint16_t port_of(int listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size)
      != 0)
    gate_fail(std::string{"getsockname: "} + std::strerror(errno));
  return ntohs(address.ss_family == AF_INET6
                 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                 : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

// -- a connection that has not shown the secret -------------------------------

enum class gate_progress { waits, admitted, refused };

/// Reads not one byte more than belongs to the gate.
class unproven {
public:
  unproven(file_descriptor connection, gate_clock::time_point deadline)
    : connection_(std::move(connection)), deadline_(deadline) {
    // nop
  }

  int fd() const noexcept {
    return connection_.get();
  }

  gate_clock::time_point deadline() const noexcept {
    return deadline_;
  }

  file_descriptor take() {
    return std::move(connection_);
  }

  gate_progress go_on(const run_secret& secret) {
    for (;;) {
      auto wanted = answered_ ? proof_size : hello_size;
      auto got = ::recv(fd(), buffer_.data() + size_, wanted - size_, 0);
      if (got < 0 && errno == EINTR)
        continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return gate_progress::waits;
      if (got <= 0)
        return gate_progress::refused;
      size_ += static_cast<size_t>(got);
      if (!begins_well())
        return gate_progress::refused;
      if (size_ < wanted)
        continue;
      if (answered_)
        return equal_in_constant_time(std::span{buffer_}.first(proof_size),
                                      secret.prove("rank", nonces_))
                 ? gate_progress::admitted
                 : gate_progress::refused;
      if (!answer(secret))
        return gate_progress::refused;
    }
  }

private:
  /// Who speaks another protocol is not kept until the deadline.
  bool begins_well() const {
    auto n = std::min(size_, hello_mark.size());
    return answered_ || std::memcmp(buffer_.data(), hello_mark.data(), n) == 0;
  }

  bool answer(const run_secret& secret) {
    std::copy_n(buffer_.begin() + hello_mark.size(), nonce_size,
                nonces_.begin());
    fill_with_random_bytes(std::span{nonces_}.last(nonce_size));
    auto proof = secret.prove("gate", nonces_);
    std::array<std::byte, answer_size> text;
    std::copy_n(nonces_.begin() + nonce_size, nonce_size, text.begin());
    std::copy(proof.begin(), proof.end(), text.begin() + nonce_size);
    answered_ = true;
    size_ = 0;
    // The first bytes on a connection always find room.
    return ::send(fd(), text.data(), text.size(), MSG_NOSIGNAL)
           == static_cast<ssize_t>(text.size());
  }

  file_descriptor connection_;
  gate_clock::time_point deadline_;
  bool answered_ = false;
  size_t size_ = 0;
  std::array<std::byte, std::max(hello_size, proof_size)> buffer_;
  nonces nonces_;
};

} // namespace

// -- gate ---------------------------------------------------------------------

struct gate::impl {
  explicit impl(options x)
    : config(std::move(x)),
      listener(listen_at(config.address, config.port)),
      port(port_of(listener.get())),
      thread([this] { run(); }) {
    // nop
  }

  ~impl() {
    stopping = true;
    wake.notify();
    thread.join();
  }

  void run() {
    while (!stopping) {
      std::vector<pollfd> fds{{wake.fd(), POLLIN, 0}};
      // Where the process has no descriptor left, the kernel keeps who comes.
      fds.push_back({exhausted ? -1 : listener.get(), POLLIN, 0});
      for (auto& x : waiting)
        fds.push_back({x.fd(), POLLIN, 0});
      ::poll(fds.data(), fds.size(), time_out());
      exhausted = false;
      auto i = fds.begin() + 2;
      for (auto x = waiting.begin(); x != waiting.end(); ++i)
        x = i->revents != 0 ? look_at(x) : std::next(x);
      if ((fds[1].revents & POLLIN) != 0)
        accept_all();
      drop_late();
    }
  }

  int time_out() const {
    constexpr std::chrono::milliseconds pause{100};
    std::optional<std::chrono::milliseconds> result;
    // The oldest one is the first.
    if (!waiting.empty())
      result = std::max(std::chrono::ceil<std::chrono::milliseconds>(
                          waiting.front().deadline() - gate_clock::now()),
                        std::chrono::milliseconds{0});
    if (exhausted)
      result = std::min(result.value_or(pause), pause);
    return result ? static_cast<int>(result->count()) : -1;
  }

  using iterator = std::list<unproven>::iterator;

  /// @returns the one after it.
  iterator look_at(iterator x) {
    switch (x->go_on(config.secret)) {
      case gate_progress::waits:
        return std::next(x);
      case gate_progress::admitted:
        ++admitted;
        config.admit(x->take());
        break;
      case gate_progress::refused:
        ++refused;
        break;
    }
    return waiting.erase(x);
  }

  void accept_all() {
    // Not for ever: who comes fast must not keep the others from being heard.
    for (size_t i = 0; i < config.unproven_limit; ++i) {
      file_descriptor x{::accept4(listener.get(), nullptr, nullptr,
                                  SOCK_NONBLOCK | SOCK_CLOEXEC)};
      if (!x) {
        auto full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS
                    || errno == ENOMEM;
        exhausted = full && !drop_oldest();
        return;
      }
      int yes = 1;
      ::setsockopt(x.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
      if (waiting.size() >= config.unproven_limit)
        drop_oldest();
      waiting.emplace_back(std::move(x), gate_clock::now() + config.patience);
    }
  }

  bool drop_oldest() {
    if (waiting.empty())
      return false;
    // It may have said all just now.
    auto first = waiting.begin();
    auto rest = waiting.size() - 1;
    look_at(first);
    if (waiting.size() > rest) {
      ++refused;
      waiting.pop_front();
    }
    return true;
  }

  void drop_late() {
    auto now = gate_clock::now();
    while (!waiting.empty() && waiting.front().deadline() <= now) {
      ++refused;
      waiting.pop_front();
    }
  }

  options config;
  file_descriptor listener;
  uint16_t port;
  pollable_wake_up wake;
  std::atomic<bool> stopping = false;
  std::atomic<uint64_t> admitted = 0;
  std::atomic<uint64_t> refused = 0;
  // Of the thread only.
  std::list<unproven> waiting;
  bool exhausted = false;
  std::thread thread;
};

gate::gate(options x) : impl_(std::make_unique<impl>(std::move(x))) {
  // nop
}

gate::~gate() = default;

uint16_t gate::port() const noexcept {
  return impl_->port;
}

int gate::listener() const noexcept {
  return impl_->listener.get();
}

gate_stats gate::stats() const noexcept {
  return {impl_->admitted, impl_->refused};
}

// -- the other side -----------------------------------------------------------

namespace {

/// Until then the other side has answered.
class answer_deadline {
public:
  explicit answer_deadline(std::chrono::milliseconds limit)
    : end_(gate_clock::now() + limit) {
    // nop
  }

  void await(int connection, short what) const {
    for (;;) {
      auto left = std::chrono::ceil<std::chrono::milliseconds>(
        end_ - gate_clock::now());
      pollfd x{connection, what, 0};
      auto n = left.count() > 0 ? ::poll(&x, 1, static_cast<int>(left.count()))
                                : 0;
      if (n > 0)
        return;
      if (n == 0)
        gate_fail("does not answer in time");
      if (errno != EINTR)
        gate_fail(std::strerror(errno));
    }
  }

private:
  gate_clock::time_point end_;
};

bool gate_may_go_on(int problem) {
  return problem == EINTR || problem == EAGAIN || problem == EWOULDBLOCK;
}

void gate_send(int connection, std::span<const std::byte> x,
               const answer_deadline& deadline) {
  while (!x.empty()) {
    auto n = ::send(connection, x.data(), x.size(),
                    MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0)
      x = x.subspan(static_cast<size_t>(n));
    else if (gate_may_go_on(errno))
      deadline.await(connection, POLLOUT);
    else
      gate_fail(std::strerror(errno));
  }
}

void gate_receive(int connection, std::span<std::byte> x,
                  const answer_deadline& deadline) {
  while (!x.empty()) {
    auto n = ::recv(connection, x.data(), x.size(), MSG_DONTWAIT);
    if (n > 0)
      x = x.subspan(static_cast<size_t>(n));
    else if (n == 0)
      gate_fail("closed the connection: it belongs to another run");
    else if (gate_may_go_on(errno))
      deadline.await(connection, POLLIN);
    else
      gate_fail(std::strerror(errno));
  }
}

} // namespace

void pass_gate(int connection, const run_secret& secret,
               std::chrono::milliseconds limit) {
  answer_deadline deadline{limit};
  nonces both;
  auto mine = std::span{both}.first(nonce_size);
  fill_with_random_bytes(mine);
  std::array<std::byte, hello_size> hello;
  std::memcpy(hello.data(), hello_mark.data(), hello_mark.size());
  std::copy(mine.begin(), mine.end(), hello.begin() + hello_mark.size());
  gate_send(connection, hello, deadline);
  std::array<std::byte, answer_size> answer;
  gate_receive(connection, answer, deadline);
  std::copy_n(answer.begin(), nonce_size, both.begin() + nonce_size);
  if (!equal_in_constant_time(std::span{answer}.last(proof_size),
                              secret.prove("gate", both)))
    gate_fail("does not know the secret of this run");
  gate_send(connection, secret.prove("rank", both), deadline);
}

} // namespace smp
