#include "tests/support/catch.hpp"

#include "tests/support/payloads.hpp"
#include "transport/ucx/wire.hpp"

#include <cstring>
#include <random>
#include <vector>

using namespace smp;
using namespace smp::test;
using namespace smp::ucx;

namespace {

message sample() {
  auto result = make_message("envelope",
                             {make_tensor(100, 1), make_tensor(0, 2),
                              make_tensor(packed_limit, 3),
                              make_tensor(packed_limit + 1, 4),
                              make_tensor(70000, 5)},
                             message_kind::control);
  result.body.tensors[0].shape = {2, 5, 10};
  result.body.tensors[0].dtype = 7;
  return result;
}

std::vector<std::byte> header_bytes(const unit_header& x) {
  std::vector<std::byte> result(sizeof x);
  std::memcpy(result.data(), &x, sizeof x);
  return result;
}

} // namespace

TEST_CASE("a description says all but the bytes of large tensors",
          "[transport][ucx][wire]") {
  block_pool pool{0};
  auto x = sample();
  auto bytes = write_description(x, 16);
  auto got = read_description(std::span{bytes}.subspan(16), pool);
  REQUIRE(got);
  CHECK(got->content.kind == message_kind::control);
  CHECK(got->content.body.bytes == x.body.bytes);
  CHECK(got->apart == std::vector<uint32_t>{3, 4});
  auto& tensors = got->content.body.tensors;
  REQUIRE(tensors.size() == 5);
  for (size_t i = 0; i < 5; ++i) {
    CHECK(tensors[i].nbytes == x.body.tensors[i].nbytes);
    CHECK(tensors[i].shape == x.body.tensors[i].shape);
    CHECK(tensors[i].dtype == x.body.tensors[i].dtype);
  }
  CHECK(same_bytes(tensors[0], pattern(100, 1)));
  CHECK(same_bytes(tensors[2], pattern(packed_limit, 3)));
  CHECK(tensors[3].data == nullptr);
  CHECK(tensors[4].data == nullptr);
}

TEST_CASE("a description that is cut or too long is refused",
          "[transport][ucx][wire]") {
  block_pool pool{0};
  auto bytes = write_description(sample(), 0);
  for (size_t size = 0; size < bytes.size(); ++size)
    REQUIRE_FALSE(read_description(std::span{bytes}.first(size), pool));
  bytes.push_back({});
  CHECK_FALSE(read_description(bytes, pool));
}

TEST_CASE("claims that memory could not hold are refused before it is asked",
          "[transport][ucx][wire]") {
  block_pool pool{0};
  auto intact = write_description(sample(), 0);
  // Numbers of tensors, size of the envelope, size and dimensions of a tensor.
  for (size_t at : {4, 8, 16, 28}) {
    auto bytes = intact;
    std::memset(bytes.data() + at, 0xFF, 4);
    CHECK_FALSE(read_description(bytes, pool));
  }
  auto bytes = intact;
  std::memset(bytes.data() + 16, 0xFF, 8);
  CHECK_FALSE(read_description(bytes, pool));
}

TEST_CASE("negative sizes, unknown kinds and devices are refused",
          "[transport][ucx][wire]") {
  block_pool pool{0};
  auto x = sample();
  x.body.tensors[0].shape[1] = -1;
  CHECK_FALSE(read_description(write_description(x, 0), pool));
  x = sample();
  x.body.tensors[4].device = {1, 0};
  CHECK_FALSE(read_description(write_description(x, 0), pool));
  auto bytes = write_description(sample(), 0);
  bytes[0] = std::byte{200};
  CHECK_FALSE(read_description(bytes, pool));
}

TEST_CASE("a damaged description is refused or read, and never worse",
          "[transport][ucx][wire]") {
  block_pool pool{0};
  auto intact = write_description(sample(), 0);
  std::mt19937_64 random{42};
  for (int round = 0; round < 20000; ++round) {
    auto bytes = intact;
    for (auto changes = random() % 4 + 1; changes > 0; --changes)
      bytes[random() % std::min<size_t>(bytes.size(), 200)]
        = static_cast<std::byte>(random());
    bytes.resize(bytes.size() - random() % 2 * (random() % bytes.size()));
    auto got = read_description(bytes, pool);
    if (!got)
      continue;
    for (auto& t : got->content.body.tensors)
      if (is_packed(t) && t.nbytes > 0)
        REQUIRE(t.data != nullptr);
  }
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
  auto bytes = header_bytes(x);
  auto got = read_header(bytes);
  REQUIRE(got);
  CHECK(std::memcmp(&*got, &x, sizeof x) == 0);
  for (size_t size = 0; size < bytes.size(); ++size)
    REQUIRE_FALSE(read_header(std::span{bytes}.first(size)));
  for (size_t at = 0; at < 5; ++at) {
    auto damaged = bytes;
    damaged[at] = std::byte{99};
    CHECK_FALSE(read_header(damaged));
  }
  x.kind = unit_kind{0};
  CHECK_FALSE(read_header(header_bytes(x)));
}
