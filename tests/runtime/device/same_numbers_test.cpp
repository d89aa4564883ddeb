// ctest: seconds=40
#include "tests/support/catch.hpp"

#include "tests/support/torch/models.hpp"
#include "tests/support/torch/simulated.hpp"
#include "tests/support/torch/small_models.hpp"

#include <algorithm>
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

struct small_model {
  const char* what;
  std::vector<model_step> (*run)(const model_options&, const tensors&);
  none (*differences)(const model_options&, const tensors&,
                      const std::vector<model_step>&);
};

template <template <template <class> class> class Impl>
small_model of(const char* what) {
  return {what, &run_ranks<Impl>, &differences<Impl>};
}

/// Without dropout, whose numbers are those of the device.
const std::vector<small_model> models = {
  of<branch>("a branch on a tensor"),
  of<early_exit>("an early exit from a loop over modules"),
  of<reused>("modules that are used again"),
  of<sometimes>("modules that are called never or only sometimes"),
  of<sizes>("sizes that differ between microbatches"),
  of<outputs>("outputs without use or without gradient"),
  of<integers>("inputs without gradient"),
  of<frozen>("frozen parameters"),
  of<in_place>("operations in place on arguments"),
  of<weight_argument>("a parameter as an argument of another rank's module"),
  of<norms>("batch norms see the microbatches in order, once"),
  of<counters>("results that depend on a buffer, and on what it was"),
};

/// With dropout.
const std::vector<small_model> drawing = {
  of<teacher>("modules under no_grad inside of forward"),
  of<nested>("calls from rank to rank and back, with structured arguments"),
};

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
  auto model = GENERATE(from_range(models));
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
  auto model = GENERATE(from_range(drawing));
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
