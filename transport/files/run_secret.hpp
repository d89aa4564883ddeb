#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace smp {

/// Precedes what a rank sends, so that other ranks can tell it from what
/// strangers send.
using run_token = std::array<std::byte, 16>;

/// Known to the ranks of a run only: otherwise any process that reaches a port
/// of a rank could be taken for one, and end the run (R44). It leaves the
/// processes of the run only by a descriptor or a file of their user: never in
/// an environment variable, over a connection or in a text.
class run_secret {
public:
  static constexpr size_t size = 32;

  /// Zeros, for a run of one process, which has no peers to tell apart.
  run_secret() = default;

  explicit run_secret(std::span<const std::byte, size> bytes);

  run_secret(const run_secret&) = default;
  run_secret& operator=(const run_secret&) = default;

  /// Erases the bytes, so that reused memory contains no copy.
  ~run_secret();

  /// @returns random bytes. @throws error (internal) if the system has none
  static run_secret make();

  /// @returns nothing unless `hex` is what `to_hex` gives; trailing blanks are
  /// ignored
  static std::optional<run_secret> from_hex(std::string_view hex);

  std::string to_hex() const;

  std::span<const std::byte, size> bytes() const noexcept {
    return bytes_;
  }

  using proof = std::array<std::byte, 32>;

  /// @returns what only a holder of the secret can compute for `what`
  /// (HMAC-SHA256). A proof for one purpose is not valid for another.
  proof prove(std::string_view purpose, std::span<const std::byte> what) const;

  run_token token(std::string_view purpose) const;

private:
  std::array<std::byte, size> bytes_ = {};
};

/// Takes equally long wherever the bytes differ, so that they cannot be guessed
/// one after the other.
bool equal_in_constant_time(std::span<const std::byte> x,
                            std::span<const std::byte> y) noexcept;

/// @throws error (internal) if the system has no random bytes
void fill_with_random_bytes(std::span<std::byte> x);

} // namespace smp
