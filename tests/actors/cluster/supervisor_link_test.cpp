#include "tests/support/catch.hpp"

#include "actors/cluster/membership.hpp"
#include "actors/cluster/supervisor_link.hpp"

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

using namespace smp;
using namespace std::chrono_literals;

TEST_CASE("the launcher of another machine hears what follows",
          "[actors][membership]") {
  // That the run begins again or is over, or nothing.
  const auto told = GENERATE(std::optional{true}, std::optional{false},
                             std::optional<bool>{});
  auto host = std::make_unique<actor_host>();
  supervisor_host::options mine;
  mine.world_size = 2;
  mine.secret = run_secret::make();
  std::vector<uint64_t> joined;
  mine.on_launcher = [&](uint64_t x) { joined.push_back(x); };
  supervisor_link::options theirs;
  theirs.machine = 3;
  theirs.secret = mine.secret;
  std::promise<void> lost;
  theirs.on_lost = [&] { lost.set_value(); };
  auto supervisor = std::make_unique<supervisor_host>(*host, std::move(mine));
  theirs.port = supervisor->port();
  actor_host elsewhere;
  supervisor_link link{elsewhere, std::move(theirs)};
  CHECK(joined == std::vector{uint64_t{3}});
  CHECK(link.course() == run_course::unknown);
  if (told)
    CHECK(supervisor->tell_course(*told) == std::vector{uint64_t{3}});
  supervisor.reset();
  host.reset();
  REQUIRE(lost.get_future().wait_for(10s) == std::future_status::ready);
  CHECK(link.course()
        == (!told   ? run_course::lost
            : *told ? run_course::again
                    : run_course::over));
}
