#include "runtime/step/executor_thread.hpp"

#include "actors/board/call_slot.hpp"
#include "actors/board/rank_board.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/base/script_error_text.hpp"
#include "runtime/collectives/data_group.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/intercept/call_observer.hpp"
#include "runtime/intercept/execution_interceptors.hpp"
#include "tp/tensor_group.hpp"

#include <ATen/ThreadLocalState.h>
#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

namespace smp {

namespace {

/// @returns the LibTorch thread-local state of a fresh thread.
const at::ThreadLocalState& plain_state() {
  static const at::ThreadLocalState x;
  return x;
}

} // namespace

uint64_t seed_of(const rank_context& rank, uint64_t drawn_step,
                 microbatch_id m) {
  auto part = rank.layout().rank(data_group(rank.config()), rank.self());
  return microbatch_seed(rank.config().seed, drawn_step, part, m.value);
}

executor_thread::executor_thread(executor_listener& listener,
                                 const rank_context& rank, fabric& messages,
                                 request_runner& runner)
  : running_call(rank),
    listener_(listener),
    messages_(messages),
    runner_(runner) {
  thread_ = std::thread{[this] { run(); }};
}

executor_thread::~executor_thread() {
  stopping_ = true;
  wake_.notify();
  thread_.join();
}

void executor_thread::start(request x) {
  request_ = std::move(x);
  wake_.notify();
}

void executor_thread::resume(response x) {
  response_ = std::move(x);
  wake_.notify();
}

// -- own thread ---------------------------------------------------------------

void executor_thread::run() {
  pthread_setname_np(pthread_self(), "smp.executor");
  // A thread inherits the priority of its creator, which may be the thread that
  // delivers messages.
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()),
                ::getpriority(PRIO_PROCESS, static_cast<id_t>(::getpid())));
  // Backward must run on this thread: it is the one that may park, and on a
  // GPU autograd's own device thread is shared by all microbatches (R9).
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  plain_state();
  rank_context::set_current(&rank());
  auto* peers = rank().tensor_peers();
  tensor_group::set_current(peers ? peers : &tensor_group::lone());
  set_current(this);
  intercept_execution();
  scoped_waiter parking{*this};
  // One wake-up announces the stop; a call that unwinds may have consumed it.
  while (!stopping_) {
    pause();
    if (stopping_)
      break;
    auto result = execute(std::move(request_));
    end();
    call_slot::set_current(nullptr);
    switch_out();
    listener_.returned(std::move(result));
  }
  set_current(nullptr);
  tensor_group::set_current(nullptr);
  rank_context::set_current(nullptr);
}

outcome executor_thread::execute(request x) {
  since_ = std::chrono::steady_clock::now();
  begin(x, seed_of(rank(), rank().drawn_step(), x.microbatch));
  call_observer::set_current(rank().observer());
  // Kept while calls of this execution may write to it.
  auto slot = rank().board().slot_of(x.id);
  call_slot::set_current(slot.get());
  std::string text;
  try {
    auto body = runner_.run(*this, x);
    if (!first_error())
      return {std::move(body), {}};
  } catch (const error& err) {
    auto cause = err.cause();
    if (cause.module.empty()) {
      cause.module = module_path();
      // An error of the step body itself, such as a wrong batch, reads better
      // without a rank.
      if (cause.rank == no_rank && !module_path().empty())
        cause.rank = rank().self();
    }
    keep_error(std::move(cause));
  } catch (const c10::Error& err) {
    text = script_error_text(err.what_without_backtrace());
  } catch (const std::exception& err) {
    text = script_error_text(err.what());
  } catch (...) {
    text = "an exception that does not derive from std::exception";
  }
  keep_error({error_code::user_code, rank().self(), module_path(), text});
  return {{}, first_error()};
}

failure executor_thread::cancelled() const {
  return {error_code::cancelled, rank().self(), module_path(),
          "the session ends"};
}

void executor_thread::check_going() const {
  if (first_error())
    throw error{first_error()};
  if (stopping_)
    throw error{cancelled()};
}

void executor_thread::send(call x) {
  check_going();
  ++rank().counters().requests;
  count_request();
  listener_.asked(std::move(x));
}

response executor_thread::park(call x) {
  check_going();
  auto& counters = rank().counters();
  auto remote = x.kind == call_kind::remote;
  if (remote) {
    ++counters.requests;
    count_request();
  }
  if (remote
      || (x.kind == call_kind::wait && x.why.from
          && *x.why.from != rank().self()))
    ++counters.waits;
  switch_out();
  listener_.called(std::move(x));
  pause();
  if (stopping_)
    response_.error = cancelled();
  switch_in();
  if (response_.error) {
    keep_error(response_.error);
    throw error{response_.error};
  }
  return std::move(response_);
}

void executor_thread::wait(const completion_ptr& x, const wait_reason& why) {
  if (!x->done())
    park(wait_call(in_backward() ? phase::backward : phase::forward, x, why));
  if (auto err = x->cause()) {
    keep_error(err);
    throw error{err};
  }
}

void executor_thread::pause() {
  // Handlers that run on this thread meanwhile belong to no execution.
  at::ThreadLocalStateGuard plain{plain_state()};
  set_current(nullptr);
  messages_.park(wake_);
  set_current(this);
}

void executor_thread::switch_in() {
  streams().resume();
  states().resume();
  since_ = std::chrono::steady_clock::now();
}

void executor_thread::switch_out() {
  auto ran = std::chrono::steady_clock::now() - since_;
  rank().counters().executing_ns += static_cast<uint64_t>(
    std::chrono::duration_cast<std::chrono::nanoseconds>(ran).count());
  states().suspend();
  streams().suspend();
}

} // namespace smp
