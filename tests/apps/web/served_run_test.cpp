// ctest: seconds=20 label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/tcp.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <filesystem>
#include <regex>
#include <span>
#include <string>
#include <vector>

// A run in the browser and in Prometheus, with smp-inspect beside it.

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using namespace smp;
using namespace smp::test;
using nlohmann::json;

namespace {

/// @returns the port of a URL that ends with `path`
uint16_t port_in(const std::string& output, const std::string& path) {
  const std::regex url{"http://127\\.0\\.0\\.1:([0-9]+)" + path + "\n"};
  std::smatch found;
  REQUIRE(std::regex_search(output, found, url));
  return static_cast<uint16_t>(std::stoi(found[1]));
}

file_descriptor ask_for(uint16_t port, const std::string& path) {
  auto result = connect_to(port);
  auto text = fmt::format("GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n", path);
  REQUIRE(send_bytes(result.get(), std::as_bytes(std::span{text})));
  return result;
}

std::string fetch(uint16_t port, const std::string& path) {
  constexpr size_t more_than_any = 8 << 20;
  auto bytes = receive_bytes(ask_for(port, path).get(), more_than_any);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// @returns the next event of a stream, as JSON
json next_event(int fd) {
  std::string line;
  for (;;) {
    auto byte = receive_bytes(fd, 1);
    REQUIRE(!byte.empty());
    if (byte.front() != std::byte{'\n'})
      line += static_cast<char>(byte.front());
    else if (line.starts_with("data: "))
      return json::parse(line.substr(6));
    else
      line.clear(); // of the head, or between events
  }
}

bool shows_both(const json& x) {
  if (!x.contains("grid")) // it has not changed
    return false;
  auto& ranks = x.at("grid").at("ranks");
  return ranks.size() == 2 && !ranks[0].at("slices").empty()
         && !ranks[1].at("slices").empty();
}

/// A busy machine may be late with what a rank did in the last seconds.
/// @param last becomes the event that shows it
bool shows_both_soon(const json& first, json& last, int fd) {
  auto shown = shows_both(first) || shows_both(last);
  for (int i = 0; i < 20 && !shown; ++i) {
    last = next_event(fd);
    shown = shows_both(last);
  }
  return shown;
}

program inspect(const train_dir& dir, std::vector<std::string> words) {
  words.insert(words.begin(), {built_program("smp-inspect"), "run"});
  return program{std::move(words), dir.path};
}

} // namespace

TEST_CASE("A run is served beside its ranks, to its end and after it",
          "[apps][web]") {
  train_dir dir{endless_gpt()};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 5/1000000"));
  auto serve = inspect(
    dir, {"serve", "--web", "127.0.0.1:0", "--prometheus", "127.0.0.1:0"});
  REQUIRE(serve.wait_for("/metrics\n"));
  auto page = port_in(serve.output(), "/");
  auto metrics = port_in(serve.output(), "/metrics");

  CHECK_THAT(fetch(page, "/"), StartsWith("HTTP/1.1 200")
                                 && ContainsSubstring("<title>smp</title>"));
  CHECK_THAT(fetch(page, "/metrics"), StartsWith("HTTP/1.1 404"));
  CHECK_THAT(fetch(metrics, "/metrics"),
             ContainsSubstring("text/plain; version=0.0.4")
               && ContainsSubstring("\nsmp_up{run=\"run\"} 1\n")
               && ContainsSubstring(
                 "\nsmp_rank_up{run=\"run\",rank=\"1\",pp=\"1\",tp=\"0\","
                 "rdp=\"0\"} 1\n")
               && ContainsSubstring("\nsmp_steps{run=\"run\"} 1000000\n")
               && ContainsSubstring("\nsmp_inflight_microbatches{"));

  auto events = ask_for(page, "/events");
  auto first = next_event(events.get());
  CHECK(first["run"]["state"] == "running");
  CHECK(first["run"]["step"].get<uint64_t>() >= 5);
  REQUIRE(first["ranks"].size() == 2);
  CHECK(first["ranks"][1]["pp"] == 1);
  CHECK(first["partition"]["nodes"].size() > 4);
  CHECK(first["traffic"].size() >= 2);
  CHECK(first["metrics"]["loss"].size() >= 5);
  auto second = next_event(events.get());
  CHECK(second["run"]["step"] >= first["run"]["step"]);
  CHECK(!second.contains("partition")); // it has not changed
  CHECK(shows_both_soon(first, second, events.get()));

  run.signal(SIGINT);
  REQUIRE(run.join() == 130);
  auto last = second;
  while (last["run"]["state"] != "ended")
    last = next_event(events.get());
  CHECK(last["run"]["exit_code"] == 130);
  CHECK_THAT(fetch(metrics, "/metrics"),
             ContainsSubstring("\nsmp_up{run=\"run\"} 0\n"));
  serve.signal(SIGTERM);
  CHECK(serve.join() == 0);

  auto report = inspect(dir, {"report", "--output", "r.html"});
  report.finish();
  CHECK_THAT(content_of(dir.path / "r.html"),
             ContainsSubstring("\"exit_code\":130")
               && ContainsSubstring("\"nodes\":[{"));
  CHECK_THAT(inspect(dir, {"report", "--output", "no/r.html"}).finish(2),
             ContainsSubstring("no/r.html: cannot be written"));
}

TEST_CASE("A launcher serves its run as long as it lasts", "[apps][web]") {
  train_dir dir{
    endless_gpt("[monitor]\nweb = \"127.0.0.1:0\"\n"
                "prometheus = \"127.0.0.1:0\"\n")};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  CHECK_THAT(run.output(), ContainsSubstring("smp: run is served at\nhttp://"));
  auto page = port_in(run.output(), "/");
  auto metrics = port_in(run.output(), "/metrics");
  CHECK_THAT(fetch(page, "/"), StartsWith("HTTP/1.1 200"));
  CHECK_THAT(fetch(metrics, "/metrics"),
             ContainsSubstring("\nsmp_up{run=\"run\"} 1\n"));

  // Another run cannot have its port, and says so before it has a rank.
  auto other = dir.start({"tiny.toml", "--run-dir", "other",
                          fmt::format("--monitor.web=127.0.0.1:{}", page)});
  CHECK_THAT(other.finish(2),
             ContainsSubstring(fmt::format("127.0.0.1:{}", page))
               && ContainsSubstring("in use"));
  CHECK(!std::filesystem::exists(dir.path / "other"));
  auto wrong = dir.start(
    {"tiny.toml", "--run-dir", "third", "--monitor.prometheus=9464"});
  CHECK_THAT(wrong.finish(2), ContainsSubstring("9464: no port"));

  run.signal(SIGINT);
  REQUIRE(run.join() == 130);
  CHECK_THROWS(connect_to(page));
  CHECK_THROWS(connect_to(metrics));
}
