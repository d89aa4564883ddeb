#include "tests/support/catch.hpp"

#include "tests/support/actors/payloads.hpp"
#include "tests/support/allocated.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/hex.hpp"
#include "tests/support/mutations.hpp"
#include "transport/bytes.hpp"

#include <limits>
#include <random>
#include <tuple>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::Message;

namespace {

enum class colour : uint8_t { red, green, blue };

constexpr colour last_of(colour) {
  return colour::blue;
}

struct point {
  int32_t x = 0;
  float y = 0;
  bool operator==(const point&) const = default;
};

template <class Inspector>
bool inspect(Inspector& f, point& x) {
  return f.object(x).fields(f.field("x", x.x), f.field("y", x.y));
}

/// Has a field of every kind.
struct sample {
  bool flag = false;
  colour paint = colour::red;
  int16_t small = 0;
  double number = 0;
  std::string text;
  std::vector<std::byte> bytes;
  std::vector<bool> flags;
  std::vector<std::vector<uint32_t>> positions;
  std::vector<std::pair<uint32_t, point>> points;
  std::array<uint16_t, 3> three = {};
  std::vector<std::variant<bool, uint16_t, point>> either;
  std::optional<failure> error;
  std::vector<object_id> objects;
  request_id request;
  device_ref device;
  bool operator==(const sample&) const = default;
};

template <class Inspector>
bool inspect(Inspector& f, sample& x) {
  return f.object(x).fields(
    f.field("flag", x.flag), f.field("paint", x.paint),
    f.field("small", x.small), f.field("number", x.number),
    f.field("text", x.text), f.field("bytes", x.bytes),
    f.field("flags", x.flags), f.field("positions", x.positions),
    f.field("points", x.points), f.field("three", x.three),
    f.field("either", x.either), f.field("error", x.error),
    f.field("objects", x.objects), f.field("request", x.request),
    f.field("device", x.device));
}

sample make_sample() {
  return {true,
          colour::blue,
          std::numeric_limits<int16_t>::min(),
          -0.5,
          std::string{"a\0b \xff", 5},
          bytes_of({1, 2, 3}),
          {true, false, true},
          {{}, {1, 2}, {std::numeric_limits<uint32_t>::max()}},
          {{7, {-1, 0.25f}}},
          {1, 2, 3},
          {uint16_t{9}, true, point{1, 2}},
          failure{error_code::user_code, rank_id{1}, "blocks.3", "boom"},
          {{rank_id{1}, 5, 6}, {rank_id{2}, 7, 8}},
          {rank_id{3}, ~uint64_t{0}},
          {1, -1}};
}

struct with_tensors {
  std::vector<tensor_ref> many;
  std::optional<tensor_ref> maybe;
  tensor_ref one;
};

template <class Inspector>
bool inspect(Inspector& f, with_tensors& x) {
  return f.object(x).fields(f.field("many", x.many), f.field("maybe", x.maybe),
                            f.field("one", x.one));
}

with_tensors make_with_tensors() {
  return {{make_tensor(3, 1), make_tensor(0, 2)},
          make_tensor(4, 1),
          make_tensor(5, 3)};
}

/// @returns the text of the protocol error, or "no error" if `x` can be read.
template <class T>
std::string refusal(const payload& x) {
  return error_of([&x] { from_payload<T>(x, "sample"); }, error_code::protocol);
}

} // namespace

// -- the primitives -----------------------------------------------------------

TEST_CASE("what a byte_writer writes a byte_reader reads",
          "[transport][bytes]") {
  byte_writer out;
  out.u8(0xab);
  out.u16(0xabcd);
  out.u32(0xabcdef01);
  out.u64(0xabcdef0123456789);
  out.i64(-5);
  out.f64(-2.25);
  out.boolean(true);
  out.string("text");
  out.bytes(bytes_of({1, 2, 3}));
  out.raw(bytes_of({9, 8}));
  CHECK(out.size() == 1 + 2 + 4 + 8 + 8 + 8 + 1 + 4 + 4 + 4 + 3 + 2);
  auto bytes = out.take();
  CHECK(out.size() == 0);
  byte_reader in{bytes};
  CHECK(in.u8() == 0xab);
  CHECK(in.u16() == 0xabcd);
  CHECK(in.u32() == 0xabcdef01);
  CHECK(in.u64() == 0xabcdef0123456789);
  CHECK(in.i64() == -5);
  CHECK(in.f64() == -2.25);
  CHECK(in.boolean());
  CHECK(in.string() == "text");
  CHECK(hex(in.bytes()) == "010203");
  CHECK(in.remaining() == 2);
  CHECK(hex(in.raw(2)) == "0908");
  CHECK_NOTHROW(in.expect_end());
}

TEST_CASE("a read past the end names the field and the place",
          "[transport][bytes]") {
  auto bytes = bytes_of({1, 0, 0, 0, 5, 0});
  byte_reader in{bytes};
  in.u32();
  CHECK_THROWS_MATCHES(in.u64("request id"), error,
                       Message("request id at byte 4: 8 bytes wanted, 2 left"));
  CHECK_THROWS_MATCHES(in.expect_end(), error,
                       Message("end of message at byte 4: 2 bytes too many"));
  CHECK(in.u16() == 5);
}

