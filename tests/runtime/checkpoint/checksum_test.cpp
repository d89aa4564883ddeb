#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checksum.hpp"

#include <string>

using namespace smp;

namespace {

std::string sum_of(const std::string& x) {
  return to_hex(checksum(x.data(), x.size()));
}

} // namespace

TEST_CASE("the checksum is XXH64, as other programs compute it",
          "[runtime][checkpoint]") {
  CHECK(sum_of("") == "ef46db3751d8e999");
  CHECK(sum_of("a") == "d24ec4f1a98c6e5b");
  CHECK(sum_of("abc") == "44bc2cf5ad770999");
  CHECK(sum_of("123456789") == "8cb841db40e6ae83");
  CHECK(sum_of("Nobody inspects the spammish repetition")
        == "fbcea83c8a378bf1");
}

TEST_CASE("every bit counts for the checksum, wherever it is",
          "[runtime][checkpoint]") {
  for (size_t size : {1, 7, 31, 32, 33, 100}) {
    std::string bytes(size, 'x');
    auto before = sum_of(bytes);
    for (size_t i = 0; i < size; ++i)
      for (int bit = 0; bit < 8; ++bit) {
        auto other = bytes;
        other[i] = static_cast<char>(other[i] ^ (1 << bit));
        CHECK(sum_of(other) != before);
      }
  }
}
