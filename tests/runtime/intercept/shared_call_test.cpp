#include "tests/support/catch.hpp"

#include "runtime/intercept/call_scope.hpp"
#include "runtime/intercept/shared_call.hpp"
#include "tests/support/error_of.hpp"
#include "tp/distributed_module.hpp"

#include <ATen/ATen.h>

#include <span>
#include <vector>

// What a call that ranks share does before its distributed module.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Looks at the first tensor, as all do.
class doubling final : public distributed_module {
public:
  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override {
    return {xs[0] * 2};
  }
};

/// Tells where it stands.
class standing final : public distributed_module {
public:
  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override {
    return forward_in_row(xs, {});
  }

  std::vector<at::Tensor>
  forward_in_row(std::span<const at::Tensor>,
                 const row_place& place) const override {
    return {at::full({1}, (place.first ? 10.0 : 0.0) + (place.last ? 1 : 0))};
  }
};

class looking final : public call_interceptor {
public:
  looking() {
    set_interceptor(interceptor::observe, this);
  }

  ~looking() override {
    set_interceptor(interceptor::observe, nullptr);
  }

  bool looks() const noexcept override {
    return true;
  }
};

} // namespace

TEST_CASE("ranks share no call without a tensor", "[runtime][intercept]") {
  doubling how;
  call_scope noted{intercepted_call{}};
  std::vector<at::Tensor> one{at::ones({2})};
  auto found = run_shared(noted, how, &how, one);
  REQUIRE(found.size() == 1);
  CHECK(at::equal(found[0], at::full({2}, 2.0)));
  CHECK_THAT(
    error_of([&] { run_shared(noted, how, &how, {}); }, error_code::user_code),
    ContainsSubstring("ranks share this module, but not a call"));
}

TEST_CASE("a call stands in its row while nobody looks",
          "[runtime][intercept]") {
  standing how;
  std::vector<at::Tensor> one{at::ones({2})};
  auto place_of_call = [&] {
    call_scope noted{intercepted_call{}};
    return run_shared(noted, how, &how, one, {false, true})
      .at(0)
      .item<double>();
  };
  CHECK(place_of_call() == 1);
  looking sees;
  CHECK(place_of_call() == 11);
}
