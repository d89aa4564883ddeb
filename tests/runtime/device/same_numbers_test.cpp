// ctest: seconds=40
#include "tests/support/catch.hpp"

#include "tests/support/torch/model_table.hpp"
#include "tests/support/torch/simulated.hpp"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

// Training on simulated devices: the numbers of one process on the host,
// whatever the device's timing, and no access that nothing orders.

using namespace smp;
using namespace smp::test;

namespace {

using none = std::vector<std::string>;
using tensors = std::vector<Tensor>;

/// x: [8, 6], another one for each step.
tensors batches(int n = 3) {
  tensors result;
  for (int i = 0; i < n; ++i)
    result.push_back(
      torch::sin(torch::arange(8 * width).view({8, width}) * (i + 1) * 0.7 + i)
      * (i + 1));
  return result;
}

std::vector<small_model> models(bool with_dropout) {
  std::vector<small_model> result;
  std::ranges::copy_if(
    small_models, std::back_inserter(result),
    [with_dropout](auto& x) { return x.has_dropout == with_dropout; });
  return result;
}

model_options on_devices(uint64_t ranks, bool fast) {
  model_options result;
  result.device = "sim";
  result.ranks = ranks;
  result.microbatches = 4;
  if (fast)
    result.fast = std::nullopt;
  return result;
}

/// But for the order in which gradients were added.
bool same_losses(const model_step& x, const model_step& y) {
  return std::ranges::equal(
    x.losses, y.losses, [](auto& a, auto& b) { return is_close(a, b, 1e-5); });
}

} // namespace

TEST_CASE("on devices a model has the numbers of one process on the host",
          "[runtime][device][models]") {
  auto model = GENERATE(from_range(models(false)));
  auto ranks = GENERATE(uint64_t{1}, uint64_t{2}, uint64_t{4});
  auto fast = GENERATE(false, true);
  INFO(model.what << " on " << ranks << " ranks" << (fast ? ", fast" : ""));
  checked_devices devices;
  auto x = on_devices(ranks, fast);
  CHECK(model.differences(x, batches(), model.run(x, batches())) == none{});
  CHECK(devices.race() == "");
}

TEST_CASE("dropout draws the same numbers on any number of devices",
          "[runtime][device][models][R23]") {
  auto model = GENERATE(from_range(models(true)));
  auto fast = GENERATE(false, true);
  checked_devices devices;
  auto alone = model.run(on_devices(1, false), batches());
  for (uint64_t ranks : {2, 4}) {
    INFO(model.what << " on " << ranks << " ranks" << (fast ? ", fast" : ""));
    auto together = model.run(on_devices(ranks, fast), batches());
    CHECK(std::ranges::equal(together, alone, same_losses));
  }
  CHECK(devices.race() == "");
  // Otherwise nothing was drawn.
  auto again = batches();
  std::ranges::fill(again, again.front());
  auto steps = model.run(on_devices(1, false), again);
  CHECK_FALSE(is_close(steps[0].losses[0], steps[0].losses[1], 1e-5));
}
