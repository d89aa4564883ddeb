#include "tests/support/catch.hpp"

#include "apps/web/metrics_history.hpp"
#include "apps/web/page.hpp"
#include "apps/web/pipeline_grid.hpp"
#include "apps/web/run_feed.hpp"
#include "tests/support/scratch_dir.hpp"

#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <string>

using namespace smp;
using namespace smp::app;
using Catch::Matchers::ContainsSubstring;
using smp::test::scratch_dir;

namespace {

std::string step_line(uint64_t step, const std::string& more = "") {
  return fmt::format(R"({{"step":{},"loss":{},"grad_norm":1.0,)"
                     R"("step_seconds":0.5,"samples_per_second":8.0,)"
                     R"("bubble_ratio":0.25,"requests":4,"bytes_sent":100{}}})"
                     "\n",
                     step, 1.0 / static_cast<double>(step), more);
}

void append(const scratch_dir& dir, const std::string& text) {
  std::ofstream{dir.path / "metrics.jsonl", std::ios::app} << text;
}

void read_all(metrics_history& x) {
  while (x.update()) {
    // the next megabytes
  }
}

flight_event& add(flight_log& to, int64_t time, flight_kind what,
                  uint32_t name = 0) {
  auto& x = to.events.emplace_back();
  x.time = time;
  x.kind = what;
  x.name = name;
  return x;
}

/// A rank that begins a step each 10 ms, executes 4 ms and then waits.
flight_log steps_of(uint64_t rank, int steps) {
  flight_log result;
  result.rank = rank_id{rank};
  result.clock = "boot";
  result.names = {{1, "<b>h.1</b>"}, {first_text_name, "optimizer"}};
  constexpr int64_t ms = 1'000'000;
  for (int i = 0; i < steps; ++i) {
    auto begin = i * 10 * ms;
    add(result, begin, flight_kind::step_begins).step = 1 + i;
    add(result, begin + ms, flight_kind::executes, 1).context = 1;
    add(result, begin + 5 * ms, flight_kind::parked, 1).context = 1;
    add(result, begin + 7 * ms, flight_kind::ended, 1).context = 1;
    add(result, begin + 7 * ms, flight_kind::activity_begins, first_text_name);
    add(result, begin + 9 * ms, flight_kind::activity_ends, first_text_name);
    add(result, begin + 9 * ms, flight_kind::step_ends).step = 1 + i;
  }
  return result;
}

} // namespace

TEST_CASE("Steps are read once, however often one looks", "[apps][web]") {
  scratch_dir dir;
  metrics_history x{dir.path / "metrics.jsonl"};
  read_all(x);
  CHECK_FALSE(x.last());
  append(dir, step_line(1) + step_line(2));
  read_all(x);
  read_all(x);
  CHECK(x.totals().steps == 2);
  CHECK(x.totals().requests == 8);
  CHECK(x.last()->step == 2);
  // Half a line counts when its rest is there.
  auto third = step_line(3, R"(,"held_out_loss":null)");
  append(dir, third.substr(0, 20));
  read_all(x);
  CHECK(x.last()->step == 2);
  append(dir, third.substr(20));
  read_all(x);
  CHECK(x.totals().steps == 3);
  CHECK(std::isnan(x.last()->held_out_loss));
  // The last line changes in place when its evaluation is done.
  auto text = dir.read("metrics.jsonl");
  dir.write("metrics.jsonl", text.replace(text.find("null"), 4, "0.50"));
  read_all(x);
  CHECK(x.last()->held_out_loss == 0.5);
  CHECK(x.totals().steps == 3);
  // Another run in this directory begins anew.
  dir.write("metrics.jsonl", step_line(1));
  read_all(x);
  CHECK(x.totals().steps == 1);
}

TEST_CASE("A long run has as many points as a chart, and the last step",
          "[apps][web]") {
  scratch_dir dir;
  constexpr uint64_t steps = 40'000;
  std::string text;
  for (uint64_t i = 1; i <= steps; ++i)
    text += step_line(i);
  append(dir, text);
  metrics_history x{dir.path / "metrics.jsonl"};
  read_all(x);
  auto points = x.points();
  CHECK(points.size() <= metrics_history::most_points);
  CHECK(points.size() > metrics_history::most_points / 4);
  CHECK(points.front().step == 1);
  CHECK(points.back().step == steps);
  CHECK(x.totals().steps == steps);
  CHECK(x.totals().bytes_sent == 100 * steps);
}

TEST_CASE("What happened in steps is told, and what is no step, too",
          "[apps][web]") {
  scratch_dir dir;
  append(dir, step_line(1) + "nonsense\n[1]\n"
                + R"({"restart":1,"why":"rank 1 was killed"})"
                  "\n"
                + R"({"step":2,"loss":null,"skipped":"the loss is nan"})"
                  "\n"
                + step_line(3, R"(,"checkpoint_seconds":0.25)"));
  metrics_history x{dir.path / "metrics.jsonl"};
  read_all(x);
  std::string all;
  for (auto& y : x.events())
    all += fmt::format("{}|{}|{}\n", y.when, y.text, y.bad);
  CHECK(all == "|restart 1, why rank 1 was killed|true\n"
               "step 2|updated nothing: the loss is nan|true\n"
               "step 3|a checkpoint held it up for 0.25 s|false\n");
  CHECK(x.totals().nonfinite == 1);
  CHECK(x.totals().skipped == 1);
  // A line without an end does not fill the memory.
  append(dir, std::string(9 << 20, 'x'));
  read_all(x);
  append(dir, "\n" + step_line(4));
  read_all(x);
  CHECK(x.last()->step == 4);
  CHECK(x.totals().steps == 4);
}

