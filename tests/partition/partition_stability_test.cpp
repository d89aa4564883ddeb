#include "tests/support/catch.hpp"

#include "partition/partition_stability.hpp"
#include "tests/support/partition_models.hpp"

using namespace smp;
using namespace smp::test;

namespace {

/// Three modules of a kind each, called one after the other, on two devices.
size_t undecided(double first, double middle, double last) {
  auto model = make_model({{"", {1, 3, 2}, 0, 0},
                           {"first", {}, 0, first},
                           {"last", {}, 0, last},
                           {"middle", {}, 0, middle}});
  for (auto& x : model)
    x.type = x.path;
  partition_options options;
  options.manual.devices = 2;
  options.memory_weight = 0;
  return undecided_modules(model, make_partition(model, options), 0.02);
}

} // namespace

TEST_CASE("a decision that errors of times would change is known",
          "[partition][margin]") {
  // Any two of them may be together.
  CHECK(undecided(10, 10, 10) > 0);
  CHECK(undecided(10.1, 10, 10) > 0);
  CHECK(undecided(10, 10, 10.1) > 0);
}

TEST_CASE("a decision that is clear stands", "[partition][margin]") {
  CHECK(undecided(10, 10, 11) == 0);
  CHECK(undecided(11, 10, 10) == 0);
  // Modules of one kind have one error.
  auto model = make_model({{"", {1, 2, 3, 4}, 0, 0},
                           {"0", {}, 0, 10},
                           {"1", {}, 0, 10},
                           {"2", {}, 0, 10},
                           {"3", {}, 0, 10}});
  partition_options options;
  options.manual.devices = 2;
  options.memory_weight = 0;
  CHECK(undecided_modules(model, make_partition(model, options), 0.02) == 0);
}
