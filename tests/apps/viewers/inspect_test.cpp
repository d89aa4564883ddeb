// ctest: seconds=18 label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/torchrun.hpp"
#include "tests/support/runs/train_dir.hpp"
#include "tests/support/slowness.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <sys/stat.h>

// smp-inspect and smp-top --once on real runs, well and with each fault.

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using namespace smp::test;
using nlohmann::json;

namespace {

const std::string endless = endless_gpt("[monitor]\nstall_timeout = 1\n");

struct answer {
  int code = 0;
  std::string output;
  double seconds = 0;

  json parsed() const {
    INFO(output);
    return json::parse(output);
  }
};

answer run_program(const train_dir& dir, std::vector<std::string> command) {
  command[0] = built_program(command[0]);
  slowness machine;
  auto begin = std::chrono::steady_clock::now();
  program x{std::move(command), dir.path};
  answer result{x.join(), x.output()};
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  result.seconds = took.count() / machine.factor();
  return result;
}

answer inspect_run(const train_dir& dir, std::vector<std::string> words) {
  words.insert(words.begin(), {"smp-inspect", "run"});
  return run_program(dir, std::move(words));
}

/// Asks until `done`, which a test expects soon. The last answer is its result.
template <class F>
answer ask_until(const train_dir& dir, const std::vector<std::string>& command,
                 F done) {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds{60};
  for (;;) {
    auto x = run_program(dir, command);
    if (done(x) || std::chrono::steady_clock::now() > end)
      return x;
  }
}

template <class F>
answer inspect_until(const train_dir& dir, std::vector<std::string> words,
                     F done) {
  words.insert(words.begin(), {"smp-inspect", "run"});
  return ask_until(dir, words, done);
}

bool is_well(const answer& x) {
  return x.code == 0;
}

bool is_refused(const answer& x) {
  return x.code == 2;
}

/// Of a run that is well. Whoever is late for a moment, of the ranks, their
/// actors and the SUPERVISOR, is something wrong at that moment.
answer inspect_well(const train_dir& dir, std::vector<std::string> words) {
  return inspect_until(dir, std::move(words), is_well);
}

template <class F>
json top_until(const train_dir& dir, F done) {
  json result;
  ask_until(dir, {"smp-top", "run", "--once", "--json"}, [&](auto& x) {
    result = x.parsed();
    return done(result);
  });
  return result;
}

bool says(const answer& x, const std::string& text) {
  return x.output.find(text) != std::string::npos;
}

/// Of an answer in JSON.
bool has_problem(const answer& x, const std::string& begin) {
  auto problems = x.parsed().at("problems");
  return std::any_of(problems.begin(), problems.end(), [&](auto& y) {
    return y.template get<std::string>().starts_with(begin);
  });
}

/// @returns what is known of it; nothing while nobody answers
json rank_of(const json& top, size_t rank) {
  auto& ranks = top.at("ranks");
  return rank < ranks.size() ? ranks[rank] : json::object();
}

std::string health_of(const json& top, size_t rank) {
  return rank_of(top, rank).value("health", "");
}

std::string state_of(const json& top, size_t rank) {
  return rank_of(top, rank).value("state", "");
}

pid_t process_of(const train_dir& dir, int rank) {
  auto id = "r" + std::to_string(rank);
  auto x = inspect_well(dir, {"actor", id, "--json"}).parsed();
  return std::stoi(x.at("actor").at("items").at("process").get<std::string>());
}

pid_t process_of_entry(const train_dir& dir) {
  auto text = content_of(dir.path / "run/inspect.entry");
  return std::stoi(text.substr(text.find("\npid ") + 5));
}

std::string plugin(const std::string& name) {
  auto bin = std::filesystem::path{std::getenv("SMP_BIN_DIR")};
  return (bin / "../lib" / (name + ".so")).lexically_normal();
}

program start_faulty(const train_dir& dir, const std::string& fault) {
  return dir.start({"tiny.toml", "--run-dir", "run", "--smp.pipeline=actor",
                    "--smp.schedule.plugin=" + plugin("faulty_schedule"),
                    "--smp.schedule.name=faulty",
                    "--smp.schedule.options=" + fault});
}

} // namespace

