#include "actors/host/node.hpp"

#include "actors/board/rank_board.hpp"
#include "actors/host/node_status.hpp"
#include "actors/protocol/actor_system.hpp"
#include "actors/protocol/plain_text.hpp"
#include "actors/protocol/server_handle.hpp"
#include "actors/server/module_server.hpp"

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace smp {

namespace {

/// Calls the `done` of a step exactly once, even if the MODULE SERVER dies.
/// Shared by the node and its MODULE SERVER.
class step_end {
public:
  void begin(std::function<void(step_report)> done, step_id step) {
    failure dead;
    {
      std::lock_guard guard{mutex_};
      if (!dead_) {
        done_ = std::move(done);
        step_ = step;
        return;
      }
      dead = dead_;
    }
    done({step, {}, dead});
  }

  void end(step_report x) {
    if (auto done = take())
      done(std::move(x));
  }

  void server_died(failure x) {
    auto done = take(&x);
    if (done)
      done({step_, {}, std::move(x)});
  }

private:
  std::function<void(step_report)> take(const failure* dead = nullptr) {
    std::lock_guard guard{mutex_};
    if (dead != nullptr)
      dead_ = *dead;
    return std::exchange(done_, nullptr);
  }

  std::mutex mutex_;
  std::function<void(step_report)> done_;
  step_id step_;
  failure dead_;
};

/// One time limit for a whole sequence of queries.
class deadline {
public:
  explicit deadline(std::chrono::milliseconds limit)
    : end_(std::chrono::steady_clock::now() + limit) {
    // nop
  }

  std::chrono::milliseconds left() const {
    using namespace std::chrono;
    auto x = ceil<milliseconds>(end_ - steady_clock::now());
    return std::max(x, milliseconds{1});
  }

private:
  std::chrono::steady_clock::time_point end_;
};

template <class T, class Handle>
T ask_status(caf::scoped_actor& self, const Handle& hdl, const deadline& limit,
             const std::string& who) {
  T result;
  self->request(hdl, limit.left(), status_atom_v)
    .receive([&](T& x) { result = std::move(x); },
             [&](const caf::error& e) {
               throw error{error_code::internal,
                           "no status from " + who + ": " + plain_text(e)};
             });
  return result;
}

} // namespace

struct node::impl {
  impl(actor_host& host, server_options x)
    : system(host.get().system),
      self(x.self),
      end(std::make_shared<step_end>()) {
    if (!x.board)
      x.board = std::make_shared<rank_board>(x.self, 0);
    board = x.board;
    auto on_report = [end = end](step_report y) { end->end(std::move(y)); };
    server = system.spawn(module_server, std::move(x), std::move(on_report));
    server->attach_functor([end = end, self = self](const caf::error& reason) {
      end->server_died({error_code::internal,
                        self,
                        {},
                        "the MODULE SERVER ended: " + plain_text(reason)});
    });
  }

  caf::actor_system& system;
  rank_id self;
  std::shared_ptr<rank_board> board;
  std::shared_ptr<step_end> end;
  module_server_actor server;
};

node::node(actor_host& host, server_options x)
  : impl_(std::make_unique<impl>(host, std::move(x))) {
  // nop
}

node::~node() {
  auto& server = impl_->server;
  caf::scoped_actor self{impl_->system};
  self->monitor(server);
  self->send_exit(server, caf::exit_reason::user_shutdown);
  // All waits are cancelled now. Only user code that computes can still hold
  // the rank, and it cannot be interrupted.
  for (bool down = false; !down;) {
    self->receive([&](const caf::down_msg&) { down = true; },
                  caf::after(std::chrono::seconds(10)) >>
                    [&] {
                      std::fprintf(
                        stderr,
                        "smp: rank %llu ends, but its user code still"
                        " runs\n",
                        static_cast<unsigned long long>(impl_->self.value));
                    });
  }
}

void node::begin_step(const run_step& x,
                      std::function<void(step_report)> done) {
  impl_->board->note();
  impl_->end->begin(std::move(done), x.step);
  caf::anon_send(impl_->server, x);
}

std::shared_ptr<const server_handle> node::server() const {
  return std::make_shared<server_handle>(server_handle{impl_->server});
}

void node::rank_down(const failure& x) {
  caf::anon_send(impl_->server, down_atom_v, x);
}

node_status node::status(std::chrono::milliseconds limit) {
  auto until = deadline{limit};
  caf::scoped_actor self{impl_->system};
  auto rank = "rank " + std::to_string(impl_->self.value);
  auto server = ask_status<server_status>(self, impl_->server, until,
                                          "the MODULE SERVER of " + rank);
  node_status result{server, {}};
  for (auto& hdl : server.contexts) {
    auto x = ask_status<context_status>(self, hdl, until,
                                        "a WORKER CONTEXT of " + rank);
    result.contexts.push_back({x.context, to_string(x.state), x.current,
                               x.microbatch, x.module, x.what,
                               std::move(x.waits_for), x.seconds, x.served});
  }
  if (server.scheduler) {
    auto x = ask_status<scheduler_status>(self, server.scheduler, until,
                                          "the PIPELINE SCHEDULER of " + rank);
    result.microbatches_running = x.running;
    result.microbatches_left = x.left;
  }
  return result;
}

// A mailbox keeps the order of messages from one sender. So if the MODULE
// SERVER answers, then the SCHEDULER, then the SERVER again, and the board did
// not change meanwhile, then no message was in flight between them.
void node::complete(rank_view& x, std::chrono::milliseconds limit) {
  auto until = deadline{limit};
  caf::scoped_actor self{impl_->system};
  auto ask_server = [&] {
    return ask_status<server_status>(self, impl_->server, until,
                                     "the MODULE SERVER");
  };
  auto before = impl_->board->look();
  try {
    auto server = ask_server();
    if (server.scheduler) {
      auto y = ask_status<scheduler_status>(self, server.scheduler, until,
                                            "the PIPELINE SCHEDULER");
      if (!y.asks.empty()) {
        activity z;
        z.who = activity::kind::schedule;
        z.executes = true;
        z.what = y.asks;
        z.seconds = y.seconds;
        x.activities.push_back(std::move(z));
      }
    }
    server = ask_server();
    for (auto& y : server.queue) {
      activity z;
      z.who = activity::kind::queued;
      z.serves = y.id;
      z.what = impl_->board->describe(y.module, y.microbatch, y.what);
      z.waits_for = y.why;
      z.from = y.from;
      z.of_later_step = y.later;
      x.activities.push_back(std::move(z));
    }
    x.complete = true;
    auto executes = [](auto& y) { return y.executes; };
    // Work that waits for its place in a record does not wait for the token.
    x.settled = !server.in_line
                && std::none_of(x.activities.begin(), x.activities.end(),
                                executes)
                && impl_->board->look() == before && x.progress == before;
  } catch (const error& e) {
    activity z;
    z.who = activity::kind::schedule;
    z.executes = true;
    z.what = std::string{"actors do not answer ("} + e.what() + ')';
    x.activities.push_back(std::move(z));
  }
}

void node::describe(rank_status& x, std::chrono::milliseconds limit) {
  auto until = deadline{limit};
  caf::scoped_actor self{impl_->system};
  actor_entries entries{impl_->self};
  x.actors.push_back(entries.watch(x.view));
  if (!x.view.complete) // they did not answer a moment ago
    return x.actors.push_back(entries.silent_server());
  // @returns the reply and true, or a default value and false
  auto ask = [&]<class T>(const auto& hdl, T answer) {
    try {
      answer = ask_status<T>(self, hdl, until, {});
      return std::pair{answer, true};
    } catch (const error&) {
      return std::pair{answer, false};
    }
  };
  auto add = [&](actor_status y, bool answers) {
    x.actors.push_back(answers ? std::move(y) : entries.silent(std::move(y)));
  };
  auto [server, answers] = ask(impl_->server, server_status{});
  add(entries.server(server), answers);
  x.view.complete = answers;
  x.step = server.step;
  x.in_step = server.in_step;
  x.queue = server.ready + server.held + server.blocked + server.later;
  for (auto& hdl : server.contexts)
    if (auto [y, ok] = ask(hdl, context_status{}); ok)
      add(entries.context(y), true);
  if (!server.scheduler)
    return;
  auto [y, ok] = ask(server.scheduler, scheduler_status{});
  add(entries.scheduler(y), ok);
  if (!y.asks.empty())
    add(entries.schedule(y), true);
}

} // namespace smp
