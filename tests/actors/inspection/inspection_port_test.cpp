// ctest: label=threads
#include "tests/support/catch.hpp"

#include "actors/client.hpp"
#include "actors/inspection/inspection_port.hpp"
#include "actors/protocol/inspect_messages.hpp"
#include "tests/support/error_of.hpp"
#include "transport/bytes.hpp"
#include "transport/error.hpp"
#include "transport/flight/flight_record.hpp"
#include "transport/gate.hpp"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <sys/socket.h>

using namespace smp;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using smp::test::error_of;

namespace {

/// A run of which `status` is told.
struct run {
  explicit run(run_status x = {}) : status(std::move(x)) {
    inspection_port::options options;
    options.secret = secret;
    options.client_limit = 2;
    options.rate_limit = 1000;
    options.collect = [this](inspection_question x) {
      ++collected;
      if (x != inspection_question::status)
        return to_payload(images).bytes;
      return to_payload(status).bytes;
    };
    port = std::make_unique<inspection_port>(std::move(options));
  }

  inspection_entry entry() const {
    return entry_of_this_process(port->port(), secret);
  }

  run_status status;
  std::vector<std::string> images; // of events
  run_secret secret = run_secret::make();
  std::atomic<int> collected = 0;
  std::unique_ptr<inspection_port> port;
};

/// @returns a connection that has shown the secret
file_descriptor enter(const run& x) {
  file_descriptor result{::socket(AF_INET, SOCK_STREAM, 0)};
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(x.port->port());
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::connect(result.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to))
          == 0);
  pass_gate(result.get(), x.secret, 5s);
  return result;
}

/// Asks again and again, and reads nothing.
/// @returns whether the other side ends the connection
bool is_refused(const file_descriptor& x) {
  auto end = std::chrono::steady_clock::now() + 20s;
  while (std::chrono::steady_clock::now() < end)
    if (::send(x.get(), "?", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0
        && errno != EAGAIN)
      return true;
  return false;
}

/// @returns whether the other side closes the connection
bool is_closed(const file_descriptor& x) {
  timeval limit{20, 0};
  ::setsockopt(x.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  std::vector<char> buffer(65536);
  for (;;) {
    auto got = ::recv(x.get(), buffer.data(), buffer.size(), 0);
    if (got <= 0)
      return got == 0 || errno == ECONNRESET;
  }
}

run_status two_ranks() {
  run_status result;
  result.pid = 4711;
  result.ranks.resize(2);
  auto& x = result.ranks[1];
  x.rank = rank_id{1};
  x.health = rank_health::stopped;
  x.why = "its process is stopped";
  x.known = true;
  x.status.bubble = 0.25;
  x.status.device = device_status{"cuda:1", 1, 2, 3};
  x.status.offload = offload_status{.written = 77};
  x.status.comm.bytes_sent = 1234;
  x.status.comm.stages.sent[2] = 5;
  x.status.comm.stages.oldest.resize(1);
  x.status.comm.stages.oldest[0].at = comm_stage::tracker;
  x.status.view.activities.resize(1);
  x.status.view.activities[0].what = "module m";
  x.status.actors.resize(1);
  x.status.actors[0].items.push_back({"step", "7"});
  return result;
}

} // namespace

TEST_CASE("A client gets what a run tells, as often as it asks",
          "[actors][inspection]") {
  run x{two_ranks()};
  run_client client{x.entry(), 5s};
  for (int i = 0; i < 3; ++i) {
    auto status = client.ask(5s);
    CHECK(status.pid == 4711);
    REQUIRE(status.ranks.size() == 2);
    auto& rank = status.ranks[1];
    CHECK(rank.health == rank_health::stopped);
    CHECK(rank.status.bubble == 0.25);
    CHECK(rank.status.offload->written == 77);
    CHECK_FALSE(status.ranks[0].status.offload);
    CHECK(rank.status.device->name == "cuda:1");
    CHECK(rank.status.device->memory == 1);
    CHECK(rank.status.device->peak_memory == 2);
    CHECK(rank.status.device->total_memory == 3);
    CHECK_FALSE(status.ranks[0].status.device);
    CHECK(rank.status.comm.bytes_sent == 1234);
    CHECK_FALSE(rank.status.comm.arena_high_water());
    CHECK(rank.status.comm.stages.sent[2] == 5);
    CHECK(rank.status.comm.stages.oldest.at(0).at == comm_stage::tracker);
    REQUIRE(rank.status.actors.size() == 1);
    CHECK(rank.status.actors[0].items[0].value == "7");
    CHECK(rank.status.view.activities[0].what == "module m");
  }
}

TEST_CASE("A peer that does not know the secret of the port gets nothing",
          "[actors][inspection][R44]") {
  run x;
  auto entry = x.entry();
  entry.secret = run_secret::make();
  auto why = error_of([&] { run_client(entry, 5s); }, error_code::transport);
  CHECK_THAT(why, ContainsSubstring("the SUPERVISOR at 127.0.0.1"));
  CHECK(x.collected == 0);
}

TEST_CASE("A peer that sends anything but the question is dropped",
          "[actors][inspection][R44]") {
  run x;
  auto stranger = enter(x);
  const std::string text = "BASP, run me an actor";
  REQUIRE(::send(stranger.get(), text.data(), text.size(), 0) > 0);
  CHECK(is_closed(stranger));
  CHECK(x.collected == 0);
  CHECK(run_client{x.entry(), 5s}.ask(5s).ranks.empty());
}

TEST_CASE("A peer that asks again without reading the answer is dropped",
          "[actors][inspection]") {
  run_status large;
  large.stalls.text = std::string(64 << 20, 'x'); // no socket holds it
  run x{large};
  auto greedy = enter(x);
  REQUIRE(::send(greedy.get(), "?", 1, 0) == 1);
  char byte;
  REQUIRE(::recv(greedy.get(), &byte, 1, 0) == 1); // it is being answered
  CHECK(is_refused(greedy));
  CHECK(x.collected == 1);
}

TEST_CASE("The oldest client makes room", "[actors][inspection]") {
  run x;
  auto first = enter(x);
  auto second = enter(x);
  run_client third{x.entry(), 5s};
  CHECK(third.ask(5s).ranks.empty());
  CHECK(is_closed(first));
}

TEST_CASE("Clients that ask at the same time share an answer",
          "[actors][inspection]") {
  run_secret secret = run_secret::make();
  std::promise<void> asked;
  std::promise<void> go_on;
  std::atomic<int> collected = 0;
  inspection_port::options options;
  options.secret = secret;
  options.collect = [&](inspection_question) {
    if (++collected == 1) {
      asked.set_value();
      go_on.get_future().wait();
    }
    return to_payload(run_status{}).bytes;
  };
  inspection_port port{std::move(options)};
  auto entry = entry_of_this_process(port.port(), secret);
  auto ask = [&] {
    return std::async(std::launch::async, [&] {
      run_client{entry, 20s}.ask(20s);
    });
  };
  auto first = ask();
  asked.get_future().wait();
  // The gate admits them meanwhile; both wait for the second answer.
  run_client second{entry, 20s};
  run_client third{entry, 20s};
  auto answers = std::async(std::launch::async, [&] { second.ask(20s); });
  go_on.set_value();
  third.ask(20s);
  answers.get();
  first.get();
  CHECK(collected <= 3);
}

TEST_CASE("A run that does not answer in time is an error that names it",
          "[actors][inspection]") {
  file_descriptor listener{::socket(AF_INET, SOCK_STREAM, 0)};
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(to);
  REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&to), size) == 0);
  REQUIRE(::listen(listener.get(), 1) == 0);
  ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&to), &size);
  auto entry = entry_of_this_process(ntohs(to.sin_port), run_secret::make());
  auto begin = std::chrono::steady_clock::now();
  auto why = error_of([&] { run_client(entry, 100ms); }, error_code::transport);
  CHECK(std::chrono::steady_clock::now() - begin < 5s);
  CHECK_THAT(why, ContainsSubstring("does not answer in time (process "
                                    + std::to_string(entry.pid)));
}

