#include "tests/support/catch.hpp"

#include "runtime/lazy/late_value.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/values/absent_tensor.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

using namespace smp;
using torch::Tensor;

namespace {

struct touch {
  std::string name;
  std::function<void(Tensor&)> run;
};

/// Whatever looks at the content, in the ways of an operation.
const std::vector<touch> touches{
  {"an operation", [](Tensor& x) { CHECK((x + 1).sum().item<float>() == 12); }},
  {"a view",
   [](Tensor& x) {
     CHECK(x.view({2, 2}).sum().item<float>() == 8);
   }},
  {"a list",
   [](Tensor& x) {
     CHECK(torch::cat({x, x}).numel() == 8);
   }},
  {"in place",
   [](Tensor& x) {
     at::NoGradGuard no_grad;
     x.mul_(2);
     CHECK(x.sum().item<float>() == 16);
   }},
  {"a copy of the handle",
   [](Tensor& x) {
     Tensor y = x;
     CHECK(y[0].item<float>() == 2);
   }},
  {"detach", [](Tensor& x) { CHECK(x.detach().sum().item<float>() == 8); }},
};

} // namespace

TEST_CASE("whoever touches a late tensor waits for its bytes",
          "[runtime][lazy][R61]") {
  for (auto& [name, run] : touches) {
    INFO(name);
    auto x = torch::zeros({4}).requires_grad_();
    auto memory = x.variable_data();
    int waited = 0;
    make_late(x, [&] {
      ++waited;
      memory.fill_(2);
    });
    CHECK(is_late(x));
    CHECK_FALSE(is_placeholder(x));
    CHECK(x.sizes() == std::vector<int64_t>{4});
    CHECK(x.requires_grad());
    CHECK(waited == 0);
    run(x);
    CHECK(waited == 1);
    CHECK_FALSE(is_late(x));
    CHECK_FALSE(is_absent(x));
  }
}

TEST_CASE("a late leaf gets its gradient", "[runtime][lazy][R61]") {
  auto x = torch::zeros({3}).requires_grad_();
  auto memory = x.variable_data();
  make_late(x, [&] { memory.fill_(3); });
  (x * x).sum().backward();
  CHECK(torch::equal(x.grad(), torch::full({3}, 6.0)));
}

TEST_CASE("what keeps a late tensor from coming is thrown by each operation",
          "[runtime][lazy][R61]") {
  auto x = torch::zeros({3});
  make_late(x, [] { throw std::runtime_error{"lost"}; });
  CHECK_THROWS(x + 1);
  CHECK(is_late(x));
  CHECK_THROWS(x.sum());
  forget_late(x);
  CHECK((x + 1).sum().item<float>() == 3);
}