TEST_CASE("The grid shows the last steps of ranks, and what goes on",
          "[apps][web]") {
  std::vector<flight_log> logs{steps_of(0, 20), steps_of(1, 20)};
  add(logs[1], 199'000'000, flight_kind::executes, 1).context = 2;
  auto x = grid_json(logs, 0.005);
  CHECK(x["seconds"].get<double>() == Catch::Approx(0.06));
  REQUIRE(x["ranks"].size() == 2);
  auto kind_of = [&](const json& slice) {
    return x["kinds"][slice[2].get<size_t>()].get<std::string>();
  };
  // 199 ms are 55 ms from the left: the last event, and 5 ms since then.
  auto& last = x["ranks"][1]["slices"].back();
  CHECK(kind_of(last) == "forward");
  CHECK(last[0] == 55'000);
  CHECK(last[1] == 60'000);
  std::map<std::string, int64_t> micros;
  for (auto& slice : x["ranks"][0]["slices"])
    micros[kind_of(slice)] += slice[1].get<int64_t>() - slice[0].get<int64_t>();
  // Of 60 ms from 144 ms on: steps 15 (a part) to 20.
  CHECK(micros["forward"] == 1'000 + 5 * 4'000);
  CHECK(micros["optimizer"] == 6 * 2'000);
  CHECK(x["names"].dump().find("forward <b>h.1</b> mb 0") != std::string::npos);
  CHECK(x["steps"].size() == 5);
  CHECK(grid_json({}, 0).is_null());
  // A rank that was asked earlier is in it with as many steps.
  logs[1] = steps_of(1, 19);
  CHECK(grid_json(logs, 0)["seconds"].get<double>() == Catch::Approx(0.07));
}

TEST_CASE("A grid of many slices stays small", "[apps][web]") {
  std::vector<flight_log> logs{steps_of(0, 5000)};
  grid_limits limits;
  limits.steps = 4000;
  limits.most = 1000;
  limits.slices = 300;
  auto x = grid_json(logs, 0, limits);
  CHECK(x["seconds"].get<double>() == Catch::Approx(40));
  CHECK(x["ranks"][0]["slices"].size() <= 300);
  CHECK(x["ranks"][0]["slices"].size() > 2);
}

TEST_CASE("Of a run that is over, its files tell", "[apps][web]") {
  scratch_dir dir;
  append(dir, step_line(1) + step_line(2));
  dir.write("config.toml", "[train]\nsteps = 4\n");
  dir.write("end.json", R"({"exit_code":3,"cause":"rank 1: killed"})");
  dir.write("stall.json", R"({"text":"r0 waits for r1","waits":["a","b",3]})");
  dir.write("partition.json",
            R"({"nodes":[{"name":"model","device":0,"parent":null,"cost":1},)"
            R"({"name":"h\u0007","device":1,"parent":0,"bytes":64,"x":[1]}],)"
            R"("loads":[0.5,0.5],"cut_bytes":64})");
  run_feed feed{dir.path};
  auto x = feed.look();
  CHECK(x["run"]["state"] == "ended");
  CHECK(x["run"]["exit_code"] == 3);
  CHECK(x["ranks"].is_null());
  CHECK(x["waits"]["chain"] == "r0 waits for r1");
  CHECK(x["waits"]["all"].size() == 2);
  CHECK(x["metrics"]["loss"] == json{1.0, 0.5});
  CHECK(x["metrics"]["held_out_loss"][0].is_null());
  auto& nodes = x["partition"]["nodes"];
  REQUIRE(nodes.size() == 2);
  CHECK(nodes[1]["name"] == "h\xef\xbf\xbd");
  CHECK(nodes[1]["bytes"] == 64);
  CHECK_FALSE(nodes[1].contains("x"));
  CHECK(
    x["events"].back()["text"].get<std::string>().ends_with("rank 1: killed"));
}

TEST_CASE("No text of a run becomes part of the page", "[apps][web]") {
  const std::string hostile
    = "</script><script>alert(1)</script><!--"
      "PAGE_JS NONCE";
  auto page = page_html({{"run", {{"run", hostile}}}});
  auto count = [&](const std::string& x) {
    size_t result = 0;
    for (auto i = page.find(x); i != page.npos; i = page.find(x, i + 1))
      ++result;
    return result;
  };
  CHECK(count("<script") == 2);
  CHECK(count("</script") == 2);
  CHECK(count("<!--") == 0);
  CHECK(count("PAGE_JS") == 1);
  auto begin = page.find('>', page.find("id=\"data\"")) + 1;
  auto data = page.substr(begin, page.find("</script", begin) - begin);
  CHECK(json::parse(data)["run"]["run"] == hostile);
  // It runs only what has its mark, loads nothing, and makes no markup of text.
  CHECK_THAT(page, ContainsSubstring("default-src 'none'"));
  const std::string script = page_js_text;
  for (auto* x : {"innerHTML", "outerHTML", "insertAdjacent", "document.write",
                  "eval(", "Function(", "http://", "https://"}) {
    INFO(x);
    auto found = script.find(x);
    CHECK((found == script.npos
           || script.substr(found).starts_with("http://www.w3.org/2000/svg")));
  }
  CHECK(std::string{page_css_text}.find("url(") == std::string::npos);
  CHECK(page_html() != page_html()); // another mark each time
}
