#include "tests/support/catch.hpp"

#include "actors/protocol/wire.hpp"
#include "tests/support/actors/actor_world.hpp"

#include <caf/binary_serializer.hpp>
#include <caf/event_based_actor.hpp>

#include <set>
#include <string>
#include <vector>

using namespace smp;

namespace {

using texts_t = std::vector<std::string>;

bool is_idle(const context_status& x) {
  return x.state == context_state::idle;
}

/// What must hold after a step, whatever it did.
void check_clean(actor_world& world, uint64_t step, uint64_t microbatches) {
  for (size_t i = 0; i < world.ranks.size(); ++i) {
    auto st = world.status(i);
    CHECK_FALSE(st.in_step);
    CHECK(st.ready == 0);
    CHECK(st.later == 0);
    CHECK(st.pending == 0);
    auto contexts = world.contexts(i);
    CHECK(std::all_of(contexts.begin(), contexts.end(), is_idle));
    // Each microbatch ended exactly once on each rank (R3).
    std::set<uint64_t> over;
    for (auto& [s, mb] : world.ranks[i]->over)
      if (s == step_id{step})
        CHECK(over.insert(mb.value).second);
    CHECK(over.size() == microbatches);
  }
}

} // namespace

// -- calls --------------------------------------------------------------------

TEST_CASE_METHOD(actor_world, "a value comes back to its caller and to all",
                 "[actors][protocol]") {
  script[root_module] = {do_call(1, 1), do_return("root:")};
  script[{1}] = {do_return("one")};
  init({});
  CHECK(texts(step(1, 1)) == texts_t{"root:one"});
  check_clean(*this, 1, 1);
}

TEST_CASE_METHOD(actor_world, "a call may come back to the rank it came from",
                 "[actors][protocol]") {
  script[root_module] = {do_call(1, 1), do_return("a")};
  script[{1}] = {do_call(0, 2), do_return("b")};
  script[{2}] = {do_return("c")};
  init({});
  CHECK(texts(step(1, 1)) == texts_t{"abc"});
  CHECK(status(0).contexts.size() == 2); // the first one was pending
  CHECK(status(1).contexts.size() == 1);
}

TEST_CASE_METHOD(actor_world, "two microbatches interleave on one rank",
                 "[actors][protocol][R25]") {
  script[root_module] = {do_call(1, 1), do_grant(),
                         do_call(1, 1, phase::backward), do_return("r")};
  script[{1}] = {do_return("x")};
  init({});
  CHECK(texts(step(1, 2)) == texts_t{"rx", "rx"});
  // The second one starts while the first one is pending.
  CHECK(at("0: m0 mb1 start") < at("0: m0 mb0 resume"));
  check_clean(*this, 1, 2);
}

TEST_CASE_METHOD(actor_world, "evaluation needs no grant",
                 "[actors][protocol]") {
  script[root_module] = {do_call(1, 1), do_return("r")}; // R4
  script[{1}] = {do_return("x")};
  auto schedule = GENERATE("simple", "interleaved");
  init({.schedule = schedule, .active = 5});
  CHECK(texts(step(1, 5)) == texts_t(5, "rx"));
  check_clean(*this, 1, 5);
}

TEST_CASE_METHOD(actor_world, "simple grants no backward before all forwards",
                 "[actors][protocol]") {
  script[root_module] = {do_call(1, 1), do_grant(),
                         do_call(1, 2, phase::backward), do_return("r")};
  script[{1}] = {do_return("x")};
  script[{2}] = {do_return("y")};
  init({.schedule = "simple", .active = 3});
  CHECK(texts(step(1, 3)) == texts_t(3, "ry"));
  for (auto mb : {"0", "1", "2"})
    CHECK(at(std::string{"1: m1 mb"} + mb + " end") < at("1: m2 mb0 start"));
  check_clean(*this, 1, 3);
}

