#include "tests/support/catch.hpp"

#include "actors/board/rank_board.hpp"
#include "actors/protocol/wire.hpp"
#include "actors/server/module_server.hpp"
#include "tests/support/actors/actor_fixture.hpp"
#include "tests/support/actors/function_services.hpp"
#include "tests/support/actors/scripted_executor.hpp"
#include "tests/support/actors/server_core_fixture.hpp"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

using namespace smp;

namespace {

/// Rank `self` of two; the test plays the other one.
struct one_rank : actor_fixture, stage {
  ~one_rank() {
    for (auto& x : spawned)
      caf::anon_send_exit(x, caf::exit_reason::kill);
    sched.run();
  }

  void init(uint64_t self) {
    services.executor = factory(rank_id{self});
    services.schedule = [](uint64_t n) {
      return make_schedule("interleaved", n, 2);
    };
    server_options options;
    options.self = rank_id{self};
    options.pipeline = {rank_id{0}, rank_id{1}};
    options.tied = tied;
    options.fabric = &net;
    options.services = &services;
    options.token = std::make_shared<execution_token>();
    options.board = board;
    auto on_report = [this](step_report x) { report = std::move(x); };
    server = own(sys.spawn(module_server, std::move(options), on_report));
    caf::anon_send(server, run_step{step_id{1}, 1});
    sched.run();
  }

  void run() {
    do
      sched.run();
    while (advance_one());
  }

  /// @returns the messages of one kind that were sent.
  template <class T>
  std::vector<T> sent() const {
    std::vector<T> result;
    for (auto& [to, x] : net.sent)
      if (auto y = std::get_if<T>(&x))
        result.push_back(*y);
    return result;
  }

  function_services services;
  test::noting_fabric net;
  std::vector<rank_id> tied;
  std::shared_ptr<rank_board> board = std::make_shared<rank_board>(rank_id{0},
                                                                   2);
  module_server_actor server;
  std::optional<step_report> report;
};

} // namespace

TEST_CASE_METHOD(one_rank, "a request that cannot be sent fails its call",
                 "[actors][server]") {
  script[root_module] = {do_call(1, 1), do_return("r")};
  net.refuse = 1;
  init(0);
  run();
  REQUIRE(report);
  CHECK(report->error.code == error_code::transport);
  CHECK(report->error.text == "too large");
}

TEST_CASE_METHOD(one_rank, "a response that cannot be sent becomes a failure",
                 "[actors][server]") {
  script[{1}] = {do_return("a value too large for the network")};
  init(1);
  net.refuse = 1;
  request x{{rank_id{0}, 5}, step_id{1}, {}, module_id{1}, {}, {}};
  caf::anon_send(server, x);
  run();
  auto responses = sent<response>();
  REQUIRE(responses.size() == 2);
  CHECK_FALSE(responses[0].error);
  CHECK(responses[1].id == x.id);
  CHECK(responses[1].error.text == "too large");
}

TEST_CASE_METHOD(one_rank, "pp_rank 0 tells the others each end once",
                 "[actors][server]") {
  script[root_module] = {do_return("r")};
  init(0);
  run();
  REQUIRE(report);
  CHECK(sent<microbatch_done>().size() == 1);
  auto reports = sent<step_report>();
  REQUIRE(reports.size() == 1);
  REQUIRE(reports[0].values.size() == 1);
  CHECK(text_of(reports[0].values[0]) == "r"); // R5
  CHECK(net.sent.size() == 2);
}

TEST_CASE_METHOD(one_rank, "pp_rank 0 tells the others the first failure",
                 "[actors][server]") {
  script[root_module] = {do_throw("boom")};
  init(0);
  run();
  auto failed = sent<step_failed>();
  REQUIRE(failed.size() == 1);
  CHECK(failed[0].error.text == "boom");
  auto reports = sent<step_report>();
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].error == failed[0].error);
}

TEST_CASE_METHOD(one_rank, "nonsense closes the endpoint of its sender",
                 "[actors][server]") {
  init(1);
  caf::anon_send(server, rank_id{0}, message{message_kind::control, {}});
  run();
  REQUIRE(net.lost.size() == 1);
  CHECK(net.lost[0].rank == rank_id{0});
  CHECK(net.lost[0].code == error_code::protocol);
  REQUIRE(report);
  CHECK(report->error == net.lost[0]);
}

TEST_CASE_METHOD(one_rank,
                 "a step fails with one of a pipeline that shares modules, and "
                 "with no other",
                 "[actors][server]") {
  script[root_module] = {do_return("r")};
  tied = {rank_id{2}};
  init(0);
  auto failed = [] {
    return encode(step_failed{step_id{1}, test::user_error("there")});
  };
  caf::anon_send(server, rank_id{2}, failed());
  run();
  REQUIRE(report);
  CHECK(report->error.text == "there");
  CHECK(net.lost.empty());
  caf::anon_send(server, rank_id{3}, failed());
  run();
  REQUIRE(net.lost.size() == 1);
  CHECK(net.lost[0].rank == rank_id{3});
}

TEST_CASE_METHOD(one_rank, "whatever a server makes happen is progress",
                 "[actors][server][board]") {
  script[{1}] = {do_call(0, 2), do_return("a")};
  init(1);
  auto before = board->look();
  auto moved = [&] {
    sched.run();
    auto now = board->look();
    return std::exchange(before, now) != now;
  };
  // The user's thread comes first.
  auto context = [&] { return board->view().activities.at(1); };
  CHECK_FALSE(moved());
  caf::anon_send(
    server, request{{rank_id{0}, 5}, step_id{1}, {}, module_id{1}, {}, {}});
  CHECK(moved());
  CHECK(context().executes);
  CHECK(advance_one());
  CHECK(moved());
  CHECK_FALSE(context().executes);
  REQUIRE(sent<request>().size() == 1);
  auto id = sent<request>()[0].id;
  CHECK(context().asks == id);
  caf::anon_send(server, response{id, {}, {}});
  CHECK(moved());
  CHECK(context().executes);
  CHECK(advance_one());
  CHECK(moved());
  CHECK(sent<response>().size() == 1);
  CHECK(board->view().activities.size() == 1); // idle
  caf::anon_send(server, step_failed{step_id{1}, test::user_error("x")});
  CHECK(moved());
  caf::anon_send(server, step_report{step_id{1}, {}, test::user_error("x")});
  CHECK(moved());
  CHECK(report);
  CHECK_FALSE(moved());
}
