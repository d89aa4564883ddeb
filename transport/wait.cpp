#include "transport/wait.hpp"

#include "transport/refuse_waits.hpp"
#include "transport/wake_up.hpp"

#include <atomic>
#include <utility>

namespace smp {

// -- completion ---------------------------------------------------------------

void completion::set() {
  finish({});
}

void completion::fail(failure x) {
  finish(std::move(x));
}

bool completion::done() const {
  std::lock_guard guard{mutex_};
  return done_;
}

failure completion::cause() const {
  std::lock_guard guard{mutex_};
  return cause_;
}

void completion::on_done(callback f) {
  {
    std::lock_guard guard{mutex_};
    if (!done_) {
      callbacks_.push_back(std::move(f));
      return;
    }
  }
  f();
}

void completion::finish(failure x) {
  std::vector<callback> callbacks;
  {
    std::lock_guard guard{mutex_};
    if (done_)
      return;
    done_ = true;
    cause_ = std::move(x);
    callbacks.swap(callbacks_);
  }
  for (auto& f : callbacks)
    f();
}

completion_ptr all_of(const std::vector<completion_ptr>& xs) {
  if (xs.size() == 1)
    return xs.front();
  auto result = std::make_shared<completion>();
  auto left = std::make_shared<std::atomic<size_t>>(xs.size());
  if (xs.empty())
    result->set();
  for (auto& x : xs)
    // The completion owns the callback, so the callback must not own it.
    x->on_done([result, left, x = x.get()] {
      if (auto why = x->cause())
        result->fail(std::move(why));
      else if (--*left == 0)
        result->set();
    });
  return result;
}

wait_reason
reason_of_all(std::vector<std::pair<completion_ptr, wait_reason>> xs) {
  if (xs.size() == 1)
    return std::move(xs.front().second);
  // Shared, because reasons are copied.
  auto now = [all = std::make_shared<decltype(xs)>(std::move(xs))] {
    for (auto& [x, why] : *all)
      if (!x->done())
        return why;
    return all->empty() ? wait_reason{} : all->back().second;
  };
  auto result = now();
  result.now = std::move(now);
  return result;
}

// -- locks --------------------------------------------------------------------

namespace {

lock_of_waits the_lock;

} // namespace

void release_in_waits(const lock_of_waits& x) noexcept {
  the_lock = x;
}

released_lock::released_lock() noexcept
  : held_(the_lock.release != nullptr ? the_lock.release() : nullptr) {
  // nop
}

released_lock::~released_lock() {
  if (held_ != nullptr)
    the_lock.take(held_);
}

double ask_for_lock() {
  return the_lock.ask != nullptr ? the_lock.ask() : 0;
}

// -- plain waiter -------------------------------------------------------------

namespace {

/// How the calling thread waits.
struct waits_of_thread {
  /// Its name, if it must not wait.
  const char* busy = nullptr;
  /// Null: a plain one.
  waiter* installed = nullptr;
};

thread_local waits_of_thread waits;

[[noreturn]] void refuse(const wait_reason& why) {
  auto from = why.from ? " from rank " + std::to_string(why.from->value)
                       : std::string{};
  throw error{error_code::unsupported,
              why.what + from + " is waited for on " + waits.busy
                + ", which must not wait: use it on a thread of your own"};
}

/// Blocks the thread.
class plain_waiter : public waiter {
public:
  void wait(const completion_ptr& x, const wait_reason& why) override {
    if (waits.busy != nullptr && !x->done())
      refuse(why);
    // Shared with the callback, which the completion keeps after its call.
    auto done = std::make_shared<wake_up>();
    x->on_done([done] { done->notify(); });
    {
      released_lock meanwhile;
      done->wait();
    }
    if (auto cause = x->cause())
      throw error{std::move(cause)};
  }
};

} // namespace

waiter& waiter::current() {
  static auto& plain = *new plain_waiter; // outlives all threads
  return waits.installed != nullptr ? *waits.installed : plain;
}

void refuse_waits(const char* thread) noexcept {
  waits.busy = thread;
}

refused_waits::refused_waits(const char* thread) noexcept
  : waiter_(std::exchange(waits.installed, nullptr)),
    thread_(std::exchange(waits.busy, thread)) {
  // nop
}

refused_waits::~refused_waits() {
  waits = {thread_, waiter_};
}

// -- scoped_waiter ------------------------------------------------------------

scoped_waiter::scoped_waiter(waiter& x)
  : previous_(std::exchange(waits.installed, &x)) {
  // nop
}

scoped_waiter::~scoped_waiter() {
  waits.installed = previous_;
}

} // namespace smp