TEST_CASE_METHOD(actor_world, "late and overtaking messages match",
                 "[actors][protocol]") {
  script[root_module] = {do_call(1, 1), do_call(2, 2), do_grant(),
                         do_call(1, 1, phase::backward), do_return("r")};
  script[{1}] = {do_call(0, 3), do_call(2, 2), do_return("x")};
  script[{2}] = {do_return("y")};
  script[{3}] = {do_call(2, 2), do_return("z")};
  auto seed = GENERATE(Catch::Generators::range(1, 21));
  auto schedule = GENERATE("simple", "interleaved");
  init({.world_size = 3,
        .seed = static_cast<uint64_t>(seed),
        .reorder = true,
        .schedule = schedule,
        .active = 6});
  for (uint64_t n = 1; n <= 3; ++n) {
    CHECK(texts(step(n, 6)) == texts_t(6, "rxy"));
    check_clean(*this, n, 6);
  }
  for (size_t i = 0; i < 3; ++i) {
    CHECK(status(i).unknown == 0);
    CHECK(status(i).dropped == 0);
  }
}

TEST_CASE_METHOD(actor_world, "contexts are used again, within their bound",
                 "[actors][protocol]") {
  // Depth 2 on rank 0: the root and module 2.
  script[root_module] = {do_call(1, 1), do_grant(),
                         do_call(1, 1, phase::backward), do_return("r")};
  script[{1}] = {do_call(0, 2), do_return("x")};
  script[{2}] = {do_call(1, 3), do_return("y")};
  script[{3}] = {do_return("z")};
  auto seed = GENERATE(Catch::Generators::range(1, 6));
  uint64_t active = 3;
  init(
    {.seed = static_cast<uint64_t>(seed), .reorder = true, .active = active});
  for (uint64_t n = 1; n <= 4; ++n)
    CHECK(texts(step(n, 12)) == texts_t(12, "rxyz"));
  CHECK(status(0).contexts.size() <= active * 2 + 1);
  CHECK(status(1).contexts.size() <= active * 2 + 1);
}

// -- waits (R28) --------------------------------------------------------------

TEST_CASE_METHOD(actor_world, "a wait gives the token to others",
                 "[actors][protocol]") {
  auto done = std::make_shared<completion>();
  script[root_module] = {do_wait(done, "the value of w"), do_return("r")};
  init({});
  SECTION("until it is done") {
    enter_all(1, 2);
    run();
    CHECK_FALSE(ranks[0]->report);
    auto xs = contexts(0);
    REQUIRE(xs.size() == 2);
    for (auto& x : xs) {
      CHECK(x.state == context_state::pending);
      CHECK(x.waits_for == "the value of w");
    }
    done->set();
    run();
    CHECK(texts(ranks[0]->report.value()) == texts_t{"r", "r"});
  }
  SECTION("which may have been before") {
    done->set();
    CHECK(texts(step(1, 2)) == texts_t{"r", "r"});
  }
  SECTION("and its failure is that of the step") {
    auto err = failure{error_code::rank_down, rank_id{1}, {}, "owner died"};
    done->fail(err);
    CHECK(step(1, 2).error == err);
  }
  check_clean(*this, 1, 2);
}

// -- token (R26) --------------------------------------------------------------

TEST_CASE_METHOD(actor_world, "ranks that share a token never execute at once",
                 "[actors][protocol]") {
  script[root_module] = {do_call(1, 1), do_call(2, 1), do_return("r")};
  script[{1}] = {do_call(0, 2), do_return("x")};
  script[{2}] = {do_return("y")};
  auto share = GENERATE(true, false);
  auto seed = GENERATE(Catch::Generators::range(1, 11));
  init({.world_size = 3,
        .seed = static_cast<uint64_t>(seed),
        .reorder = true,
        .share_token = share,
        .active = 4});
  CHECK(texts(step(1, 8)) == texts_t(8, "rxy"));
  // Each rank alone is always bound to one execution.
  if (share)
    CHECK(most_executing == 1);
  else
    CHECK(most_executing <= 3);
}

// -- failures -----------------------------------------------------------------

