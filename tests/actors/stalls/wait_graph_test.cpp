#include "tests/support/catch.hpp"

#include "actors/stalls/wait_graph.hpp"
#include "tests/support/reworded.hpp"

using namespace smp;

// Who waits for whom as plain data, and whom the graph blames.

namespace {

using end = wait_graph::end;
using kind = activity::kind;

/// A context of `rank` that serves request `origin`#`number`.
activity serving(uint64_t origin, uint64_t number, std::string what) {
  activity x;
  x.who = kind::context;
  x.executes = true;
  x.what = std::move(what);
  x.serves = {rank_id{origin}, number};
  x.seconds = 61;
  return x;
}

activity waits(activity x, std::string what, uint64_t from,
               request_id asks = {}) {
  x.executes = false;
  x.waits_for = std::move(what);
  x.from = rank_id{from};
  x.asks = asks;
  return x;
}

activity main_waits(std::string what, uint64_t from, double seconds = 61) {
  activity x;
  x.waits_for = std::move(what);
  x.from = rank_id{from};
  x.seconds = seconds;
  return x;
}

activity ends_step(double seconds = 61) {
  auto x = main_waits("the end of step 1", 0, seconds);
  x.subject.what = wait_subject::kind::step_end;
  return x;
}

activity main_executes(double seconds = 61) {
  activity x;
  x.executes = true;
  x.what = "user code outside of a step";
  x.seconds = seconds;
  return x;
}

rank_view rank(uint64_t x, std::vector<activity> activities,
               std::vector<traffic> peers = {}) {
  rank_view result;
  result.rank = rank_id{x};
  result.activities = std::move(activities);
  result.peers = std::move(peers);
  return result;
}

/// A microbatch of rank 0 that waits for block 5 of rank 1.
rank_view caller(std::vector<traffic> peers = {}) {
  return rank(0,
              {ends_step(70),
               waits(serving(0, 7, "the step body, microbatch 2, backward"),
                     "module encoder.block.5, microbatch 2, backward", 1,
                     {rank_id{0}, 5})},
              std::move(peers));
}

struct explained {
  end how;
  rank_id culprit;
  std::string text;
};

explained explain(std::vector<rank_view> views,
                  std::map<rank_id, double> silent = {}) {
  wait_graph graph{views, silent};
  auto chain = graph.worst();
  for (uint32_t seed = 0; seed < 20; ++seed) {
    wait_graph other{reworded(views, seed), silent};
    auto same = other.worst();
    CHECK(same.nodes == chain.nodes);
    CHECK(same.how == chain.how);
    CHECK(same.culprit == chain.culprit);
  }
  return {chain.how, chain.culprit, graph.text(chain)};
}

} // namespace

TEST_CASE("a chain of waits ends at who executes", "[actors][stalls]") {
  auto x = explain(
    {caller(),
     rank(1, {ends_step(70), serving(0, 5,
                                     "module encoder.block.4, microbatch 2, "
                                     "backward")})});
  CHECK(x.how == end::executing);
  CHECK(x.culprit == rank_id{1});
  CHECK(x.text
        == "rank 0 (the step body, microbatch 2, backward) waits for module "
           "encoder.block.5, microbatch 2, backward from rank 1 for 61 s; "
           "rank 1 executes module encoder.block.4, microbatch 2, backward "
           "for 61 s");
}

TEST_CASE("a request in line leads to who has the token", "[actors][stalls]") {
  activity queued;
  queued.who = kind::queued;
  queued.what = "module encoder.block.5, microbatch 2, backward";
  queued.serves = {rank_id{0}, 5};
  queued.waits_for = "waits for the execution token";
  auto x = explain(
    {caller(), rank(1, {ends_step(70), queued, serving(2, 1, "module b")})});
  CHECK(x.how == end::executing);
  CHECK(x.culprit == rank_id{1});
  CHECK_THAT(x.text, Catch::Matchers::EndsWith("executes module b for 61 s"));
}

