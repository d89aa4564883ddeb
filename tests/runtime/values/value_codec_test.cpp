#include "tests/support/catch.hpp"

#include "runtime/values/value_codec.hpp"
#include "tests/support/allocated.hpp"
#include "tests/support/hex.hpp"
#include "tests/support/mutations.hpp"

#include <cmath>
#include <limits>
#include <random>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::Message;

namespace {

// -- helpers ------------------------------------------------------------------

std::vector<std::byte> encode(const value& x) {
  return to_payload(x).bytes;
}

/// Reads a whole message of one value.
value decode(const std::vector<std::byte>& xs) {
  byte_reader in{xs};
  auto result = in.get<value>();
  in.expect_end();
  return result;
}

/// Holds every kind, nested, with the numbers at the edges of their types.
value everything() {
  auto nan = std::numeric_limits<double>::quiet_NaN();
  auto inf = std::numeric_limits<double>::infinity();
  return value::tuple({
    value::none(),
    value::of(true),
    value::of(false),
    value::of(std::numeric_limits<int64_t>::min()),
    value::of(std::numeric_limits<int64_t>::max()),
    value::of(-0.0),
    value::of(nan),
    value::of(std::complex<double>{-inf, 0.5}),
    value::of(std::string{"a\0b \xff", 5}),
    value::of(""),
    value::tensor(0),
    value::tensor(0xffffffff),
    value::undefined(),
    value::list({}, "List[int]"),
    value::list({value::of(int64_t{1}), value::list({value::none()})}),
    value::tuple({}),
    value::dict({{value::of("b"), value::tensor(3)},
                 {value::of(int64_t{7}), value::of(2.5)},
                 {value::of("a"), value::dict({}, "Dict[str, Tensor]")}}),
    value::of(device_ref{1, -1}),
    value::of(device_ref{0, 127}),
    value::of(dtype_value{15}),
    value::of(nested_tensor{{0}, {1}, {0xffffffff}, {3}}),
  });
}

/// @returns `depth` lists around none.
value nested(size_t depth) {
  value result;
  for (size_t i = 0; i < depth; ++i)
    result = value::list({std::move(result)});
  return result;
}

bool is_protocol_error(const error& x) {
  return x.code() == error_code::protocol;
}

} // namespace

// -- values -------------------------------------------------------------------

TEST_CASE("a value of every kind survives the codec bit for bit") {
  auto x = everything();
  CHECK(decode(encode(x)) == x);
  for (auto& item : x.get_if<tuple_value>()->items) {
    INFO(to_string(item.kind()));
    CHECK(decode(encode(item)) == item);
  }
}

TEST_CASE("equality of values is that of kinds and bits") {
  auto items = everything().get_if<tuple_value>()->items;
  for (size_t i = 0; i < items.size(); ++i)
    for (size_t j = 0; j < items.size(); ++j)
      CHECK((items[i] == items[j]) == (i == j));
  CHECK_FALSE(value::of(0.0) == value::of(-0.0));
  CHECK_FALSE(value::of(int64_t{1}) == value::of(1.0));
  CHECK_FALSE(value::list({}) == value::list({}, "List[int]"));
  CHECK_FALSE(value::list({value::none()}) == value::tuple({value::none()}));
}

TEST_CASE("the bytes of a value are those of the description") {
  CHECK(hex(encode(value::none())) == "00");
  CHECK(hex(encode(value::of(true))) == "0101");
  CHECK(hex(encode(value::of(int64_t{-2}))) == "02feffffffffffffff");
  // 1.5 = 0x3ff8000000000000
  CHECK(hex(encode(value::of(1.5))) == "03000000000000f83f");
  CHECK(hex(encode(value::of("ab"))) == "05020000006162");
  CHECK(hex(encode(value::tensor(258))) == "0602010000");
  CHECK(hex(encode(value::list({value::undefined()}, "x")))
        == "0801000000780100000007");
  CHECK(hex(encode(value::tuple({}))) == "0900000000");
  CHECK(hex(encode(value::dict({{value::none(), value::none()}})))
        == "0a00000000010000000000");
  CHECK(hex(encode(value::of(device_ref{1, -1}))) == "0b01ffff");
  CHECK(hex(encode(value::of(dtype_value{6}))) == "0c06");
}

TEST_CASE(
  "tensors are visited in the order of the tree and can be renumbered") {
  auto x = value::tuple(
    {value::tensor(4),
     value::dict({{value::tensor(2), value::list({value::tensor(9)})}}),
     value::of(int64_t{1}), value::tensor(4)});
  std::vector<uint32_t> seen;
  for_each_tensor(std::as_const(x),
                  [&](const tensor_index& t) { seen.push_back(t.index); });
  CHECK(seen == std::vector<uint32_t>{4, 2, 9, 4});
  for_each_tensor(x, [](tensor_index& t) { t.index += 1; });
  CHECK(x
        == value::tuple(
          {value::tensor(5),
           value::dict({{value::tensor(3), value::list({value::tensor(10)})}}),
           value::of(int64_t{1}), value::tensor(5)}));
}

