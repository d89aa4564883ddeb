#include "runtime/step/executor_thread.hpp"

#include "actors/board/rank_board.hpp"
#include "runtime/base/fault.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/base/script_error_text.hpp"
#include "runtime/calls/callee.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/execution/device_failure.hpp"
#include "runtime/intercept/call_observer.hpp"
#include "runtime/intercept/execution_interceptors.hpp"
#include "runtime/lazy/late_logits.hpp"
#include "runtime/step/step_runner.hpp"
#include "runtime/step/trace_recorder.hpp"
#include "tp/tensor_group.hpp"

#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>
#include <utility>

namespace smp {

namespace {

/// @returns the LibTorch thread-local state of a fresh thread.
const at::ThreadLocalState& plain_state() {
  static const at::ThreadLocalState x;
  return x;
}

} // namespace

executor_thread::executor_thread(const rank_context& rank, fabric& messages,
                                 const step_runner& steps)
  : rank_(rank), messages_(messages), steps_(steps), call_(rank, *this) {
  thread_ = std::thread{[this] { run(); }};
}

executor_thread::~executor_thread() {
  close();
}

// -- executor -----------------------------------------------------------------

void executor_thread::wake() {
  wake_.notify();
}

void executor_thread::join() {
  wake_.notify();
  thread_.join();
}

void executor_thread::begin_call(call_kind what, std::optional<rank_id> from) {
  if (call_.first_error())
    throw error{call_.first_error()};
  if (closing())
    throw error{cancelled()};
  auto& counters = rank_.counters();
  if (what == call_kind::remote || what == call_kind::promise) {
    ++counters.requests;
    call_.count_request();
  }
  if (what == call_kind::remote
      || (what == call_kind::wait && from && *from != rank_.self()))
    ++counters.waits;
}

void executor_thread::switch_out() {
  if (auto* launches = rank_.launches()) {
    launches->end_span();
    launches->when_reached(teller_of_reached());
  } else {
    auto ran = std::chrono::steady_clock::now() - since_;
    rank_.counters().executing_ns += static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(ran).count());
  }
  call_.states().suspend();
  call_.streams().suspend();
  set_aside();
}

void executor_thread::pause() {
  released_lock meanwhile;
  messages_.park(wake_);
}

void executor_thread::switch_in(const failure& why) {
  take_back();
  call_.streams().resume();
  call_.states().resume();
  begin_span();
  auto cause = closing() ? cancelled() : why;
  if (cause) {
    call_.keep_error(cause);
    throw error{std::move(cause)};
  }
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
  if (auto* launches = rank_.launches();
      launches && !SMP_FAULT("default-stream"))
    launches->enter_thread();
  auto* peers = rank_.tensor_peers();
  tensor_group::set_current(peers ? peers : &tensor_group::lone());
  rank_context::set_current(&rank_);
  running_call::set_current(&call_);
  intercept_execution();
  scoped_waiter parking{*this};
  set_aside();
  // One wake-up announces the end; a call that unwinds may have consumed it.
  while (!closing()) {
    pause();
    if (closing())
      break;
    take_back();
    auto result = execute(take_request());
    trace_memory(rank_);
    call_.end();
    switch_out();
    finish(std::move(result));
  }
  plain_.reset(); // as it is about this thread
  tensor_group::set_current(nullptr);
}

// Handlers that run on this thread meanwhile belong to no execution.
void executor_thread::set_aside() {
  here_ = std::exchange(here::of_thread(), {});
  plain_.emplace(plain_state());
}

void executor_thread::take_back() {
  plain_.reset();
  here::of_thread() = std::exchange(here_, {});
}

void executor_thread::begin_span() {
  if (auto* launches = rank_.launches())
    launches->begin_span();
  else
    since_ = std::chrono::steady_clock::now();
}

outcome executor_thread::execute(request x) {
  here::of_thread().slot = slot();
  slot()->begin();
  call_.begin(x, seed_of(rank_, rank_.drawn_step(), x.microbatch));
  call_observer::set_current(rank_.observer());
  std::string text;
  try {
    begin_span();
    auto body = answer(x);
    settle_device(call_);
    if (!call_.first_error())
      return {std::move(body), {}};
  } catch (const error& err) {
    auto cause = err.cause();
    if (cause.module.empty()) {
      cause.module = failed_module();
      // An error of the step body itself, such as a wrong batch, reads better
      // without a rank.
      if (cause.rank == no_rank && !cause.module.empty())
        cause.rank = rank_.self();
    }
    call_.keep_error(std::move(cause));
  } catch (const c10::Error& err) {
    text = script_error_text(err.what_without_backtrace());
  } catch (const std::exception& err) {
    text = script_error_text(err.what());
  } catch (...) {
    text = "an exception that does not derive from std::exception";
  }
  text = with_device_failure(rank_, std::move(text));
  call_.keep_error(
    {error_code::user_code, rank_.self(), failed_module(), text});
  return {{}, call_.first_error()};
}

std::string executor_thread::failed_module() const {
  auto inner = slot()->failed();
  return inner == call_slot::none ? call_.module_path()
                                  : rank_.board().path_of(module_id{inner});
}

payload executor_thread::answer(const request& x) {
  if (call_.is_root())
    return steps_.run_body(call_);
  auto result = serve(call_, x);
  // What the module stored is read when its peers may be elsewhere.
  read_late_logits(call_.take_promises());
  fence(call_);
  steps_.check_order();
  return result;
}

failure executor_thread::cancelled() const {
  return {error_code::cancelled, rank_.self(), call_.module_path(),
          "the session ends"};
}

void executor_thread::wait(const completion_ptr& x, const wait_reason& why) {
  if (!x->done())
    park(wait_call(call_.in_backward() ? phase::backward : phase::forward, x,
                   why));
  if (auto err = x->cause()) {
    call_.keep_error(err);
    throw error{err};
  }
}

} // namespace smp
