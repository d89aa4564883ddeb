#include "tests/support/catch.hpp"

#include "actors/protocol/request_number.hpp"
#include "tests/support/actors/server_core_fixture.hpp"

#include <string>
#include <utility>

using namespace smp;
using namespace smp::test;

namespace {

const std::string no_request
  = "malformed response: the answer does not belong to a request";

/// Rank 0 serves a request of rank 1 and waits meanwhile, in every step.
struct waiting_fixture : replaying_core {
  waiting_fixture() {
    records->set_key(0);
  }

  /// @param until a request whose result it waits for; 0: for something else
  void begin(uint64_t step, uint32_t until) {
    core.enter({step_id{step}, 1});
    request x;
    x.id = {rank_id{1}, request_number(step_id{step}, 1)};
    x.step = step_id{step};
    core.receive(std::move(x));
    call y;
    y.kind = call_kind::wait;
    if (until != 0)
      y.until = {request_number(step_id{step}, until)};
    core.suspend(out.executing, std::move(y));
    out.take();
  }
};

} // namespace

TEST_CASE_METHOD(waiting_fixture, "an answer to a wait fails a recorded step",
                 "[actors][core][static][R33]") {
  begin(1, GENERATE(0u, 7u));
  core.receive(response{out.reported, {}, {}});
  CHECK(out.take() == lines{"failed " + no_request, "resume c1 " + no_request});
  CHECK(out.last.error.code == error_code::protocol);
  CHECK(core.num_pending() == 0);
  core.complete({out.reported, {}}); // what it waited for comes after all
  CHECK(out.take().empty());
}

TEST_CASE_METHOD(waiting_fixture, "an answer to a wait fails a replayed step",
                 "[actors][core][static][R33]") {
  begin(1, 7);
  core.complete({out.reported, {}});
  core.finish(out.executing, {});
  end_step(1);
  begin(2, 7);
  core.receive(response{out.reported, {}, {}});
  CHECK(out.take() == lines{"failed " + no_request, "resume c1 " + no_request});
}
