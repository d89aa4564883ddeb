#include "runtime/intercept/call_observer.hpp"

#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/call_scope.hpp"

#include <vector>

namespace smp {

namespace {

/// Reports calls to an observer. A module can be intercepted at two places: the
/// inner one of two calls of one object is not reported. Nor are recomputations
/// (R52).
class observing final : public call_interceptor {
public:
  call_observer* observer = nullptr;

  void enter(const intercepted_call&) override {
    calls_.push_back(nullptr);
  }

  bool looks() const noexcept override {
    return true;
  }

  void arguments(const intercepted_call&, const void* object,
                 std::span<const at::Tensor> xs) override {
    auto* ex = running_call::current();
    auto again = ex && ex->pass().what == recompute_pass::kind::again;
    if (again || innermost() == object)
      return;
    observer->begin(object, xs);
    calls_.back() = object;
  }

  void results(const intercepted_call&,
               std::span<const at::Tensor> xs) override {
    if (auto* object = std::exchange(calls_.back(), nullptr))
      observer->end(object, xs);
  }

  void leave(const intercepted_call&, bool) override {
    auto* object = calls_.back();
    calls_.pop_back();
    if (object != nullptr)
      observer->fail(object); // it has no results
  }

private:
  const void* innermost() const noexcept {
    for (auto i = calls_.rbegin(); i != calls_.rend(); ++i)
      if (*i != nullptr)
        return *i;
    return nullptr;
  }

  std::vector<const void*> calls_; // null: not reported
};

thread_local observing of_thread;

} // namespace

call_observer::~call_observer() = default;

call_observer* call_observer::current() noexcept {
  return of_thread.observer;
}

void call_observer::set_current(call_observer* x) noexcept {
  of_thread.observer = x;
  set_interceptor(interceptor::observe, x ? &of_thread : nullptr);
}

} // namespace smp
