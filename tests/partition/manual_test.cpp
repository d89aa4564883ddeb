#include "tests/support/catch.hpp"

#include "partition/partitioner.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/partition_models.hpp"

#include "transport/error.hpp"

#include <algorithm>

using namespace smp;
using namespace smp::test;

namespace {

using devices = std::vector<uint32_t>;

/// root(embed blocks(0 1 2(inner)) head)
model_info small_model() {
  return make_model({{"", {1, 2, 7}},
                     {"embed", {}, 4, 1},
                     {"blocks", {3, 4, 5}},
                     {"blocks.0", {}, 4, 4},
                     {"blocks.1", {}, 4, 4},
                     {"blocks.2", {6}, 2, 2},
                     {"blocks.2.inner", {}, 2, 2},
                     {"head", {}, 4, 1}});
}

partition_options manual_options_of(uint32_t num_devices) {
  partition_options result;
  result.manual.devices = num_devices;
  result.manual.automatic = false;
  result.strategy = partition_strategy::paper;
  return result;
}

devices placed(const model_info& model, const partition_options& options) {
  return make_partition(model, options).module_device;
}

std::string message_of(const model_info& model,
                       const partition_options& options) {
  return cause_of([&] { make_partition(model, options); }, error_code::config);
}

} // namespace

TEST_CASE(
  "without automatic partitioning all goes to the default device, "
  "except for the root",
  "[partition][manual]") {
  auto options = manual_options_of(3);
  CHECK(placed(small_model(), options) == devices{0, 0, 0, 0, 0, 0, 0, 0});
  options.manual.default_device = 2;
  CHECK(placed(small_model(), options) == devices{0, 2, 2, 2, 2, 2, 2, 2});
}

TEST_CASE("a pinned module takes its subtree along unless pinned otherwise",
          "[partition][manual]") {
  auto model = small_model();
  model[2].pinned_device = 1;
  model[5].pinned_device = 2;
  model[7].pinned_device = 0;
  auto options = manual_options_of(4);
  options.manual.default_device = 3;
  CHECK(placed(model, options) == devices{0, 3, 1, 1, 1, 2, 2, 0});
}

TEST_CASE("pinned modules stay, the rest is partitioned automatically",
          "[partition][manual]") {
  auto model = small_model();
  model[5].pinned_device = 1;
  auto options = manual_options_of(2);
  options.manual.automatic = true;
  for (auto strategy :
       {partition_strategy::paper, partition_strategy::balanced}) {
    options.strategy = strategy;
    auto plan = make_partition(model, options);
    CHECK(plan.module_device[0] == 0);
    CHECK(plan.module_device[5] == 1);
    CHECK(plan.module_device[6] == 1);
    auto others = devices(plan.module_device.begin(),
                          plan.module_device.begin() + 5);
    CHECK(std::count(others.begin(), others.end(), 1u) > 0);
    CHECK(std::count(others.begin(), others.end(), 0u) > 1);
  }
}

TEST_CASE("a pinned root keeps the whole model on device 0",
          "[partition][manual]") {
  auto model = small_model();
  model[0].pinned_device = 0;
  auto options = manual_options_of(2);
  options.manual.automatic = true;
  auto plan = make_partition(model, options);
  CHECK(plan.module_device == devices(8, 0));
  REQUIRE(plan.warnings.size() == 1);
  CHECK(plan.warnings[0] == "device 1 stays idle: nothing is placed there");
}

TEST_CASE("a root that is pinned elsewhere is an error",
          "[partition][manual]") {
  auto model = small_model();
  model[0].pinned_device = 1;
  CHECK(message_of(model, manual_options_of(2))
        == "the root is pinned to device 1, but the root runs where the step "
           "runs, on device 0");
  SECTION("also through a module that is one node with it") {
    model[0].pinned_device.reset();
    model[0].parameters.push_back({1, "scale", 1});
    model[7].parameters.push_back({1, "scale", 1});
    model[7].pinned_device = 1;
    CHECK(message_of(model, manual_options_of(2))
          == "module head is pinned to device 1, but the root runs where the "
             "step runs, on device 0, and they must be together: they share "
             "parameter scale");
  }
}

