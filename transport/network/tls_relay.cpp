#include "transport/network/tls_relay.hpp"

#include "transport/network/addresses.hpp"
#include "transport/wake_up.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/socket.h>

namespace smp {

namespace {

using relay_clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds last_words_limit{1000};

/// Buffer of one connection and direction, in bytes.
constexpr size_t relay_room = 64 << 10;

/// Bytes in flight in one direction.
struct relay_buffer {
  std::vector<std::byte> bytes = std::vector<std::byte>(relay_room);
  size_t begin = 0;
  size_t end = 0;

  bool empty() const noexcept {
    return begin == end;
  }

  std::span<std::byte> room() noexcept {
    return bytes;
  }

  std::span<const std::byte> content() const noexcept {
    return std::span{bytes}.subspan(begin, end - begin);
  }

  void fill(size_t n) noexcept {
    begin = 0;
    end = n;
  }

  void drop() noexcept {
    begin = end = 0;
  }
};

bool means_silence(int problem) {
  return problem == ETIMEDOUT || problem == EHOSTUNREACH
         || problem == ENETUNREACH || problem == EHOSTDOWN
         || problem == ENETDOWN;
}

class relay_link {
public:
  relay_link(tls_stream tls, file_descriptor local)
    : tls_(std::move(tls)),
      local_(std::move(local)),
      machine_(peer_address(tls_.fd())) {
    // nop
  }

  /// Moves the bytes that can be moved. @returns false when this is over
  bool pump() {
    // Bounded, so that other links get their turn.
    for (int i = 0; i < 16; ++i)
      if (!(take_local() | give_tls() | take_tls() | give_local()))
        break;
    if (local_over_ && outgoing_.empty()) {
      tls_.say_end();
      return false;
    }
    return !tls_over_ || !incoming_.empty();
  }

  std::array<pollfd, 2> wanted() const {
    short local = 0;
    short tls = outgoing_.empty() ? 0 : tls_.write_events();
    if (outgoing_.empty())
      local |= POLLIN;
    if (incoming_.empty())
      tls |= tls_.read_events();
    else
      local |= POLLOUT;
    // A socket that hung up ends each `poll` at once, whatever it asks for.
    return {pollfd{local_over_ || local == 0 ? -1 : local_.get(), local, 0},
            pollfd{tls_over_ || tls == 0 ? -1 : tls_.fd(), tls, 0}};
  }

  /// @returns whether bytes are here that `poll` would wait for
  bool has_more() const {
    return incoming_.empty() && tls_.has_buffered();
  }

  const std::string& machine() const noexcept {
    return machine_;
  }

  bool silent() const noexcept {
    return means_silence(tls_.problem_number());
  }

private:
  bool take_local() {
    if (local_over_ || !outgoing_.empty())
      return false;
    auto room = outgoing_.room();
    auto n = ::recv(local_.get(), room.data(), room.size(), MSG_DONTWAIT);
    if (n > 0)
      outgoing_.fill(static_cast<size_t>(n));
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
      local_over_ = true;
    return n > 0;
  }

  bool give_tls() {
    if (outgoing_.empty())
      return false;
    auto n = tls_.write(outgoing_.content());
    if (n > 0)
      outgoing_.begin += static_cast<size_t>(n);
    if (n < 0) {
      tls_over_ = true;
      outgoing_.drop();
    }
    return n > 0;
  }

  bool take_tls() {
    if (tls_over_ || !incoming_.empty())
      return false;
    auto n = tls_.read(incoming_.room());
    if (n > 0)
      incoming_.fill(static_cast<size_t>(n));
    else if (n < 0)
      tls_over_ = true;
    return n > 0;
  }

  bool give_local() {
    if (incoming_.empty())
      return false;
    auto content = incoming_.content();
    auto n = ::send(local_.get(), content.data(), content.size(),
                    MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0)
      incoming_.begin += static_cast<size_t>(n);
    else if (n < 0 && errno != EAGAIN && errno != EINTR) {
      local_over_ = true;
      incoming_.drop();
    }
    return n > 0;
  }

  tls_stream tls_;
  file_descriptor local_;
  std::string machine_;
  relay_buffer outgoing_;
  relay_buffer incoming_;
  bool local_over_ = false;
  bool tls_over_ = false;
};

} // namespace

struct tls_relay::impl {
  impl() : thread([this] { run(); }) {
    // nop
  }

  ~impl() {
    stopping = true;
    wake.notify();
    thread.join();
  }

  void run() {
    std::optional<relay_clock::time_point> end;
    for (;;) {
      if (stopping && !end)
        end = relay_clock::now() + last_words_limit;
      take_new();
      pump_all();
      if (end && (links.empty() || relay_clock::now() >= *end))
        return;
      wait(end);
    }
  }

  void take_new() {
    std::lock_guard guard{mutex};
    links.splice(links.end(), added);
  }

  void pump_all() {
    std::set<std::string> silent;
    for (auto x = links.begin(); x != links.end();) {
      if (x->pump()) {
        ++x;
        continue;
      }
      if (x->silent())
        silent.insert(x->machine());
      x = links.erase(x);
    }
    if (!silent.empty())
      links.remove_if([&](auto& x) { return silent.contains(x.machine()); });
  }

  void wait(const std::optional<relay_clock::time_point>& end) {
    std::vector<pollfd> fds{{wake.fd(), POLLIN, 0}};
    bool more = false;
    for (auto& x : links) {
      for (auto& fd : x.wanted())
        fds.push_back(fd);
      more |= x.has_more();
    }
    auto limit = -1;
    if (more)
      limit = 0;
    else if (end) // may be past by now; a negative limit waits forever
      limit = static_cast<int>(std::max<int64_t>(
        0,
        std::chrono::ceil<std::chrono::milliseconds>(*end - relay_clock::now())
          .count()));
    ::poll(fds.data(), fds.size(), limit);
    wake.try_wait();
  }

  std::mutex mutex;
  std::list<relay_link> added; // guarded by mutex
  pollable_wake_up wake;
  std::atomic<bool> stopping = false;
  std::list<relay_link> links; // of the thread only
  std::thread thread;
};

tls_relay::tls_relay() : impl_(std::make_unique<impl>()) {
  // nop
}

tls_relay::~tls_relay() = default;

file_descriptor tls_relay::add(tls_stream x) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends)
      != 0)
    throw std::system_error{errno, std::generic_category(), "socketpair"};
  file_descriptor mine{ends[0]};
  file_descriptor theirs{ends[1]};
  {
    std::lock_guard guard{impl_->mutex};
    impl_->added.emplace_back(std::move(x), std::move(mine));
  }
  impl_->wake.notify();
  return theirs;
}

} // namespace smp
