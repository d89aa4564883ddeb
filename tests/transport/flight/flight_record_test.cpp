#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/mutations.hpp"
#include "transport/flight/flight_image.hpp"
#include "transport/flight/flight_layout.hpp"
#include "transport/flight/flight_record.hpp"

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

flight_event event(flight_kind kind, uint64_t number) {
  flight_event result;
  result.kind = kind;
  result.number = number;
  result.peer = 1;
  return result;
}

/// Memory of a launcher, for a record that others read.
std::shared_ptr<std::byte> shared_memory() {
  auto* p = new (std::align_val_t{4096}) std::byte[flight_record::image_size()];
  std::memset(p, 0, flight_record::image_size());
  return {p,
          [](std::byte* x) { operator delete[](x, std::align_val_t{4096}); }};
}

} // namespace

TEST_CASE("Events come back in their order, with the names they have",
          "[transport][flight]") {
  flight_record record{rank_id{3}};
  std::vector<std::string> paths{"", "h.0", "h.1"};
  record.name_modules(paths);
  record.note(event(flight_kind::asked, 7));
  auto of_module = event(flight_kind::executes, 8);
  of_module.name = 2;
  record.note(of_module);
  auto named = event(flight_kind::activity_begins, 0);
  named.name = record.name("optimizer");
  CHECK(record.name("optimizer") == named.name);
  record.note(named);
  auto log = read_flight_image(record.image());
  CHECK(log.rank == rank_id{3});
  CHECK(log.lost == 0);
  CHECK(!log.host.empty());
  CHECK(!log.clock.empty());
  REQUIRE(log.events.size() == 3);
  CHECK(log.events[0].number == 7);
  CHECK(log.events[0].time <= log.events[1].time);
  CHECK(log.name(log.events[1].name) == "h.1");
  CHECK(log.name(log.events[2].name) == "optimizer");
  CHECK(log.names.count(1) == 0); // of no event
}

TEST_CASE("A record keeps its last events and counts those before",
          "[transport][flight]") {
  flight_record record{rank_id{0}};
  constexpr auto more = flight_record::capacity + 100;
  for (uint64_t i = 0; i < more; ++i)
    record.note(event(flight_kind::asked, i));
  auto all = read_flight_image(record.image());
  CHECK(all.lost == 100);
  REQUIRE(all.events.size() == flight_record::capacity);
  CHECK(all.events.front().number == 100);
  CHECK(all.events.back().number == more - 1);
  auto some = read_flight_image(record.image(10));
  REQUIRE(some.events.size() == 10);
  CHECK(some.events.front().number == more - 10);
  CHECK(some.lost == more - 10);
}

TEST_CASE("Threads note events, and others read them, at the same time",
          "[transport][flight]") {
  constexpr uint64_t each = 20'000;
  flight_record record{rank_id{0}};
  std::atomic<int> running = 3;
  std::vector<std::jthread> threads;
  for (uint64_t t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < each; ++i) {
        auto x = event(flight_kind::asked, i);
        x.context = static_cast<uint32_t>(t);
        x.amount = i * 3 + t;
        record.note(x);
      }
      --running;
    });
  size_t read = 0;
  for (bool last = false; !last;) {
    last = running == 0;
    for (auto& x : read_flight_image(record.image()).events) {
      REQUIRE(x.amount == x.number * 3 + x.context); // none is torn
      ++read;
    }
  }
  threads.clear();
  CHECK(read_flight_image(record.image()).lost
        == 3 * each - flight_record::capacity);
  CHECK(read > 0);
}

TEST_CASE(
  "The record of a process that was killed in the middle of an event "
  "is read without it",
  "[transport][flight]") {
  auto memory = shared_memory();
  CHECK(flight_record::image_of(memory.get()).empty()); // none began
  {
    flight_record record{rank_id{1}, memory};
    for (uint64_t i = 0; i < 5; ++i)
      record.note(event(flight_kind::asked, i));
  }
  auto* slots = reinterpret_cast<flight::slot*>(memory.get() + flight::page
                                                + flight::names_capacity);
  slots[4].stamp = 2 * 4 + 1; // as while it is written
  auto log = read_flight_image(flight_record::image_of(memory.get()));
  REQUIRE(log.events.size() == 4);
  CHECK(log.events.back().number == 3);
  CHECK(log.lost == 1);
  // A later session of the process begins anew.
  flight_record again{rank_id{1}, memory};
  again.note(event(flight_kind::reply, 9));
  log = read_flight_image(flight_record::image_of(memory.get()));
  REQUIRE(log.events.size() == 1);
  CHECK(log.events.front().number == 9);
}

