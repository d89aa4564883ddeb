#include "transport/files/run_secret.hpp"

#include "transport/error.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include <sys/random.h>

namespace smp {

namespace {

std::optional<unsigned> hex_digit(char x) {
  if (x >= '0' && x <= '9')
    return x - '0';
  if (x >= 'a' && x <= 'f')
    return x - 'a' + 10;
  if (x >= 'A' && x <= 'F')
    return x - 'A' + 10;
  return std::nullopt;
}

} // namespace

run_secret::run_secret(std::span<const std::byte, size> bytes) {
  std::copy(bytes.begin(), bytes.end(), bytes_.begin());
}

run_secret::~run_secret() {
  OPENSSL_cleanse(bytes_.data(), bytes_.size());
}

run_secret run_secret::make() {
  run_secret result;
  fill_with_random_bytes(result.bytes_);
  return result;
}

std::optional<run_secret> run_secret::from_hex(std::string_view hex) {
  hex = hex.substr(0, hex.find_last_not_of(" \t\r\n") + 1);
  if (hex.size() != 2 * size)
    return std::nullopt;
  run_secret result;
  for (size_t i = 0; i < size; ++i) {
    auto high = hex_digit(hex[2 * i]);
    auto low = hex_digit(hex[2 * i + 1]);
    if (!high || !low)
      return std::nullopt;
    result.bytes_[i] = static_cast<std::byte>(*high << 4 | *low);
  }
  return result;
}

std::string run_secret::to_hex() const {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string result;
  for (auto x : bytes_) {
    result += digits[std::to_integer<size_t>(x >> 4)];
    result += digits[std::to_integer<size_t>(x & std::byte{15})];
  }
  return result;
}

run_secret::proof run_secret::prove(std::string_view purpose,
                                    std::span<const std::byte> what) const {
  // The first zero ends the purpose, so no two pairs give the same bytes.
  std::vector<unsigned char> text(purpose.size() + 1 + what.size());
  std::copy(purpose.begin(), purpose.end(), text.begin());
  std::transform(what.begin(), what.end(),
                 text.begin() + static_cast<std::ptrdiff_t>(purpose.size() + 1),
                 [](std::byte x) { return std::to_integer<unsigned char>(x); });
  proof result;
  unsigned length = 0;
  if (HMAC(EVP_sha256(), bytes_.data(), static_cast<int>(bytes_.size()),
           text.data(), text.size(),
           reinterpret_cast<unsigned char*>(result.data()), &length)
        == nullptr
      || length != result.size())
    throw error{error_code::internal, "OpenSSL does not compute HMAC-SHA256"};
  return result;
}

run_token run_secret::token(std::string_view purpose) const {
  auto whole = prove(purpose, {});
  run_token result;
  std::copy_n(whole.begin(), result.size(), result.begin());
  return result;
}

bool equal_in_constant_time(std::span<const std::byte> x,
                            std::span<const std::byte> y) noexcept {
  return x.size() == y.size()
         && CRYPTO_memcmp(x.data(), y.data(), x.size()) == 0;
}

void fill_with_random_bytes(std::span<std::byte> x) {
  while (!x.empty()) {
    auto got = ::getrandom(x.data(), x.size(), 0);
    if (got < 0 && errno != EINTR)
      throw error{error_code::internal,
                  std::string{"no random bytes: "} + std::strerror(errno)};
    if (got > 0)
      x = x.subspan(static_cast<size_t>(got));
  }
}

} // namespace smp
