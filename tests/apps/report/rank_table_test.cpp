#include "tests/support/catch.hpp"

#include "apps/report/activity_strip.hpp"
#include "apps/report/rank_table.hpp"
#include "apps/report/run_json.hpp"
#include "apps/report/run_text.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::app;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;

namespace {

activity executing(std::string brief, double seconds = 1) {
  activity x;
  x.who = activity::kind::context;
  x.executes = true;
  x.what = "a long text";
  x.brief = std::move(brief);
  x.seconds = seconds;
  return x;
}

activity waiting(std::string awaits, rank_id from, double seconds = 1) {
  activity x;
  x.who = activity::kind::context;
  x.waits_for = "a long text";
  x.awaits = std::move(awaits);
  x.from = from;
  x.seconds = seconds;
  return x;
}

activity step_end() {
  activity x;
  x.waits_for = "the end of step 7";
  x.subject.what = wait_subject::kind::step_end;
  x.seconds = 100;
  return x;
}

rank_entry rank_with(std::vector<activity> xs,
                     rank_health health = rank_health::well) {
  rank_entry result;
  result.health = health;
  result.known = true;
  result.seconds = 3.2;
  result.status.view.complete = true;
  result.status.view.activities = std::move(xs);
  return result;
}

size_t characters_of(const std::string& x) {
  return static_cast<size_t>(std::ranges::count_if(
    x, [](char y) { return (static_cast<uint8_t>(y) & 0xc0) != 0x80; }));
}

/// Two ranks: one executes, one is stopped.
run_look two_ranks() {
  run_look result;
  result.what = run_look::state::live;
  result.files.last = last_step{40, 2.5, 0.5, 8, 1.25, 0.125, {4, 3.5, 2, 2.5}};
  result.files.steps = 100;
  result.files.tokens_per_sample = 16;
  auto& status = result.status.emplace();
  status.ranks.push_back(rank_with({step_end(), executing("FWD mb3 h.2")}));
  status.ranks.push_back(
    rank_with({waiting("h.0", rank_id{0})}, rank_health::stopped));
  status.ranks[1].rank = rank_id{1};
  status.ranks[1].why = "its process is stopped";
  auto& x = status.ranks[0].status;
  x.up_seconds = 10;
  x.busy_seconds = 4;
  x.bubble = 0.125;
  x.queue = 2;
  x.comm.bytes_sent = 1'000'000;
  x.comm.bytes_received = 500'000;
  x.memory = 364'000'000;
  actor_status server;
  server.id = "r0.server";
  server.name = "MODULE SERVER";
  server.items = {{"step", "40"}};
  actor_status context;
  context.id = "r0.context.1";
  context.name = "WORKER CONTEXT";
  context.parent = "r0.server";
  context.state = "PENDING";
  context.waits_for = "h.2 from rank 1";
  context.seconds = 0.5;
  x.actors = {context, server};
  return result;
}

} // namespace

TEST_CASE("A rank shows what tells most of it", "[apps][report]") {
  auto state = [](std::vector<activity> xs) {
    return state_of(rank_with(std::move(xs)));
  };
  activity user = step_end();
  user.executes = true;
  user.brief = "user code";
  CHECK(state({step_end()}) == "IDLE");
  auto worded_anew = step_end();
  worded_anew.waits_for = "its step to end";
  CHECK(state({worded_anew}) == "IDLE");
  CHECK(state({worded_anew, waiting("h.2", rank_id{1})}) == "WAIT h.2 <- r1");
  CHECK(state({user}) == "user code");
  CHECK(state({step_end(), waiting("h.2", rank_id{1})}) == "WAIT h.2 <- r1");
  CHECK(state({step_end(), waiting("its backward phase", no_rank)})
        == "WAIT its backward phase");
  CHECK(state({step_end(), waiting("old", rank_id{1}, 9),
               waiting("young", rank_id{1}, 1)})
        == "WAIT old <- r1");
  CHECK(
    state({step_end(), waiting("h.2", rank_id{1}, 9), executing("BWD mb0 h.1")})
    == "BWD mb0 h.1");
  CHECK(state({}) == "");
}

