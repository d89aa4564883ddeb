#pragma once

// To name the module where two runs diverge, the results of every call must be
// compared, including those of modules on other ranks. Whole activations would
// fill the memory and the network; a checksum does not tolerate rounding. A
// digest does: sums under random signs (a Johnson-Lindenstrauss projection per
// piece of the tensor), which change no more than the elements do.

#include "runtime/verify/tensor_compare.hpp"
#include "transport/bytes.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace smp {

struct tensor_digest {
  /// Pieces per tensor; up to this many elements are kept as they are.
  static constexpr int64_t pieces = 256;

  uint8_t dtype = 0;
  std::vector<int64_t> sizes;
  /// max|x| over what is finite.
  double largest = 0;
  /// Values that are not finite: NaN, infinity, minus infinity.
  uint64_t nans = 0, plus = 0, minus = 0;
  /// Per piece of equal length: the sum of its elements, each under a sign that
  /// is a function of its place, and its first element. Of finite values.
  std::vector<double> sums;
  std::vector<double> samples;

  bool operator==(const tensor_digest&) const = default;
};

/// Reads `x` once; draws from no generator. @pre x.defined()
tensor_digest digest_of(const at::Tensor& x);

/// Tells whether `x` has as many sums and samples as its sizes require: a
/// digest from another rank may not.
bool is_whole(const tensor_digest& x);

/// Compares as `compare_tensors` would, as far as sums can tell: elements
/// within the bound never make a difference (up to chance, below 1e-7 per
/// piece: Hoeffding), elements well above it do.
/// @pre is_whole(a) && is_whole(b)
std::optional<mismatch> compare_digests(const tensor_digest& a,
                                        const tensor_digest& b,
                                        const tolerance& x);

/// The same, with how close a scalar came to its bound; of others, that is not
/// known.
comparison score_of(const tensor_digest& a, const tensor_digest& b,
                    const tolerance& x);

template <class Inspector>
bool inspect(Inspector& f, tensor_digest& x) {
  auto samples = [&x]() -> const auto& {
    return x.samples;
  };
  auto set_samples = [&x](std::vector<double> y) {
    x.samples = std::move(y);
    return is_whole(x);
  };
  return f.object(x).fields(
    f.field("dtype", x.dtype), f.field("sizes", x.sizes),
    f.field("largest", x.largest), f.field("nans", x.nans),
    f.field("plus", x.plus), f.field("minus", x.minus), f.field("sums", x.sums),
    f.field("samples", samples, set_samples));
}

} // namespace smp
