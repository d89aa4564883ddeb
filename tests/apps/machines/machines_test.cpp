// ctest: seconds=98 label=proof processors=4

// Runs over several "machines": network namespaces of this one.

#include "tests/support/catch.hpp"

#include "tests/support/runs/machine_runs.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using namespace smp::test;
using namespace std::chrono_literals;

TEST_CASE_METHOD(machines_dir,
                 "ranks of two machines compute what one process does",
                 "[apps][machines]") {
  auto master = GENERATE_REF(on.ipv4_address(0), on.name(0),
                             on.ipv6_address(0));
  INFO(master);
  auto before = on.bytes_sent(0);
  start_ranks(master, {"verify", "tiny.toml"});
  CHECK(join_all() == std::vector{0, 0, 0, 0});
  INFO(output(0));
  CHECK_THAT(output(0), ContainsSubstring("equal"));
  CHECK(on.bytes_sent(0) - before > 50'000);
  for (auto i : {0, 1, 2, 3})
    CHECK_THAT(read(fmt::format("run/log-{}.txt", i)),
               ContainsSubstring(fmt::format("local rank {} of 2 on {}", i % 2,
                                             on.name(size_t(i) / 2))));
}

TEST_CASE_METHOD(machines_dir, "the named one of several interfaces is used",
                 "[apps][machines]") {
  on.add_second_network();
  std::map<std::string, uint64_t> before;
  for (auto x : {"eth0", "eth1"})
    before[x] = on.bytes_sent(0, x) + on.bytes_sent(1, x);
  // By name the way to rank 0 leads through the first one: so may the control
  // plane, but not what ranks compute.
  auto master = on.name(0);
  std::function<std::string(size_t)> interface;
  SECTION("by its name") {
    interface = [](size_t) { return "eth1"; };
  }
  SECTION("by an address, another one on each machine") {
    interface = [this](size_t i) { return on.second_address(i); };
  }
  SECTION("or none, and that is the one that leads to rank 0") {
    master = on.second_address(0);
  }
  for (size_t i = 0; i < 4; ++i) {
    std::vector<std::string> words{"verify", "tiny.toml"};
    if (interface)
      words.push_back("--transport.interface=" + interface(i / 2));
    start_rank(i, master, words);
  }
  check_equal();
  for (auto& [x, bytes] : before)
    bytes = on.bytes_sent(0, x) + on.bytes_sent(1, x) - bytes;
  CHECK(before["eth1"] > 100'000);
  CHECK(before["eth0"] < 50'000);
}

TEST_CASE_METHOD(machines_dir,
                 "a network is used only if it is trusted, and with keys",
                 "[apps][machines][R45]") {
  auto refusal = [&](const std::string& config, size_t rank) {
    write("other.toml", config);
    running.clear();
    start_rank(rank, on.ipv4_address(0), {"other.toml"});
    auto code = running[0]->join();
    return fmt::format("{}: {}", code, output(0));
  };
  auto without = [](const std::string& line) {
    auto result = four_ranks;
    return result.erase(result.find(line), line.size());
  };
  for (size_t rank : {0, 3}) {
    CHECK_THAT(refusal(without("trusted_network = true\n"), rank),
               StartsWith("2: ") && ContainsSubstring(on.ipv4_address(0))
                 && ContainsSubstring("transport.trusted_network = true")
                 && !ContainsSubstring("transport.keys"));
    CHECK_THAT(refusal(without("keys = \"keys\"\n"), rank),
               StartsWith("2: ") && ContainsSubstring("transport.keys = DIR")
                 && ContainsSubstring("smp-train keys DIR"));
    std::filesystem::permissions(path / "keys",
                                 std::filesystem::perms::others_read,
                                 std::filesystem::perm_options::add);
    CHECK_THAT(refusal(four_ranks, rank),
               StartsWith("2: ")
                 && ContainsSubstring("chmod 700 " + (path / "keys").string()));
    std::filesystem::permissions(path / "keys",
                                 std::filesystem::perms::others_read,
                                 std::filesystem::perm_options::remove);
  }
}

TEST_CASE_METHOD(machines_dir, "a rank with the keys of another run is refused",
                 "[apps][machines]") {
  auto keys = start({"keys", "others"});
  REQUIRE(keys.join() == 0);
  start_rank(0, on.ipv4_address(0), {"tiny.toml"});
  start_rank(2, on.ipv4_address(0), {"tiny.toml", "--transport.keys=others"});
  CHECK(running[1]->join() == 2);
  CHECK_THAT(output(1), ContainsSubstring("certificate")
                          && ContainsSubstring("the keys of this run"));
  running[0]->signal(SIGKILL);
}

TEST_CASE("four machines of one rank each compute what one process does",
          "[apps][machines]") {
  machines_dir four{4};
  four.start_comparison(3);
  four.check_equal();
  for (size_t i = 0; i < 4; ++i)
    CHECK_THAT(four.read(fmt::format("run/log-{}.txt", i)),
               ContainsSubstring("local rank 0 of 1 on " + four.on.name(i)));
}

TEST_CASE("machines may have IPv6 only", "[apps][machines]") {
  machines_dir two{2, true};
  two.start_comparison(3);
  two.check_equal();
}

TEST_CASE_METHOD(machines_dir, "mpirun starts the ranks of two machines",
                 "[apps][machines]") {
  auto ssh = write("bin/ssh", on.stand_in_for_ssh());
  std::filesystem::permissions(ssh, std::filesystem::perms::owner_all);
  std::vector<std::string> words{"mpirun", "--mca",           "plm_rsh_agent",
                                 ssh,      "--oversubscribe", "-np",
                                 "4",      "--host",          "ma:2,mb:2"};
  std::vector<std::string> keys;
  SECTION("and the user says where rank 0 is") {
    words.insert(words.end(),
                 {"-x", "MASTER_ADDR=ma", "-x", "MASTER_PORT=29400"});
  }
  SECTION("and rank 0 says it in a folder that all share") {
    std::filesystem::create_directory(path / "meet");
    words.insert(words.end(),
                 {"-x", "SMP_RENDEZVOUS_DIR=" + (path / "meet").string()});
    keys = {"--transport.interface=eth0"};
  }
  words.insert(words.end(), {built_program("smp-train"), "verify", "tiny.toml",
                             "--ranks", "4", "--run-dir", "run"});
  words.insert(words.end(), keys.begin(), keys.end());
  auto run = on.start(
    0, words, path,
    {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
  CHECK(run.join() == 0);
  CHECK_THAT(run.output(), ContainsSubstring("equal: "));
  CHECK_THAT(read("run/log-3.txt"),
             ContainsSubstring("local rank 1 of 2 on mb"));
}

// -- the device path ----------------------------------------------------------

TEST_CASE_METHOD(machines_dir,
                 "what crosses machines takes the device path between nodes",
                 "[apps][machines][R46]") {
  // So wide that no activation rides in the first message.
  more_environment = device_path;
  start_comparison(100000, {"--model.width=64"});
  auto handled = [](const nlohmann::json& comm, const std::string& stage) {
    uint64_t result = 0;
    for (auto& rank : comm)
      if (rank.contains("stages")) // it answered in time
        result += rank["stages"].at(stage).at("handled").get<uint64_t>();
    return result;
  };
  nlohmann::json comm;
  auto deadline = std::chrono::steady_clock::now() + 60s;
  do {
    auto look = on.start(
      0, {built_program("smp-inspect"), "run", "comm", "--json"}, path);
    look.join();
    INFO(look.output());
    // There is none while nobody answers.
    comm = nlohmann::json::parse(look.output())
             .value("comm", nlohmann::json::array());
  } while (handled(comm, "IO SEND WATCHER") == 0
           && std::chrono::steady_clock::now() < deadline);
  INFO(comm.dump(2));
  CHECK(handled(comm, "CROSS-NODE PROGRESS") > 0);
  CHECK(handled(comm, "IO SEND WATCHER") > 0);
  // On a machine the receiver pulls from where a tensor lies.
  CHECK(handled(comm, "D2D SEND") > 0);
}

// -- bad lines ----------------------------------------------------------------

TEST_CASE_METHOD(machines_dir, "a cable that is put back costs time only",
                 "[apps][machines]") {
  start_comparison(100);
  running[0]->signal(SIGSTOP); // it is not done before the cable is out
  on.cut(1);
  running[0]->signal(SIGCONT);
  CHECK_FALSE(running[0]->wait_for("equal: ", 3s));
  on.mend(1);
  check_equal();
}

TEST_CASE_METHOD(machines_dir, "a slow line, or a bad one, costs time only",
                 "[apps][machines]") {
  SECTION("10 Mbit/s") {
    on.slow_down(0, "10mbit");
    on.slow_down(1, "10mbit");
    start_comparison(3);
    check_equal();
  }
  SECTION("one packet of fifty is lost, from the first on") {
    on.lose_packets(0, 0.02);
    on.lose_packets(1, 0.02);
    start_comparison(10);
    check_equal();
  }
  SECTION("one packet of fifteen is lost, while it runs") {
    start_comparison(20);
    on.lose_packets(0, 0.07);
    on.lose_packets(1, 0.07);
    check_equal();
  }
}

// -- strangers ----------------------------------------------------------------

TEST_CASE_METHOD(machines_dir,
                 "a stranger without keys changes nothing at any port",
                 "[apps][machines]") {
  start_comparison(400); // so that it goes on
  auto all = on.listening_ports(0);
  REQUIRE(all.size() >= 3); // the gate, and UCX of two ranks
  std::string ports;
  for (auto port : all)
    ports += " " + std::to_string(port);
  // Random bytes, the beginning of a gate's hello, and CAF's header of 4 GB.
  auto junk = fmt::format(
    "for i in $(seq 30); do for p in{}; do "
    "head -c 700 /dev/urandom >/dev/tcp/{}/$p; "
    "printf 'smpgate1aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' >/dev/tcp/{}/$p; "
    "printf '\\4\\0\\0\\0\\377\\377\\377\\377' >/dev/tcp/{}/$p; "
    "done; done 2>/dev/null; exit 0",
    ports, on.ipv4_address(0), on.ipv4_address(0), on.ipv4_address(0));
  auto stranger = on.start(1, {"bash", "-c", junk}, path);
  CHECK(stranger.join() == 0);
  check_equal();
}

// -- launchers ----------------------------------------------------------------

TEST_CASE_METHOD(launchers, "a launcher on each machine starts its share",
                 "[apps][machines]") {
  auto more = GENERATE(std::vector<std::string>{},
                       std::vector<std::string>{"--ranks-per-node", "1,3"});
  more.insert(more.begin(), {"verify", "tiny.toml", "--run-dir", "run"});
  start_launchers(more);
  CHECK(join_all() == std::vector{0, 0});
  INFO(output(0) << output(1));
  CHECK_THAT(output(0), ContainsSubstring("equal: "));
  CHECK(output(1).empty());
  // Not only rank 0 has a log.
  for (size_t i = 0; i < 4; ++i)
    CHECK(std::filesystem::exists(path / fmt::format("run/log-{}.txt", i)));
}

TEST_CASE_METHOD(launchers, "one command starts a run on all machines by ssh",
                 "[apps][machines]") {
  auto ssh = write("bin/ssh", on.stand_in_for_ssh());
  std::filesystem::permissions(ssh, std::filesystem::perms::owner_all);
  const std::map<std::string, std::string> variables{
    {"PATH", (path / "bin").string() + ':' + std::getenv("PATH")}};
  std::vector<std::string> words{
    "tiny.toml", "--ranks", "4",         "--hosts", "ma:2,mb:2",
    "--keys",    "keys",    "--run-dir", "run",     "--train.steps=3"};
  SECTION("to its end") {
    words.insert(words.begin(), "verify");
    words.pop_back();
    auto run = start(words, variables);
    CHECK(run.join() == 0);
    CHECK_THAT(run.output(), ContainsSubstring("equal: "));
  }
  SECTION("which goes on where a rank was lost") {
    words.back() = "--train.steps=30";
    words.insert(words.end(),
                 {"--train.max_restarts=2", "--checkpoint.interval=2",
                  "--checkpoint.dir=checkpoints"});
    auto run = start(words, variables);
    REQUIRE(run.wait_for("checkpoint at step 2"));
    REQUIRE(::kill(process_of(3), SIGKILL) == 0);
    CHECK(run.join() == 0);
    INFO(run.output());
    CHECK_THAT(run.output(), ContainsSubstring("restart 1 of 2 in 1 s, from")
                               && ContainsSubstring("30/30 "));
  }
  SECTION("until a machine cannot") {
    words[4] = "ma:2,nowhere:2";
    auto run = start(words, variables);
    CHECK(run.join(60s) == 3);
    CHECK_THAT(run.output(), ContainsSubstring("machine nowhere: ssh exited"));
  }
  SECTION("until it is interrupted") {
    words.back() = "--train.steps=1000000";
    auto run = start(words, variables);
    REQUIRE(run.wait_for("1/1000000 "));
    run.signal(SIGINT);
    CHECK(run.join(60s) == 130);
  }
  // Nothing is left on any machine.
  for (size_t i : {0, 1})
    CHECK(on.empty_within(i, 60s));
}
