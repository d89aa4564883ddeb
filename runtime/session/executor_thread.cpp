#include "runtime/session/executor_thread.hpp"

#include "runtime/intercept/call_observer.hpp"
#include "runtime/session/engine.hpp"
#include "runtime/intercept/script/script_calls.hpp"

#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>

#include <pthread.h>

namespace smp {

namespace {

thread_local execution* current_execution = nullptr;

} // namespace

execution* execution::current() noexcept {
  return current_execution;
}

void execution::set_current(execution* x) noexcept {
  current_execution = x;
}

executor_thread::executor_thread(executor_listener& listener, engine& eng)
  : listener_(listener), stream_(0) {
  this->eng = &eng;
  thread_ = std::thread{[this] { run(); }};
}

executor_thread::~executor_thread() {
  stopping_ = true;
  wake_.release();
  thread_.join();
}

void executor_thread::start(request x) {
  request_ = std::move(x);
  wake_.release();
}

void executor_thread::resume(response x) {
  response_ = std::move(x);
  wake_.release();
}

// -- executor thread -----------------------------------------------------------

void executor_thread::run() {
  pthread_setname_np(pthread_self(), "smp.executor");
  // Backward must run on this thread: it is the one that may park, and on a
  // GPU the engine's own device thread is shared by all microbatches (R9).
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  session::set_current(eng->owner());
  set_current(this);
  scoped_waiter parking{*this};
  // One wake-up announces the stop; a call that unwinds may have consumed it.
  while (!stopping_) {
    wake_.acquire();
    if (stopping_)
      break;
    auto result = execute(std::move(request_));
    outstanding.clear();
    promises.clear();
    call_slot::set_current(nullptr);
    switch_out();
    listener_.returned(std::move(result));
  }
  set_current(nullptr);
}

outcome executor_thread::execute(request x) {
  first_error = {};
  module_path.clear();
  range = {};
  lent.clear();
  stateful = false;
  step = x.step;
  microbatch = x.microbatch;
  id = x.id;
  requests = 0;
  turn = x.turn;
  calls = 0;
  in_backward = false;
  granted = false;
  is_root = x.module == root_module && x.id.origin == eng->self();
  stream_ = eng->initial_stream(x.step, x.microbatch);
  stream_is_initial = true;
  call_observer::set_current(eng->observer());
  // Kept while calls of this execution may write to it.
  auto slot = eng->board().slot_of(x.id);
  call_slot::set_current(slot.get());
  switch_in();
  last_stream = random_stream::of_default();
  auto code = error_code::user_code;
  std::string text;
  try {
    auto body = eng->execute(*this, x);
    if (!first_error)
      return {std::move(body), {}};
  } catch (const error& err) {
    if (!first_error) {
      first_error = err.cause();
      if (first_error.module.empty()) {
        first_error.module = module_path;
        // What the step body itself throws, such as a wrong batch, reads
        // better without a rank.
        if (first_error.rank == no_rank && !module_path.empty())
          first_error.rank = eng->self();
      }
    }
  } catch (const c10::Error& err) {
    text = script_error_text(err.what_without_backtrace());
  } catch (const std::exception& err) {
    text = script_error_text(err.what());
  } catch (...) {
    text = "an exception that is no std::exception";
  }
  if (!first_error)
    first_error = failure{code, eng->self(), module_path, text};
  return {{}, first_error};
}

void executor_thread::check_going() const {
  if (first_error)
    throw error{first_error};
  if (stopping_)
    throw error{failure{error_code::cancelled, eng->self(), module_path,
                        "the session ends"}};
}

void executor_thread::send(call x) {
  check_going();
  eng->count_request();
  ++requests;
  listener_.asked(std::move(x));
}

response executor_thread::park(call x) {
  check_going();
  if (x.kind == call_kind::remote) {
    eng->count_request();
    ++requests;
  }
  if (x.kind == call_kind::remote
      || (x.kind == call_kind::wait && x.why.from
          && *x.why.from != eng->self()))
    eng->count_wait();
  switch_out();
  listener_.called(std::move(x));
  wake_.acquire();
  if (stopping_)
    response_.error = failure{error_code::cancelled, eng->self(), module_path,
                              "the session ends"};
  switch_in();
  if (response_.error) {
    first_error = response_.error;
    throw error{first_error};
  }
  return std::move(response_);
}

void executor_thread::wait(const completion_ptr& x, const wait_reason& why) {
  if (!x->done()) {
    call c;
    c.kind = call_kind::wait;
    c.what = in_backward ? phase::backward : phase::forward;
    c.done = x;
    c.why = why;
    park(std::move(c));
  }
  if (auto err = x->cause()) {
    if (!first_error)
      first_error = err;
    throw error{err};
  }
}

void executor_thread::switch_in() {
  stream_.swap_with_default();
  since_ = std::chrono::steady_clock::now();
}

void executor_thread::switch_out() {
  auto now = std::chrono::steady_clock::now();
  eng->add_executing(now - since_);
  stream_.swap_with_default();
}

} // namespace smp