TEST_CASE("requests that wait for arguments lead to who has to send them",
          "[actors][stalls]") {
  auto queued = [](uint64_t number) {
    activity x;
    x.who = kind::queued;
    x.what = "module encoder.block.5, microbatch 2, forward";
    x.serves = {rank_id{0}, number};
    x.waits_for = "waits for its arguments";
    x.from = rank_id{2};
    return x;
  };
  auto of_1 = rank(1, {ends_step(70), queued(5), queued(6)});
  SECTION("which is stopped") {
    auto x = explain({caller(), of_1}, {{rank_id{2}, 62}});
    CHECK(x.how == end::silent);
    CHECK(x.culprit == rank_id{2});
    CHECK_THAT(x.text, Catch::Matchers::EndsWith(
                         "; rank 1 has module encoder.block.5, microbatch 2, "
                         "forward in line, waits for its arguments from rank "
                         "2; rank 2 has not answered for 62 s (stopped?)"));
  }
  SECTION("which executes") {
    auto x = explain({caller(), of_1, rank(2, {serving(0, 1, "module b")})});
    CHECK(x.how == end::executing);
    CHECK(x.culprit == rank_id{2});
  }
}

TEST_CASE("a rank that left out a step is told so, and not of a cycle",
          "[actors][stalls]") {
  auto first = caller();
  first.step = step_id{8};
  first.activities.push_back(ends_step());
  activity in_line;
  in_line.who = kind::queued;
  in_line.what = "module encoder.block.5, microbatch 2, forward";
  in_line.serves = {rank_id{0}, 5};
  in_line.waits_for = "waits until this rank begins the step";
  in_line.of_later_step = true;
  auto second = rank(1, {main_waits("exchange \"norm\"", 0), in_line});
  second.step = step_id{7};
  auto x = explain({first, second});
  CHECK(x.how == end::cycle);
  CHECK_THAT(x.text,
             Catch::Matchers::EndsWith(
               "; rank 0 is in step 8, but rank 1 made 7 and waits elsewhere: "
               "every rank has to call each step"));
}

TEST_CASE("nothing is known of what blocked actors have in line",
          "[actors][stalls]") {
  activity blocked;
  blocked.who = kind::schedule;
  blocked.executes = true;
  blocked.what = "actors do not answer (no status)";
  auto x = explain({caller(), rank(1, {ends_step(70), blocked})});
  CHECK(x.how == end::executing);
  CHECK(x.culprit == rank_id{1});
  CHECK_THAT(x.text, Catch::Matchers::EndsWith(
                       "; rank 1's actors do not answer (no status)"));
  // Nor of what they have sent.
  auto sender = caller();
  sender.activities.push_back(blocked);
  CHECK(explain({sender, rank(1, {ends_step(70)})}).culprit == rank_id{0});
  // Actors that answer know what they have.
  auto answers = rank(1, {ends_step(70), blocked});
  answers.complete = true;
  CHECK(explain({caller(), answers}).how == end::lost);
}

TEST_CASE("a request that nobody knows was lost", "[actors][stalls]") {
  auto peers_0 = std::vector<traffic>{{rank_id{1}, 9, 3, 0}};
  auto peers_1 = std::vector<traffic>{{rank_id{0}, 4, 9, 0}};
  auto x = explain({caller(peers_0), rank(1, {ends_step(70)}, peers_1)});
  CHECK(x.how == end::lost);
  CHECK(x.culprit == rank_id{1});
  CHECK_THAT(x.text, Catch::Matchers::EndsWith(
                       "rank 1 has nothing of it: 1 of 4 messages from rank 1 "
                       "to rank 0 did not arrive"));
}

TEST_CASE("a rank that does not answer is the culprit of who waits for it",
          "[actors][stalls]") {
  auto x = explain({caller()}, {{rank_id{1}, 62.0}});
  CHECK(x.how == end::silent);
  CHECK(x.culprit == rank_id{1});
  CHECK_THAT(x.text, Catch::Matchers::EndsWith(
                       "; rank 1 has not answered for 62 s (stopped?)"));
}

TEST_CASE("where all others compute, a silent rank is named alone",
          "[actors][stalls]") {
  auto x = explain({rank(0, {main_executes()})}, {{rank_id{1}, 2.0}});
  CHECK(x.text == "rank 1 has not answered for 2.0 s (stopped?)");
}

