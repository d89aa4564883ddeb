#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace smp {

/// Stands in front of what a rank sends, so that the others tell it from what
/// strangers send.
using run_token = std::array<std::byte, 16>;

/// What the ranks of a run know and nobody else. Whoever reaches a port of a
/// rank could else be taken for one, and end the run (R44). It never leaves the
/// processes of the run but by a descriptor or a file of their user: not in an
/// environment variable, not over a connection, not in a text.
class run_secret {
public:
  static constexpr size_t size = 32;

  /// Zeros: a run of one process, where nobody has to be told apart.
  run_secret() = default;

  explicit run_secret(std::span<const std::byte, size> bytes);

  run_secret(const run_secret&) = default;
  run_secret& operator=(const run_secret&) = default;

  /// Leaves no copy in memory that others are given.
  ~run_secret();

  /// @returns random bytes. @throws error (internal) if the system has none
  static run_secret make();

  /// @returns nothing unless `hex` is what `to_hex` gives; blanks at its end do
  /// not count
  static std::optional<run_secret> from_hex(std::string_view hex);

  std::string to_hex() const;

  std::span<const std::byte, size> bytes() const noexcept {
    return bytes_;
  }

  using proof = std::array<std::byte, 32>;

  /// @returns what nobody can compute for `what` who does not know the secret
  /// (HMAC-SHA256). A proof for one purpose is none for another.
  proof prove(std::string_view purpose, std::span<const std::byte> what) const;

  run_token token(std::string_view purpose) const;

private:
  std::array<std::byte, size> bytes_ = {};
};

/// Takes as long for bytes that differ at once as for equal ones, so that
/// nobody can guess one after the other.
bool equal_in_constant_time(std::span<const std::byte> x,
                            std::span<const std::byte> y) noexcept;

/// @throws error (internal) if the system has no random bytes
void fill_with_random_bytes(std::span<std::byte> x);

} // namespace smp