TEST_CASE("a count must fit into what is left", "[transport][bytes]") {
  byte_writer out;
  out.u32(3);
  out.raw(std::vector<std::byte>(12));
  auto bytes = out.take();
  CHECK(byte_reader{bytes}.count(4) == 3);
  CHECK_THROWS_MATCHES(
    byte_reader{bytes}.count(5, "ids"), error,
    Message("ids at byte 4: claims 3 items, but only 12 bytes are left"));
}

// -- fields -------------------------------------------------------------------

TEST_CASE("a struct comes back with all its fields", "[transport][bytes]") {
  CHECK(from_payload<sample>(to_payload(make_sample()), "sample")
        == make_sample());
  CHECK(from_payload<sample>(to_payload(sample{}), "sample") == sample{});
}

TEST_CASE("the bytes of a struct are those of its fields",
          "[transport][bytes]") {
  CHECK(hex(to_payload(point{-2, 1.5f}).bytes) == "feffffff0000c03f");
  CHECK(hex(to_payload(colour::green).bytes) == "01");
  CHECK(hex(to_payload(std::optional<uint16_t>{}).bytes) == "00");
  CHECK(hex(to_payload(std::optional<uint16_t>{258}).bytes) == "010201");
  using either = std::variant<bool, uint16_t>;
  CHECK(hex(to_payload(either{true}).bytes) == "0001");
  CHECK(hex(to_payload(either{uint16_t{2}}).bytes) == "010200");
  CHECK(refusal<either>({bytes_of({2, 0, 0}), {}})
        == "malformed sample at byte 0: there is no value 2");
  CHECK(hex(to_payload(std::vector<uint16_t>{1, 2}).bytes)
        == "0200000001000200");
  CHECK(hex(to_payload(object_id{rank_id{1}, 2, 3}).bytes)
        == "0100000000000000020000000000000003000000");
  CHECK(
    hex(
      to_payload(failure{error_code::config, rank_id{2}, "m", "t", "h"}).bytes)
    == "010200000000000000010000006d01000000740100000068");
}

TEST_CASE("an error names the path of the field and its place",
          "[transport][bytes]") {
  auto bytes = to_payload(make_sample()).bytes;
  auto changed = [&](size_t at, int x) {
    auto result = bytes;
    result.at(at) = static_cast<std::byte>(x);
    return refusal<sample>({result, {}});
  };
  CHECK(changed(0, 2) == "malformed sample: flag at byte 0: neither 0 nor 1");
  CHECK(changed(1, 3)
        == "malformed sample: paint at byte 1: there is no value 3");
  auto size = bytes.size();
  // The device is one byte and two, before it the request of 16, before it two
  // objects of 20.
  CHECK(changed(size - 1, 1)
        == "malformed sample: device.index at byte " + std::to_string(size - 2)
             + ": no such value");
  auto cut = bytes;
  cut.resize(size - 3 - 16 - 4);
  CHECK_THAT(refusal<sample>({cut, {}}),
             ContainsSubstring("malformed sample: objects"));
  cut.resize(size - 3 - 8);
  CHECK_THAT(
    refusal<sample>(
      {{bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size) - 3 - 8},
       {}}),
    ContainsSubstring("request.number at byte " + std::to_string(size - 11)
                      + ": 8 bytes wanted, 0 left"));
}

TEST_CASE("an error may name the rank that sent the bytes",
          "[transport][bytes]") {
  CHECK(error_of([] { from_payload<uint64_t>({}, "length", rank_id{3}); },
                 error_code::protocol)
        == "rank 3: malformed length at byte 0: 8 bytes wanted, 0 left");
}

TEST_CASE("an enumeration and a device of a failure are checked",
          "[transport][bytes]") {
  auto x = to_payload(failure{error_code::config, rank_id{2}, "m", "t"});
  x.bytes[0] = std::byte{12}; // one more than `internal`
  CHECK(refusal<failure>(x)
        == "malformed sample: code at byte 0: there is no value 12");
  for (auto index : {-2, 128}) {
    auto y = to_payload(device_ref{0, static_cast<int16_t>(index)});
    CHECK_THAT(refusal<device_ref>(y), ContainsSubstring("no such value"));
  }
}

TEST_CASE("every truncation of a struct is refused", "[transport][bytes]") {
  auto bytes = to_payload(make_sample()).bytes;
  for (size_t n = 0; n < bytes.size(); ++n) {
    CAPTURE(n);
    // A buffer of the exact size, so that AddressSanitizer sees each read.
    std::vector<std::byte> cut{bytes.begin(),
                               bytes.begin() + static_cast<ptrdiff_t>(n)};
    CHECK_THAT(refusal<sample>({cut, {}}), ContainsSubstring(" at byte "));
  }
  bytes.push_back({});
  CHECK_THAT(refusal<sample>({bytes, {}}),
             ContainsSubstring("1 bytes too many"));
}