TEST_CASE("A rank that is not well shows that first", "[apps][report]") {
  auto state = [](rank_health x) {
    return state_of(rank_with({executing("FWD mb0 h.1")}, x));
  };
  CHECK(state(rank_health::stopped) == "STOPPED 3.20 s (FWD mb0 h.1)");
  CHECK(state(rank_health::silent) == "SILENT 3.20 s (FWD mb0 h.1)");
  CHECK(state(rank_health::blocked) == "BLOCKED FWD mb0 h.1");
  CHECK(state(rank_health::lost) == "LOST");
  CHECK(state(rank_health::left) == "LEFT");
  CHECK(state_of({}) == "JOINING");
}

TEST_CASE("What is counted becomes a rate by the rank's own clock",
          "[apps][report]") {
  rank_rows rows;
  rank_rows::time_point now{};
  auto look = two_ranks();
  auto first = rows.add(look, now);
  REQUIRE(first.size() == 2);
  CHECK_FALSE(first[0].busy);
  CHECK(first[0].bubble == 0.125);
  CHECK(first[0].queue == 2);
  CHECK_FALSE(first[0].arena);
  // Two seconds of the rank, however long the answer took.
  auto& x = look.status->ranks[0].status;
  x.up_seconds += 2;
  x.busy_seconds += 1;
  x.comm.bytes_sent += 3'000'000;
  x.comm.stages.device_path = true;
  x.comm.stages.send_arena.high_water = 4000;
  x.comm.stages.receive_arena.high_water = 96;
  auto second = rows.add(look, now + 5s);
  CHECK(second[0].busy == 0.5);
  CHECK(second[0].out == 1'500'000.0);
  CHECK(second[0].in == 0.0);
  CHECK(second[0].arena == 4096);
  // Of a rank that does not answer nothing is new.
  CHECK_FALSE(second[1].busy);
  CHECK_FALSE(second[1].queue);
  CHECK(second[1].memory == 0);
  // After a look without an answer one begins anew.
  CHECK(rows.add({}, now).empty());
  CHECK_FALSE(rows.add(look, now)[0].busy);
}

TEST_CASE("The table has a header, what is wrong, and a row for each rank",
          "[apps][report]") {
  auto look = two_ranks();
  rank_rows rows;
  rows.add(look, {});
  look.status->ranks[0].status.up_seconds += 2;
  look.status->ranks[0].status.busy_seconds += 1;
  auto lines = table_of("runs/x", look, rows.add(look, {}), 100);
  REQUIRE(lines.size() == 7);
  CHECK(lines[0].text
        == "runs/x  running  step 40/100, loss 2.5000  128 tokens/s  ETA 30 s");
  CHECK(lines[1].text == "loss █▆▁▃  grad norm 1.25  bubble 12 %  ");
  CHECK(
    lines[2].text
    == "rank 1 is stopped: its process is stopped, last heard of 3.2 s ago");
  CHECK(lines[2].how == table_line::style::bad);
  CHECK_THAT(lines[4].text, StartsWith("rank  state") && EndsWith("memory"));
  CHECK(lines[4].how == table_line::style::head);
  CHECK_THAT(lines[5].text, StartsWith("   0  FWD mb3 h.2 ")
                              && ContainsSubstring(" 50 %    12 %      2")
                              && EndsWith("-    364 MB"));
  CHECK(lines[5].how == table_line::style::plain);
  CHECK_THAT(lines[6].text,
             StartsWith("   1  STOPPED 3.20 s (WAIT h.0 <- r0)"));
  CHECK(lines[6].how == table_line::style::bad);
  for (auto& line : lines)
    CHECK(characters_of(line.text) <= 100);
  // Where there is room, and ranks differ in more than their stage.
  look.status->ranks[1].status.rdp_rank = 1;
  look.status->ranks[0].status.up_seconds += 2;
  look.status->ranks[0].status.busy_seconds += 1;
  lines = table_of("runs/x", look, rows.add(look, {}), 160);
  CHECK_THAT(lines[5].text,
             ContainsSubstring("0/0/0  █████       50 %  █▎          12 % "));
  REQUIRE(lines[5].marks.size() == 2); // bars
  CHECK(lines[5].marks[0].size == 10);
  CHECK_THAT(lines[4].text, ContainsSubstring("pp/tp/dp"));
  CHECK_THAT(lines[6].text, ContainsSubstring(" 0/0/1"));
}

