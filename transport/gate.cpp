#include "transport/gate.hpp"

#include "transport/bytes.hpp"
#include "transport/error.hpp"
#include "transport/network/addresses.hpp"
#include "transport/wake_up.hpp"

#include <openssl/crypto.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

namespace smp {

namespace {

using gate_clock = std::chrono::steady_clock;

constexpr std::string_view hello_mark = "smpgate1";
constexpr std::string_view question_mark = "smpasks1";
static_assert(hello_mark.size() == question_mark.size());
constexpr size_t nonce_size = 32;
constexpr size_t proof_size = std::tuple_size_v<run_secret::proof>;
constexpr size_t hello_size = hello_mark.size() + nonce_size;
constexpr size_t answer_size = nonce_size + proof_size;

/// Limit of the note that a gate sends with the secret, in bytes.
constexpr uint32_t note_limit = 4096;

/// Both sides' random bytes, so that neither side can replay an old proof.
using nonces = std::array<std::byte, 2 * nonce_size>;

constexpr const char* need_of_keys
  = "; each machine must have the keys of this run";

[[noreturn]] void gate_fail(std::string text) {
  throw error{error_code::transport, std::move(text)};
}

// -- a connection that has not shown the secret -------------------------------

enum class gate_progress { waits, admitted, answered, refused };

/// Never reads past the bytes that belong to the gate.
class unproven {
public:
  unproven(file_descriptor connection, const std::optional<tls_line>& line,
           gate_clock::time_point deadline)
    : deadline_(deadline) {
    if (line) {
      peer_ = peer_address(connection.get()); // later it may be gone
      tls_.emplace(std::move(connection), line->keys, tls_side::accepts);
    } else {
      connection_ = std::move(connection);
    }
  }

  pollfd wanted() const noexcept {
    return tls_ ? pollfd{tls_->fd(), tls_->read_events(), 0}
                : pollfd{connection_.get(), POLLIN, 0};
  }

  gate_clock::time_point deadline() const noexcept {
    return deadline_;
  }

  /// Who the peer is, and why it is refused. @pre over a network
  std::string refusal() const {
    auto why = tls_->problem();
    if (!why.empty())
      why = "TLS: " + why + need_of_keys;
    else if (answered_)
      why = "it does not know the secret of this run";
    else
      why = size_ > 0 ? "it is not a rank of smp" : "it said nothing in time";
    return peer_ + ": " + why;
  }

  file_descriptor take(const std::optional<tls_line>& line) {
    return tls_ ? line->relay->add(std::move(*tls_)) : std::move(connection_);
  }

  gate_progress go_on(const run_secret& secret, const std::string& note) {
    for (;;) {
      auto wanted = answered_ ? proof_size : hello_size;
      auto got = receive(std::span{buffer_}.subspan(size_, wanted - size_));
      if (got == 0)
        return gate_progress::waits;
      if (got < 0)
        return gate_progress::refused;
      size_ += static_cast<size_t>(got);
      if (!begins_with(hello_mark) && !(tls_ && begins_with(question_mark)))
        return gate_progress::refused;
      if (size_ < wanted)
        continue;
      if (answered_)
        return equal_in_constant_time(std::span{buffer_}.first(proof_size),
                                      secret.prove("rank", nonces_))
                 ? gate_progress::admitted
                 : gate_progress::refused;
      if (!begins_with(hello_mark))
        return tell(secret, note) ? gate_progress::answered
                                  : gate_progress::refused;
      if (!answer(secret))
        return gate_progress::refused;
    }
  }

private:
  /// @returns as `tls_stream::read`
  ssize_t receive(std::span<std::byte> x) {
    if (tls_)
      return tls_->read(x);
    for (;;) {
      auto got = ::recv(connection_.get(), x.data(), x.size(), 0);
      if (got < 0 && errno == EINTR)
        continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return 0;
      return got > 0 ? got : -1;
    }
  }

  /// The first bytes of a connection always fit into its send buffer.
  bool send_all(std::span<const std::byte> x) {
    auto sent = tls_
                  ? tls_->write(x)
                  : ::send(connection_.get(), x.data(), x.size(), MSG_NOSIGNAL);
    return sent == static_cast<ssize_t>(x.size());
  }

