#include "runtime/intercept/call_observer.hpp"

#include "runtime/base/here.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/call_scope.hpp"

#include <utility>
#include <vector>

namespace smp {

namespace {

/// Reports calls to an observer. A module can be intercepted at two places: the
/// inner one of two calls of one object is not reported. Nor are recomputations
/// (R52).
class observing final : public call_interceptor {
public:
  void enter(const intercepted_call&) override {
    here::of_thread().observed.push_back(nullptr);
  }

  bool looks() const noexcept override {
    return true;
  }

  void arguments(const intercepted_call&, const void* object,
                 std::span<const at::Tensor> xs) override {
    auto* ex = running_call::current();
    auto again = ex && ex->pass().what == recompute_pass::kind::again;
    auto& place = here::of_thread();
    if (again || innermost(place.observed) == object)
      return;
    place.observer->begin(object, xs);
    place.observed.back() = object;
  }

  void results(const intercepted_call&,
               std::span<const at::Tensor> xs) override {
    auto& place = here::of_thread();
    if (auto* object = std::exchange(place.observed.back(), nullptr))
      place.observer->end(object, xs);
  }

  void leave(const intercepted_call&, bool) override {
    auto& place = here::of_thread();
    auto* object = place.observed.back();
    place.observed.pop_back();
    if (object != nullptr)
      place.observer->fail(object); // it has no results
  }

private:
  static const void* innermost(const std::vector<const void*>& calls) noexcept {
    for (auto i = calls.rbegin(); i != calls.rend(); ++i)
      if (*i != nullptr)
        return *i;
    return nullptr;
  }
};

observing observes;

} // namespace

call_observer::~call_observer() = default;

call_observer* call_observer::current() noexcept {
  return here::of_thread().observer;
}

void call_observer::set_current(call_observer* x) noexcept {
  here::of_thread().observer = x;
  set_interceptor(interceptor::observe, x ? &observes : nullptr);
}

} // namespace smp
