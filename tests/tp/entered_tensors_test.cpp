#include "tests/support/catch.hpp"

#include "tp/entered_tensors.hpp"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/types.h>

using namespace smp;
using torch::Tensor;

namespace {

using form = entered_tensors::form;

} // namespace

TEST_CASE("what a tensor became is found by the tensor and by what it is for",
          "[tp][entered_tensors]") {
  entered_tensors known;
  auto x = torch::ones({2, 3}), y = torch::full({4, 3}, 2.0);
  CHECK_FALSE(known.find(x, form::part, 2).defined());
  known.add(x, form::part, 2, y);
  CHECK(known.find(x, form::part, 2).is_same(y));
  CHECK_FALSE(known.find(x, form::whole, 2).defined());
  CHECK_FALSE(known.find(x, form::part, 3).defined());
  CHECK_FALSE(known.find(x.view({2, 3}), form::part, 2).defined());
  SECTION("until it is written to") {
    x.add_(1);
    CHECK_FALSE(known.find(x, form::part, 2).defined());
  }
  SECTION("until all is let go of") {
    known.clear();
    CHECK_FALSE(known.find(x, form::part, 2).defined());
  }
  SECTION("and nothing is kept of one that is gone") {
    x = Tensor{};
    known.find(y, form::part, 2);
    CHECK(y.use_count() == 1);
  }
}

TEST_CASE("what was made without a graph is not found in one, nor the reverse",
          "[tp][entered_tensors]") {
  entered_tensors known;
  auto x = torch::ones({2}).requires_grad_();
  auto y = torch::ones({2}), z = torch::ones({2});
  {
    at::NoGradGuard no_grad;
    known.add(x, form::mask, 1, y);
  }
  CHECK_FALSE(known.find(x, form::mask, 1).defined());
  known.add(x, form::mask, 1, z);
  CHECK(known.find(x, form::mask, 1).is_same(z));
  at::NoGradGuard no_grad;
  CHECK(known.find(x, form::mask, 1).is_same(y));
}

TEST_CASE("what inference mode made of a tensor is not found in a graph",
          "[tp][entered_tensors]") {
  entered_tensors known;
  auto x = torch::ones({2}); // a mask: it has no gradient itself
  {
    c10::InferenceMode inference;
    auto y = x + 1;
    known.add(x, form::mask, 1, y);
    CHECK(known.find(x, form::mask, 1).is_same(y));
  }
  CHECK_FALSE(known.find(x, form::mask, 1).defined());
  auto z = x + 1;
  known.add(x, form::mask, 1, z);
  CHECK(known.find(x, form::mask, 1).is_same(z));
}

TEST_CASE("nothing is kept of tensors without versions",
          "[tp][entered_tensors]") {
  c10::InferenceMode inference;
  entered_tensors known;
  auto x = torch::ones({2});
  known.add(x, form::whole, 2, x);
  CHECK_FALSE(known.find(x, form::whole, 2).defined());
}
