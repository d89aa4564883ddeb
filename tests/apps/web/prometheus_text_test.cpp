#include "tests/support/catch.hpp"

#include "apps/web/prometheus_text.hpp"
#include "tests/support/runs/program.hpp"

#include <nlohmann/json.hpp>

#include <chrono>
#include <cmath>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>

using namespace smp;
using namespace smp::app;
using namespace smp::test;
using namespace std::chrono_literals;

namespace {

/// What a scraper understands of the text: each line is one of three kinds,
/// families stand together, below their two lines.
struct scraped {
  std::map<std::string, double> samples; // by name and labels, as written
  std::map<std::string, std::string> types;

  explicit scraped(const std::string& text) {
    const std::regex help{"# HELP (smp_[a-z_]+) [^\\\\]+"};
    const std::regex type{"# TYPE (smp_[a-z_]+) (gauge|counter)"};
    const std::regex sample{
      R"re((smp_[a-z_]+)\{([a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+\} (\S+))re"};
    REQUIRE(text.ends_with('\n'));
    std::istringstream lines{text};
    std::string family;
    for (std::string line; std::getline(lines, line);) {
      INFO(line);
      std::smatch found;
      if (std::regex_match(line, found, help)) {
        family = found[1];
        REQUIRE(!types.contains(family));
      } else if (std::regex_match(line, found, type)) {
        REQUIRE(found[1] == family);
        types[family] = found[2];
      } else {
        REQUIRE(std::regex_match(line, found, sample));
        REQUIRE(found[1] == family);
        REQUIRE(types.contains(family));
        auto key = line.substr(0, line.rfind(' '));
        REQUIRE(samples.emplace(key, std::stod(found[3])).second);
      }
    }
  }
};

std::chrono::system_clock::time_point epoch_plus(std::chrono::milliseconds x) {
  return std::chrono::system_clock::time_point{x};
}

rank_entry entry_of(uint64_t rank, rank_health health) {
  rank_entry result;
  result.rank = rank_id{rank};
  result.health = health;
  result.known = true;
  auto& status = result.status;
  status.pp_rank = rank;
  status.queue = 3;
  status.busy_seconds = 12.5;
  status.bubble = 0.25;
  status.memory = 1'000'000;
  status.peak_memory = 2'000'000;
  status.comm.bytes_sent = 100;
  status.comm.bytes_received = 200;
  activity waits;
  waits.who = activity::kind::context;
  waits.seconds = 1.5;
  activity user;
  user.seconds = 99;
  status.view.activities = {waits, user};
  actor_status scheduler;
  scheduler.name = "PIPELINE SCHEDULER";
  scheduler.items = {{"step", "7"}, {"running", "2"}, {"left", "4"}};
  status.actors = {scheduler};
  return result;
}

/// All metrics that are used in a text.
std::set<std::string> names_in(const std::string& text) {
  const std::regex name{"\\bsmp_[a-z_]+"};
  std::set<std::string> result;
  for (std::sregex_iterator i{text.begin(), text.end(), name}, end; i != end;
       ++i)
    result.insert(i->str());
  return result;
}

} // namespace

TEST_CASE("A run as Prometheus reads it", "[apps][web]") {
  run_look look;
  look.what = run_look::state::live;
  look.files.steps = 100;
  look.files.checkpoint = 30;
  look.files.checkpoint_time = epoch_plus(900'700ms);
  auto& status = look.status.emplace();
  status.stalls.quiet_seconds = 2.5;
  status.ranks = {
    entry_of(0, rank_health::well), entry_of(1, rank_health::stopped), {}};
  status.ranks[1].status.device = device_status{"cuda:0", 10, 20, 80};
  status.ranks[2].rank = rank_id{2};
  step_point last;
  last.step = 40;
  last.step_seconds = 0.5;
  step_totals totals;
  totals.requests = 320;
  totals.nonfinite = 1;
  auto text = prometheus_text(
    {"a \"run\"\\\nof mine", look, totals, last, epoch_plus(1000s)});
  INFO(text);
  scraped x{text};
  auto value = [&](const std::string& name, const std::string& more = "") {
    auto key = name + R"({run="a \"run\"\\\nof mine")" + more + "}";
    INFO(key);
    REQUIRE(x.samples.contains(key));
    return x.samples.at(key);
  };
  CHECK(value("smp_up") == 1);
  CHECK(value("smp_step") == 40);
  CHECK(value("smp_steps") == 100);
  CHECK(std::isnan(value("smp_loss")));
  CHECK(value("smp_step_seconds") == 0.5);
  CHECK(value("smp_requests_total") == 320);
  CHECK(value("smp_nonfinite_total") == 1);
  CHECK(value("smp_last_progress_timestamp_seconds") == 997.5);
  CHECK(value("smp_checkpoint_last_success_timestamp_seconds") == 900);
  const std::string first = R"(,rank="0",pp="0",tp="0",rdp="0")",
                    second = R"(,rank="1",pp="1",tp="0",rdp="0")";
  CHECK(value("smp_rank_up", first) == 1);
  CHECK(value("smp_rank_up", second) == 0);
  CHECK(value("smp_rank_state", second + R"(,state="stopped")") == 1);
  CHECK(value("smp_rank_state", second + R"(,state="well")") == 0);
  CHECK(value("smp_rank_up", R"(,rank="2")") == 1); // it has not joined
  CHECK(value("smp_inflight_microbatches", first) == 2);
  CHECK(value("smp_queue_size", first) == 3);
  CHECK(value("smp_request_oldest_seconds", first) == 1.5);
  CHECK(value("smp_comm_bytes_total", first + R"(,dir="out")") == 100);
  CHECK(value("smp_comm_bytes_total", first + R"(,dir="in")") == 200);
  CHECK(value("smp_memory_peak_bytes", first) == 2e6);
  CHECK(value("smp_device_memory_bytes", second + R"(,device="cuda:0")") == 10);
  CHECK(x.types.at("smp_comm_bytes_total") == "counter");
  // Such a run tells all that there is.
  CHECK(x.types.size() == metric_families().size());
}

TEST_CASE("A run that does not answer is down, and its steps stay",
          "[apps][web]") {
  run_look look;
  step_point last;
  last.step = 7;
  scraped x{prometheus_text({"r", look, {}, last, epoch_plus(1000s)})};
  CHECK(x.samples.at("smp_up{run=\"r\"}") == 0);
  CHECK(x.samples.at("smp_step{run=\"r\"}") == 7);
  CHECK(!x.types.contains("smp_rank_up"));
  CHECK(!x.types.contains("smp_checkpoint_last_success_timestamp_seconds"));
}

TEST_CASE("Alert rules and the dashboard name metrics that exist",
          "[apps][web]") {
  std::set<std::string> known;
  for (auto& x : metric_families())
    known.insert(x.name);
  auto alerts = content_of(source_file("config/monitoring/alerts.yml"));
  auto board = content_of(source_file("config/monitoring/dashboard.json"));
  auto used = nlohmann::json::parse(board);
  CHECK(used.at("panels").size() >= 8);
  for (auto& text : {alerts, board}) {
    auto names = names_in(text);
    CHECK(names.size() >= 5);
    for (auto& name : names) {
      INFO(name);
      CHECK(known.contains(name));
    }
  }
}
