#include "tests/support/catch.hpp"

#include "tests/support/actors/inbox.hpp"
#include "tests/support/actors/payloads.hpp"
#include "tests/support/cpu_time.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mutations.hpp"
#include "tests/support/runs/tcp.hpp"
#include "transport/gate.hpp"
#include "transport/network/addresses.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

/// A gate, and what it lets through.
struct guarded_port {
  explicit guarded_port(std::chrono::milliseconds limit = 30s,
                        size_t unproven_limit = 64,
                        const std::string& address = "127.0.0.1") {
    gate::options x;
    x.address = address;
    x.secret = secret;
    x.patience = limit;
    x.unproven_limit = unproven_limit;
    x.admit = [this](file_descriptor y) {
      std::lock_guard guard{mutex};
      admitted.push_back(std::move(y));
      changed.notify_all();
    };
    entrance.emplace(std::move(x));
  }

  /// @returns the next connection that the gate let through, or none after the
  /// deadline.
  file_descriptor next() {
    std::unique_lock guard{mutex};
    changed.wait_for(guard, 30s, [&] { return !admitted.empty(); });
    if (admitted.empty())
      return {};
    auto result = std::move(admitted.front());
    admitted.pop_front();
    return result;
  }

  /// Connects and shows a secret.
  file_descriptor enter(const run_secret& x) {
    auto result = connect_to(entrance->port());
    pass_gate(result.get(), x, 30s);
    return result;
  }

  /// Fails the test unless who knows the secret comes through, and what is
  /// said then reaches the other side whole.
  void check_open() {
    auto mine = enter(secret);
    auto other = next();
    REQUIRE(other);
    REQUIRE(send_bytes(mine.get(), to_bytes("hello")));
    CHECK(to_text(receive_bytes(other.get(), 5)) == "hello");
    REQUIRE(send_bytes(other.get(), to_bytes("welcome")));
    CHECK(to_text(receive_bytes(mine.get(), 7)) == "welcome");
  }

  run_secret secret = run_secret::make();
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<file_descriptor> admitted;
  std::optional<gate> entrance;
};

/// What a rank says to a gate that answers `answer`, without the last proof.
std::vector<std::byte> hello() {
  auto result = to_bytes("smpgate1");
  result.resize(40, std::byte{7});
  return result;
}

/// What a stranger could send of CAF's protocol: a header that announces 4 GB.
std::vector<std::byte> basp_header() {
  std::vector<std::byte> result(32, std::byte{0});
  result[0] = std::byte{4};                            // direct message
  std::fill_n(result.begin() + 4, 4, std::byte{0xff}); // payload
  return result;
}

} // namespace

TEST_CASE("a peer that knows the secret comes through, with all that it says",
          "[transport][gate]") {
  guarded_port x;
  for (int i = 0; i < 3; ++i)
    x.check_open();
  CHECK(x.entrance->stats().admitted == 3);
  CHECK(x.entrance->stats().refused == 0);
}

TEST_CASE("what is said right behind the proof is not lost",
          "[transport][gate]") {
  guarded_port x;
  auto mine = connect_to(x.entrance->port());
  auto nonces = std::vector<std::byte>(32, std::byte{7});
  REQUIRE(send_bytes(mine.get(), hello()));
  auto answer = receive_bytes(mine.get(), 64);
  REQUIRE(answer.size() == 64);
  nonces.insert(nonces.end(), answer.begin(), answer.begin() + 32);
  auto proof = x.secret.prove("rank", nonces);
  std::vector<std::byte> all{proof.begin(), proof.end()};
  auto more = to_bytes("and more");
  all.insert(all.end(), more.begin(), more.end());
  REQUIRE(send_bytes(mine.get(), all));
  auto other = x.next();
  REQUIRE(other);
  CHECK(to_text(receive_bytes(other.get(), more.size())) == "and more");
}

TEST_CASE("a peer that does not know the secret is not let through",
          "[transport][gate]") {
  guarded_port x;
  CHECK_THAT(
    error_of([&] { x.enter(run_secret::make()); }, error_code::transport),
    ContainsSubstring("does not know the secret"));
  x.check_open();
  CHECK(x.entrance->stats().admitted == 1);
}

TEST_CASE("an answer is worth nothing for the other side, and only once",
          "[transport][gate]") {
  guarded_port x;
  auto first = connect_to(x.entrance->port());
  REQUIRE(send_bytes(first.get(), hello()));
  auto answer = receive_bytes(first.get(), 64);
  REQUIRE(answer.size() == 64);
  // The proof of the gate, sent back.
  REQUIRE(send_bytes(first.get(), std::span{answer}.last(32)));
  CHECK(is_closed(first.get()));
  // The proof for one connection, recorded, on another one.
  auto nonces = std::vector<std::byte>(32, std::byte{7});
  nonces.insert(nonces.end(), answer.begin(), answer.begin() + 32);
  auto second = connect_to(x.entrance->port());
  REQUIRE(send_bytes(second.get(), hello()));
  REQUIRE(receive_bytes(second.get(), 64).size() == 64);
  REQUIRE(send_bytes(second.get(), x.secret.prove("rank", nonces)));
  CHECK(is_closed(second.get()));
  CHECK(x.entrance->stats().admitted == 0);
}

