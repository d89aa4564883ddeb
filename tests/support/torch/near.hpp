#pragma once

#include "tests/support/catch.hpp"

#include <torch/types.h>

namespace smp::test {

/// max|a - b| <= share max|b|, but for what rounding leaves of zeros (R35).
inline void check_near(const torch::Tensor& a, const torch::Tensor& b,
                       double share = 1e-5) {
  REQUIRE(a.sizes() == b.sizes());
  CHECK((a - b).abs().max().item<double>()
        <= share * b.abs().max().item<double>() + 1e-7);
}

} // namespace smp::test
