#include "tests/support/catch.hpp"

#include "tests/support/actors/payloads.hpp"
#include "tests/support/hex.hpp"
#include "transport/files/run_secret.hpp"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

run_secret counting() {
  std::vector<std::byte> bytes(run_secret::size);
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(i);
  return run_secret{std::span{bytes}.first<run_secret::size>()};
}

} // namespace

TEST_CASE("a proof is what Python's hmac module computes",
          "[transport][secret]") {
  CHECK(hex(counting().prove("gate", to_bytes("what")))
        == "edc574d9e15d01a306f4c2a6067a353632ea709ad7a529b2c1bedb816f0c78a5");
  CHECK(hex(counting().token("ucx")) == "90f9950e6010ae65e66e7960230386ff");
}

TEST_CASE("a proof holds for one secret, one purpose and one text",
          "[transport][secret]") {
  auto x = run_secret::make();
  auto what = to_bytes("what");
  auto proof = x.prove("a", what);
  CHECK(equal_in_constant_time(proof, x.prove("a", what)));
  CHECK_FALSE(equal_in_constant_time(proof, x.prove("b", what)));
  CHECK_FALSE(equal_in_constant_time(proof, x.prove("a", to_bytes("other"))));
  CHECK_FALSE(
    equal_in_constant_time(proof, run_secret::make().prove("a", what)));
  CHECK_FALSE(
    equal_in_constant_time(proof, std::span{proof}.first(proof.size() - 1)));
}

TEST_CASE("a secret is written as text and read back", "[transport][secret]") {
  auto x = run_secret::make();
  auto text = x.to_hex();
  CHECK(text.size() == 64);
  for (auto& y : {text, text + "\n", text + " \r\n"}) {
    auto back = run_secret::from_hex(y);
    REQUIRE(back);
    CHECK(equal_in_constant_time(back->bytes(), x.bytes()));
  }
  CHECK(counting().to_hex().starts_with("000102030405060708090a0b0c0d0e0f"));
  auto odd = text;
  odd[10] = 'g';
  for (auto& y : {std::string{}, text.substr(1), text + "0", odd, "\n" + text})
    CHECK_FALSE(run_secret::from_hex(y));
}

TEST_CASE("each run has a secret of its own", "[transport][secret]") {
  CHECK(run_secret::make().to_hex() != run_secret::make().to_hex());
}
