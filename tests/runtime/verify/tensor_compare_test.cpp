#include "tests/support/catch.hpp"

#include "runtime/verify/findings.hpp"
#include "runtime/verify/tensor_compare.hpp"
#include "runtime/verify/tensor_digest.hpp"

#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <vector>

using namespace smp;
using torch::Tensor;

namespace {

Tensor with(const Tensor& x, int64_t index, double value) {
  auto result = x.clone();
  result.view({-1})[index] = value;
  return result;
}

} // namespace

// -- tensors ------------------------------------------------------------------

TEST_CASE("Tensors are equal up to R35's tolerance", "[runtime][verify]") {
  auto b = torch::tensor({1.0f, -4.0f, 0.5f, 0.0f}).view({2, 2});
  auto largest = 4.0;
  auto near = with(b, 2, 0.5 + 0.9 * (1e-5 * largest + 1e-7));
  auto far = with(b, 2, 0.5 + 1.1 * (1e-5 * largest + 1e-7));
  CHECK_FALSE(compare_tensors(b, b, {}).wrong);
  CHECK(compare_tensors(b, b, {}).relative == 0);
  CHECK_FALSE(compare_tensors(near, b, {}).wrong);
  auto x = compare_tensors(far, b, {});
  REQUIRE(x.wrong);
  CHECK(x.wrong->place == "element [1, 0]");
  CHECK(x.wrong->reference == "0.5");
  CHECK(x.wrong->bound == Catch::Approx(1e-5 * largest + 1e-7));
  CHECK(x.relative == Catch::Approx(1.1e-5).epsilon(0.05));
  CHECK(x.share == Catch::Approx(1.1).epsilon(0.01));
  CHECK(compare_tensors(near, b, {}).share == Catch::Approx(0.9).epsilon(0.01));
}

TEST_CASE("Rounding noise is shown as a share of what is allowed",
          "[runtime][verify]") {
  // Gradients that are zero but for rounding, as a key's bias in attention.
  auto noise = torch::tensor({1e-9f, -2e-9f}), other = -noise;
  auto x = compare_tensors(noise, other, {});
  CHECK_FALSE(x.wrong);
  CHECK(x.relative > 1);
  CHECK(x.share == Catch::Approx(4e-9 / (1e-5 * 2e-9 + 1e-7)).epsilon(0.01));
  // What counts is how close to wrong, not how far apart.
  verify_summary sum;
  sum.steps = 1;
  sum.gradients.add("gradient of 'noise'", x);
  auto b = torch::ones({2});
  sum.gradients.add("gradient of 'weight'",
                    compare_tensors(with(b, 0, 1 + 5e-6), b, {}));
  CHECK(sum.gradients.worst == "gradient of 'weight'");
  CHECK_THAT(to_text(sum),
             Catch::Matchers::ContainsSubstring(
               "% of what is allowed (gradient of 'weight', relative"));
}

TEST_CASE("The worst of several differences is shown", "[runtime][verify]") {
  auto b = torch::ones({3});
  auto x = compare_tensors(with(with(b, 0, 1.5), 2, 3.0), b, {});
  REQUIRE(x.wrong);
  CHECK(x.wrong->place == "element [2]");
  CHECK(x.wrong->pipeline == "3");
}

TEST_CASE("Values that are not finite equal only themselves",
          "[runtime][verify]") {
  auto one = torch::ones({3});
  auto nan = with(one, 1, std::nan(""));
  auto inf = with(one, 1, infinity);
  for (auto& x : {nan, inf})
    CHECK_FALSE(compare_tensors(x, x, {}).wrong);
  for (auto& [a, b] : std::vector<std::pair<Tensor, Tensor>>{{nan, one},
                                                             {one, nan},
                                                             {inf, one},
                                                             {one, inf},
                                                             {inf, -inf},
                                                             {nan, inf}})
    CHECK(compare_tensors(a, b, {}).wrong);
}

TEST_CASE("Tensors of other shapes or types differ", "[runtime][verify]") {
  auto x = compare_tensors(torch::ones({2, 3}), torch::ones({3, 2}), {});
  REQUIRE(x.wrong);
  CHECK(x.wrong->pipeline == "Float [2, 3]");
  CHECK(compare_tensors(torch::ones({2}), torch::ones({2}, torch::kDouble), {})
          .wrong);
}

TEST_CASE("Types with fewer digits have a wider tolerance",
          "[runtime][verify]") {
  auto b = torch::ones({4}, torch::kBFloat16);
  auto a = b + 0x1p-6;
  CHECK(compare_tensors(a, b, tolerance_for(torch::kFloat)).wrong);
  CHECK_FALSE(compare_tensors(a, b, tolerance_for(torch::kBFloat16)).wrong);
  CHECK(compare_tensors(b + 0.25, b, tolerance_for(torch::kBFloat16)).wrong);
}

TEST_CASE("An update is compared by what was added", "[runtime][verify]") {
  // 1e-5 of the largest value would hide a whole step of this size.
  auto before = torch::full({4}, 100.0f);
  auto b = before + 1e-3;
  CHECK_FALSE(compare_update(b, b, before).wrong);
  CHECK(compare_update(before, b, before).wrong);
  CHECK(compare_update(before + 2e-3, b, before).wrong);
}

// -- digests ------------------------------------------------------------------

TEST_CASE("A digest tolerates what a tensor tolerates", "[runtime][verify]") {
  auto n = GENERATE(1, 100, 256, 257, 5000, 100000);
  torch::manual_seed(n);
  auto b = torch::randn({n});
  auto bound = tolerance{}.bound(b.abs().max().item<double>());
  auto digest = digest_of(b);
  CHECK((digest == digest_of(b.clone())));
  CHECK(digest.sums.size() <= tensor_digest::pieces);
  // Every element off by almost the bound, in random directions.
  auto near = b + (torch::randint(2, {n}) * 2 - 1) * 0.9 * bound;
  CHECK_FALSE(compare_digests(digest_of(near), digest, {}));
  // Some elements off by much more.
  auto far = b + (torch::randint(2, {n}) * 2 - 1) * 100 * bound;
  CHECK(compare_digests(digest_of(far), digest, {}));
  CHECK(compare_digests(digest_of(with(b, n - 1, 7)), digest, {}));
}

TEST_CASE("A digest sees where elements stand", "[runtime][verify]") {
  torch::manual_seed(1);
  auto b = torch::randn({64, 64});
  CHECK(compare_digests(digest_of(b.t().contiguous()), digest_of(b), {}));
  CHECK(compare_digests(digest_of(b.roll(1, 0)), digest_of(b), {}));
  CHECK(compare_digests(digest_of(b.view({32, 128})), digest_of(b), {}));
  CHECK(compare_digests(digest_of(with(b, 5, std::nan(""))), digest_of(b), {}));
  CHECK_FALSE(
    compare_digests(digest_of(b.t().contiguous().t()), digest_of(b), {}));
}

TEST_CASE("A digest of few elements is the tensor itself",
          "[runtime][verify]") {
  auto b = torch::arange(10, torch::kFloat);
  auto x = compare_digests(digest_of(with(b, 3, 3.01)), digest_of(b), {});
  REQUIRE(x);
  CHECK(x->place == "element 3");
  CHECK(x->reference == "3");
}

TEST_CASE("A digest draws no random numbers", "[runtime][verify]") {
  torch::manual_seed(3);
  auto expected = torch::rand({4});
  torch::manual_seed(3);
  digest_of(torch::ones({1000}));
  CHECK(torch::equal(torch::rand({4}), expected));
}