  /// Drops a peer that speaks another protocol before the deadline.
  bool begins_with(std::string_view mark) const {
    auto n = std::min(size_, mark.size());
    return answered_ || std::memcmp(buffer_.data(), mark.data(), n) == 0;
  }

  bool tell(const run_secret& secret, const std::string& note) {
    byte_writer out;
    // A buffer that grows would leave a copy of the secret behind.
    out.reserve(run_secret::size + sizeof(uint32_t) + note.size());
    out.raw(secret.bytes());
    out.string(note);
    auto text = out.take();
    auto sent = send_all(text);
    OPENSSL_cleanse(text.data(), text.size());
    tls_->say_end();
    return sent;
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
    return send_all(text);
  }

  file_descriptor connection_; // or
  std::optional<tls_stream> tls_;
  std::string peer_; // with TLS
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
      listeners(listen_at(resolve(config.address, config.port).get(),
                          endpoint(config.address, config.port))),
      port(local_port(listeners.front().get())),
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
      // If the process has no descriptor left, the kernel queues new peers.
      for (auto& x : listeners)
        fds.push_back({exhausted ? -1 : x.get(), POLLIN, 0});
      for (auto& x : waiting)
        fds.push_back(x.wanted());
      ::poll(fds.data(), fds.size(), time_out());
      exhausted = false;
      auto i = fds.begin() + 1 + static_cast<ptrdiff_t>(listeners.size());
      for (auto x = waiting.begin(); x != waiting.end(); ++i)
        x = i->revents != 0 ? look_at(x) : std::next(x);
      for (size_t j = 0; j < listeners.size(); ++j)
        if ((fds[j + 1].revents & POLLIN) != 0)
          accept_all(listeners[j].get());
      drop_late();
    }
  }

  int time_out() const {
    constexpr std::chrono::milliseconds pause{100};
    std::optional<std::chrono::milliseconds> result;
    // The first one is the oldest.
    if (!waiting.empty())
      result = std::max(std::chrono::ceil<std::chrono::milliseconds>(
                          waiting.front().deadline() - gate_clock::now()),
                        std::chrono::milliseconds{0});
    if (exhausted)
      result = std::min(result.value_or(pause), pause);
    return result ? static_cast<int>(result->count()) : -1;
  }

  using iterator = std::list<unproven>::iterator;

  /// @returns the next one.
  iterator look_at(iterator x) {
    switch (x->go_on(config.secret, config.note)) {
      case gate_progress::waits:
        return std::next(x);
      case gate_progress::admitted:
        admit(*x);
        break;
      case gate_progress::answered:
        ++answered;
        break;
      case gate_progress::refused:
        refuse(*x);
        break;
    }
    return waiting.erase(x);
  }

  void refuse(const unproven& x) {
    ++refused;
    if (!config.on_refused || !config.line || told.size() >= told_limit)
      return;
    if (auto why = x.refusal(); told.insert(why).second)
      config.on_refused(why);
  }

  void admit(unproven& x) {
    try {
      auto connection = x.take(config.line);
      ++admitted;
      config.admit(std::move(connection));
    } catch (const std::system_error&) { // no descriptor left
      ++refused;
    }
  }

  void accept_all(int listener) {
    // Bounded: peers that connect quickly must not starve the others.
    for (size_t i = 0; i < config.unproven_limit; ++i) {
      file_descriptor x{
        ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)};
      if (!x) {
        auto full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS
                    || errno == ENOMEM;
        if (full && !drop_oldest())
          exhausted = true;
        return;
      }
      int yes = 1;
      ::setsockopt(x.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
      if (config.line)
        bound_silence(x.get(), config.line->silence);
      if (waiting.size() >= config.unproven_limit)
        drop_oldest();
      waiting.emplace_back(std::move(x), config.line,
                           gate_clock::now() + config.patience);
    }
  }

  bool drop_oldest() {
    if (waiting.empty())
      return false;
    // Its last bytes may just have arrived.
    auto first = waiting.begin();
    auto rest = waiting.size() - 1;
    look_at(first);
    if (waiting.size() > rest) {
      refuse(waiting.front());
      waiting.pop_front();
    }
    return true;
  }

  void drop_late() {
    auto now = gate_clock::now();
    while (!waiting.empty() && waiting.front().deadline() <= now) {
      refuse(waiting.front());
      waiting.pop_front();
    }
  }