TEST_CASE("a mutated struct is refused or gives its bytes again",
          "[transport][bytes]") {
  auto original = to_payload(make_sample()).bytes;
  std::mt19937_64 engine{20260102};
  size_t refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    auto bytes = mutated(original, engine);
    allocated = 0;
    try {
      byte_reader in{bytes};
      auto x = in.get<sample>();
      if (allocated > 100 * bytes.size())
        FAIL("round " << round << " took " << allocated << " bytes");
      bytes.resize(in.position());
      if (to_payload(x).bytes != bytes)
        FAIL("round " << round << " does not give its bytes again");
    } catch (const error& x) {
      if (x.code() != error_code::protocol)
        FAIL("round " << round << ": " << x.what());
      if (allocated > 100 * original.size())
        FAIL("round " << round << " took " << allocated << " bytes");
      ++refused;
    }
  }
  CHECK(refused > 2'000);
  CHECK(refused < 20'000);
}

TEST_CASE("a vector that claims too much takes no memory",
          "[transport][bytes]") {
  std::vector<std::byte> bytes(1000, std::byte{0xff});
  auto took = [&](auto x) {
    byte_reader in{bytes};
    allocated = 0;
    CHECK_THROWS_AS(in.item("xs", x), error);
    return allocated;
  };
  CHECK(took(std::vector<uint64_t>{}) < 1000);
  CHECK(took(std::vector<sample>{}) < 1000);
  CHECK(took(std::vector<std::vector<std::string>>{}) < 1000);
  CHECK(took(std::string{}) < 1000);
  // As many as there are bytes: only what is really there takes memory.
  std::fill_n(bytes.begin(), 4, std::byte{});
  bytes[0] = std::byte{200};
  CHECK(took(std::vector<sample>{}) < 3 * sizeof(sample));
}

// -- tensors ------------------------------------------------------------------

TEST_CASE("tensors travel beside the bytes, in the order of the fields",
          "[transport][bytes]") {
  auto x = make_with_tensors();
  auto sent = to_payload(x);
  REQUIRE(sent.tensors.size() == 4);
  CHECK(sent.tensors[0].data == x.many[0].data); // passed through, not copied
  CHECK(sent.tensors[3].data == x.one.data);
  CHECK(sent.bytes.size() == 4 + 1);
  auto y = from_payload<with_tensors>(sent, "sample");
  REQUIRE(y.many.size() == 2);
  CHECK(y.many[1].shape == x.many[1].shape);
  REQUIRE(y.maybe);
  CHECK(y.maybe->data == x.maybe->data);
  CHECK(y.one.data == x.one.data);
}

TEST_CASE("a message with other tensors than its bytes say is refused",
          "[transport][bytes]") {
  auto x = to_payload(make_with_tensors());
  auto y = x;
  y.tensors.pop_back();
  CHECK_THAT(refusal<with_tensors>(y),
             ContainsSubstring("one at byte 5: the message has no more"));
  y = x;
  y.tensors.push_back(make_tensor(1, 1));
  CHECK_THAT(refusal<with_tensors>(y), ContainsSubstring("1 tensors too many"));
  y = x;
  y.bytes[0] = std::byte{5};
  CHECK_THAT(refusal<with_tensors>(y),
             ContainsSubstring("many at byte 4: claims 5 tensors, but only 4"));
  CHECK_THROWS_MATCHES(byte_writer{}.put(x.tensors[0]), error,
                       Message("a tensor where only bytes travel"));
}

TEST_CASE("the outline of a tensor is checked", "[transport][bytes]") {
  auto read = [](tensor_ref x) {
    byte_writer out;
    inspect_outline(out, x);
    auto bytes = out.take();
    byte_reader in{bytes};
    tensor_ref result;
    inspect_outline(in, result);
    in.expect_end();
    return result;
  };
  auto x = make_tensor(24, 1);
  x.shape = {2, 0, 3};
  x.device = {1, 127};
  auto y = read(x);
  CHECK(y.nbytes == x.nbytes);
  CHECK(y.dtype == x.dtype);
  CHECK(y.device == x.device);
  CHECK(y.shape == x.shape);
  CHECK(y.data == nullptr);
  CHECK(y.strides.empty());
  x.shape = {2, 3, 1};
  for (auto& strides :
       std::vector<std::vector<int64_t>>{{1, 2, 6}, {1, 2, 1}, {3, 1, 3}}) {
    x.strides = strides;
    CHECK(read(x).strides == strides);
  }
  for (auto& strides : std::vector<std::vector<int64_t>>{
         {1, 2}, {1, 2, 6, 6}, {1, 1, 1}, {2, 1, 1}, {1, 2, 5}, {1, 2, -1}}) {
    x.strides = strides;
    CHECK_THROWS_MATCHES(read(x), error,
                         Message("strides at byte 41: no such value"));
  }
  constexpr auto many = int64_t{1} << 40;
  x.shape = {many, many};
  x.strides = {1, many};
  CHECK_THROWS_MATCHES(read(x), error,
                       Message("strides at byte 33: no such value"));
  x.shape = {2, 0, 3};
  x.strides.clear();
  x.shape[1] = -1;
  CHECK_THROWS_MATCHES(read(x), error,
                       Message("shape at byte 13: no such value"));
}
