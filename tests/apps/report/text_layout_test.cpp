#include "tests/support/catch.hpp"

#include "apps/report/text_layout.hpp"

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