TEST_CASE("exhausted credits name the rank that takes nothing",
          "[actors][stalls]") {
  auto x = explain({caller({{rank_id{1}, 90, 3, 40}}),
                    rank(1, {ends_step(70), serving(2, 1, "module b")})});
  CHECK(x.how == end::credits);
  CHECK(x.culprit == rank_id{1});
  CHECK_THAT(x.text, Catch::Matchers::EndsWith(
                       "; 40 messages of rank 0 wait until rank 1 takes "
                       "earlier ones"));
}

TEST_CASE("a module and a barrier that wait for each other are a cycle",
          "[actors][stalls]") {
  auto x = explain(
    {caller(), rank(1, {ends_step(70),
                        waits(serving(0, 5,
                                      "module encoder.block.5, microbatch 2, "
                                      "backward"),
                              "exchange \"barrier smp.barrier.world\"", 0)})});
  CHECK(x.how == end::cycle);
  CHECK_THAT(x.text, Catch::Matchers::EndsWith(
                       "; rank 1 (module encoder.block.5, microbatch 2, "
                       "backward) waits for exchange \"barrier "
                       "smp.barrier.world\" from rank 0 for 61 s; cycle: "
                       "rank 0 -> rank 1 -> rank 0"));
}

TEST_CASE("exchanges of two names are a cycle of both ranks",
          "[actors][stalls]") {
  auto x = explain({rank(0, {main_waits("exchange \"a\"", 1)}),
                    rank(1, {main_waits("exchange \"b\"", 0)})});
  CHECK(x.how == end::cycle);
  CHECK(x.text
        == "rank 0 waits for exchange \"a\" from rank 1 for 61 s; rank 1 "
           "waits for exchange \"b\" from rank 0 for 61 s; cycle: rank 0 -> "
           "rank 1 -> rank 0");
}

TEST_CASE("a cycle reads the same whoever waits longest", "[actors][stalls]") {
  auto x = explain({rank(0, {main_waits("exchange \"a\"", 1)}),
                    rank(1, {main_waits("exchange \"b\"", 0, 70)})});
  CHECK_THAT(x.text, Catch::Matchers::StartsWith("rank 1 waits for "));
  CHECK_THAT(x.text, Catch::Matchers::EndsWith("; cycle: rank 0 -> rank 1 -> "
                                               "rank 0"));
}

TEST_CASE("a barrier leads to the rank that computes between steps",
          "[actors][stalls]") {
  auto x = explain({rank(0, {main_waits("exchange \"barrier x\"", 1)}),
                    rank(1, {main_executes()})});
  CHECK(x.how == end::executing);
  CHECK(x.culprit == rank_id{1});
  CHECK_THAT(x.text, Catch::Matchers::EndsWith("; rank 1 executes user code "
                                               "outside of a step for 61 s"));
}

TEST_CASE("a schedule that does not answer is who all wait for",
          "[actors][stalls]") {
  activity schedule;
  schedule.who = kind::schedule;
  schedule.executes = true;
  schedule.what
    = "schedule actor \"mine\" owes an answer to event \"backward "
      "ready, microbatch 0\"";
  schedule.seconds = 3;
  auto x = explain(
    {rank(0, {ends_step(),
              waits(serving(0, 7, "the step body, microbatch 0, backward"),
                    "the grant of its backward phase", 0),
              schedule}),
     rank(1, {ends_step()})});
  CHECK(x.how == end::executing);
  CHECK(x.culprit == rank_id{0});
  CHECK_THAT(x.text, Catch::Matchers::EndsWith(
                       "; rank 0's schedule actor \"mine\" owes an answer to "
                       "event \"backward ready, microbatch 0\" for 3.0 s"));
}

TEST_CASE("a rank that only computes waits for nobody", "[actors][stalls]") {
  wait_graph graph{{rank(0, {main_executes()}), rank(1, {main_executes()})},
                   {}};
  CHECK_FALSE(graph.waiting());
  CHECK(graph.worst().nodes.empty());
}
