#include "tests/support/catch.hpp"

#include "runtime/optimizer/loss_scaler.hpp"
#include "tests/support/error_of.hpp"

#include <ATen/ATen.h>

#include <limits>
#include <memory>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("a dynamic scale is as large as gradients bear",
          "[runtime][precision][R56]") {
  loss_scaler x{{.init_scale = 64, .scale_factor = 4, .scale_window = 3}};
  CHECK(x.is_dynamic());
  CHECK(x.value() == 64);
  x.update(false);
  CHECK(x.value() == 16);
  for (int i = 0; i < 2; ++i)
    x.update(true);
  CHECK(x.value() == 16);
  x.update(true);
  CHECK(x.value() == 64);
  CHECK(x.good_steps() == 0);
  // What is in between begins the count anew.
  x.update(true);
  x.update(true);
  x.update(false);
  x.update(true);
  CHECK(x.value() == 16);
  CHECK(x.good_steps() == 1);
}

TEST_CASE("a dynamic scale stays within bounds", "[runtime][precision][R56]") {
  loss_scaler x{{.init_scale = 8, .scale_window = 1, .min_scale = 3}};
  for (int i = 0; i < 100; ++i)
    x.update(true);
  CHECK(x.value() == 0x1p32);
  for (int i = 0; i < 31; ++i)
    x.update(false);
  CHECK(x.value() == 3);
  CHECK_THAT(error_of([&] { x.update(false); }),
             ContainsSubstring("a loss scale of 3")
               && ContainsSubstring("dynamic_loss_args.min_scale"));
}

TEST_CASE("a fixed scale stays, and nothing restores another",
          "[runtime][precision][R56]") {
  loss_scaler x{128};
  CHECK_FALSE(x.is_dynamic());
  for (bool finite : {true, false})
    x.update(finite);
  x.restore(4, 1);
  CHECK(x.value() == 128);
}

TEST_CASE("a dynamic scale goes on where it was", "[runtime][precision][R56]") {
  loss_scaler x{{.init_scale = 8, .scale_window = 3}};
  x.restore(1024, 2);
  x.update(true);
  CHECK(x.value() == 2048);
}

TEST_CASE("a scale out of range is refused by name",
          "[runtime][precision][R56]") {
  constexpr auto infinity = std::numeric_limits<double>::infinity();
  for (double bad : {0.0, -1.0, infinity, 0x1p33})
    CHECK_THAT(error_of([&] { loss_scaler{bad}; }),
               ContainsSubstring("static_loss_scale = "));
  auto refused = [](const dynamic_loss_args& x) {
    return error_of([&] { loss_scaler{x}; });
  };
  CHECK_THAT(refused({.init_scale = 0}),
             ContainsSubstring("dynamic_loss_args.init_scale = 0"));
  CHECK_THAT(refused({.scale_factor = 1}),
             ContainsSubstring("dynamic_loss_args.scale_factor = 1"));
  CHECK_THAT(refused({.scale_window = 0}),
             ContainsSubstring("dynamic_loss_args.scale_window = 0"));
  CHECK_THAT(refused({.init_scale = 1, .min_scale = 2}),
             ContainsSubstring("dynamic_loss_args.min_scale = 2"));
}

TEST_CASE("one optimizer at a time scales the loss of a model",
          "[runtime][precision][R56]") {
  model_loss_scale x;
  CHECK(x.value() == 1);
  CHECK_FALSE(x.scaler());
  auto first = std::make_shared<loss_scaler>(8.0);
  auto second = std::make_shared<loss_scaler>(4.0);
  x.follow(first);
  CHECK(x.value() == 8);
  CHECK_THAT(error_of([&] { x.follow(second); }, error_code::unsupported),
             ContainsSubstring("another optimizer of the model scales"));
  CHECK(x.scaler() == first);
  first.reset();
  CHECK(x.value() == 1);
  x.follow(second);
  CHECK(x.value() == 4);
}

TEST_CASE("a gradient without its scale is in float32 at least",
          "[runtime][precision][R56]") {
  model_loss_scale x;
  auto half = at::full({2}, 12.0, at::kHalf);
  CHECK(x.divide(half).is_same(half)); // nothing scales
  auto scaler = std::make_shared<loss_scaler>(8.0);
  x.follow(scaler);
  CHECK_FALSE(x.divide({}).defined());
  CHECK(at::equal(x.divide(half), at::full({2}, 1.5, at::kFloat)));
  auto wide = at::full({2}, 12.0, at::kDouble);
  CHECK(at::equal(x.divide(wide), at::full({2}, 1.5, at::kDouble)));
}
