#include "tests/support/catch.hpp"

#include "apps/report/text_layout.hpp"

#include <cmath>
#include <limits>

using smp::app::rate_text;

TEST_CASE("A rate below one still has three digits", "[apps][report]") {
  CHECK(rate_text(0.0417) == "0.042");
  CHECK(rate_text(0.4172) == "0.417");
  CHECK(rate_text(0.9996) == "1.00");
  CHECK(rate_text(9.996) == "10.0");
  CHECK(rate_text(35.12) == "35.1");
  CHECK(rate_text(99.96) == "100");
  CHECK(rate_text(28173.6) == "28174");
}

TEST_CASE("What is not a number is shown without a sign", "[apps][report]") {
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  for (auto x : {nan, -nan})
    CHECK_FALSE(std::signbit(smp::app::plain_number(x)));
  CHECK(smp::app::plain_number(-1.5) == -1.5);
}