TEST_CASE_METHOD(actor_world, "user code that throws ends the step everywhere",
                 "[actors][protocol]") {
  script[root_module] = {do_call(1, 1), do_grant(), do_return("r")};
  script[{1}] = {do_throw("boom")};
  auto seed = GENERATE(Catch::Generators::range(1, 6));
  init({.world_size = 3, .seed = static_cast<uint64_t>(seed), .reorder = true});
  auto err = step(1, 4).error;
  CHECK(err == failure{error_code::user_code, rank_id{1}, "m1", "boom"});
  CHECK_FALSE(has("0: m0 mb2 start")); // nothing new was started
  check_clean(*this, 1, 4);
  script[{1}] = {do_return("fine")}; // the session stays usable
  CHECK(texts(step(2, 4)) == texts_t(4, "r"));
  check_clean(*this, 2, 4);
}

TEST_CASE_METHOD(actor_world, "code that swallows an error does not hide it",
                 "[actors][protocol]") {
  script[root_module] = {do_swallow(), do_call(1, 1), do_call(1, 2),
                         do_return("fine?")};
  script[{1}] = {do_throw("boom")};
  script[{2}] = {do_return("x")};
  init({});
  CHECK(step(1, 1).error.text == "boom");
  CHECK_FALSE(has("1: m2 mb0 start")); // later calls throw at once (R6)
  check_clean(*this, 1, 1);
}

TEST_CASE_METHOD(actor_world, "the first error cancels grants and queued work",
                 "[actors][protocol]") {
  // Microbatch 0 waits for its grant, 1 fails, 2 and 3 are queued or new.
  script[root_module] = {do_call(1, 1), do_grant(), do_return("r")};
  script[{1}] = {do_return("x")};
  init({.schedule = "simple", .active = 4});
  after_each = [this] {
    if (has("1: m1 mb0 end"))
      script[{1}] = {do_throw("boom")};
  };
  CHECK(step(1, 4).error.text == "boom");
  CHECK(has("0: m0 mb0 failed")); // its grant
  CHECK_FALSE(has("1: m1 mb3 start"));
  check_clean(*this, 1, 4);
}

TEST_CASE_METHOD(actor_world, "an executor that throws is lost, not its rank",
                 "[actors][protocol]") {
  script[root_module] = {do_call(1, 1), do_return("r")};
  script[{1}] = {do_crash("bug")};
  init({});
  auto err = step(1, 1).error;
  CHECK(err.code == error_code::internal);
  CHECK(err.rank == rank_id{1});
  CHECK_THAT(err.text, Catch::Matchers::ContainsSubstring("bug"));
  CHECK(status(1).contexts.empty()); // and its token came back:
  script[{1}] = {do_return("fine")};
  CHECK(texts(step(2, 1)) == texts_t{"rfine"});
}

TEST_CASE_METHOD(actor_world, "a context that is killed fails its request",
                 "[actors][protocol]") {
  auto never = std::make_shared<completion>();
  script[root_module] = {do_call(1, 1), do_return("r")};
  script[{1}] = {do_wait(never), do_return("x")};
  init({});
  enter_all(1, 1);
  run();
  auto xs = status(1).contexts;
  REQUIRE(xs.size() == 1);
  caf::anon_send_exit(xs[0], caf::exit_reason::kill);
  run();
  CHECK(ranks[0]->report.value().error.code == error_code::internal);
  check_clean(*this, 1, 1);
  never->set(); // too late for anybody
  run();
  CHECK(status(1).unknown == 0);
}

TEST_CASE_METHOD(actor_world, "a scheduler that dies ends the step everywhere",
                 "[actors][protocol]") {
  auto never = std::make_shared<completion>();
  script[root_module] = {do_wait(never), do_return("r")};
  init({});
  enter_all(1, 1);
  run();
  caf::anon_send_exit(status(0).scheduler, caf::exit_reason::kill);
  run();
  for (auto& x : ranks)
    CHECK_THAT(x->report.value().error.text,
               Catch::Matchers::ContainsSubstring("SCHEDULER died"));
}

TEST_CASE_METHOD(actor_world, "a response that nobody waits for is counted",
                 "[actors][protocol]") {
  script[root_module] = {do_return("r")};
  init({});
  caf::anon_send(server(0), response{{rank_id{0}, 77}, {}, {}});
  CHECK(status(0).unknown == 1);
  CHECK(texts(step(1, 1)) == texts_t{"r"});
}

