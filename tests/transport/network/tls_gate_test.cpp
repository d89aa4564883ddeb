#include "tests/support/catch.hpp"

#include "tests/support/actors/payloads.hpp"
#include "tests/support/cpu_time.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/tcp.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/gate.hpp"
#include "transport/network/addresses.hpp"
#include "transport/network/tls_relay.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <netinet/in.h>

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

/// A gate behind TLS, and what it lets through.
struct tls_port : scratch_dir {
  tls_port() {
    make_keys(path / "keys");
    line.emplace(
      tls_line{tls_keys{path / "keys"}, 15s, std::make_shared<tls_relay>()});
    gate::options x;
    x.secret = secret;
    x.line = line;
    x.note = "runs/of today";
    x.patience = 30s;
    x.on_refused = [this](const std::string& y) {
      std::lock_guard guard{mutex};
      refusals.push_back(y);
      changed.notify_all();
    };
    x.admit = [this](file_descriptor y) {
      std::lock_guard guard{mutex};
      admitted.push_back(std::move(y));
      changed.notify_all();
    };
    entrance.emplace(std::move(x));
  }

  tls_stream connect(const tls_keys& keys) const {
    return {connect_within("127.0.0.1", entrance->port(), 30s), keys,
            tls_side::connects};
  }

  file_descriptor next() {
    std::unique_lock guard{mutex};
    changed.wait_for(guard, 30s, [&] { return !admitted.empty(); });
    REQUIRE(!admitted.empty());
    auto result = std::move(admitted.front());
    admitted.pop_front();
    return result;
  }

  /// Both ends of a connection that passed, as who uses it sees them.
  std::pair<file_descriptor, file_descriptor> enter() {
    auto mine = connect(line->keys);
    pass_gate(mine, secret, 30s);
    return {line->relay->add(std::move(mine)), next()};
  }

  void check_open() {
    auto [mine, other] = enter();
    REQUIRE(send_bytes(mine.get(), to_bytes("hello")));
    CHECK(to_text(receive_bytes(other.get(), 5)) == "hello");
    REQUIRE(send_bytes(other.get(), to_bytes("welcome")));
    CHECK(to_text(receive_bytes(mine.get(), 7)) == "welcome");
  }

  run_secret secret = run_secret::make();
  std::optional<tls_line> line;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<file_descriptor> admitted;
  std::vector<std::string> refusals;
  std::optional<gate> entrance;
};

/// A stranger can have keys of his own making.
tls_keys other_keys(const scratch_dir& x) {
  auto dir = (x.path / "others").string();
  make_keys(dir);
  return tls_keys{dir};
}

void make_blocking(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK);
}

/// Sends until nothing more was taken for a while.
/// @returns how many bytes went
size_t send_all_that_fits(int fd) {
  const auto block = pattern(64 << 10, 3);
  size_t result = 0;
  for (;;) {
    auto n = ::send(fd, block.data(), block.size(),
                    MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) {
      result += static_cast<size_t>(n);
      continue;
    }
    pollfd room{fd, POLLOUT, 0};
    if (::poll(&room, 1, 300) <= 0)
      return result;
  }
}

} // namespace

TEST_CASE_METHOD(tls_port,
                 "a peer that has the keys and the secret comes through",
                 "[transport][tls]") {
  for (int i = 0; i < 3; ++i)
    check_open();
  CHECK(entrance->stats().admitted == 3);
  CHECK(entrance->stats().refused == 0);
}

TEST_CASE_METHOD(tls_port, "a peer that has the keys is told the secret",
                 "[transport][tls]") {
  auto mine = connect(line->keys);
  auto answer = ask_gate(mine, 30s);
  CHECK(answer.secret.to_hex() == secret.to_hex());
  CHECK(answer.note == "runs/of today");
  CHECK(entrance->stats().refused == 0);
  CHECK(entrance->stats().admitted == 0);
}

TEST_CASE_METHOD(tls_port, "a peer that has other keys is told nothing",
                 "[transport][tls][R45]") {
  auto others = other_keys(*this);
  auto asking = connect(others);
  CHECK_THAT(error_of([&] { ask_gate(asking, 30s); }, error_code::transport),
             ContainsSubstring("certificate")
               && ContainsSubstring("keys of this run"));
  auto entering = connect(others);
  CHECK_THAT(
    error_of([&] { pass_gate(entering, secret, 30s); }, error_code::transport),
    ContainsSubstring("certificate"));
  check_open();
  CHECK(entrance->stats().admitted == 1);
  CHECK(entrance->stats().answered == 0);
  // Told once, however often it tries again.
  std::unique_lock guard{mutex};
  changed.wait_for(guard, 30s, [&] { return !refusals.empty(); });
  REQUIRE(refusals.size() == 1);
  CHECK_THAT(refusals.front(), ContainsSubstring("127.0.0.1: TLS: "));
}

