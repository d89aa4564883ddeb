#include "tests/support/catch.hpp"

#include "actors/comm/device_arenas.hpp"
#include "tests/support/actors/payloads.hpp"
#include "tests/support/actors/simulated_device.hpp"
#include "transport/bytes.hpp"

#include <memory>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr rank_id zero{0};
constexpr rank_id one{1};

/// The device of a rank, and its arena of 64 KB.
struct side {
  explicit side(int16_t index)
    : device(
      std::make_shared<simulated_device>(index, device_reach{true, false})),
      arenas(device, 64 * 1024) {
    // nop
  }

  std::shared_ptr<simulated_device> device;
  device_arenas arenas;
};

/// Rank 1 has opened the arena of rank 0.
struct pair_of_ranks {
  pair_of_ranks() {
    opened = b.arenas.open({a.arenas.handle(), ""});
  }

  /// A tensor of rank 0, on its way to rank 1.
  tensor_ref lend(uint64_t size) {
    auto result = make_tensor(size, 1);
    auto block = a.arenas.take(size);
    REQUIRE(block);
    result.data = block.get();
    result.owner = std::move(block);
    result.device = a.arenas.place();
    a.arenas.lend(one, result);
    return result;
  }

  side a{0};
  side b{1};
  std::vector<bool> opened;
};

message returned(const std::vector<uint64_t>& numbers) {
  return device_arenas::give_back(numbers);
}

/// What a message says of a tensor that is lent.
tensor_ref place(uint64_t number, uint64_t offset, uint64_t size) {
  byte_writer out;
  for (auto x : {number, offset, size})
    out.u64(x);
  auto bytes = std::make_shared<std::vector<std::byte>>(out.take());
  tensor_ref result;
  result.data = bytes->data();
  result.nbytes = bytes->size();
  result.owner = bytes;
  result.lent = true;
  return result;
}

} // namespace

TEST_CASE("a tensor that is lent is found where it lies, until it is returned",
          "[actors][comm][device]") {
  pair_of_ranks x;
  CHECK(x.opened == std::vector<bool>{true, false});
  auto first = x.lend(40 * 1024);
  CHECK(first.nbytes < 100); // it says where
  CHECK(first.device == device_ref{});
  CHECK(first.home == device_ref{simulated_device::type, 0});
  CHECK(x.a.arenas.take(40 * 1024) == nullptr);
  auto found = x.b.arenas.find(zero, first);
  CHECK(found.tensor.device == device_ref{simulated_device::type, 0});
  CHECK(found.tensor.nbytes == 40 * 1024);
  CHECK_FALSE(found.tensor.lent);
  x.a.arenas.take_back(one, returned({found.number}));
  CHECK(x.a.arenas.status().used == 0);
}

TEST_CASE("a lost rank keeps no block", "[actors][comm][device]") {
  pair_of_ranks x;
  x.lend(4096);
  x.lend(4096);
  x.a.arenas.lost(zero);
  CHECK(x.a.arenas.status().blocks == 2);
  x.a.arenas.lost(one);
  CHECK(x.a.arenas.status().blocks == 0);
}

TEST_CASE("what no rank was lent is not taken back", "[actors][comm][device]") {
  pair_of_ranks x;
  auto number = x.b.arenas.find(zero, x.lend(4096)).number;
  auto from = GENERATE(zero, one);
  auto what = from == one ? number + 1 : number;
  CHECK_THROWS_WITH(x.a.arenas.take_back(from, returned({what})),
                    ContainsSubstring("returned a block"));
  CHECK(x.a.arenas.status().blocks == 1);
}

TEST_CASE("a place that cannot be is refused", "[actors][comm][device]") {
  struct row {
    rank_id from;
    uint64_t offset, size;
    std::string text;
  };
  auto y = GENERATE(values<row>({
    {zero, 60 * 1024, 4 * 1024 + 1, "ends after its arena"},
    {zero, uint64_t(-1), 2, "ends after its arena"},
    {zero, 0, uint64_t(-1), "ends after its arena"},
    {one, 0, 1, "not open here"},
    {rank_id{7}, 0, 1, "not open here"},
  }));
  pair_of_ranks x;
  CHECK_THROWS_WITH(x.b.arenas.find(y.from, place(1, y.offset, y.size)),
                    ContainsSubstring(y.text));
  auto short_one = place(1, 0, 1);
  short_one.nbytes = 8;
  CHECK_THROWS_AS(x.b.arenas.find(zero, short_one), error);
}

TEST_CASE("without a device, or one that shares memory, there is no arena",
          "[actors][comm][device]") {
  device_arenas none{nullptr, 4096};
  CHECK_FALSE(none);
  device_arenas alone{std::make_shared<simulated_device>(int16_t{0}), 4096};
  CHECK_FALSE(alone);
  CHECK(alone.handle().empty());
  CHECK(alone.open({"x", ""}) == std::vector<bool>{false, false});
}
