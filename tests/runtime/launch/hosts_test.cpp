#include "tests/support/catch.hpp"

#include "runtime/launch/hosts.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <chrono>
#include <cstdlib>
#include <filesystem>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

using shares = std::vector<uint64_t>;

constexpr std::chrono::seconds patience{30};

std::string refusal(const std::function<void()>& f) {
  return error_of(f, error_code::config);
}

/// A stand-in for ssh on PATH while it lives: it runs the command here, and
/// $HOST says where it should have been.
struct stand_in : scratch_dir {
  stand_in() : before(std::getenv("PATH")) {
    auto file = write("ssh",
                      "#!/bin/sh\n"
                      "[ \"$1 $2\" = '-o BatchMode=yes' ] || exit 99\n"
                      "HOST=$5 exec sh -c \"$6\"\n");
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
    ::setenv("PATH", (path.string() + ':' + before).c_str(), 1);
    ::setenv("DIR", path.c_str(), 1);
  }

  ~stand_in() {
    ::setenv("PATH", before.c_str(), 1);
    ::unsetenv("DIR");
  }

  std::string before;
};

} // namespace

TEST_CASE("ranks are shared among machines equally, or as the user says",
          "[runtime][launch]") {
  CHECK(shares_of(2, {}, 4) == shares{2, 2});
  CHECK(shares_of(3, {2}, 6) == shares{2, 2, 2});
  CHECK(shares_of(3, {1, 2, 1}, 4) == shares{1, 2, 1});
  CHECK_THAT(refusal([] { shares_of(2, {}, 3); }),
             ContainsSubstring("--ranks-per-node"));
  CHECK_THAT(refusal([] {
               shares_of(3, {1, 2}, 3);
             }),
             ContainsSubstring("2 numbers for 3 machines"));
  CHECK_THAT(refusal([] { shares_of(2, {2}, 3); }),
             ContainsSubstring("2 + 2")
               && ContainsSubstring("smp.pipeline_parallel_degree"));
  CHECK_THAT(refusal([] {
               shares_of(2, {2, 0}, 2);
             }),
             ContainsSubstring("at least one rank"));
  // As from -1: with the others that would be 2.
  CHECK_THAT(refusal([] {
               shares_of(2, {~uint64_t{0}, 3}, 2);
             }),
             ContainsSubstring("smp.pipeline_parallel_degree"));
}

TEST_CASE("hosts are a name each, with or without their ranks",
          "[runtime][launch]") {
  auto both = read_hosts({"a:1", "me@b:3"}, 4);
  REQUIRE(both.size() == 2);
  CHECK(both[0].host == "a");
  CHECK(both[0].ranks == 1);
  CHECK(both[1].host == "me@b");
  CHECK(both[1].ranks == 3);
  CHECK(read_hosts({"a", "b"}, 4)[1].ranks == 2);
  CHECK_THAT(refusal([] {
               read_hosts({"a:1", "b"}, 2);
             }),
             ContainsSubstring("for all hosts, or for none"));
  for (auto bad :
       {":1", "-oProxyCommand=x:1", "a:0", "a:x", "a:1:2", "me@:1", "a:"})
    CHECK_THAT(refusal([&] { read_hosts({bad}, 1); }), ContainsSubstring(bad));
}

TEST_CASE("hosts may be IPv6 addresses, in brackets where ranks follow",
          "[runtime][launch]") {
  auto both = read_hosts({"[fd77::1]:1", "me@[fd77::2]:3"}, 4);
  REQUIRE(both.size() == 2);
  // ssh wants no brackets.
  CHECK(both[0].host == "fd77::1");
  CHECK(both[0].ranks == 1);
  CHECK(both[1].host == "me@fd77::2");
  CHECK(both[1].ranks == 3);
  both = read_hosts({"fd77::1", "me@fe80::2%eth0", "[fd77::3]", "a"}, 8);
  REQUIRE(both.size() == 4);
  CHECK(both[0].host == "fd77::1");
  CHECK(both[1].host == "me@fe80::2%eth0");
  CHECK(both[2].host == "fd77::3");
  for (auto& x : both)
    CHECK(x.ranks == 2);
  for (auto bad : {"[fd77::1]:0", "[fd77::1", "[fd77::1]2", "[]:1", "[a]:1",
                   "fd77:::1", "[fd77::1]:"})
    CHECK_THAT(refusal([&] { read_hosts({bad}, 1); }), ContainsSubstring(bad));
}

TEST_CASE("the first machine is a host and a port", "[runtime][launch]") {
  auto x = read_node(1, {1, 1}, "node7:29400");
  CHECK(x.master == "node7");
  CHECK(x.port == 29400);
  CHECK(read_node(0, {1}, "[fd00::7]:1").master == "fd00::7");
  for (auto bad : {"node7", ":29400", "node7:", "node7:0", "node7:70000",
                   "fd00::7:29400", "[]:1"})
    CHECK_THAT(refusal([&] { read_node(0, {1}, bad); }),
               ContainsSubstring("--master") && ContainsSubstring(bad));
}

TEST_CASE_METHOD(stand_in, "each host runs the command as one of several",
                 "[runtime][launch]") {
  auto code = launch_on_hosts(
    {{"a", 2}, {"me@b", 1}},
    {"sh", "-c", "echo $HOST \"$@\" > $DIR/$HOST", "it's", "two words"}, "",
    patience, false);
  CHECK(code == 0);
  auto said = [](const std::string& node) {
    return "two words --nodes 2 --node-rank " + node
           + " --master a:29400 --ranks-per-node 2,1\n";
  };
  CHECK(read("a") == "a " + said("0"));
  CHECK(read("me@b") == "me@b " + said("1"));
}

TEST_CASE_METHOD(stand_in, "the address of the first host is told in brackets",
                 "[runtime][launch]") {
  auto code = launch_on_hosts({{"me@fd77::1", 1}, {"b", 1}},
                              {"sh", "-c", "echo \"$5 $6\" > $DIR/$HOST", "sh"},
                              "", patience, false);
  CHECK(code == 0);
  CHECK(read("b") == "--master [fd77::1]:29400\n");
}

TEST_CASE_METHOD(stand_in, "the first failure of a host is the code of all",
                 "[runtime][launch]") {
  auto run = [](const std::string& script) {
    return launch_on_hosts({{"a", 1}, {"b", 1}}, {"sh", "-c", script}, "a:1",
                           patience, false);
  };
  CHECK(run("[ $HOST = a ] || exit 5; exec tail -f /dev/null") == 5);
  // Not one of ours: ssh, or what it should have started.
  CHECK(run("[ $HOST = a ] || exit 127; exec tail -f /dev/null") == 3);
}
