#include "tests/support/catch.hpp"

#include "actors/cluster/roster.hpp"

#include <set>
#include <string>
#include <vector>

using namespace smp;

namespace {

member make_member(uint64_t rank) {
  member result;
  result.rank = rank_id{rank};
  result.pid = static_cast<int64_t>(100 + rank);
  result.host = "h";
  result.run_id = "secret";
  result.build = "b1";
  result.settings = "smp.seed = 1\ntrain.steps = 4\n";
  result.fabric_address = std::string{"a\0b", 3} + std::to_string(rank);
  return result;
}

failure killed(uint64_t rank) {
  return {error_code::rank_down, rank_id{rank}, {}, "killed"};
}

} // namespace

TEST_CASE("a roster is complete when each rank came once", "[actors][roster]") {
  roster x{2, "secret"};
  CHECK_FALSE(x.admit(make_member(1)));
  CHECK_FALSE(x.complete());
  CHECK_FALSE(x.admit(make_member(0)));
  CHECK(x.complete());
  auto xs = x.members();
  REQUIRE(xs.size() == 2);
  CHECK(xs[0].rank == rank_id{0});
  CHECK(xs[1].fabric_address == make_member(1).fabric_address);
  CHECK(xs[1].run_id.empty());
}

TEST_CASE("a rank that differs is named with what differs",
          "[actors][roster]") {
  roster x{3, "secret"};
  CHECK_FALSE(x.admit(make_member(0)));
  auto y = make_member(1);
  SECTION("build") {
    y.build = "b2";
    CHECK(x.admit(y).text
          == "rank 1 (pid 101 on host h) runs another build than rank 0 (pid"
             " 100 on host h): b2 vs b1");
  }
  SECTION("configuration") {
    const std::string who
      = "rank 1 (pid 101 on host h) has another "
        "configuration than rank 0 (pid 100 on host h): ";
    y.settings = "smp.seed = 1\ntrain.steps = 5\n";
    CHECK(x.admit(y).text == who + "train.steps = 5 against 4");
    y.settings = "data.path = \"a = b\"\ntrain.steps = 4\n";
    CHECK(x.admit(y).text
          == who + "data.path = \"a = b\" against none, smp.seed = none "
                   "against 1");
    y.settings = "a = 1\nb = 2\nc = 3\n";
    CHECK(x.admit(y).text
          == who + "a = 1 against none, b = 2 against none, c = 3 against "
                   "none, and 2 more");
  }
  SECTION("range") {
    CHECK(x.admit(make_member(3)).text
          == "rank 3 (pid 103 on host h) is out of range: the run has 3 ranks");
  }
  SECTION("duplicate") {
    y = make_member(0);
    y.pid = 7;
    CHECK(x.admit(y).text
          == "rank 0 (pid 7 on host h) claims the place of rank 0 (pid 100 on"
             " host h)");
  }
  CHECK(x.missing(std::chrono::milliseconds{1500}).text
        == "ranks 1, 2 did not join within 1.5 s");
}

TEST_CASE("a stranger is refused without the secret", "[actors][roster]") {
  roster x{1, "secret"};
  auto y = make_member(0);
  CHECK_FALSE(x.check_stranger(y));
  y.run_id = "guess";
  auto text = x.check_stranger(y).text;
  CHECK(text == "rank 0 (pid 100 on host h) belongs to another run");
  CHECK(text.find("secret") == std::string::npos);
}

TEST_CASE("a rank is lost at most once and not after its goodbye",
          "[actors][roster]") {
  roster x{3, "secret"};
  for (uint64_t i = 0; i < 3; ++i)
    x.admit(make_member(i));
  CHECK(x.lose(killed(1)));
  CHECK_FALSE(x.lose(killed(1)));
  x.leave(rank_id{2});
  CHECK_FALSE(x.lose(killed(2)));
  CHECK_FALSE(x.lose(killed(9)));
  CHECK(x.losses() == std::vector<failure>{killed(1)});
  CHECK(x.present() == std::vector<rank_id>{rank_id{0}});
  CHECK(x.gone() == std::vector<rank_id>{rank_id{2}});
}

TEST_CASE("a loss is that of a machine when no rank there is left",
          "[actors][roster]") {
  roster x{5, "secret"};
  const char* hosts[] = {"a", "a", "b", "b", "c"};
  for (uint64_t i = 0; i < 5; ++i) {
    auto y = make_member(i);
    y.host = hosts[i];
    y.machine = std::string{hosts[i]} + " of some kernel";
    REQUIRE_FALSE(x.admit(y));
  }
  auto text = [&](uint64_t lost, std::set<rank_id> connected) {
    auto result = x.loss_of(rank_id{lost}, connected);
    CHECK(result.code == error_code::rank_down);
    CHECK(result.rank == rank_id{lost});
    CHECK(result.machine == hosts[lost]);
    return result.text;
  };
  constexpr rank_id r0{0}, r1{1}, r2{2}, r4{4};
  CHECK(text(3, {r0, r1, r2, r4})
        == "lost: its process ended or its connection broke (on machine b)");
  CHECK(text(3, {r0, r1, r4})
        == "lost with machine b (ranks 2, 3): it is off or out of reach, or "
           "its processes ended");
  CHECK(text(4, {r0, r1, r2})
        == "lost with machine c (rank 4): it is off or out of reach, or its "
           "processes ended");
}

TEST_CASE("a loss on the only machine is that of a rank", "[actors][roster]") {
  roster x{2, "secret"};
  for (uint64_t i = 0; i < 2; ++i)
    REQUIRE_FALSE(x.admit(make_member(i)));
  CHECK(x.loss_of(rank_id{1}, {}).text
        == "lost: its process ended or its connection broke");
}

TEST_CASE("a rank that is stopped is told with what the others do",
          "[actors][roster]") {
  using namespace std::chrono_literals;
  roster x{2, "secret"};
  const std::string stopped = "rank 1 has been stopped by a signal for 3.0 s, ";
  x.admit(make_member(0));
  CHECK(x.describe_stop(rank_id{1}, 3s) == stopped + "before all ranks joined");
  x.admit(make_member(1));
  CHECK(x.describe_stop(rank_id{1}, 3s) == stopped + "while the run begins");
  x.leave(rank_id{0});
  CHECK(x.describe_stop(rank_id{1}, 3s)
        == stopped + "and others have left the run");
}
