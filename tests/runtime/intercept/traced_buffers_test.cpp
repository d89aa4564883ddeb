#include "tests/support/catch.hpp"

#include "runtime/intercept/trace/tracer.hpp"
#include "runtime/model/module_walk.hpp"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <stdexcept>

// What a trace makes of buffers that a module does not only write to, and of a
// body that fails when it runs again.

using namespace smp;

TEST_CASE("a trace puts back sizes and types of buffers as well",
          "[runtime][trace]") {
  auto module = std::make_shared<torch::nn::Module>();
  auto mask = module->register_buffer("mask", at::full({2, 2}, 3.0));
  auto scale = module->register_buffer("scale", at::full({2}, 0.5));
  auto still = module->register_buffer("still", at::ones({2}));
  auto model = walk(*module);
  at::Tensor seen;
  auto found = trace_forward(model, {}, random_stream{1}, [&] {
    mask.resize_({3, 3}).fill_(1);
    scale.set_data(at::full({2}, 7.0, at::kDouble));
    seen = mask.clone();
  });
  CHECK(found.failure == "");
  CHECK(found.changed == std::set<uint32_t>{0, 1});
  CHECK(at::equal(seen, at::ones({3, 3})));
  CHECK(at::equal(mask, at::full({2, 2}, 3.0)));
  CHECK(scale.scalar_type() == at::kFloat);
  CHECK(at::equal(scale, at::full({2}, 0.5)));
  CHECK(at::equal(still, at::ones({2})));
}

TEST_CASE("a body that fails when a trace repeats it keeps its first times",
          "[runtime][trace]") {
  using clock = std::chrono::steady_clock;
  auto module = std::make_shared<torch::nn::Module>();
  auto sum = module->register_buffer("sum", at::zeros({2}));
  auto model = walk(*module);
  int runs = 0;
  auto found = trace_forward(model, {}, random_stream{1}, [&] {
    sum.add_(1);
    if (++runs > 1)
      throw std::runtime_error{"its data have ended"};
    auto end = clock::now() + std::chrono::milliseconds{20};
    while (clock::now() < end)
      ;
  });
  CHECK(runs == 2);
  CHECK(found.failure == "");
  CHECK_FALSE(found.failed);
  CHECK(found.modules.at(0).seconds >= 0.02);
  CHECK(at::equal(sum, at::zeros({2})));
}
