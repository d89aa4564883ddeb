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