// A trap of CAF 0.18: an error answered to a plain `send` travels back, and
// the default error handler of the sender quits.
TEST_CASE_METHOD(actor_world, "a refused message ends the step, not the server",
                 "[actors][protocol]") {
  auto never = std::make_shared<completion>();
  script[root_module] = {do_wait(never), do_return("r")};
  init({});
  enter_all(1, 1);
  run();
  caf::anon_send(caf::actor_cast<caf::actor>(server(0)),
                 caf::make_error(caf::sec::unexpected_message));
  run();
  CHECK(ranks[1]->report.value().error.code == error_code::internal);
}

// -- gate (R1) ----------------------------------------------------------------

TEST_CASE_METHOD(actor_world, "a rank between steps serves nobody",
                 "[actors][protocol]") {
  script[root_module] = {do_call(1, 1), do_return("r")};
  script[{1}] = {do_return("x")};
  init({});
  enter(0, 1, 1); // rank 1 still runs its optimizer
  run();
  CHECK(status(1).later == 1);
  CHECK_FALSE(has("1: m1 mb0 start"));
  enter(1, 1, 1);
  run();
  CHECK(texts(ranks[0]->report.value()) == texts_t{"rx"});
  request old{{rank_id{0}, 5}, step_id{1}, {}, module_id{1}, {}, {}};
  caf::anon_send(server(1), old);
  CHECK(status(1).dropped == 1);
}

TEST_CASE_METHOD(actor_world,
                 "the end of a step waits for a rank that enters later",
                 "[actors][protocol]") {
  script[root_module] = {do_return("r")}; // rank 1 is not needed
  init({});
  enter(0, 1, 2);
  run();
  CHECK(texts(ranks[0]->report.value()) == texts_t{"r", "r"});
  enter(0, 2, 1); // rank 0 may be steps ahead
  run();
  CHECK_FALSE(ranks[1]->report);
  enter(1, 1, 2);
  run();
  CHECK(texts(ranks[1]->report.value()) == texts_t{"r", "r"});
  enter(1, 2, 1);
  run();
  CHECK(texts(ranks[1]->report.value()) == texts_t{"r"});
}

TEST_CASE_METHOD(actor_world, "a step cannot begin twice",
                 "[actors][protocol]") {
  script[root_module] = {do_return("r")};
  init({});
  step(1, 1);
  enter(0, 1, 1);
  CHECK(ranks[0]->report.value().error.code == error_code::internal);
}

// -- dead ranks ---------------------------------------------------------------

TEST_CASE_METHOD(actor_world, "a dead rank fails the calls that wait for it",
                 "[actors][protocol]") {
  script[root_module] = {do_call(1, 1), do_return("r")};
  script[{1}] = {do_call(2, 2), do_return("x")};
  script[{2}] = {do_call(1, 3), do_return("y")};
  script[{3}] = {do_return("never")};
  init({.world_size = 3});
  auto victim = GENERATE(1u, 2u);
  auto cause = failure{error_code::rank_down, rank_id{victim}, {}, "killed"};
  after_each = [&] {
    if (at("1: m3 mb0 start") < trace.size())
      net->kill(cause);
  };
  enter_all(1, 2);
  run();
  for (size_t i = 0; i < 3; ++i)
    if (i != victim)
      CHECK(ranks[i]->report.value().error == cause);
}

TEST_CASE_METHOD(actor_world, "the death of pp_rank 0 ends the others' steps",
                 "[actors][protocol]") {
  auto never = std::make_shared<completion>();
  script[root_module] = {do_call(1, 1), do_return("r")};
  script[{1}] = {do_wait(never), do_return("x")};
  init({.world_size = 3});
  enter_all(1, 1);
  run();
  auto cause = failure{error_code::rank_down, rank_id{0}, {}, "killed"};
  net->kill(cause);
  run();
  CHECK(ranks[1]->report.value().error == cause); // it served
  CHECK(ranks[2]->report.value().error == cause); // it only waited
}

