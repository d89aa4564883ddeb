#pragma once

// Whole tensors, element by element: losses, gradients, parameters, buffers.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <limits>
#include <optional>
#include <string>

namespace smp {

/// The difference between values that cannot be compared.
inline constexpr double infinity = std::numeric_limits<double>::infinity();

/// Two runs add up in different orders, so equal means nearly equal. Per
/// tensor: max|a - b| <= relative max|b| + absolute (R35).
struct tolerance {
  double relative = 1e-5;
  double absolute = 1e-7;

  /// @param largest max|b|
  double bound(double largest) const noexcept {
    return relative * largest + absolute;
  }
};

/// @returns R35's tolerance, wider for types that hold fewer digits: some
/// units in the last place of the largest value.
tolerance tolerance_for(c10::ScalarType x);

/// @returns the wider one.
tolerance wider(const tolerance& x, const tolerance& y);

/// Where two values differ, for people: the worst place and both values there.
struct mismatch {
  /// "element [3, 7]", "elements 512 to 1023 (checksum)", "the shape".
  std::string place;
  std::string pipeline;
  std::string reference;
  /// |a - b| at that place, and what would be allowed; infinite where values
  /// cannot be subtracted (shapes, NaN).
  double difference = 0;
  double bound = 0;
};

struct comparison {
  /// max|a - b| / max|b|; 0 for equal tensors.
  double relative = 0;
  /// Largest ratio of |a - b| to its bound; more than 1 is wrong. For tensors
  /// of rounding noise only this is meaningful.
  double share = 0;
  std::optional<mismatch> wrong;
};

/// Compares `a`, the pipeline's, with `b`, the reference's. A value that is
/// not finite equals only itself.
comparison compare_tensors(const at::Tensor& a, const at::Tensor& b,
                           const tolerance& x);

/// Compares parameters after an update. Their own digits are exact (R35: bit
/// for bit, except the last place, which LibTorch rounds differently once in
/// some hundred runs); the added update may differ in its last digits.
/// @param before the parameters before the update
comparison compare_update(const at::Tensor& a, const at::Tensor& b,
                          const at::Tensor& before);

/// @returns how `a` differs from `b`, the reference's; nothing if it equals it.
/// A number that is not finite equals only itself.
std::optional<mismatch> compare_numbers(double a, double b,
                                        const tolerance& allowed);

/// @returns a number with enough digits to tell floats apart.
std::string number_text(double x);

} // namespace smp
