#pragma once

// A server_core alone: what it wants is noted, the test plays contexts and
// other ranks.

#include "actors/protocol/wire.hpp"
#include "actors/server/server_core.hpp"
#include "tests/support/actors/function_services.hpp"
#include "transport/wake_up.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace smp::test {

/// Notes what is sent, and refuses as much of it as a test wants.
struct noting_fabric : fabric {
  rank_id self() const override {
    return {};
  }

  std::string address() const override {
    return {};
  }

  void start(const std::vector<std::string>&, fabric_listener&) override {
    // nop
  }

  void send(rank_id to, message x, sent_callback done) override {
    sent.emplace_back(to, decode(std::move(x)));
    if (on_sent)
      on_sent(to, sent.back().second);
    failure why;
    if (refuse > 0) {
      --refuse;
      why = {error_code::transport, to, {}, "too large"};
    }
    if (done)
      done(why);
  }

  void park(pollable_wake_up& x) override {
    x.wait();
  }

  void peer_lost(const failure& x) override {
    lost.push_back(x);
  }

  void stop(std::chrono::milliseconds) override {
    // nop
  }

  fabric_stats stats() const override {
    return {};
  }

  int refuse = 0;
  std::vector<std::pair<rank_id, incoming>> sent;
  std::function<void(rank_id, const incoming&)> on_sent;
  std::vector<failure> lost;
};

/// Calls functions instead of running anything.
struct noting_executor : executor {
  ~noting_executor() override {
    close();
  }

  failure start(request x) override {
    on_start(x);
    return {};
  }

  failure resume(response x) override {
    on_resume(x);
    return {};
  }

  void wake() override {
    // nop
  }

  std::function<void(const request&)> on_start;
  std::function<void(const response&)> on_resume;
};

/// Notes what the core wants; the test plays contexts and other ranks.
struct noted_output : server_output {
  noted_output() {
    net.on_sent = [this](rank_id to, const incoming& x) {
      if (auto* y = std::get_if<request>(&x))
        ask(to, *y);
      else
        answer(std::get<response>(x));
    };
  }

  std::shared_ptr<executor> make_context(context_id ctx) override {
    auto result = std::make_shared<noting_executor>();
    result->on_start = [this, ctx](const request& x) { start(ctx, x); };
    result->on_resume = [this, ctx](const response& x) { resume(ctx, x); };
    return result;
  }

  void crashed(context_id ctx, const std::exception_ptr&) override {
    note("crashed c" + number(ctx));
  }

  fabric::sent_callback on_asked(request_id) override {
    return {};
  }

  fabric::sent_callback on_answered(request_id) override {
    return {};
  }

  void body_over(response x) override {
    answer(x);
  }

  void start(context_id ctx, const request& x) {
    executing = ctx;
    had_token = board_says_so();
    note("start c" + number(ctx) + " mb" + number(x.microbatch));
  }

  void resume(context_id ctx, const response& x) {
    executing = ctx;
    had_token = board_says_so();
    last = x;
    note("resume c" + number(ctx) + (x.error ? " " + x.error.text : ""));
  }

  void ask(rank_id owner, const request& x) {
    asked = x;
    note("ask r" + number(owner));
  }

  void answer(const response& x) {
    answered = x;
    note("answer " + std::to_string(x.id.number)
         + (x.error ? " " + x.error.text : ""));
  }

  void forward_done(const smp::forward_done& x) override {
    waiting = x;
    note("forward done mb" + number(x.microbatch));
  }

  void run(const scheduled_step& x) override {
    note("run " + number(x.what.step)
         + (x.recorded.empty() ? "" : " as recorded")
         + (x.serial ? " one by one" : ""));
  }

  void planned(const step_plan& x) override {
    note("plan " + number(x.step));
  }

  void diverged(const step_diverged& x) override {
    note("diverged " + x.text);
  }

  void failed(const step_failed& x) override {
    note("failed " + x.error.text);
  }