TEST_CASE("A run tells of all its actors, and its end too", "[apps][inspect]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto ls = inspect_well(dir, {"ls", "--json"});
  CHECK(ls.code == 0);
  auto x = ls.parsed();
  CHECK(x.at("state") == "running");
  CHECK(x.at("healthy") == true);
  CHECK(x.at("step").get<int>() >= 2);
  CHECK(x.at("steps") == 1000000);
  std::set<std::string> ids;
  for (auto& actor : x.at("actors")) {
    ids.insert(actor.at("id"));
    CHECK(actor.at("answers") == true);
  }
  for (auto id :
       {"supervisor", "stalls", "inspector", "r0", "r0.watch", "r0.server",
        "r0.context.1", "r0.scheduler", "r0.comm-initiator", "r1", "r1.server"})
    CHECK(ids.count(id) == 1);
  CHECK(ids.count("r1.scheduler") == 0);

  auto text = inspect_well(dir, {"ls"});
  CHECK(text.code == 0);
  CHECK_THAT(text.output, ContainsSubstring("MODULE SERVER")
                            && ContainsSubstring("PIPELINE SCHEDULER"));
  auto tree = inspect_well(dir, {"tree", "--json"}).parsed().at("tree");
  auto is_r0 = [](auto& y) { return y.at("id") == "r0"; };
  auto r0 = std::find_if(tree.begin(), tree.end(), is_r0);
  REQUIRE(r0 != tree.end());
  auto is_server = [](auto& y) { return y.at("id") == "r0.server"; };
  auto& below = r0->at("children");
  auto server = std::find_if(below.begin(), below.end(), is_server);
  REQUIRE(server != below.end());
  CHECK(server->at("children").at(0).at("parent") == "r0.server");
  CHECK(inspect_well(dir, {"actor", "r1.server"}).code == 0);
  auto none = inspect_until(dir, {"actor", "r7.server"}, is_refused);
  CHECK(none.code == 2);
  CHECK_THAT(none.output,
             ContainsSubstring("no actor of this run has this id"));
  auto comm = inspect_well(dir, {"comm", "--json"}).parsed().at("comm");
  CHECK(comm.at(0).at("bytes_sent").get<uint64_t>() > 0);
  CHECK(comm.at(1).at("peers").at(0).at("rank") == 0);
  CHECK(comm.at(0).at("device_path") == false);
  CHECK(inspect_well(dir, {"waits"}).code == 0);

  run.signal(SIGINT);
  REQUIRE(run.join() == 130);
  auto ended = inspect_run(dir, {"ls"});
  CHECK(ended.code == 3);
  CHECK_THAT(ended.output,
             StartsWith("run: ended: the run ended with exit code 130 after "
                        "step "));
  auto as_json = inspect_run(dir, {"waits", "--json"});
  CHECK(as_json.code == 3);
  CHECK(as_json.parsed().at("exit_code") == 130);
  auto top = run_program(dir, {"smp-top", "run"});
  CHECK(top.code == 3);
  CHECK_THAT(top.output, ContainsSubstring("exit code 130"));
}

TEST_CASE("smp-top --once tells what each rank does", "[apps][inspect]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  // Rates want two looks, in both of which the ranks answer.
  auto moves = [](const json& top, size_t rank) {
    auto is_positive = [y = rank_of(top, rank)](const char* key) {
      auto value = y.value(key, json{});
      return value.is_number() && value.get<double>() > 0;
    };
    return health_of(top, rank) == "well" && !state_of(top, rank).empty()
           && is_positive("busy") && is_positive("bytes_out_per_second")
           && is_positive("bytes_in_per_second");
  };
  auto x = top_until(dir, [&](auto& y) { return moves(y, 0) && moves(y, 1); });
  CHECK(x.at("samples_per_second").get<double>() > 0);
  for (size_t i = 0; i < 2; ++i) {
    auto rank = rank_of(x, i);
    INFO(rank.dump());
    CHECK(rank.at("health") == "well");
    CHECK(rank.at("state") != "");
    CHECK(rank.at("busy").get<double>() > 0);
    CHECK(rank.at("busy").get<double>() <= 1.01);
    CHECK(rank.at("bubble").get<double>() >= 0);
    CHECK(rank.at("bytes_out_per_second").get<double>() > 0);
    CHECK(rank.at("bytes_in_per_second").get<double>() > 0);
    CHECK(rank.at("arena_high_water").is_null());
    CHECK(rank.at("memory").get<uint64_t>() > 10'000'000);
  }
  auto table = ask_until(dir, {"smp-top", "run", "--once"}, is_well);
  CHECK(table.code == 0);
  CHECK_THAT(table.output, ContainsSubstring("run  running  step ")
                             && ContainsSubstring("tokens/s  ETA ")
                             && ContainsSubstring("bubble"));
}

