#include "tests/support/catch.hpp"

#include "tests/support/actors/server_core_fixture.hpp"

#include <memory>

using namespace smp;
using namespace smp::test;

TEST_CASE("no more than two executions wait for the device",
          "[actors][core][device]") {
  core_fixture x{false, std::make_shared<execution_token>(), {}, 2};
  x.enter(1, 4);
  for (uint64_t i = 0; i < 4; ++i)
    x.receive(i, 1, i);
  x.finish();
  x.call_remote(2);
  CHECK(x.core.num_launched() == 2);
  CHECK(x.out.take()
        == lines{"start c1 mb0", "answer 0", "start c1 mb1", "ask r2"});
  SECTION("the oldest is done") {
    x.core.reached();
    CHECK(x.out.take() == lines{"start c2 mb2"});
    // The device may be faster than the message that the token is free.
    x.core.reached();
    x.core.reached();
    x.finish();
    CHECK(x.out.take() == lines{"answer 2", "start c2 mb3"});
    CHECK(x.core.num_launched() == 0);
  }
  SECTION("what is more urgent arrives meanwhile") {
    x.receive(9, 1, 0, phase::backward);
    CHECK(x.out.take().empty());
    x.core.reached();
    CHECK(x.out.take() == lines{"start c2 mb0"});
  }
}