  options config;
  std::vector<file_descriptor> listeners; // at least one
  uint16_t port;
  pollable_wake_up wake;
  std::atomic<bool> stopping = false;
  std::atomic<uint64_t> admitted = 0;
  std::atomic<uint64_t> answered = 0;
  std::atomic<uint64_t> refused = 0;
  // Used by the thread only.
  std::list<unproven> waiting;
  std::set<std::string> told; // refusals
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
  return impl_->listeners.front().get();
}

gate_stats gate::stats() const noexcept {
  return {impl_->admitted, impl_->answered, impl_->refused};
}

// -- the other side -----------------------------------------------------------

namespace {

/// The time until which the other side must have answered.
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

/// Both kinds of connection, which transfer all of `x`, or throw an error.
class gate_line {
public:
  gate_line(int fd, tls_stream* tls, std::chrono::milliseconds limit)
    : fd_(fd), tls_(tls), deadline_(limit) {
    // nop
  }

  void send(std::span<const std::byte> x) {
    while (!x.empty()) {
      auto n = tls_ != nullptr ? tls_->write(x) : write(x);
      if (n < 0)
        fail();
      if (n == 0)
        deadline_.await(fd_, tls_ != nullptr ? tls_->write_events() : POLLOUT);
      x = x.subspan(static_cast<size_t>(n));
    }
  }

  void receive(std::span<std::byte> x) {
    while (!x.empty()) {
      auto n = tls_ != nullptr ? tls_->read(x) : read(x);
      if (n < 0)
        fail();
      if (n == 0)
        deadline_.await(fd_, tls_ != nullptr ? tls_->read_events() : POLLIN);
      x = x.subspan(static_cast<size_t>(n));
    }
  }

private:
  ssize_t write(std::span<const std::byte> x) {
    return settle(::send(fd_, x.data(), x.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
  }

  ssize_t read(std::span<std::byte> x) {
    auto n = ::recv(fd_, x.data(), x.size(), MSG_DONTWAIT);
    if (n == 0)
      gate_fail("closed the connection: it belongs to another run");
    return settle(n);
  }

  static ssize_t settle(ssize_t n) {
    auto again = errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK;
    return n < 0 && again ? 0 : n;
  }

  [[noreturn]] void fail() const {
    if (tls_ == nullptr)
      gate_fail(std::strerror(errno));
    gate_fail("TLS: " + tls_->problem() + need_of_keys);
  }

  int fd_;
  tls_stream* tls_;
  answer_deadline deadline_;
};

void show_secret(gate_line line, const run_secret& secret) {
  nonces both;
  auto mine = std::span{both}.first(nonce_size);
  fill_with_random_bytes(mine);
  std::array<std::byte, hello_size> hello;
  std::memcpy(hello.data(), hello_mark.data(), hello_mark.size());
  std::copy(mine.begin(), mine.end(), hello.begin() + hello_mark.size());
  line.send(hello);
  std::array<std::byte, answer_size> answer;
  line.receive(answer);
  std::copy_n(answer.begin(), nonce_size, both.begin() + nonce_size);
  if (!equal_in_constant_time(std::span{answer}.last(proof_size),
                              secret.prove("gate", both)))
    gate_fail("does not know the secret of this run");
  line.send(secret.prove("rank", both));
}

} // namespace

void pass_gate(int connection, const run_secret& secret,
               std::chrono::milliseconds limit) {
  show_secret({connection, nullptr, limit}, secret);
}

void pass_gate(tls_stream& connection, const run_secret& secret,
               std::chrono::milliseconds limit) {
  show_secret({connection.fd(), &connection, limit}, secret);
}

gate_answer ask_gate(tls_stream& connection, std::chrono::milliseconds limit) {
  gate_line line{connection.fd(), &connection, limit};
  std::array<std::byte, hello_size> question = {};
  std::memcpy(question.data(), question_mark.data(), question_mark.size());
  line.send(question);
  std::array<std::byte, run_secret::size> secret;
  line.receive(secret);
  gate_answer result{run_secret{secret}, {}};
  OPENSSL_cleanse(secret.data(), secret.size());
  std::array<std::byte, 4> length;
  line.receive(length);
  auto size = byte_reader{length}.u32();
  if (size > note_limit)
    gate_fail("does not answer what this program asks");
  result.note.resize(size);
  line.receive(std::as_writable_bytes(std::span{result.note}));
  return result;
}

} // namespace smp
