#include "tests/support/catch.hpp"

#include "runtime/session/form_comparison.hpp"
#include "tests/support/error_of.hpp"

#include <torch/types.h>

#include <cstdint>
#include <limits>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

/// What ranks 3 and 5 say of a float32[4, 8]: a hash, how many, and of each its
/// type, number of axes and sizes. Rank 5 has another one at `at`.
torch::Tensor told(int64_t at, int64_t value) {
  auto result = torch::zeros({2, 64}, torch::kLong);
  for (int64_t rank = 0; rank < 2; ++rank) {
    const std::vector<int64_t> all{rank, 1, 6, 2, 4, 8};
    for (int64_t i = 0; i < 6; ++i)
      result[rank][i] = all[static_cast<size_t>(i)];
  }
  result[1][at] = value;
  return result;
}

std::string refused(int64_t at, int64_t value) {
  return error_of([&] { compare_forms({3, 5}, told(at, value)); });
}

} // namespace

TEST_CASE("ranks with arguments of other forms are named with both",
          "[runtime][tensor_parallel][R62]") {
  CHECK(refused(0, 0) == "no error"); // of the same hash
  CHECK(refused(5, 9)
        == "ranks that share modules need batches of the same sizes, but a "
           "microbatch has as tensor 0 float32[4, 8] on rank 3 and "
           "float32[4, 9] on rank 5");
}

TEST_CASE("a rank that tells forms of no arguments is named",
          "[runtime][tensor_parallel][R62]") {
  CHECK(refused(1, -1) == "rank 5: malformed forms of arguments: -1 at 1");
  CHECK(refused(2, 1000) == "rank 5: malformed forms of arguments: 1000 at 2");
  // Past the end of what was told, and so far that the end wraps around.
  CHECK(refused(3, -2) == "rank 5: malformed forms of arguments: -2 at 3");
  CHECK(refused(3, std::numeric_limits<int64_t>::max())
        == "ranks that share modules need batches of the same sizes, but a "
           "microbatch has tensors of other sizes on rank 3 than on rank 5");
}
