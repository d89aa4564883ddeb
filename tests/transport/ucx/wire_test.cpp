#include "tests/support/catch.hpp"

#include "tests/support/actors/payloads.hpp"
#include "tests/support/error_of.hpp"
#include "transport/ucx/wire.hpp"

#include <algorithm>
#include <random>
#include <vector>

using namespace smp;
using namespace smp::test;
using namespace smp::ucx;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

namespace {

message sample() {
  auto result = make_message(
    "envelope",
    {make_tensor(100, 1), make_tensor(0, 2), make_tensor(packed_limit, 3),
     make_tensor(packed_limit + 1, 4), make_tensor(70000, 5)},
    message_kind::control);
  result.body.tensors[0].shape = {2, 5, 10};
  result.body.tensors[0].strides = {1, 2, 10};
  result.body.tensors[0].dtype = 7;
  return result;
}

constexpr run_token token = {std::byte{1}, std::byte{2}, std::byte{3}};

std::vector<std::byte> header_bytes(const unit_header& x) {
  std::vector<std::byte> result(header_size);
  write_header(result, x, token);
  return result;
}

/// @returns why `bytes` are not a description, or "no error".
std::string refusal(std::span<const std::byte> bytes) {
  block_pool pool{0};
  return error_of([&] { read_description(bytes, pool); }, error_code::protocol);
}

} // namespace

TEST_CASE("a description says all but the bytes of large tensors",
          "[transport][ucx][wire]") {
  block_pool pool{0};
  auto x = sample();
  auto bytes = write_description(x, 16);
  auto got = read_description(std::span{bytes}.subspan(16), pool);
  CHECK(got.content.kind == message_kind::control);
  CHECK(got.content.body.bytes == x.body.bytes);
  CHECK(got.apart == std::vector<uint32_t>{3, 4});
  auto& tensors = got.content.body.tensors;
  REQUIRE(tensors.size() == 5);
  for (size_t i = 0; i < 5; ++i) {
    CHECK(tensors[i].nbytes == x.body.tensors[i].nbytes);
    CHECK(tensors[i].shape == x.body.tensors[i].shape);
    CHECK(tensors[i].strides == x.body.tensors[i].strides);
    CHECK(tensors[i].dtype == x.body.tensors[i].dtype);
  }
  CHECK(same_bytes(tensors[0], pattern(100, 1)));
  CHECK(same_bytes(tensors[2], pattern(packed_limit, 3)));
  CHECK(tensors[3].data == nullptr);
  CHECK(tensors[4].data == nullptr);
}

TEST_CASE("bytes lie in host memory, and say where they belong",
          "[transport][ucx][wire]") {
  block_pool pool{0};
  auto x = sample();
  x.body.tensors[1].home = {1, 3};
  auto bytes = write_description(x, 0);
  CHECK(bytes.size() == write_description(sample(), 0).size());
  auto tensors = read_description(bytes, pool).content.body.tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    CHECK(tensors[i].device == device_ref{});
    CHECK(tensors[i].home == x.body.tensors[i].home);
  }
}

TEST_CASE("a description that is cut or too long is refused",
          "[transport][ucx][wire]") {
  auto bytes = write_description(sample(), 0);
  for (size_t size = 0; size < bytes.size(); ++size)
    REQUIRE_THAT(refusal(std::span{bytes}.first(size)),
                 StartsWith("malformed message: "));
  bytes.push_back({});
  CHECK_THAT(refusal(bytes), ContainsSubstring("tensors at byte"));
}

TEST_CASE("claims that memory could not hold are refused before it is asked",
          "[transport][ucx][wire]") {
  auto intact = write_description(sample(), 0);
  // Size of the envelope, number of tensors, size of a tensor, its dimensions.
  for (auto [at, field] : {std::pair{1, "envelope"},
                           {9, "tensors"},
                           {13, "tensor.nbytes"},
                           {26, "tensor.shape"}}) {
    INFO(field);
    auto bytes = intact;
    std::fill_n(bytes.begin() + at, 4, std::byte{0xff});
    if (field == std::string{"tensor.nbytes"})
      std::fill_n(bytes.begin() + at, 8, std::byte{0xff});
    CHECK_THAT(refusal(bytes), ContainsSubstring(field));
  }
}

TEST_CASE("wrong sizes, strides, kinds and devices are refused",
          "[transport][ucx][wire]") {
  auto x = sample();
  x.body.tensors[0].shape[1] = -1;
  CHECK_THAT(refusal(write_description(x, 0)),
             ContainsSubstring("tensor.shape at byte"));
  x = sample();
  x.body.tensors[0].strides[1] = 3;
  CHECK_THAT(refusal(write_description(x, 0)),
             ContainsSubstring("tensor.strides at byte"));
  x = sample();
  x.body.tensors[4].home = {1, 300};
  CHECK_THAT(refusal(write_description(x, 0)),
             ContainsSubstring("tensor.device.index at byte"));
  auto bytes = write_description(sample(), 0);
  bytes[0] = std::byte{200};
  CHECK_THAT(refusal(bytes),
             ContainsSubstring("kind at byte 0: there is no value 200"));
}

TEST_CASE("a damaged description is refused or read, and never worse",
          "[transport][ucx][wire]") {
  block_pool pool{0};
  auto intact = write_description(sample(), 0);
  std::mt19937_64 random{42};
  size_t refused = 0;
  for (int round = 0; round < 20000; ++round) {
    auto bytes = intact;
    for (auto changes = random() % 4 + 1; changes > 0; --changes)
      bytes[random() % std::min<size_t>(bytes.size(), 200)] = static_cast<
        std::byte>(random());
    bytes.resize(bytes.size() - random() % 2 * (random() % bytes.size()));
    if (refusal(bytes) != "no error") {
      ++refused;
      continue;
    }
    auto got = read_description(bytes, pool);
    for (auto& t : got.content.body.tensors)
      if (is_packed(t) && t.nbytes > 0)
        REQUIRE(t.data != nullptr);
  }
  CHECK(refused > 1000);
  CHECK(refused < 20000);
}

TEST_CASE("a header is read back, and damaged ones are refused",
          "[transport][ucx][wire]") {
  unit_header x;
  x.kind = unit_kind::chunk;
  x.data = data_kind::bytes;
  x.from = 3;
  x.tensor = 4;
  x.number = 5;
  x.offset = 6;
  x.tensor_size = 7;
  x.transfer = 8;
  auto bytes = header_bytes(x);
  auto got = read_header(bytes, token);
  REQUIRE(got);
  CHECK(*got == x);
  for (size_t size = 0; size < bytes.size(); ++size)
    REQUIRE_FALSE(read_header(std::span{bytes}.first(size), token));
  for (size_t at = 0; at < token.size() + 6; ++at) {
    auto damaged = bytes;
    damaged[at] = std::byte{99};
    CHECK_FALSE(read_header(damaged, token));
  }
  CHECK_FALSE(read_header(bytes, run_token{}));
}
