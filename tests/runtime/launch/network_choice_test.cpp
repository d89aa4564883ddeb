#include "tests/support/catch.hpp"

#include "runtime/launch/network_choice.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"
#include "transport/process_state.hpp"

#include <algorithm>
#include <string>

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Rank `rank` of two, told that rank 0 is at `master`.
rank_environment rank_of_two(uint64_t rank, const std::string& master,
                             uint16_t port = 29400) {
  rank_environment result;
  result.rank = rank;
  result.world_size = 2;
  result.rendezvous_address = master;
  result.rendezvous_port = port;
  return result;
}

std::string refusal(const rank_environment& x, const session_config& config) {
  return error_of([&] { choose_network(x, config); }, error_code::config);
}

} // namespace

TEST_CASE("a run of one machine stays on its loopback interface",
          "[runtime][launch]") {
  for (auto master : {"127.0.0.1", "localhost", "::1"})
    for (uint16_t port : {0, 29400}) {
      auto x = choose_network(rank_of_two(0, master, port), {});
      CHECK(x.interface == "lo");
      CHECK(x.master == master);
      CHECK_FALSE(x.line);
    }
}

TEST_CASE("an address that others reach wants trust and keys",
          "[runtime][launch][R45]") {
  session_config config;
  for (auto master : {"192.0.2.1", "2001:db8::1"})
    for (uint64_t rank : {0, 1}) {
      auto text = refusal(rank_of_two(rank, master), config);
      CHECK_THAT(text, ContainsSubstring(master)
                         && ContainsSubstring("transport.trusted_network")
                         && ContainsSubstring("smp-train keys DIR")
                         && ContainsSubstring("docs/machines.md"));
    }
  config.trusted_network = true;
  CHECK_THAT(refusal(rank_of_two(0, "192.0.2.1"), config),
             !ContainsSubstring("trusted_network")
               && ContainsSubstring("transport.keys"));
  config.trusted_network = false;
  config.keys = "keys";
  CHECK_THAT(refusal(rank_of_two(0, "192.0.2.1"), config),
             ContainsSubstring("trusted_network")
               && !ContainsSubstring("transport.keys"));
}

TEST_CASE(
  "an interface that rank 0 is to tell is not the loopback interface either",
  "[runtime][launch]") {
  session_config config;
  config.interface = "eth7";
  CHECK_THAT(refusal(rank_of_two(0, "127.0.0.1", 0), config),
             ContainsSubstring("transport.keys"));
  config.trusted_network = true;
  config.keys = "keys";
  CHECK_THAT(refusal(rank_of_two(0, "127.0.0.1", 0), config),
             ContainsSubstring("no interface eth7"));
  // Who wrote an address counts more.
  CHECK_FALSE(choose_network(rank_of_two(0, "127.0.0.1", 29400), config).line);
}

TEST_CASE("UCX opens ports where it may use tcp", "[runtime][launch]") {
  for (auto x : {"tcp", "tcp,self", "posix,cma,tcp,self", "all", "self,all",
                 "^posix", "^ib,sm"}) {
    CAPTURE(x);
    CHECK(opens_ports(x));
  }
  for (auto x : {"posix,cma,self", "shm,self", "^tcp", "^posix,tcp", ""}) {
    CAPTURE(x);
    CHECK_FALSE(opens_ports(x));
  }
}

TEST_CASE("ranks of one machine are told from those of others",
          "[runtime][launch]") {
  CHECK(machine_identity() == machine_identity());
  CHECK_THAT(machine_identity(), ContainsSubstring(host_name()));
  CHECK(machine_identity().size() > host_name().size() + 30);
}

// As two containers on one machine that share its name.
TEST_CASE("ranks that see other processes are not of one machine",
          "[runtime][launch]") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  auto outer = ::fork();
  if (outer == 0) {
    // What it starts next has a namespace of its own.
    if (::unshare(CLONE_NEWPID) != 0)
      ::_exit(1);
    auto inner = ::fork();
    if (inner == 0) {
      auto x = machine_identity();
      auto written = ::write(ends[1], x.data(), x.size());
      ::_exit(written == static_cast<ssize_t>(x.size()) ? 0 : 2);
    }
    int status = 0;
    ::waitpid(inner, &status, 0);
    ::_exit(WEXITSTATUS(status));
  }
  ::close(ends[1]);
  char buffer[1024];
  auto size = std::max<ssize_t>(0, ::read(ends[0], buffer, sizeof(buffer)));
  ::close(ends[0]);
  int status = 0;
  REQUIRE(::waitpid(outer, &status, 0) == outer);
  if (WEXITSTATUS(status) == 1)
    SKIP("may not make a namespace");
  std::string other(buffer, static_cast<size_t>(size));
  CHECK_THAT(other, ContainsSubstring(host_name()));
  CHECK(other != machine_identity());
}
