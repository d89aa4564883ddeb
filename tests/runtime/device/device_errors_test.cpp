#include "tests/support/catch.hpp"

#include "tests/simulated/driver/failures.hpp"
#include "tests/simulated/driver/streams.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/torch/simulated.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// A kernel that fails is noticed when the device is used next, or waited for.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using torch::Tensor;
using torch::nn::Linear;

namespace {

constexpr int64_t side = 16;

/// Of the device of the calling thread, when it gets there.
void launch_broken_kernel() {
  auto device = sim::current_device();
  sim::launch(device, sim::current_stream(device), "broken kernel",
              [device] { sim::fail_device(device); });
}

/// `other`: of the last rank, when rank 0 has what it computed, but not yet
/// sent the gradient of that.
enum class place { forward, backward, after, other };

struct broken_impl : torch::nn::Module {
  explicit broken_impl(place x) : where(x) {
    register_module("inner", inner);
  }

  Tensor forward(Tensor x) {
    auto y = inner(x);
    if (where == place::forward)
      launch_broken_kernel();
    if (where == place::backward)
      y.register_hook([](Tensor) { launch_broken_kernel(); });
    return y * 2;
  }

  place where;
  Linear inner{side, side};
};
TORCH_MODULE_IMPL(broken, broken_impl);

/// The broken one is on the last rank.
struct row_impl : torch::nn::Module {
  row_impl(uint64_t ranks, place where) {
    auto on = [&](uint64_t rank, auto make) {
      partition_scope scope{static_cast<uint32_t>(rank)};
      return make();
    };
    auto linear = [] { return submodule<Linear>(side, side); };
    first = on(0, linear);
    second = on(ranks - 1, [&] { return submodule<broken>(where); });
    third = on(ranks - 1, linear);
    fourth = on(0, linear);
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
    register_module("fourth", fourth);
  }

  Tensor forward(Tensor x) {
    auto y = fourth(third(second(first(x))));
    if (second->where == place::other)
      sim::fail_device(1);
    return y.square().mean();
  }

  submodule<Linear> first = nullptr, third = nullptr, fourth = nullptr;
  submodule<broken> second = nullptr;
};
TORCH_MODULE_IMPL(row, row_impl);

/// @returns what the last rank says of the step
failure failure_of(uint64_t ranks, place where, bool wait) {
  checked_devices devices{200};
  auto world = manual_world(ranks, 4);
  world.reorder = false;
  world.config.device = "sim";
  world.config.wait_for_device = wait;
  failure result;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model model{seeded([&] { return row{s.size(), where}; })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      if (where == place::after)
        launch_broken_kernel();
      return loss;
    });
    try {
      train_step(torch::ones({8, side}));
    } catch (const error& e) {
      assertion_lock asserting;
      if (s.rank() == ranks - 1)
        result = e.cause();
    }
  });
  return result;
}

} // namespace

TEST_CASE("a rank that waits for its device names the module that failed",
          "[runtime][device]") {
  auto where = GENERATE(place::forward, place::backward);
  auto ranks = GENERATE(uint64_t{1}, uint64_t{2});
  auto why = failure_of(ranks, where, true);
  CAPTURE(ranks, why.text, static_cast<int>(where));
  CHECK(why.code == error_code::user_code);
  CHECK(why.rank == rank_id{ranks - 1});
  CHECK(why.module == "second");
  CHECK_THAT(why.text, ContainsSubstring("a kernel has failed")
                         && !ContainsSubstring("smp.wait_for_device"));
}

TEST_CASE("an error of a device says how to find its module",
          "[runtime][device]") {
  auto where = GENERATE(place::forward, place::backward, place::after);
  auto ranks = where == place::after ? uint64_t{1}
                                     : GENERATE(uint64_t{1}, uint64_t{2});
  auto why = failure_of(ranks, where, false);
  CAPTURE(ranks, why.text, static_cast<int>(where));
  CHECK_THAT(why.text, ContainsSubstring("has failed")
                         && ContainsSubstring("smp.wait_for_device = true"));
  if (ranks > 1) // a message may be the first that cannot leave
    return;
  CHECK(why.code == error_code::user_code);
  CHECK_THAT(why.text,
             ContainsSubstring("a kernel has failed")
               && ContainsSubstring("in this launch or in an earlier one"));
}

TEST_CASE("a rank whose device fails while others send to it is named on all",
          "[runtime][device]") {
  auto peers = GENERATE(true, false);
  CAPTURE(peers);
  checked_devices devices{200};
  sim::config().no_peers = !peers;
  auto world = manual_world(2, 4);
  world.config.device = "sim";
  std::vector<failure> heard(2);
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded([] { return row{2, place::other}; })};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x);
      model.backward(loss);
      return loss;
    });
    try {
      train_step(torch::ones({2048, side})); // more than rides in a message
    } catch (const error& e) {
      assertion_lock asserting;
      heard[s.rank()] = e.cause();
    }
  });
  for (auto& why : heard) {
    CAPTURE(why.rank.value, why.text);
    CHECK(why.rank == rank_id{1});
    CHECK_THAT(why.text, ContainsSubstring("failed"));
  }
}

TEST_CASE("a rank whose part has no room on its device says what it needs",
          "[runtime][device]") {
  auto small = sim::config();
  small.capacity = 4 << 20;
  sim::changed_options now{small};
  auto world = manual_world(2, 1);
  world.config.device = "sim";
  failure why;
  auto body = [&](session& s) {
    const int64_t wide = 1024; // 4.2 MB
    Linear last{wide, wide};
    distributed_model model{torch::nn::Sequential{Linear{8, wide}, last}};
    set_partition(*last, 1);
    auto evaluate = step([&](Tensor x) { return model(x); });
    try {
      evaluate(torch::ones({2, 8}));
    } catch (const error& e) {
      assertion_lock asserting;
      if (s.rank() == 1)
        why = e.cause();
      throw;
    }
  };
  CHECK_THROWS_AS(run_virtual_world(2, world, body), error);
  CHECK(why.code == error_code::user_code);
  CHECK(why.rank == rank_id{1});
  CHECK_THAT(why.text,
             ContainsSubstring("out of memory")
               && ContainsSubstring("to sim:1: 4.2 MB of parameters and 0.0 MB "
                                    "of buffers; ")
               && ContainsSubstring(" of the device's 4.2 MB; what helps is "));
}