TEST_CASE_METHOD(actor_world, "after the death of a rank no step runs",
                 "[actors][protocol]") {
  script[root_module] = {do_return("r")};
  init({.world_size = 3});
  auto cause = failure{error_code::rank_down, rank_id{2}, {}, "killed"};
  net->kill(cause);
  run();
  enter(0, 1, 2);
  enter(1, 1, 2);
  run();
  CHECK(ranks[0]->report.value().error == cause);
  CHECK(ranks[1]->report.value().error == cause);
  CHECK_FALSE(has("0: m0 mb0 start"));
}

TEST_CASE_METHOD(actor_world, "a rank that sends nonsense counts as dead",
                 "[actors][protocol]") {
  auto never = std::make_shared<completion>();
  script[root_module] = {do_wait(never), do_return("r")};
  init({});
  enter_all(1, 1);
  run();
  message bad;
  SECTION("too short") {
    bad = {message_kind::request, {}};
  }
  SECTION("a request in the name of another rank") {
    bad = encode(request{{rank_id{0}, 1}, {}, {}, {}, {}, {}});
  }
  SECTION("a response for another rank") {
    bad = encode(response{{rank_id{1}, 1}, {}, {}});
  }
  SECTION("the end of a step that only pp_rank 0 may send") {
    bad = encode(step_report{step_id{1}, {}, {}});
  }
  net->at(rank_id{1}).send(rank_id{0}, std::move(bad));
  run();
  auto& err = ranks[0]->report.value().error;
  CHECK(err.code == error_code::protocol);
  CHECK(err.rank == rank_id{1});
  CHECK_THAT(err.text, Catch::Matchers::StartsWith("malformed"));
}

// -- status -------------------------------------------------------------------

TEST_CASE_METHOD(actor_world, "every actor of a rank answers status",
                 "[actors][protocol]") {
  auto done = std::make_shared<completion>();
  script[root_module] = {do_call(1, 1), do_grant(), do_return("r")};
  script[{1}] = {do_wait(done, "bucket 3"), do_return("x")};
  init({});
  enter_all(1, 3);
  run();
  auto st = status(0);
  CHECK(st.rank == rank_id{0});
  CHECK(st.step == step_id{1});
  CHECK(st.in_step);
  CHECK(st.pending == 2);
  auto sched_st = ask<scheduler_status>(st.scheduler, status_atom_v);
  CHECK(sched_st.step == step_id{1});
  CHECK(sched_st.running == 2);
  CHECK(sched_st.left == 3);
  for (auto& x : contexts(0))
    CHECK(x.waits_for == "module 1 from rank 1");
  for (auto& x : contexts(1))
    CHECK(x.waits_for == "bucket 3");
  done->set();
  run();
  sched_st = ask<scheduler_status>(st.scheduler, status_atom_v);
  CHECK(sched_st.left == 0);
  CHECK(texts(ranks[1]->report.value()) == texts_t(3, "r"));
}

// -- safety -------------------------------------------------------------------

TEST_CASE_METHOD(actor_fixture, "tensors cannot slip onto CAF's socket",
                 "[actors][protocol]") {
  auto refused = [this](caf::message x) {
    caf::byte_buffer buf;
    caf::binary_serializer sink{sys, buf};
    return !sink.apply(x) && sink.get_error() == caf::sec::unsafe_type;
  };
  CHECK(refused(caf::make_message(request{})));
  CHECK(refused(caf::make_message(response{})));
  CHECK(refused(caf::make_message(call{})));
  CHECK(refused(caf::make_message(outcome{})));
  CHECK(refused(caf::make_message(step_report{})));
  CHECK_FALSE(refused(caf::make_message(context_status{})));
}

// -- shutdown -----------------------------------------------------------------

TEST_CASE_METHOD(actor_world, "a rank that shuts down unwinds what is parked",
                 "[actors][protocol]") {
  auto never = std::make_shared<completion>();
  script[root_module] = {do_wait(never), do_return("r")};
  init({});
  enter(0, 1, 2);
  run();
  caf::anon_send_exit(server(0), caf::exit_reason::user_shutdown);
  run();
  CHECK(ranks[0]->report.value().error.code == error_code::cancelled);
  CHECK(has("0: m0 mb0 failed")); // unwound under the token, not torn down
  CHECK(has("0: m0 mb1 failed"));
  CHECK_THROWS(status(0));
}
