#include "tests/support/catch.hpp"

#include "actors/flight/trace_file.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

using namespace smp;

namespace {

using kind = flight_slice::kind;

/// Two ranks: the step body on rank 0 calls module 1 of rank 1 and waits.
struct two_ranks {
  std::vector<flight_log> logs = std::vector<flight_log>(2);

  two_ranks() {
    logs[0].clock = logs[1].clock = "boot";
    logs[1].rank = rank_id{1};
    for (auto& x : logs)
      x.names = {{1, "h.1"}, {first_text_name, "optimizer"}};
  }

  flight_event& at(uint64_t rank, int64_t time, flight_kind what) {
    auto& x = logs[rank].events.emplace_back();
    x.time = time;
    x.kind = what;
    return x;
  }

  flight_event& of(uint64_t rank, int64_t time, flight_kind what,
                   uint64_t number, uint32_t context) {
    auto& x = at(rank, time, what);
    x.number = number;
    x.context = context;
    x.step = 1;
    return x;
  }

  void step(uint32_t number, int64_t begin) {
    for (uint64_t rank : {0u, 1u})
      at(rank, begin, flight_kind::step_begins).step = number;
    of(0, begin + 10, flight_kind::executes, 100, 1);
    auto& parked = of(0, begin + 20, flight_kind::parked, 100, 1);
    parked.name = 1;
    parked.peer = 1;
    auto& asked = of(0, begin + 21, flight_kind::asked, number, 1);
    asked.name = 1;
    asked.peer = 1;
    of(1, begin + 30, flight_kind::arrived, number, 0).peer = 0;
    of(1, begin + 35, flight_kind::executes, number, 4).name = 1;
    of(1, begin + 50, flight_kind::ended, number, 4).name = 1;
    of(1, begin + 51, flight_kind::answered, number, 0).peer = 0;
    of(0, begin + 60, flight_kind::reply, number, 1);
    of(0, begin + 62, flight_kind::resumed, 100, 1);
    of(0, begin + 70, flight_kind::ended, 100, 1);
    for (uint64_t rank : {0u, 1u})
      at(rank, begin + 80, flight_kind::step_ends).step = number;
  }
};

std::vector<flight_slice> slices(const flight_timeline& x, kind what) {
  std::vector<flight_slice> result;
  std::ranges::copy_if(x.slices, std::back_inserter(result),
                       [what](auto& y) { return y.what == what; });
  return result;
}

nlohmann::json trace_of(const std::vector<flight_log>& logs,
                        std::span<const planned_slice> plan = {}) {
  std::ostringstream out;
  write_trace(out, logs, plan);
  return nlohmann::json::parse(out.str());
}

} // namespace

TEST_CASE("An execution that waits for an answer is two periods and a wait",
          "[actors][flight]") {
  two_ranks run;
  run.step(1, 1000);
  auto line = timeline_of(run.logs[0]);
  auto executing = slices(line, kind::executing);
  REQUIRE(executing.size() == 2);
  CHECK(executing[0].begin == 1010);
  CHECK(executing[0].end == 1020);
  CHECK(executing[1].begin == 1062);
  CHECK(executing[1].end == 1070);
  auto waits = slices(line, kind::waiting);
  REQUIRE(waits.size() == 1);
  CHECK(waits[0].request == request_id{rank_id{0}, 1});
  CHECK(title_of(waits[0], run.logs[0]) == "waits for h.1 from rank 1");
  auto whole = slices(line, kind::execution);
  REQUIRE(whole.size() == 1);
  CHECK(whole[0].end - whole[0].begin == 60);
  CHECK(title_of(whole[0], run.logs[0]) == "forward step body mb 0");
  REQUIRE(line.replies.size() == 1);
  CHECK(std::ranges::none_of(line.slices, &flight_slice::open));
}