TEST_CASE("A stopped rank is shown as stopped within a second, with the others",
          "[apps][inspect]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto pid = process_of(dir, 1);
  // By the clock of somebody else, who is late on a busy machine: what has to
  // be shown is that the program can do it.
  answer x;
  for (int attempt = 0; attempt < 5; ++attempt) {
    REQUIRE(::kill(pid, SIGSTOP) == 0);
    x = inspect_run(dir, {"ls", "--json"});
    if (x.seconds < 1 && has_problem(x, "rank 1 is stopped: "))
      break;
    REQUIRE(::kill(pid, SIGCONT) == 0);
  }
  CHECK(x.seconds < 1);
  CHECK(x.code == 1);
  INFO(x.output);
  CHECK(has_problem(x, "rank 1 is stopped: "));
  // It does not tell its actors any more, which is not a mistake of the user.
  auto server = inspect_until(dir, {"actor", "r1.server"},
                              [](auto& y) { return says(y, "NO ANSWER"); });
  CHECK(server.code == 1);
  CHECK_THAT(server.output, ContainsSubstring("NO ANSWER")
                              && ContainsSubstring("rank 1 is stopped: "));
  auto top = top_until(dir, [](auto& y) {
    return health_of(y, 0) == "well" && health_of(y, 1) == "stopped";
  });
  CHECK(health_of(top, 0) == "well");
  CHECK(health_of(top, 1) == "stopped");
  CHECK_THAT(state_of(top, 1), StartsWith("STOPPED "));
  // Nor is it another stall, from before.
  auto stall = inspect_until(dir, {"waits"}, [](auto& y) {
    return says(y, "! stall: ") && says(y, "rank 1 has not answered");
  });
  CHECK(stall.code == 1);
  CHECK_THAT(stall.output, ContainsSubstring("! stall: nothing moved for ")
                             && ContainsSubstring("rank 1 has not answered"));
  REQUIRE(::kill(pid, SIGCONT) == 0);
  CHECK(inspect_well(dir, {"waits"}).code == 0);
}

TEST_CASE("A rank that is stopped before it joined is shown",
          "[apps][inspect]") {
  answer x;
  // It loads its libraries for longer than this takes, unless who sends the
  // signal is late.
  for (int attempt = 0; attempt < 5; ++attempt) {
    train_dir dir{endless};
    auto run = dir.start({"tiny.toml", "--run-dir", "run"});
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds{60};
    // Not before its exec, for which the launcher waits.
    auto is_started = [&] {
      auto children = children_of(run.pid());
      return children.size() == 2 && has_variable(children[1], "SMP_RANK");
    };
    while (!std::filesystem::exists(dir.path / "run/inspect.entry")
           || !is_started())
      REQUIRE(std::chrono::steady_clock::now() < end);
    auto pid = children_of(run.pid()).at(1);
    REQUIRE(::kill(pid, SIGSTOP) == 0);
    x = inspect_until(dir, {"ls"},
                      [](auto& y) { return says(y, "rank 1 is stopped"); });
    auto in_time = says(x, "it has not joined");
    if (in_time) {
      auto is_shown = [](const json& y) {
        return health_of(y, 1) == "stopped";
      };
      CHECK(is_shown(top_until(dir, is_shown)));
    }
    REQUIRE(::kill(pid, SIGCONT) == 0);
    REQUIRE(run.wait_for(" 2/1000000"));
    CHECK(inspect_well(dir, {"ls"}).code == 0);
    if (in_time)
      break;
  }
  CHECK(x.code == 1);
  CHECK_THAT(x.output, ContainsSubstring("it has not joined"));
}

