#include "tests/support/catch.hpp"

#include "runtime/verify/call_log.hpp"

#include <torch/types.h>
#include <torch/utils.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

using namespace smp;
using torch::Tensor;

TEST_CASE("A call whose arguments cannot be read leaves the others as they are",
          "[runtime][verify]") {
  int outer = 0;
  int broken = 0;
  int inner = 0;
  const std::map<const void*, std::string> names{
    {&outer, "outer"}, {&broken, "broken"}, {&inner, "inner"}};
  const std::vector<Tensor> values{torch::ones({2})};
  const std::vector<Tensor> without_data{torch::empty({2}, at::kMeta)};
  call_logger logger;
  logger.begin(&outer, values);
  CHECK_THROWS(logger.begin(&broken, without_data));
  logger.begin(&inner, values);
  logger.end(&inner, values);
  logger.end(&outer, values);
  auto step = logger.take(
    [&](const void* x) { return std::optional{names.at(x)}; });
  REQUIRE(step.calls.size() == 2);
  CHECK(step.calls[0].module == "outer");
  CHECK(step.calls[1].module == "inner");
  CHECK(step.calls[1].outer.value_or(9) == 0u);
}
