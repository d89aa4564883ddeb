// ctest: processors=2

// What was recorded of one run, sent to the ports of another.

#include "tests/support/catch.hpp"

#include "tests/support/actors/inbox.hpp"
#include "tests/support/actors/payloads.hpp"
#include "tests/support/actors/recorder.hpp"
#include "tests/support/runs/tcp.hpp"
#include "transport/files/run_secret.hpp"
#include "transport/ucx/ucx_fabric.hpp"
#include "transport/ucx/wire.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;

namespace {

std::set<uint16_t> listening_ports() {
  std::set<uint16_t> result;
  for (auto fd : open_descriptors())
    if (auto port = listening_port(fd))
      result.insert(port);
  return result;
}

/// @returns a port as it stands in the address of a UCX worker
std::string port_bytes(uint16_t x) {
  return {static_cast<char>(x >> 8), static_cast<char>(x)};
}

/// A fabric over tcp, and the port at which UCX listens for it, which stands in
/// its address once.
struct listening_rank {
  listening_rank(uint64_t rank, const run_token& token) {
    do
      open(rank, token);
    while (fabric->address().find(port_bytes(port))
           != fabric->address().rfind(port_bytes(port)));
  }

  void open(uint64_t rank, const run_token& token) {
    fabric.reset();
    auto before = listening_ports();
    ucx_options options;
    options.transports = "tcp,self";
    options.token = token;
    fabric = std::make_unique<ucx_fabric>(rank_id{rank}, 2, options);
    for (auto x : listening_ports())
      if (!before.contains(x))
        port = x;
    REQUIRE(port != 0);
  }

  std::unique_ptr<ucx_fabric> fabric;
  uint16_t port = 0;
};

struct two_ranks {
  two_ranks()
    : token(run_secret::make().token("ucx")),
      ranks{listening_rank{0, token}, listening_rank{1, token}} {
    // nop
  }

  ~two_ranks() {
    for (auto& x : ranks)
      x.fabric->stop(5s);
  }

  void start(const std::vector<std::string>& addresses_for_0,
             const std::vector<std::string>& addresses_for_1) {
    ranks[0].fabric->start(addresses_for_0, heard[0]);
    ranks[1].fabric->start(addresses_for_1, heard[1]);
  }

  std::vector<std::string> addresses() const {
    return {ranks[0].fabric->address(), ranks[1].fabric->address()};
  }

  uint64_t refused_by(size_t rank) const {
    return ranks[rank].fabric->stats().messages_refused;
  }

  /// Fails the test unless both ranks still hear each other.
  void check_connected() {
    for (uint64_t to : {0, 1}) {
      auto have = heard[to].messages().size();
      ranks[1 - to].fabric->send(rank_id{to}, make_message("x", {}));
      CHECK(heard[to].wait_messages(have + 1));
      CHECK(heard[to].losses().empty());
    }
  }

  run_token token;
  std::array<listening_rank, 2> ranks;
  std::array<inbox, 2> heard;
};

/// @returns the address of a UCX worker with another port.
std::string with_port(std::string address, uint16_t from, uint16_t to) {
  auto at = address.find(port_bytes(from));
  REQUIRE(at != std::string::npos);
  address.replace(at, 2, port_bytes(to));
  return address;
}

/// A run that goes on, of which is recorded what rank 0 sent to rank 1.
struct recorded_run {
  recorded_run() : there(ranks.ranks[1].port), back(ranks.ranks[0].port) {
    // Both ways: of two connections between the same addresses UCX closes one.
    auto for_0 = ranks.addresses();
    for_0[1] = with_port(for_0[1], ranks.ranks[1].port, there.port());
    auto for_1 = ranks.addresses();
    for_1[0] = with_port(for_1[0], ranks.ranks[0].port, back.port());
    ranks.start(for_0, for_1);
    // Too few for a marker, which UCX would answer.
    for (size_t i = 0; i < 10; ++i) {
      ranks.ranks[0].fabric->send(
        rank_id{1}, make_message("recorded", {make_tensor(100, 1)}));
      REQUIRE(ranks.heard[1].wait_messages(i + 1));
    }
    recorded = there.stop();
  }