TEST_CASE_METHOD(tls_port, "the keys of another run open no gate of strangers",
                 "[transport][tls]") {
  // He who listens has none: the rank tells him nothing either.
  auto impostor = listen_anywhere();
  auto port = listening_port(impostor.get());
  auto others = other_keys(*this);
  std::thread listener{[&] {
    file_descriptor x{::accept4(impostor.get(), nullptr, nullptr,
                                SOCK_NONBLOCK | SOCK_CLOEXEC)};
    tls_stream stream{std::move(x), others, tls_side::accepts};
    std::array<std::byte, 100> heard;
    for (;;) {
      auto n = stream.read(heard);
      if (n != 0)
        break;
      pollfd fd{stream.fd(), stream.read_events(), 0};
      ::poll(&fd, 1, 10000);
    }
  }};
  tls_stream mine{connect_within("127.0.0.1", port, 30s), line->keys,
                  tls_side::connects};
  CHECK_THAT(
    error_of([&] { pass_gate(mine, secret, 30s); }, error_code::transport),
    ContainsSubstring("certificate"));
  mine = connect(line->keys); // closes the other one
  listener.join();
}

TEST_CASE_METHOD(tls_port, "a peer that speaks no TLS is not let through",
                 "[transport][tls][R45]") {
  SECTION("though he knows the secret") {
    auto mine = connect_to(entrance->port());
    CHECK_THAT(error_of([&] { pass_gate(mine.get(), secret, 30s); },
                        error_code::transport),
               !ContainsSubstring("no error"));
  }
  SECTION("and sends anything") {
    auto mine = connect_to(entrance->port());
    send_bytes(mine.get(), pattern(5000, 7));
    CHECK(is_closed(mine.get()));
  }
  check_open();
  CHECK(entrance->stats().admitted == 1);
  CHECK(entrance->stats().refused == 1);
}

TEST_CASE_METHOD(tls_port, "the keys without the secret are not enough",
                 "[transport][tls]") {
  auto mine = connect(line->keys);
  CHECK_THAT(error_of([&] { pass_gate(mine, run_secret::make(), 30s); },
                      error_code::transport),
             ContainsSubstring("does not know the secret"));
  check_open();
}

TEST_CASE_METHOD(tls_port, "much crosses in both directions at once, whole",
                 "[transport][tls]") {
  auto [mine, other] = enter();
  make_blocking(mine.get());
  make_blocking(other.get());
  const auto there = pattern(3'000'001, 1);
  const auto back = pattern(2'000'003, 2);
  std::vector<std::byte> heard;
  std::thread far{[&, fd = other.get()] {
    std::thread answer{[&] { send_bytes(fd, back); }};
    heard = receive_bytes(fd, there.size());
    answer.join();
  }};
  std::thread sender{[&, fd = mine.get()] { send_bytes(fd, there); }};
  CHECK(receive_bytes(mine.get(), back.size()) == back);
  sender.join();
  far.join();
  CHECK(heard == there);
}

TEST_CASE_METHOD(tls_port, "what was said before the end arrives, then the end",
                 "[transport][tls]") {
  auto [mine, other] = enter();
  REQUIRE(send_bytes(mine.get(), to_bytes("farewell")));
  mine.reset();
  CHECK(to_text(receive_bytes(other.get(), 8)) == "farewell");
  CHECK(is_closed(other.get()));
}

// As a stopped machine: the process here closes what it has to it.
TEST_CASE_METHOD(
  tls_port, "a peer that takes nothing costs the one that leaves it nothing",
  "[transport][tls]") {
  auto mine = connect(line->keys);
  pass_gate(mine, secret, 30s); // and reads nothing any more
  auto other = next();
  CHECK(send_all_that_fits(other.get()) > 200'000);
  other.reset();
  auto before = cpu_seconds();
  let_pass(1s);
  CHECK(cpu_seconds() - before < 0.3);
}

TEST_CASE_METHOD(tls_port, "nothing of it can be read on the way",
                 "[transport][tls]") {
  // A wire tap between the two.
  auto tap = listen_anywhere();
  auto port = listening_port(tap.get());
  std::string seen;
  std::thread middle{[&] {
    file_descriptor in{::accept(tap.get(), nullptr, nullptr)};
    auto out = connect_to(entrance->port());
    std::array<pollfd, 2> fds{pollfd{in.get(), POLLIN, 0},
                              pollfd{out.get(), POLLIN, 0}};
    for (bool open = true; open;) {
      ::poll(fds.data(), fds.size(), 30000);
      for (size_t i = 0; i < 2; ++i) {
        if (fds[i].revents == 0)
          continue;
        char text[4096];
        auto n = ::recv(fds[i].fd, text, sizeof(text), 0);
        open = n > 0;
        if (!open)
          break;
        seen.append(text, static_cast<size_t>(n));
        ::send(fds[1 - i].fd, text, static_cast<size_t>(n), MSG_NOSIGNAL);
      }
    }
  }};
  {
    tls_stream outer{connect_within("127.0.0.1", port, 30s), line->keys,
                     tls_side::connects};
    pass_gate(outer, secret, 30s);
    auto mine = line->relay->add(std::move(outer));
    auto other = next();
    REQUIRE(send_bytes(mine.get(), to_bytes("what nobody may read")));
    CHECK(receive_bytes(other.get(), 20).size() == 20);
  }
  middle.join();
  CHECK(seen.size() > 500);
  CHECK_THAT(seen,
             !ContainsSubstring("nobody") && !ContainsSubstring("smpgate"));
}
