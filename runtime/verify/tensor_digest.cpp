#include "runtime/verify/tensor_digest.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace smp {

namespace {

/// A random sign per place: a bit of splitmix64's finaliser.
double sign_at(int64_t place) noexcept {
  auto x = (static_cast<uint64_t>(place) + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return (x >> 40) & 1 ? 1.0 : -1.0;
}

int64_t count_of(const std::vector<int64_t>& sizes) {
  int64_t result = 1;
  for (auto n : sizes)
    result *= n;
  return result;
}

int64_t piece_length(int64_t elements) {
  return std::max<int64_t>(1, (elements + tensor_digest::pieces - 1)
                                / tensor_digest::pieces);
}

std::string shape_text(const tensor_digest& x) {
  return fmt::format("{} [{}]",
                     c10::toString(static_cast<c10::ScalarType>(x.dtype)),
                     fmt::join(x.sizes, ", "));
}

std::string special_text(const tensor_digest& x) {
  return fmt::format("{} NaN, {} inf, {} -inf", x.nans, x.plus, x.minus);
}

} // namespace

tensor_digest digest_of(const at::Tensor& x) {
  tensor_digest result;
  result.dtype = static_cast<uint8_t>(x.scalar_type());
  auto y = x.detach();
  if (y.is_sparse())
    y = y.to_dense();
  if (y.is_complex())
    y = at::view_as_real(y.resolve_conj());
  result.sizes = y.sizes().vec();
  y = y.to(at::kCPU, at::kDouble).contiguous();
  auto* p = y.const_data_ptr<double>();
  const auto n = y.numel();
  const auto length = piece_length(n);
  for (int64_t begin = 0; begin < n; begin += length) {
    const auto end = std::min(n, begin + length);
    double sum = 0;
    for (auto i = begin; i < end; ++i) {
      if (!std::isfinite(p[i])) {
        ++(std::isnan(p[i]) ? result.nans
           : p[i] > 0       ? result.plus
                            : result.minus);
        continue;
      }
      result.largest = std::max(result.largest, std::abs(p[i]));
      sum += length == 1 ? p[i] : sign_at(i) * p[i];
    }
    result.sums.push_back(sum);
    result.samples.push_back(std::isfinite(p[begin]) ? p[begin] : 0);
  }
  return result;
}

bool is_whole(const tensor_digest& x) {
  constexpr auto most = std::numeric_limits<int64_t>::max()
                        - tensor_digest::pieces;
  int64_t elements = 1;
  for (auto n : x.sizes) {
    if (n < 0 || (n > 0 && elements > most / n))
      return false;
    elements *= n;
  }
  const auto length = piece_length(elements);
  const auto pieces = elements / length + (elements % length != 0);
  return x.sums.size() == static_cast<size_t>(pieces)
         && x.samples.size() == x.sums.size();
}

std::optional<mismatch> compare_digests(const tensor_digest& a,
                                        const tensor_digest& b,
                                        const tolerance& x) {
  if (a.dtype != b.dtype || a.sizes != b.sizes)
    return mismatch{"the shape", shape_text(a), shape_text(b), infinity, 0};
  if (a.nans != b.nans || a.plus != b.plus || a.minus != b.minus)
    return mismatch{"what is not finite", special_text(a), special_text(b),
                    infinity, 0};
  const auto length = piece_length(count_of(b.sizes));
  const auto bound = x.bound(b.largest);
  // A sum of n differences d under random signs exceeds 6 sqrt(n) max|d| with
  // probability 3e-8.
  const auto sum_bound = length == 1
                           ? bound
                           : 6 * std::sqrt(static_cast<double>(length)) * bound;
  auto worst_of = [](const std::vector<double>& xs,
                     const std::vector<double>& ys) {
    std::pair<double, size_t> result{0, 0};
    for (size_t i = 0; i < ys.size(); ++i)
      result = std::max(result, {std::abs(xs[i] - ys[i]), i});
    return result;
  };
  auto [off, piece] = worst_of(a.sums, b.sums);
  auto [far, sample] = worst_of(a.samples, b.samples);
  // An element says more to people than a sum.
  if (far > bound)
    return mismatch{
      fmt::format("element {}", static_cast<int64_t>(sample) * length),
      number_text(a.samples[sample]), number_text(b.samples[sample]), far,
      bound};
  if (off > sum_bound) {
    const auto first = static_cast<int64_t>(piece) * length;
    const auto last = std::min(count_of(b.sizes), first + length) - 1;
    return mismatch{fmt::format("elements {} to {} (checksum)", first, last),
                    number_text(a.sums[piece]), number_text(b.sums[piece]), off,
                    sum_bound};
  }
  return std::nullopt;
}

comparison score_of(const tensor_digest& a, const tensor_digest& b,
                    const tolerance& x) {
  comparison result{.wrong = compare_digests(a, b, x)};
  auto bad = result.wrong ? std::numeric_limits<double>::infinity() : 0;
  result.relative = result.share = bad;
  if (a.sums.size() == 1 && b.sums.size() == 1 && b.sums[0] != 0) {
    auto off = std::abs(a.sums[0] - b.sums[0]), size = std::abs(b.sums[0]);
    result.relative = off / size;
    result.share = off / x.bound(size);
  }
  return result;
}

} // namespace smp