  two_ranks ranks;
  recorder there;
  recorder back;
  std::vector<std::vector<std::byte>> recorded; // by connection
};

bool contains(const std::vector<std::vector<std::byte>>& xs,
              const std::vector<std::byte>& part) {
  return std::any_of(xs.begin(), xs.end(), [&](auto& x) {
    return std::search(x.begin(), x.end(), part.begin(), part.end()) != x.end();
  });
}

/// @returns where `part` begins in `x`, each time
std::vector<size_t> places_of(const run_token& part,
                              const std::vector<std::byte>& x) {
  std::vector<size_t> result;
  for (auto i = x.begin();; ++i) {
    i = std::search(i, x.end(), part.begin(), part.end());
    if (i == x.end())
      return result;
    result.push_back(static_cast<size_t>(i - x.begin()));
  }
}

constexpr size_t variants = 1000;

/// @param said ends with messages of one size
/// @param token begins what is ours of each
/// @returns `said`, and then its last message a thousand times, each time with
/// other bytes of our header changed. What UCX puts around it stays as it is:
/// UCX believes that (docs/secret.md).
std::vector<std::byte> with_variants(std::vector<std::byte> said,
                                     const run_token& token) {
  auto begins = places_of(token, said);
  REQUIRE(begins.size() > 2);
  auto last = std::span{begins}.last(3);
  auto size = last[2] - last[1];
  REQUIRE(size == last[1] - last[0]);
  const std::vector<std::byte> frame(
    said.end() - static_cast<std::ptrdiff_t>(size), said.end());
  auto ours = places_of(token, frame);
  REQUIRE(ours.size() == 1);
  REQUIRE(ours[0] + ucx::header_size <= frame.size());
  std::mt19937 random{13};
  for (size_t i = 0; i < variants; ++i) {
    auto variant = frame;
    for (auto n = 1 + random() % 4; n > 0; --n)
      variant[ours[0] + random() % ucx::header_size] = static_cast<std::byte>(
        random());
    said.insert(said.end(), variant.begin(), variant.end());
  }
  return said;
}

} // namespace

TEST_CASE("what another run said changes nothing", "[transport][ucx]") {
  // UCX connects to where the recorded run is; where nobody listens any more,
  // it may abort (docs/secret.md).
  recorded_run another;
  auto& recorded = another.recorded;
  REQUIRE(contains(recorded, to_bytes("recorded")));
  two_ranks x;
  x.start(x.addresses(), x.addresses());
  x.check_connected();
  for (auto& rank : x.ranks)
    for (auto& bytes : recorded) {
      auto stranger = connect_to(rank.port);
      send_bytes(stranger.get(), bytes);
      // Both while the stranger is there and after he left.
      x.check_connected();
    }
  auto refused = [&] { return x.refused_by(0) + x.refused_by(1); };
  // UCX reads what the stranger left when it likes.
  auto end = std::chrono::steady_clock::now() + patience;
  do
    x.check_connected();
  while (refused() == 0 && std::chrono::steady_clock::now() < end);
  CHECK(refused() > 0);
}

TEST_CASE("what another run said changes nothing in a thousand variants",
          "[transport][ucx][R44]") {
  recorded_run another; // goes on, as above
  two_ranks x;
  x.start(x.addresses(), x.addresses());
  x.check_connected();
  for (size_t rank : {0, 1})
    for (auto& bytes : another.recorded) {
      // UCX may have begun with another connection.
      auto is_ours = places_of(another.ranks.token, bytes).size() > 2;
      auto stranger = connect_to(x.ranks[rank].port);
      send_bytes(stranger.get(),
                 is_ours ? with_variants(bytes, another.ranks.token) : bytes);
      // He stays until UCX has read it all.
      auto end = std::chrono::steady_clock::now() + patience;
      do
        x.check_connected();
      while (is_ours && x.refused_by(rank) < variants
             && std::chrono::steady_clock::now() < end);
    }
  for (size_t rank : {0, 1}) {
    CHECK(x.refused_by(rank) >= variants);
    for (auto& [from, what] : x.heard[rank].messages())
      CHECK(to_text(what.body.bytes) == "x");
  }
}