TEST_CASE("Ranks on devices show these, and on a narrow screen less of others",
          "[apps][report]") {
  auto look = two_ranks();
  look.status->ranks[0].status.device = device_status{
    "cuda:3", 10'200'000'000, 12'100'000'000, 85'000'000'000};
  look.status->ranks[1].status.device = device_status{"cuda:4", 0, 0,
                                                      85'000'000'000};
  rank_rows rows;
  auto all = rows.add(look, {});
  auto heads = [&](size_t width) {
    auto lines = table_of("runs/x", look, all, width);
    auto head = lines.at(4).text;
    CHECK(head.size() == width);
    CHECK_THAT(lines.at(5).text,
               EndsWith("   cuda:3   10.2 GB   12.1 GB   85.0 GB"));
    // Nothing ran there yet.
    CHECK_THAT(lines.at(6).text,
               EndsWith("   cuda:4         -         -   85.0 GB"));
    return head.substr(head.find("busy"));
  };
  const std::string devices = "   device      used      peak        of";
  const std::string busy = "busy  bubble  queue";
  CHECK(heads(80) == busy + devices);
  CHECK(heads(100) == busy + "    memory" + devices);
  CHECK(heads(120) == busy + "     out/s      in/s    memory" + devices);
  CHECK(heads(126)
        == busy + "     out/s      in/s     arena    memory" + devices);
  CHECK_THAT(*actor_text(*look.status, "r0"),
             ContainsSubstring("device        cuda:3 (10.2 GB used, 12.1 GB at "
                               "most, of 85.0 GB)\n"));
  CHECK_THAT(actor_list(*look.status), ContainsSubstring(", device cuda:3 ("));
  auto json = to_json(all[0]);
  CHECK(json["device"] == "cuda:3");
  CHECK(json["device_memory"] == 10'200'000'000);
  CHECK(json["device_peak_memory"] == 12'100'000'000);
  CHECK(json["device_total_memory"] == 85'000'000'000);
  CHECK(to_json(all[1])["device_memory"].is_null());
  CHECK_THAT(*actor_text(*look.status, "r1"),
             ContainsSubstring("device        cuda:4 (of 85.0 GB)\n"));
  // Nothing more is said of ranks on the host.
  look.status->ranks[0].status.device.reset();
  auto on_host = rows.add(look, {})[0];
  CHECK_FALSE(to_json(on_host).contains("device"));
  CHECK(actor_text(*look.status, "r0")->find("device") == std::string::npos);
}

TEST_CASE("A table keeps to the width of the screen", "[apps][report]") {
  auto look = two_ranks();
  auto& what = look.status->ranks[0].status.view.activities[1].brief;
  what = "FWD mb3 a.very.long.name.that.no.column.holds\x1b[2J";
  rank_rows rows;
  auto all = rows.add(look, {});
  for (size_t width : {0, 1, 7, 40, 79, 200}) {
    auto lines = table_of("p", look, all, width);
    for (auto& line : lines) {
      CHECK(characters_of(line.text) <= width);
      CHECK(line.text.find('\x1b') == std::string::npos);
    }
  }
}

TEST_CASE("Rows are sorted by a column, the most telling first",
          "[apps][report]") {
  std::vector<rank_row> rows(3);
  for (uint64_t i = 0; i < 3; ++i) {
    rows[i].rank = i;
    rows[i].queue = 10 - i;
    rows[i].memory = i;
  }
  rows[1].busy = 0.5;
  auto first = [&](row_order x) {
    sort_rows(rows, x);
    return rows.front().rank;
  };
  CHECK(first(row_order::busy) == 1);
  CHECK(first(row_order::queue) == 0);
  CHECK(first(row_order::memory) == 2);
  CHECK(first(row_order::rank) == 0);
}

TEST_CASE("The last seconds of ranks are drawn by what took most of each cell",
          "[apps][report]") {
  flight_log log;
  log.clock = "boot";
  log.names[first_text_name] = "optimizer";
  auto at = [&log](int64_t milliseconds, flight_kind what,
                   phase in = phase::forward) -> flight_event& {
    auto& x = log.events.emplace_back();
    x.time = milliseconds * 1'000'000;
    x.kind = what;
    x.what = in;
    x.context = 1;
    return x;
  };
  at(0, flight_kind::step_begins);
  at(100, flight_kind::executes);
  at(200, flight_kind::parked);
  at(300, flight_kind::resumed);
  at(300, flight_kind::ended);
  at(300, flight_kind::executes, phase::backward);
  at(500, flight_kind::ended);
  at(500, flight_kind::collective_begins).context = 0;
  at(600, flight_kind::collective_ends).context = 0;
  at(600, flight_kind::activity_begins).name = first_text_name;
  at(700, flight_kind::activity_ends).name = first_text_name;
  at(1000, flight_kind::step_ends);
  auto timeline = timeline_of(log);
  std::string letters;
  for (auto x : strip_of(timeline, first_text_name, 0, 1'000'000'000, 10))
    letters += letter_of(x);
  CHECK(letters == " F.BBco   ");
  rank_row row;
  auto lines = strips_of({log}, {row}, 27);
  REQUIRE(lines.size() == 3);
  CHECK_THAT(lines[1].text, StartsWith("last 1.00 s   F forward   B backward"));
  CHECK(lines[2].text == "   0    FF..BBBBccoo      ");
  REQUIRE(lines[2].marks.size() == 5);
  CHECK(lines[2].marks[2].how == table_line::style::backward);
  CHECK(lines[2].marks[2].begin == 12);
  CHECK(lines[2].marks[2].size == 4);
}

TEST_CASE("Long ids of actors have a column as wide as they are",
          "[apps][report]") {
  auto look = two_ranks();
  actor_status stage;
  stage.id = "r0.cross-node-progress";
  stage.name = "CROSS-NODE PROGRESS";
  look.status->ranks[0].status.actors.push_back(stage);
  auto ls = actor_list(*look.status);
  CHECK_THAT(ls, ContainsSubstring("\nr0.cross-node-progress  CROSS-NODE "
                                   "PROGRESS"));
  CHECK_THAT(actor_tree(*look.status),
             ContainsSubstring("r0.cross-node-progress  CROSS-NODE PROGRESS"));
}

TEST_CASE("Lists, trees and JSON have the same actors", "[apps][report]") {
  auto look = two_ranks();
  auto& status = *look.status;
  auto ls = actor_list(status);
  CHECK_THAT(ls, ContainsSubstring("\nr0.context.1 ")
                   && ContainsSubstring("waits for h.2 from rank 1")
                   && ContainsSubstring("why its process is stopped"));
  auto tree = actor_tree(status);
  CHECK_THAT(tree, ContainsSubstring("\n  r0.server ")
                     && ContainsSubstring("\n    r0.context.1 "));
  CHECK(tree.find("  r0.server ") < tree.find("    r0.context.1 "));
  auto json_tree = tree_json(status);
  REQUIRE(json_tree.size() == 2);
  CHECK(json_tree[0]["children"][0]["children"][0]["id"] == "r0.context.1");
  CHECK(json_tree[1]["answers"] == false);
  CHECK(actors_json(status).size() == 4);
  auto one = actor_text(status, "r0.context.1");
  REQUIRE(one);
  CHECK_THAT(*one, ContainsSubstring("made by       r0.server")
                     && ContainsSubstring("since         0.50 s"));
  CHECK_FALSE(actor_text(status, "r9"));
}

TEST_CASE("Nothing that ranks say speaks to the terminal", "[apps][report]") {
  const std::string clears = "\x1b[2J";
  auto look = two_ranks();
  auto& status = *look.status;
  status.ranks[1].why = clears;
  for (auto& x : status.ranks[0].status.actors) {
    x.name += clears;
    x.state = clears;
    x.items.push_back({clears, "1"});
  }
  for (auto& text : {state_text("x", look), actor_list(status),
                     actor_tree(status), *actor_text(status, "r0.server")})
    CHECK(text.find('\x1b') == std::string::npos);
  run_look ended;
  ended.text = clears; // the last line of a rank's log
  CHECK(state_text("x", ended).find('\x1b') == std::string::npos);
}

TEST_CASE("A tree whose parents are a circle ends", "[apps][report]") {
  run_status x;
  x.ranks.push_back(rank_with({}));
  actor_status a;
  a.id = a.parent = "r0"; // what a rank says may be anything
  x.ranks[0].status.actors = {a};
  CHECK_FALSE(actor_tree(x).empty());
  CHECK(tree_json(x).size() == 1);
}

TEST_CASE("What is wrong makes a run unhealthy", "[apps][report]") {
  auto look = two_ranks();
  CHECK(head_json("x", look)["healthy"] == false);
  look.status->ranks[1].health = rank_health::well;
  CHECK(head_json("x", look)["healthy"] == true);
  look.status->stalls.standing = true;
  look.status->stalls.text = "nothing moved";
  CHECK(head_json("x", look)["problems"][0] == "stall: nothing moved");
  look.status->stalls.standing = false;
  actor_status boss;
  boss.name = "SUPERVISOR";
  boss.answers = false;
  look.status->actors = {boss};
  CHECK(head_json("x", look)["problems"][0]
        == "the SUPERVISOR does not answer");
  run_look none;
  none.text = "no answer";
  CHECK(head_json("x", none)["healthy"] == false);
}

TEST_CASE("Waits name the end of the chain", "[apps][report]") {
  auto look = two_ranks();
  auto& status = *look.status;
  status.ranks[0].status.view.activities = {waiting("h.2", rank_id{1})};
  auto text = waits_text(status);
  CHECK_THAT(text, ContainsSubstring("waits for a long text from rank 1")
                     && ContainsSubstring("rank 1 has not answered for 3.2 s"));
  status.stalls.quiet_seconds = 12;
  CHECK_THAT(waits_text(status),
             StartsWith("nothing moved on any rank for 12"));
  CHECK_THAT(comm_text(status),
             ContainsSubstring("r0 ") && ContainsSubstring("1.00 MB"));
  CHECK(comm_json(status)[0]["arena_high_water"].is_null());
  status.ranks[0].status.offload = smp::offload_status{
    1'000'000, 3'000'000, 16'000'000, 40'000'000, 39'000'000, 0, 1.5};
  CHECK_THAT(*actor_text(status, "r0"),
             ContainsSubstring("1.00 MB in a file of 16.0 MB, 3.00 MB at most, "
                               "40.0 MB written, 39.0 MB read, waited 1.5"));
  auto& stages = status.ranks[0].status.comm.stages;
  stages.device_path = true;
  stages.send_arena.capacity = 8'000'000;
  stages.sent[1] = 12;
  stages.stages = {{smp::comm_stage::d2d_send, 3, 4000, 2, 1}};
  stages.oldest.resize(1);
  stages.oldest[0].number = 7;
  stages.oldest[0].at = comm_stage::tracker;
  CHECK_THAT(comm_text(status),
             ContainsSubstring("rule \"host tensor\": 12 sent, 0 received")
               && ContainsSubstring("send arena: 0 B of 8.00 MB used")
               && ContainsSubstring("message 7 to r0, 0 B: at COMM TRACKER"));
  auto comm = comm_json(status)[0];
  CHECK(comm["tensors"]["host tensor"]["sent"] == 12);
  CHECK(comm["stages"]["D2D SEND"]["handled"] == 3);
  CHECK(comm["under_way"][0]["at"] == "COMM TRACKER");
  CHECK(comm["send_arena"]["capacity"] == 8'000'000);
}