TEST_CASE("a device that does not exist is an error naming the module",
          "[partition][manual]") {
  auto model = small_model();
  model[3].pinned_device = 2;
  CHECK(message_of(model, manual_options_of(2))
        == "the partition of module blocks.0 is device 2, but "
           "smp.pipeline_parallel_degree = 2 has devices 0 to 1");
  auto options = manual_options_of(2);
  options.manual.default_device = 5;
  CHECK(message_of(small_model(), options).find("smp.default_partition") == 0);
  CHECK(message_of(small_model(), manual_options_of(0))
          .find("smp.pipeline_parallel_degree")
        == 0);
}

TEST_CASE("modules of one node that are pinned apart are an error",
          "[partition][manual]") {
  auto model = small_model();
  model[1].parameters.push_back({1, "w", 8});
  model[7].parameters.push_back({1, "w", 8});
  model[1].pinned_device = 0;
  model[7].pinned_device = 1;
  CHECK(message_of(model, manual_options_of(2))
        == "module head is pinned to device 1 and module embed to device 0, "
           "but they must be together: they share parameter w");
  SECTION("one pin decides for both") {
    model[1].pinned_device.reset();
    CHECK(placed(model, manual_options_of(2))
          == devices{0, 1, 0, 0, 0, 0, 0, 1});
  }
}

TEST_CASE("a module that cannot leave its parent may only be pinned with it",
          "[partition][manual][R20]") {
  auto model = small_model();
  model[6].not_interceptable = "write smp::submodule<linear> for linear";
  model[6].pinned_device = 1;
  CHECK(message_of(model, manual_options_of(2))
        == "module blocks.2.inner is pinned to device 1, but stays with its "
           "parent: write smp::submodule<linear> for linear");
  SECTION("which is fine if the parent is there") {
    model[5].pinned_device = 1;
    CHECK(placed(model, manual_options_of(2))
          == devices{0, 0, 0, 0, 0, 1, 1, 0});
  }
  SECTION("also by inheritance") {
    model[2].pinned_device = 1;
    CHECK(placed(model, manual_options_of(2))
          == devices{0, 0, 1, 1, 1, 1, 1, 0});
  }
  SECTION("also by default") {
    auto options = manual_options_of(2);
    options.manual.default_device = 1;
    CHECK(placed(model, options) == devices{0, 1, 1, 1, 1, 1, 1, 1});
  }
}

TEST_CASE("a module that cannot leave its caller may only be pinned with it",
          "[partition][manual][R20]") {
  auto model = small_model();
  model[6].stays_with[module_id{3}] = "argument 1: an Odd cannot be sent";
  model[6].pinned_device = 1;
  CHECK(message_of(model, manual_options_of(2))
        == "module blocks.2.inner is pinned to device 1, but stays with module "
           "blocks.0: argument 1: an Odd cannot be sent");
  model[3].pinned_device = 1;
  CHECK(placed(model, manual_options_of(2)) == devices{0, 0, 0, 1, 0, 0, 1, 0});
}

TEST_CASE("reasons name what surprises", "[partition][manual]") {
  auto model = small_model();
  model[1].parameters.push_back({1, "embed.weight", 8});
  model[7].parameters.push_back({1, "embed.weight", 8});
  model[3].not_interceptable = "write smp::submodule<block>";
  model[6].not_interceptable = "it is inside of a LibTorch module";
  auto plan = make_partition(model, manual_options_of(1));
  CHECK(plan.reasons
        == std::vector<std::string>{
          "head runs on device 0 with embed: they share parameter "
          "embed.weight",
          "blocks.2.inner stays with blocks.2: it is inside of a LibTorch "
          "module",
          "blocks.0 stays with blocks: write smp::submodule<block>"});
  SECTION("what a call carries, too") {
    for (auto block : {4u, 5u})
      model[block].stays_with[module_id{0}] = "result: an Odd cannot be sent";
    auto again = make_partition(model, manual_options_of(1));
    CHECK(std::ranges::find(again.reasons,
                            "blocks.1 and 1 like it stay with what calls them: "
                            "result: an Odd cannot be sent")
          != again.reasons.end());
  }
}

TEST_CASE("an unknown strategy is an error that names the allowed ones",
          "[partition][manual]") {
  CHECK(parse_partition_strategy("paper") == partition_strategy::paper);
  CHECK(parse_partition_strategy("balanced") == partition_strategy::balanced);
  try {
    parse_partition_strategy("best");
    FAIL("nothing was thrown");
  } catch (const error& x) {
    CHECK(x.cause().text
          == "smp.strategy = \"best\" is not known; allowed: \"paper\", "
             "\"balanced\"");
  }
}