TEST_CASE(
  "What had not ended when a record ends is open, and what began "
  "before it is left out",
  "[actors][flight]") {
  two_ranks run;
  run.of(0, 5, flight_kind::ended, 99, 2);
  run.at(0, 6, flight_kind::activity_ends);
  run.at(0, 7, flight_kind::activity_begins).name = first_text_name;
  run.of(0, 8, flight_kind::executes, 100, 1);
  run.of(0, 9, flight_kind::parked, 100, 1).peer = 1;
  run.at(0, 20, flight_kind::failed);
  auto line = timeline_of(run.logs[0]);
  std::map<kind, std::pair<int64_t, bool>> found;
  for (auto& x : line.slices)
    found[x.what] = {x.end - x.begin, x.open};
  CHECK(
    found
    == std::map<kind, std::pair<int64_t, bool>>{{kind::activity, {13, true}},
                                                {kind::executing, {1, false}},
                                                {kind::waiting, {11, true}},
                                                {kind::execution, {12, true}}});
}

TEST_CASE("Clocks of machines are compared by the fastest messages both ways",
          "[actors][flight]") {
  constexpr int64_t ahead = 123'456'789;
  two_ranks run;
  for (uint32_t i = 1; i < 4; ++i)
    run.step(i, 1000 * i);
  run.logs[1].clock = "other boot";
  for (auto& x : run.logs[1].events)
    x.time += ahead;
  std::vector<flight_timeline> lines{timeline_of(run.logs[0]),
                                     timeline_of(run.logs[1])};
  auto offsets = clock_offsets(run.logs, lines);
  CHECK(offsets[0].offset == 0);
  CHECK(offsets[0].uncertainty == 0);
  // Both ways take 9.
  CHECK(offsets[1].offset == -ahead);
  CHECK(offsets[1].uncertainty == 9);
  CHECK(!offsets[1].by_date);

  SECTION("without messages their dates are compared") {
    run.logs[0].epoch = 1'000'000;
    run.logs[1].epoch = 3'000'000;
    std::erase_if(run.logs[1].events,
                  [](auto& x) { return x.kind == flight_kind::arrived; });
    lines[1] = timeline_of(run.logs[1]);
    offsets = clock_offsets(run.logs, lines);
    CHECK(offsets[1].offset == 2'000'000);
    CHECK(offsets[1].by_date);
  }
}

TEST_CASE("A trace has each request with its execution and its reply",
          "[actors][flight]") {
  two_ranks run;
  run.step(1, 1000);
  run.step(2, 2000);
  std::vector<planned_slice> plan{
    {.rank = rank_id{1}, .step = 2, .begin = 5, .end = 25, .microbatch = {}}};
  auto trace = trace_of(run.logs, plan);
  std::map<std::string, int> counts;
  std::set<uint64_t> from, to;
  for (auto& x : trace["traceEvents"]) {
    auto what = x["ph"].get<std::string>();
    if (what == "s" || what == "f") {
      what += ' ' + x["name"].get<std::string>();
      (what == "s request" ? from : to).insert(x["pid"].get<uint64_t>());
    }
    ++counts[what];
  }
  CHECK(counts["s request"] == 2);
  CHECK(counts["f request"] == 2);
  CHECK(counts["s reply"] == 2);
  CHECK(counts["f reply"] == 2);
  CHECK(from == std::set<uint64_t>{0});
  // The first event is at 0, and times are microseconds.
  auto& events = trace["traceEvents"];
  auto planned = std::ranges::find_if(
    events, [](auto& x) { return x["name"] == "planned forward mb 0"; });
  REQUIRE(planned != events.end());
  CHECK((*planned)["ts"].get<double>() == Catch::Approx(1.005));
  CHECK((*planned)["dur"].get<double>() == Catch::Approx(0.02));
}

TEST_CASE("Steps that are not whole on all ranks are cut off",
          "[actors][flight]") {
  two_ranks run;
  run.at(0, 10, flight_kind::step_ends).step = 1; // its begin was not seen
  for (uint32_t i = 2; i < 6; ++i)
    run.step(i, 1000 * i);
  run.at(0, 6000, flight_kind::step_begins).step = 6;
  CHECK(complete_steps(run.logs) == std::pair{2u, 5u});
  for (auto& x : run.logs)
    keep_steps(x, 3, 4);
  CHECK(complete_steps(run.logs) == std::pair{3u, 4u});
  for (auto& x : run.logs)
    for (auto& y : x.events) {
      CHECK(y.time >= 3000);
      CHECK(y.time < 5000);
    }
  CHECK(complete_steps({}) == std::pair{0u, 0u});
}