TEST_CASE("An answer that is none is an error of the protocol",
          "[actors][inspection]") {
  auto secret = run_secret::make();
  inspection_port::options options;
  options.secret = secret;
  options.collect = [](inspection_question) {
    return inspection_port::bytes(3);
  };
  inspection_port port{std::move(options)};
  run_client client{entry_of_this_process(port.port(), secret), 5s};
  auto why = error_of([&] { client.ask(5s); }, error_code::protocol);
  CHECK_THAT(why, ContainsSubstring("another build of smp"));
}

TEST_CASE("A client gets the stacks of ranks", "[actors][inspection]") {
  run x;
  for (auto rank : {rank_id{1}, rank_id{0}}) {
    process_stacks stacks;
    stacks.rank = rank;
    stacks.threads.resize(2 + rank.value);
    byte_writer out;
    out.put(stacks);
    auto bytes = out.take();
    x.images.emplace_back(reinterpret_cast<const char*>(bytes.data()),
                          bytes.size());
  }
  run_client client{x.entry(), 5s};
  auto stacks = client.stacks(5s);
  REQUIRE(stacks.size() == 2);
  CHECK(stacks[0].rank == rank_id{0});
  CHECK(stacks[1].threads.size() == 3);
  x.images.front().pop_back();
  CHECK_THAT(error_of([&] { client.stacks(5s); }, error_code::protocol),
             ContainsSubstring("stacks of a rank"));
}

TEST_CASE("A client gets the events of ranks, and traces them",
          "[actors][inspection]") {
  run x;
  for (auto rank : {rank_id{1}, rank_id{0}}) {
    flight_record record{rank};
    flight_event event;
    event.kind = flight_kind::asked;
    event.number = 10 + rank.value;
    record.note(event);
    auto image = record.image();
    x.images.emplace_back(reinterpret_cast<const char*>(image.data()),
                          image.size());
  }
  run_client client{x.entry(), 5s};
  auto logs = client.events(5s);
  REQUIRE(logs.size() == 2);
  CHECK(logs[0].rank == rank_id{0});
  CHECK(logs[1].events.at(0).number == 11);
  CHECK(client.ask(5s).ranks.empty()); // the same connection
  client.begin_trace(5s);
  CHECK(client.finish_trace(5s).size() == 2);
  x.images.front()[0] = 'x';
  CHECK_THAT(error_of([&] { client.events(5s); }, error_code::protocol),
             ContainsSubstring("not a flight record"));
}