TEST_CASE("A collective that a rank does not join names that one",
          "[apps][inspect]") {
  train_dir dir{endless};
  // Nearly all that peers of shared modules wait for is a collective.
  auto run = dir.start({"tiny.toml", "--run-dir", "run", "--smp.ddp=true",
                        "--smp.pipeline_parallel_degree=1",
                        "--smp.tensor_parallel_degree=2",
                        "--tensor_parallel.modules=[\"transformer.h\"]"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto pid = process_of(dir, 1);
  const std::string missing = "(not joined by rank 1)";
  answer x;
  // It may stop in the middle of one, which it has joined.
  for (int attempt = 0; attempt < 20 && !says(x, missing); ++attempt) {
    REQUIRE(::kill(pid, SIGCONT) == 0);
    REQUIRE(
      run.wait_for(fmt::format(" {}/1000000", dir.metrics("run").size() + 2)));
    REQUIRE(::kill(pid, SIGSTOP) == 0);
    x = inspect_until(dir, {"waits"},
                      [](auto& y) { return says(y, "! stall: "); });
  }
  CHECK(x.code == 1);
  CHECK_THAT(x.output, ContainsSubstring(missing)
                         && ContainsSubstring("rank 1 is stopped"));
}

TEST_CASE("A run by tcp, and one with arenas, tell what they use",
          "[apps][inspect]") {
  train_dir dir{endless};
  auto arenas = GENERATE(false, true);
  // Small tensors take no arena.
  auto run = arenas ? dir.start(
               {"tiny.toml", "--run-dir", "run", "--data.batch_size=32"},
               device_path)
                    : dir.start({"tiny.toml", "--run-dir", "run"},
                                {{"UCX_TLS", "tcp,self"}});
  REQUIRE(run.wait_for(" 2/1000000"));
  // The port that UCX then opens is everybody's.
  CHECK(arenas == (run.output().find("UCX (tcp,self)") == std::string::npos));
  auto well = inspect_well(dir, {"ls"});
  {
    INFO(well.output);
    CHECK(well.code == 0);
  }
  auto x = inspect_well(dir, {"comm", "--json"});
  CHECK(x.code == 0);
  auto comm = x.parsed().at("comm");
  for (size_t i = 0; i < 2; ++i) {
    INFO(comm.at(i).dump());
    CHECK(comm.at(i).at("bytes_sent").get<uint64_t>() > 0);
    CHECK(comm.at(i).at("device_path") == arenas);
    if (arenas)
      for (auto name : {"send_arena", "receive_arena"})
        CHECK(comm.at(i).at(name).at("capacity").get<uint64_t>() > 0);
  }
  if (arenas) {
    auto used = [&](size_t i, const char* name) {
      return comm.at(i).at(name).at("high_water").get<uint64_t>();
    };
    CHECK(used(0, "receive_arena") + used(1, "receive_arena") > 0);
    auto is_shown = [](const json& y) {
      return rank_of(y, 0).value("arena_high_water", json{}).is_number();
    };
    CHECK(is_shown(top_until(dir, is_shown)));
  }
  REQUIRE(::kill(process_of(dir, 1), SIGSTOP) == 0);
  auto stopped = inspect_until(
    dir, {"comm"}, [](auto& y) { return says(y, "rank 1 is stopped"); });
  CHECK(stopped.code == 1);
}

TEST_CASE("A schedule that owes an answer is named", "[apps][inspect]") {
  train_dir dir{endless};
  auto run = start_faulty(dir, "silent");
  // The first stall that is reported may be another one, of a slow start.
  auto x = inspect_until(dir, {"waits"}, [](auto& y) {
    return says(y, "! stall: nothing moved for ") && says(y, "owes an answer");
  });
  CHECK(x.code == 1);
  CHECK_THAT(x.output, ContainsSubstring("! stall: nothing moved for "));
  CHECK_THAT(x.output, ContainsSubstring("rank 0's schedule actor \"faulty\" "
                                         "owes an answer to event \"backward "
                                         "ready, microbatch 1\""));
  auto actor = inspect_until(dir, {"actor", "r0.schedule"},
                             [](auto& y) { return says(y, "OWES AN ANSWER"); });
  CHECK_THAT(actor.output, ContainsSubstring("OWES AN ANSWER"));
}

TEST_CASE("A rank whose actors have no thread is blocked", "[apps][inspect]") {
  train_dir dir{endless};
  auto run = start_faulty(dir, "blocks");
  auto x = inspect_until(dir, {"ls", "--json"},
                         [](auto& y) { return says(y, "rank 0 is blocked"); });
  CHECK(x.code == 1);
  CHECK_THAT(x.parsed().at("problems").at(0).get<std::string>(),
             StartsWith("rank 0 is blocked: the thread of its actors"));
  // Nobody waits for it; that one can be late is said above.
  for (int attempt = 0; attempt < 5 && x.seconds >= 1; ++attempt)
    x = inspect_run(dir, {"ls", "--json"});
  CHECK(x.seconds < 1);
  auto again = inspect_until(dir, {"actor", "r0.server"},
                             [](auto& y) { return says(y, "NO ANSWER"); });
  CHECK(again.code == 1);
  CHECK_THAT(again.output, ContainsSubstring("NO ANSWER"));
  // It is silent while the thread that would say so is late.
  auto top = top_until(dir, [](auto& y) {
    return health_of(y, 0) == "blocked" && health_of(y, 1) == "well";
  });
  CHECK_THAT(state_of(top, 0), StartsWith("BLOCKED "));
  CHECK(health_of(top, 1) == "well");
}

TEST_CASE("The end of a rank is told afterwards, with its cause",
          "[apps][inspect]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  REQUIRE(::kill(process_of(dir, 1), SIGKILL) == 0);
  REQUIRE(run.join() == 3);
  auto x = inspect_run(dir, {"ls"});
  CHECK(x.code == 3);
  CHECK_THAT(x.output, ContainsSubstring("the run ended with exit code 3 after")
                         && ContainsSubstring("rank 1: killed by signal 9"));
}

TEST_CASE("A launcher that is stopped or killed is told", "[apps][inspect]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto pid = process_of_entry(dir);
  auto named = "its process " + std::to_string(pid);
  run.signal(SIGSTOP);
  auto stopped = inspect_until(
    dir, {"ls"}, [&](auto& y) { return says(y, named + " is stopped"); });
  CHECK(stopped.code == 1);
  CHECK_THAT(stopped.output, StartsWith("run: unreachable")
                               && ContainsSubstring(named + " is stopped"));
  run.signal(SIGKILL);
  run.join();
  auto killed = inspect_run(dir, {"ls"});
  CHECK(killed.code == 3);
  CHECK_THAT(killed.output, StartsWith("run: ended")
                              && ContainsSubstring(named + " was killed"));
}

// The launcher, which would tell its end, does not.
TEST_CASE("A rank that dies while its launcher is stopped is told afterwards",
          "[apps][inspect]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto rank = process_of(dir, 1);
  run.signal(SIGSTOP);
  REQUIRE(::kill(rank, SIGKILL) == 0);
  auto x = inspect_run(dir, {"ls"});
  auto is_told = [&] { return x.seconds < 1 && says(x, " is stopped"); };
  for (int attempt = 0; attempt < 5 && !is_told(); ++attempt)
    x = inspect_run(dir, {"ls"});
  CHECK(x.seconds < 1);
  CHECK(x.code == 1);
  CHECK_THAT(x.output, StartsWith("run: unreachable")
                         && ContainsSubstring(" is stopped"));
  run.signal(SIGCONT);
  REQUIRE(run.join() == 3);
  CHECK_THAT(inspect_run(dir, {"ls"}).output,
             ContainsSubstring("rank 1: killed by signal 9"));
}

TEST_CASE("Nobody but the user of a run looks at it", "[apps][inspect][R44]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto entry = dir.path / "run/inspect.entry";
  struct stat info {};
  REQUIRE(::stat(entry.c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  // By address, with a copy of the file.
  auto text = content_of(entry);
  auto begin = text.find("\nport ") + 6;
  auto port = text.substr(begin, text.find('\n', begin) - begin);
  auto address = "127.0.0.1:" + port;
  auto by_address = ask_until(
    dir, {"smp-inspect", address, "--secret", "run/inspect.entry", "ls"},
    is_well);
  CHECK(by_address.code == 0);
  auto without = run_program(dir, {"smp-inspect", address, "ls"});
  CHECK(without.code == 2);
  CHECK_THAT(without.output, ContainsSubstring("--secret"));
  // With another secret.
  auto at = text.find("\nsecret ") + 8;
  text[at] = text[at] == '0' ? '1' : '0';
  dir.write("wrong.entry", text);
  REQUIRE(::chmod((dir.path / "wrong.entry").c_str(), 0600) == 0);
  auto refused = run_program(
    dir, {"smp-inspect", address, "--secret", "wrong.entry", "ls"});
  CHECK(refused.code == 1);
  CHECK_THAT(refused.output, ContainsSubstring("unreachable"));
  // What others can read is not a secret.
  REQUIRE(::chmod(entry.c_str(), 0644) == 0);
  auto open = inspect_run(dir, {"ls"});
  CHECK(open.code == 2);
  CHECK_THAT(open.output, ContainsSubstring("mode 0600"));
}

TEST_CASE("A directory without a run is refused", "[apps][inspect]") {
  train_dir dir{endless};
  for (auto name : {"smp-inspect", "smp-top"}) {
    std::vector<std::string> words{name, "."};
    if (words[0] == "smp-inspect")
      words.push_back("ls");
    auto x = run_program(dir, words);
    CHECK(x.code == 2);
    CHECK_THAT(x.output, ContainsSubstring(".: not a run directory"));
    words[1] = "nowhere";
    CHECK_THAT(run_program(dir, words).output,
               ContainsSubstring("nowhere: neither a directory nor HOST:PORT"));
  }
}

TEST_CASE("A run is looked at whoever started its ranks", "[apps][inspect]") {
  train_dir dir{endless};
  auto ranks = start_as_torchrun(dir, {"tiny.toml", "--run-dir", "run"});
  REQUIRE(ranks[0]->wait_for(" 2/1000000"));
  auto x = inspect_well(dir, {"ls"});
  CHECK(x.code == 0);
  CHECK_THAT(x.output, ContainsSubstring("r1.server"));
  // It hosts the SUPERVISOR.
  ranks[0]->signal(SIGSTOP);
  auto stopped = inspect_until(dir, {"ls"},
                               [](auto& y) { return says(y, " is stopped"); });
  CHECK(stopped.code == 1);
  CHECK_THAT(stopped.output, ContainsSubstring(" is stopped"));
  ranks[0]->signal(SIGCONT);
}

TEST_CASE("Ranks that are threads, and one that is alone, are looked at",
          "[apps][inspect]") {
  train_dir dir{endless};
  for (auto threads : {true, false}) {
    std::filesystem::remove_all(dir.path / "run");
    auto run = threads
                 ? dir.start({"tiny.toml", "--run-dir", "run"},
                             threads_as_ranks)
                 : dir.start({"tiny.toml", "--run-dir", "run", "--ranks=1"});
    REQUIRE(run.wait_for(" 2/1000000"));
    auto x = inspect_well(dir, {"tree"});
    INFO(threads << '\n' << x.output);
    CHECK(x.code == 0);
    CHECK(says(x, "r0.server"));
    CHECK(says(x, "r1.server") == threads);
    run.signal(SIGINT);
    CHECK(run.join() == 130);
    CHECK(inspect_run(dir, {"ls"}).code == 3);
  }
}