TEST_CASE(
  "A slot that a thread still writes when the ring comes back to it "
  "stays that thread's",
  "[transport][flight]") {
  auto memory = shared_memory();
  flight_record record{rank_id{1}, memory};
  auto* slots = reinterpret_cast<flight::slot*>(memory.get() + flight::page
                                                + flight::names_capacity);
  for (uint64_t i = 0; i < 5; ++i)
    record.note(event(flight_kind::asked, i));
  slots[4].stamp = 2 * 4 + 1; // as of a thread that was stopped there
  for (uint64_t i = 0; i < flight_record::capacity; ++i)
    record.note(event(flight_kind::asked, 5 + i));
  CHECK(slots[4].stamp == 2 * 4 + 1);
  auto log = read_flight_image(record.image());
  CHECK(log.events.size() == flight_record::capacity - 1);
  CHECK(log.events.back().number == flight_record::capacity + 3);
  CHECK(log.lost == 6);
  slots[4].stamp = 2 * 4 + 2; // it goes on
  CHECK(read_flight_image(record.image()).lost == 5);
  // One that was stopped before it began finds a later event there.
  slots[5].stamp = 2 * (2 * flight_record::capacity + 5) + 2;
  for (uint64_t i = 0; i < flight_record::capacity; ++i)
    record.note(event(flight_kind::asked, i));
  CHECK(slots[5].stamp == 2 * (2 * flight_record::capacity + 5) + 2);
}

TEST_CASE("A record whose room for names is used up goes on without names",
          "[transport][flight]") {
  flight_record record{rank_id{0}};
  std::string path(1000, 'x');
  for (int i = 0; i < 2000; ++i)
    record.name(path + std::to_string(i));
  auto x = event(flight_kind::activity_begins, 0);
  x.name = record.name(path + "and more");
  record.note(x);
  auto log = read_flight_image(record.image());
  REQUIRE(log.events.size() == 1);
  CHECK(log.name(log.events[0].name).empty());
  CHECK(record.name("short") != x.name); // has room, and is another name
}

TEST_CASE("A trace has all events from its begin on, up to its limit",
          "[transport][flight]") {
  flight_record record{rank_id{0}};
  record.note(event(flight_kind::asked, 0));
  CHECK(!record.tracing());
  auto trace = record.trace(2);
  CHECK(record.tracing());
  for (uint64_t i = 1; i < 5; ++i)
    record.note(event(flight_kind::asked, i));
  auto lost = trace->lost();
  CHECK(lost == 2);
  auto log = read_flight_image(record.image(trace->take(), lost));
  REQUIRE(log.events.size() == 2);
  CHECK(log.events[0].number == 1);
  CHECK(log.lost == 2);
  SECTION("which ends with the last reference to it") {
    trace = nullptr;
  }
  SECTION("which ends by itself when its time is over") {
    trace = record.trace(2, std::chrono::seconds{-1});
  }
  record.note(event(flight_kind::asked, 5));
  record.note(event(flight_kind::asked, 6));
  CHECK(!record.tracing());
}

TEST_CASE("What is no record is refused, and damaged ones harm nobody",
          "[transport][flight]") {
  auto refused = [](const std::vector<std::byte>& x) {
    return error_of([&] { read_flight_image(x); }, error_code::protocol);
  };
  CHECK_THAT(refused({}), ContainsSubstring("too short"));
  CHECK_THAT(refused(std::vector<std::byte>(8192)),
             ContainsSubstring("begins with something else"));
  flight_record record{rank_id{0}};
  auto x = event(flight_kind::activity_begins, 0);
  x.name = record.name("optimizer");
  for (int i = 0; i < 3; ++i)
    record.note(x);
  auto image = record.image();
  auto cut = image;
  cut.pop_back();
  CHECK_THAT(refused(cut), ContainsSubstring("sizes do not match"));
  // Only what is used of the header and what follows it.
  std::mt19937 engine{1};
  std::vector<std::byte> used{image.begin(), image.begin() + 160};
  used.insert(used.end(), image.begin() + 4096, image.end());
  for (int i = 0; i < 3000; ++i) {
    auto bad = mutated(used, engine);
    if (bad.size() < 160)
      continue;
    std::vector<std::byte> y{bad.begin(), bad.begin() + 160};
    y.resize(4096);
    y.insert(y.end(), bad.begin() + 160, bad.end());
    try {
      for (auto& z : read_flight_image(y).events)
        CHECK(z.kind <= last_of(z.kind));
    } catch (const error& e) {
      CHECK(e.code() == error_code::protocol);
    }
  }
}
