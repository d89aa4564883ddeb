#include "actors/client.hpp"

#include "actors/inspection/inspection_port.hpp"
#include "actors/protocol/inspect_messages.hpp"
#include "actors/stalls/wait_graph.hpp"
#include "transport/bytes.hpp"
#include "transport/error.hpp"
#include "transport/files/file_descriptor.hpp"
#include "transport/gate.hpp"
#include "transport/process_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

namespace smp {

namespace {

using client_clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// What is known about the process that should have answered.
std::string blame(const inspection_entry& x) {
  if (x.pid == 0 || x.host != host_name())
    return {};
  if (is_orphaned(x))
    return fmt::format(": its process {} is gone", x.pid);
  auto state = state_of_process(x.pid);
  return state && state->stopped()
           ? fmt::format(": its process {} is stopped", x.pid)
           : fmt::format(" (process {})", x.pid);
}

class deadline_socket {
public:
  explicit deadline_socket(milliseconds limit) {
    renew(limit);
  }

  int fd() const noexcept {
    return fd_.get();
  }

  void renew(milliseconds limit) {
    end_ = client_clock::now() + limit;
  }

  milliseconds left() const {
    return std::max(std::chrono::ceil<milliseconds>(end_ - client_clock::now()),
                    milliseconds{0});
  }

  void connect(const std::string& address, uint16_t port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    addrinfo* found = nullptr;
    if (auto status = ::getaddrinfo(
          address.c_str(), std::to_string(port).c_str(), &hints, &found))
      fail(::gai_strerror(status));
    std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner{found, ::freeaddrinfo};
    std::string why = "no address";
    for (auto* x = found; x != nullptr; x = x->ai_next) {
      fd_.reset(
        ::socket(x->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (fd_ && ::connect(fd(), x->ai_addr, x->ai_addrlen) == 0)
        return;
      if (errno == EINPROGRESS && connected(why))
        return;
      if (errno != EINPROGRESS)
        why = std::strerror(errno);
    }
    fail(why);
  }

  void send(char x) {
    if (::send(fd(), &x, 1, MSG_NOSIGNAL) != 1)
      fail(std::strerror(errno));
  }

  void receive(std::span<std::byte> x) {
    while (!x.empty()) {
      auto got = ::recv(fd(), x.data(), x.size(), MSG_DONTWAIT);
      if (got > 0)
        x = x.subspan(static_cast<size_t>(got));
      else if (got == 0)
        fail("the run ended");
      else if (errno != EAGAIN && errno != EINTR)
        fail(std::strerror(errno));
      else if (!ready(POLLIN))
        fail("does not answer in time");
    }
  }

  [[noreturn]] static void fail(const std::string& why) {
    throw error{error_code::transport, why};
  }

private:
  bool ready(short what) {
    pollfd x{fd(), what, 0};
    return ::poll(&x, 1, static_cast<int>(left().count())) > 0;
  }

  bool connected(std::string& why) {
    if (!ready(POLLOUT)) {
      why = "does not answer in time";
      return false;
    }
    int problem = 0;
    socklen_t size = sizeof(problem);
    ::getsockopt(fd(), SOL_SOCKET, SO_ERROR, &problem, &size);
    why = std::strerror(problem);
    return problem == 0;
  }

  file_descriptor fd_;
  client_clock::time_point end_;
};

} // namespace

// -- asking -------------------------------------------------------------------

struct run_client::impl {
  impl(const inspection_entry& x, milliseconds limit)
    : entry(x), socket(limit) {
    attempt([&] {
      socket.connect(entry.address, entry.port);
      pass_gate(socket.fd(), entry.secret, socket.left());
    });
  }

  template <class T>
  T ask(inspection_question x, milliseconds limit) {
    std::vector<std::byte> answer;
    attempt([&] {
      socket.renew(limit);
      socket.send(static_cast<char>(x));
      std::array<std::byte, 4> head;
      socket.receive(head);
      auto size = byte_reader{head}.u32();
      if (size > inspection_answer_limit)
        socket.fail(fmt::format("claims {} bytes", size));
      answer.resize(size);
      socket.receive(answer);
    });
    byte_reader in{answer, "answer of the run: is it of another build of smp?"};
    auto result = in.get<T>();
    in.expect_end();
    return result;
  }

  template <class F>
  void attempt(F f) {
    try {
      f();
    } catch (const error& e) {
      throw error{e.code(),
                  fmt::format("the SUPERVISOR at {}:{}: {}{}", entry.address,
                              entry.port, e.what(), blame(entry))};
    }
  }

  inspection_entry entry;
  deadline_socket socket;
};

run_client::run_client(const inspection_entry& x, milliseconds limit)
  : impl_(std::make_unique<impl>(x, limit)) {
  // nop
}

run_client::~run_client() = default;

run_status run_client::ask(milliseconds limit) {
  return impl_->ask<run_status>(inspection_question::status, limit);
}

namespace {

std::vector<flight_log> logs_of(const std::vector<std::string>& images) {
  std::vector<flight_log> result;
  for (auto& x : images)
    result.push_back(read_flight_image(std::as_bytes(std::span{x})));
  std::ranges::sort(result, {}, &flight_log::rank);
  return result;
}

} // namespace

std::vector<flight_log> run_client::events(milliseconds limit) {
  return logs_of(
    impl_->ask<std::vector<std::string>>(inspection_question::events, limit));
}

std::vector<flight_log> run_client::recent_events(milliseconds limit) {
  return logs_of(
    impl_->ask<std::vector<std::string>>(inspection_question::recent, limit));
}

void run_client::begin_trace(milliseconds limit) {
  impl_->ask<std::vector<std::string>>(inspection_question::begin_trace, limit);
}

std::vector<flight_log> run_client::finish_trace(milliseconds limit) {
  return logs_of(impl_->ask<std::vector<std::string>>(
    inspection_question::finish_trace, limit));
}

std::vector<process_stacks> run_client::stacks(milliseconds limit) {
  std::vector<process_stacks> result;
  for (auto& x : impl_->ask<std::vector<std::string>>(
         inspection_question::stacks, limit)) {
    byte_reader in{std::as_bytes(std::span{x}), "stacks of a rank"};
    result.push_back(in.get<process_stacks>());
    in.expect_end();
  }
  std::ranges::sort(result, {}, &process_stacks::rank);
  return result;
}

bool may_still_answer(const inspection_entry& x) {
  if (x.host != host_name())
    return true;
  auto state = state_of_process(x.pid);
  return state && !state->stopped() && !is_orphaned(x);
}

// -- waits --------------------------------------------------------------------

wait_report waits_of(const run_status& x) {
  std::vector<rank_view> views;
  std::map<rank_id, double> silent;
  for (auto& rank : x.ranks) {
    auto answers = rank.health == rank_health::well
                   || rank.health == rank_health::blocked;
    if (answers && rank.known) {
      views.push_back(rank.status.view);
      views.back().rank = rank.rank;
    } else if (!is_well(rank.health)) {
      silent.emplace(rank.rank, rank.seconds);
    }
  }
  wait_graph graph{std::move(views), std::move(silent)};
  wait_report result;
  result.chain = graph.text(graph.worst());
  result.all = graph.lines();
  return result;
}

} // namespace smp