TEST_CASE("a rank does not pass a gate of another run, nor wait for ever",
          "[transport][gate]") {
  run_secret secret = run_secret::make();
  auto listener = listen_anywhere();
  auto mine = connect_to(listening_port(listener.get()));
  SECTION("that answers something else") {
    std::thread other{[&] {
      file_descriptor x{::accept(listener.get(), nullptr, nullptr)};
      receive_bytes(x.get(), 40);
      send_bytes(x.get(), std::vector<std::byte>(64));
      is_closed(x.get());
    }};
    CHECK_THAT(error_of([&] { pass_gate(mine.get(), secret, 30s); }),
               ContainsSubstring("does not know the secret"));
    mine.reset();
    other.join();
  }
  SECTION("that closes") {
    std::thread other{[&] {
      file_descriptor x{::accept(listener.get(), nullptr, nullptr)};
      receive_bytes(x.get(), 40);
    }};
    CHECK_THAT(error_of([&] { pass_gate(mine.get(), secret, 30s); }),
               ContainsSubstring("another run"));
    other.join();
  }
  SECTION("that is silent") {
    CHECK_THAT(error_of([&] { pass_gate(mine.get(), secret, 20ms); }),
               ContainsSubstring("does not answer in time"));
  }
}

TEST_CASE("strangers of all kinds change nothing", "[transport][gate]") {
  guarded_port x;
  auto intact = hello();
  intact.resize(intact.size() + 32, std::byte{9});
  std::mt19937_64 random{42};
  for (int i = 0; i < 1000; ++i) {
    auto stranger = connect_to(x.entrance->port());
    send_bytes(stranger.get(), mutated(intact, random));
    if (i % 100 == 0)
      x.check_open();
  }
  for (auto& bytes :
       {to_bytes("GET / HTTP/1.1\r\n\r\n"), basp_header(), to_bytes("smp")}) {
    auto stranger = connect_to(x.entrance->port());
    send_bytes(stranger.get(), bytes);
    ::shutdown(stranger.get(), SHUT_WR);
    CHECK(is_closed(stranger.get()));
  }
  x.check_open();
  CHECK(x.entrance->stats().admitted == 11);
}

TEST_CASE("a peer that speaks another protocol is sent away at once",
          "[transport][gate]") {
  guarded_port x{1h};
  auto stranger = connect_to(x.entrance->port());
  send_bytes(stranger.get(), basp_header());
  CHECK(is_closed(stranger.get()));
  CHECK(x.entrance->stats().refused == 1);
}

TEST_CASE("a silent peer is sent away after a while, without computing",
          "[transport][gate]") {
  guarded_port x{50ms};
  auto silent = connect_to(x.entrance->port());
  auto begun = connect_to(x.entrance->port());
  send_bytes(begun.get(), to_bytes("smpga"));
  auto half = connect_to(x.entrance->port());
  send_bytes(half.get(), hello());
  for (auto fd : {silent.get(), begun.get(), half.get()})
    CHECK(is_closed(fd));
  CHECK(x.entrance->stats().refused == 3);
}

TEST_CASE("silent connections hold few descriptors and keep nobody out",
          "[transport][gate]") {
  constexpr size_t many = 1300;
  descriptor_limit enough{2 * many};
  guarded_port x{1h};
  auto before = open_descriptors().size();
  std::vector<file_descriptor> silent;
  for (size_t i = 0; i < many; ++i) {
    silent.push_back(connect_to(x.entrance->port()));
    if (i % 100 == 0)
      x.check_open();
  }
  x.check_open();
  CHECK(open_descriptors().size() <= before + many + 64);
  CHECK(x.entrance->stats().refused >= many - 64);
  CHECK(x.entrance->stats().admitted == 14);
}

TEST_CASE("a gate without a free descriptor waits, and does not compute",
          "[transport][gate]") {
  guarded_port x{1h};
  std::vector<file_descriptor> outside;
  for (int i = 0; i < 8; ++i)
    outside.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  auto used = open_descriptors();
  auto address = loopback_address(x.entrance->port());
  auto begin = std::chrono::steady_clock::now();
  auto cpu = cpu_seconds();
  {
    descriptor_limit none{
      static_cast<rlim_t>(*std::max_element(used.begin(), used.end()) + 1)};
    // Holes below the limit.
    std::vector<file_descriptor> holes;
    while (true) {
      file_descriptor hole{::dup(0)};
      if (!hole)
        break;
      holes.push_back(std::move(hole));
    }
    for (auto& y : outside)
      REQUIRE(::connect(y.get(), reinterpret_cast<sockaddr*>(&address),
                        sizeof(address))
              == 0);
    // Nobody answers; meanwhile the gate would compute if it did.
    CHECK_FALSE(is_closed(outside[0].get(), 300ms));
  }
  std::chrono::duration<double> passed = std::chrono::steady_clock::now()
                                         - begin;
  CHECK(cpu_seconds() - cpu < 0.5 * passed.count());
  x.check_open();
}

TEST_CASE("a gate is open at IPv4 and IPv6 where its name is both",
          "[transport][gate]") {
  auto addresses = resolve("localhost", 0);
  std::set<int> families;
  for (auto* x = addresses.get(); x != nullptr; x = x->ai_next)
    if (file_descriptor y{
          ::socket(x->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0)};
        y && ::bind(y.get(), x->ai_addr, x->ai_addrlen) == 0)
      families.insert(x->ai_family);
  if (families.size() < 2)
    SKIP("localhost is one address here");
  guarded_port x{30s, 64, "localhost"};
  for (auto host : {"127.0.0.1", "::1"}) {
    auto mine = connect_within(host, x.entrance->port(), 30s);
    pass_gate(mine.get(), x.secret, 30s);
    CHECK(x.next());
  }
  CHECK(x.entrance->stats().admitted == 2);
}

TEST_CASE("a port that is taken is an error", "[transport][gate]") {
  guarded_port x;
  gate::options y;
  y.port = x.entrance->port();
  CHECK_THAT(error_of([&] { gate{std::move(y)}; }, error_code::transport),
             ContainsSubstring(std::to_string(x.entrance->port())));
}