  void report_done(request_id id, const completion_ptr&) override {
    reported = id;
    note("report_done");
  }

  bool gather(const request& x) override {
    note("gather " + std::to_string(x.id.number));
    return false;
  }

  void microbatch_over(const microbatch_done& x) override {
    note("over s" + number(x.step) + " mb" + number(x.microbatch));
  }

  void step_over(step_report x) override {
    report = x;
    note("step " + number(x.step) + " over"
         + (x.error ? " " + x.error.text : ""));
  }

  template <class T>
  static std::string number(T x) {
    return std::to_string(x.value);
  }

  void note(std::string x) {
    lines.push_back(std::move(x));
  }

  /// @returns the lines since the last call.
  std::vector<std::string> take() {
    return std::exchange(lines, {});
  }

  noting_fabric net;
  std::vector<std::string> lines;
  context_id executing;
  response last;
  response answered;
  request asked;
  bool board_says_so() {
    auto view = board.view();
    return std::ranges::any_of(view.activities, [](auto& x) {
      return x.who == activity::kind::context && x.executes;
    });
  }

  rank_board board{rank_id{0}, 2};
  /// The board said so before the context knew.
  bool had_token = false;
  smp::forward_done waiting;
  request_id reported;
  step_report report;
};

using lines = std::vector<std::string>;

struct core_fixture {
  explicit core_fixture(
    bool leader = true,
    std::shared_ptr<execution_token> token = std::make_shared<
      execution_token>(),
    std::shared_ptr<microbatch_sequencer> sequencer = {},
    uint64_t launch_ahead = 0)
    : core({.self = rank_id{0},
            .leader = leader,
            .fabric = out.net,
            .services = services,
            .board = out.board,
            .token = std::move(token),
            .on_token = [this] { ++granted; },
            .sequencer = std::move(sequencer),
            .launch_ahead = launch_ahead},
           out) {
    // nop
  }

  void enter(uint64_t step, uint64_t microbatches = 2) {
    core.enter({step_id{step}, microbatches});
  }

  void receive(uint64_t number, uint64_t step, uint64_t mb,
               phase what = phase::forward, uint64_t origin = 1) {
    core.receive(request{{rank_id{origin}, number},
                         step_id{step},
                         microbatch_id{mb},
                         module_id{7},
                         what,
                         {}});
  }

  void call_remote(uint64_t owner, phase what = phase::forward) {
    call x;
    x.owner = rank_id{owner};
    x.what = what;
    core.suspend(out.executing, std::move(x));
  }

  void call_other(call_kind kind) {
    call x;
    x.kind = kind;
    core.suspend(out.executing, std::move(x));
  }

  void finish(failure err = {}) {
    core.finish(out.executing, {{}, std::move(err)});
  }

  noted_output out;
  function_services services;
  int granted = 0;
  server_core core;
};

inline failure user_error(std::string text) {
  return {error_code::user_code, rank_id{1}, "m", std::move(text)};
}

inline failure death(uint64_t rank, std::string text) {
  return {error_code::rank_down, rank_id{rank}, {}, std::move(text)};
}

struct leader_fixture : core_fixture {
  leader_fixture() : core_fixture(true) {
    // nop
  }
};

struct follower_fixture : core_fixture {
  follower_fixture() : core_fixture(false) {
    // nop
  }
};

/// On pp_rank 0, which replays the first step and may diverge from it.
struct replaying_core {
  /// The step ended well.
  void end_step(uint64_t step) {
    core.end_step({step_id{step}, {}, {}});
    records->took(step_id{step}, 1);
  }

  std::shared_ptr<order_book> records = std::make_shared<order_book>(
    order_book::options{.static_mode = true, .steps = 1});
  noted_output out;
  function_services services;
  server_core core{{.self = rank_id{0},
                    .leader = true,
                    .fabric = out.net,
                    .services = services,
                    .board = out.board,
                    .token = std::make_shared<execution_token>(),
                    .on_token = [] {},
                    .records = records},
                   out};
};

} // namespace smp::test