// -- hostile bytes ------------------------------------------------------------

TEST_CASE("every truncation of a value is refused with its place") {
  auto bytes = encode(everything());
  for (size_t n = 0; n < bytes.size(); ++n) {
    std::vector<std::byte> cut{bytes.begin(),
                               bytes.begin() + static_cast<ptrdiff_t>(n)};
    CAPTURE(n);
    try {
      decode(cut);
      FAIL("no error");
    } catch (const error& x) {
      CHECK(is_protocol_error(x));
      CHECK_THAT(x.what(), ContainsSubstring(" at byte "));
    }
  }
}

TEST_CASE("mutated bytes are refused or are another value") {
  auto original = encode(everything());
  std::mt19937_64 engine{20260101};
  size_t refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    auto bytes = mutated(original, engine);
    allocated = 0;
    try {
      byte_reader in{bytes};
      auto x = in.get<value>();
      // What can be read is written as the same bytes: nothing is lost.
      auto again = encode(x);
      bytes.resize(in.position());
      if (again != bytes)
        FAIL("round " << round << " does not give its bytes again");
    } catch (const error& x) {
      if (!is_protocol_error(x))
        FAIL("round " << round << ": " << x.what());
      ++refused;
    }
    if (allocated > 200 * original.size())
      FAIL("round " << round << " took " << allocated << " bytes");
  }
  CHECK(refused > 5'000);
  CHECK(refused < 20'000);
}

TEST_CASE("nested lists that claim all bytes that are left take no memory") {
  // Each level claims as many items as bytes follow it, which a check of one
  // level alone would believe 60 times.
  constexpr size_t depth = 60;
  constexpr size_t padding = 100'000;
  byte_writer out;
  constexpr size_t header = 1 + 4;
  for (size_t i = 1; i <= depth; ++i) {
    out.u8(static_cast<uint8_t>(value_kind::tuple));
    out.u32(static_cast<uint32_t>((depth - i) * header + padding));
  }
  for (size_t i = 0; i < padding; ++i)
    out.u8(0);
  auto bytes = out.take();
  byte_reader in{bytes};
  allocated = 0;
  CHECK_THROWS_MATCHES(in.get<value>(), error,
                       Message("tuple at byte 10: claims more items than the "
                               "message has bytes"));
  CHECK(allocated < 2 * sizeof(value) * bytes.size());
}

TEST_CASE("a count that the message cannot hold is refused before it is used") {
  for (auto kind : {value_kind::string, value_kind::list, value_kind::tuple,
                    value_kind::dict}) {
    INFO(to_string(kind));
    byte_writer out;
    out.u8(static_cast<uint8_t>(kind));
    for (int i = 0; i < 16; ++i)
      out.u8(0xff);
    auto bytes = out.take();
    byte_reader in{bytes};
    allocated = 0;
    CHECK_THROWS_AS(in.get<value>(), error);
    CHECK(allocated < 10'000); // the error itself
  }
}

TEST_CASE("values nest 64 deep and no deeper, written and read") {
  CHECK(decode(encode(nested(max_value_depth))) == nested(max_value_depth));
  try {
    encode(nested(max_value_depth + 1));
    FAIL("no error");
  } catch (const error& x) {
    CHECK(x.code() == error_code::unsupported);
  }
  byte_writer out;
  for (int i = 0; i < 1'000'000; ++i) {
    out.u8(static_cast<uint8_t>(value_kind::tuple));
    out.u32(1);
  }
  auto bytes = out.take();
  CHECK_THROWS_MATCHES(decode(bytes), error,
                       Message("tuple at byte 321: nested more than 64 deep"));
}

TEST_CASE("an unknown kind and an impossible bool are refused") {
  CHECK_THROWS_MATCHES(decode(bytes_of({14})), error,
                       Message("value kind at byte 1: unknown kind 14"));
  CHECK_THROWS_MATCHES(decode(bytes_of({1, 2})), error,
                       Message("bool at byte 1: neither 0 nor 1"));
}

TEST_CASE("a device that no library can count to is refused") {
  for (auto index : {-2, 128, 300, -32768}) {
    INFO(index);
    auto bytes = encode(value::of(device_ref{1, static_cast<int16_t>(index)}));
    CHECK_THROWS_MATCHES(decode(bytes), error,
                         Message("device.index at byte 2: no such value"));
  }
}
