// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/actors/recorder.hpp"
#include "tests/support/mutations.hpp"
#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

// What was recorded of one run, and a thousand variants of it, sent to the
// ports of another. (UCX opens none where ranks share a machine;
// docs/secret.md says what it does where they do not.)

using namespace smp::test;

namespace {

using recording = std::vector<std::vector<std::byte>>;

/// Steps that add rounding errors up slowly.
const std::string endless = tiny_gpt(2, 2, 4, R"([optimizer]
type = "sgd"
lr = 1e-2

[train]
steps = 1000000
log_interval = 1
eval_steps = 0
)");

/// Two ranks without our launcher: rank 0 has the SUPERVISOR, and rank 1 comes
/// to it through somebody who writes all down, as does smp-inspect.
struct recorded_run {
  recorded_run() : dir(endless) {
    auto rank_0 = start_rank(0, {});
    auto gate = *await_ports(rank_0.pid(), 1).begin();
    recorder to_supervisor{gate};
    auto rank_1 = start_rank(
      1, {{"MASTER_PORT", std::to_string(to_supervisor.port())}});
    REQUIRE(rank_0.wait_for(" 2/1000000"));
    auto ports = await_ports(rank_0.pid(), 2);
    ports.erase(gate);
    recorder to_door{*ports.begin()};
    // A rank that answers late makes it fail.
    int code = 1;
    std::string said;
    for (int i = 0; i < 20 && code != 0; ++i) {
      program watcher{{built_program("smp-inspect"),
                       "127.0.0.1:" + std::to_string(to_door.port()),
                       "--secret", "run/inspect.entry", "ls"},
                      dir.path};
      code = watcher.join();
      said = watcher.output();
    }
    INFO(said);
    REQUIRE(code == 0);
    for (auto x : {&rank_0, &rank_1})
      x->signal(SIGINT);
    CHECK(rank_0.join() == 130);
    CHECK(rank_1.join() == 130);
    streams = to_supervisor.stop();
    for (auto& x : to_door.stop())
      streams.push_back(std::move(x));
  }

  program start_rank(int rank, std::map<std::string, std::string> more) const {
    more.insert({{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
                 {"OMPI_COMM_WORLD_SIZE", "2"},
                 {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                 {"PMIX_NAMESPACE", "recorded"},
                 {"SMP_RENDEZVOUS_DIR", dir.path}});
    return dir.start({"tiny.toml", "--ranks", "2", "--run-dir", "run"}, more);
  }

  static std::set<uint16_t> await_ports(pid_t x, size_t count) {
    std::set<uint16_t> result;
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds{60};
    while (result.size() < count && std::chrono::steady_clock::now() < end) {
      let_pass(std::chrono::milliseconds{5});
      result = listening_ports_of(x);
    }
    REQUIRE(result.size() == count);
    return result;
  }

  train_dir dir;
  recording streams; // by connection
};

void send_to(uint16_t port, const std::vector<std::byte>& bytes) {
  auto stranger = connect_to(port);
  send_bytes(stranger.get(), bytes);
}

std::vector<double> losses_of(const train_dir& dir, const std::string& run) {
  std::vector<double> result;
  for (auto& step : dir.metrics(run))
    result.push_back(step.at("loss").get<double>());
  return result;
}

} // namespace

TEST_CASE("What another run said changes nothing, in a thousand variants",
          "[apps][secret][R44]") {
  auto streams = recorded_run{}.streams;
  REQUIRE(streams.size() >= 2);
  size_t bytes = 0;
  for (auto& x : streams)
    bytes += x.size();
  CHECK(bytes > 1000); // proofs, and what was said after them
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  std::set<uint16_t> ports = listening_ports_of(run.pid());
  for (auto rank : children_of(run.pid()))
    ports.merge(listening_ports_of(rank));
  CHECK(ports.size() == 2); // of the SUPERVISOR, and of who looks
  for (auto port : ports)
    for (auto& x : streams)
      send_to(port, x);
  std::mt19937 random{13};
  for (size_t i = 0; i < 1000; ++i) {
    auto variant = mutated(streams[i % streams.size()], random);
    for (auto port : ports)
      send_to(port, variant);
  }
  auto last = dir.metrics("run").size();
  REQUIRE(run.wait_for(' ' + std::to_string(last + 20) + "/1000000"));
  run.signal(SIGINT);
  CHECK(run.join() == 130);
  INFO(run.output());
  // The numbers are those of a run that nobody talked to.
  auto disturbed = losses_of(dir, "run");
  auto other = dir.start({"tiny.toml", "--run-dir", "other",
                          "--train.steps=" + std::to_string(disturbed.size())});
  REQUIRE(other.join() == 0);
  auto quiet = losses_of(dir, "other");
  REQUIRE(quiet.size() == disturbed.size());
  for (size_t i = 0; i < quiet.size(); ++i)
    CHECK(disturbed[i] == Catch::Approx(quiet[i]).epsilon(1e-4));
}
