#include "tests/support/catch.hpp"

#include "transport/error.hpp"
#include "transport/memory/buddy_allocator.hpp"

#include <algorithm>
#include <bit>
#include <map>
#include <optional>
#include <random>
#include <vector>

using namespace smp;

namespace {

constexpr uint64_t smallest = 64;

/// The same by trying every place: one flag per smallest part.
class plain_allocator {
public:
  explicit plain_allocator(uint64_t capacity)
    : taken_(capacity / smallest, false) {
    // Parts reach over no border between the powers of two of the capacity.
    uint64_t begin = 0;
    for (auto rest = taken_.size(); rest > 0; rest -= std::bit_floor(rest)) {
      begin += std::bit_floor(rest);
      borders_.push_back(begin);
    }
  }

  std::optional<uint64_t> allocate(uint64_t size) {
    auto units = std::bit_ceil(
      std::max<uint64_t>((size + smallest - 1) / smallest, 1));
    // The smallest free part that is large enough gives a place, the lowest
    // among those of its size.
    for (auto part = units; part <= taken_.size(); part *= 2)
      for (uint64_t i = 0; i + part <= taken_.size(); i += part)
        if (is_part(i, part)) {
          std::fill_n(taken_.begin() + static_cast<ptrdiff_t>(i), units, true);
          return i * smallest;
        }
    return std::nullopt;
  }

  void release(uint64_t offset, uint64_t size) {
    auto units = std::bit_ceil(
      std::max<uint64_t>((size + smallest - 1) / smallest, 1));
    std::fill_n(taken_.begin() + static_cast<ptrdiff_t>(offset / smallest),
                units, false);
  }

  uint64_t used() const {
    return smallest
           * static_cast<uint64_t>(
             std::count(taken_.begin(), taken_.end(), true));
  }

  uint64_t largest_free() const {
    for (auto part = std::bit_floor(taken_.size()); part > 0; part /= 2)
      for (uint64_t i = 0; i + part <= taken_.size(); i += part)
        if (is_free(i, part))
          return part * smallest;
    return 0;
  }

private:
  bool is_free(uint64_t begin, uint64_t units) const {
    auto first = taken_.begin() + static_cast<ptrdiff_t>(begin);
    return std::none_of(first, first + static_cast<ptrdiff_t>(units),
                        [](bool x) { return x; })
           && std::none_of(borders_.begin(), borders_.end(), [&](auto x) {
                return x > begin && x < begin + units;
              });
  }

  /// Free, and its buddy is not: else both were one.
  bool is_part(uint64_t begin, uint64_t units) const {
    if (!is_free(begin, units))
      return false;
    auto both = begin / (2 * units) * (2 * units);
    return both + 2 * units > taken_.size() || !is_free(both, 2 * units);
  }

  std::vector<bool> taken_;
  std::vector<uint64_t> borders_;
};

} // namespace

TEST_CASE("random allocations and releases are those of a plain allocator",
          "[transport][buddy_allocator]") {
  auto capacity = GENERATE(as<uint64_t>{}, 64, 4096, 64 * 127, 64 * 200 + 13,
                           65536);
  auto seed = GENERATE(range(1u, 6u));
  CAPTURE(capacity, seed);
  std::mt19937_64 random{seed};
  buddy_allocator x{capacity, smallest};
  plain_allocator plain{capacity};
  REQUIRE(x.capacity() == capacity / smallest * smallest);
  std::map<uint64_t, uint64_t> held; // size by offset
  uint64_t wanted = 0;
  for (int i = 0; i < 3000; ++i) {
    // By turns more is taken and more released.
    auto takes = random() % 8 < (i / 300 % 2 == 0 ? 6u : 2u);
    if (takes || held.empty()) {
      auto size = random() % (uint64_t{1} << (random() % 17));
      auto got = x.allocate(size);
      REQUIRE(got == plain.allocate(size));
      if (got) {
        REQUIRE(*got + size <= x.capacity());
        held.emplace(*got, size);
        wanted += size;
      }
    } else {
      auto which = std::next(held.begin(),
                             static_cast<ptrdiff_t>(random() % held.size()));
      x.release(which->first);
      plain.release(which->first, which->second);
      wanted -= which->second;
      held.erase(which);
    }
    REQUIRE(x.used() == plain.used());
    REQUIRE(x.largest_free() == plain.largest_free());
    REQUIRE(x.wanted() == wanted);
    REQUIRE(x.parts() == held.size());
  }
  for (auto& [offset, size] : held)
    x.release(offset);
  CHECK(x.used() == 0);
  CHECK(x.largest_free() == std::bit_floor(capacity / smallest) * smallest);
}

TEST_CASE("a part lies at a multiple of its size",
          "[transport][buddy_allocator]") {
  buddy_allocator x{64 * 77, smallest};
  while (auto a = x.allocate(65))
    CHECK(*a % 128 == 0);
  CHECK(x.capacity() - x.used() == 64);
}

TEST_CASE("nothing is dealt out of nothing, and nothing released twice",
          "[transport][buddy_allocator]") {
  buddy_allocator none{63, smallest};
  CHECK(none.capacity() == 0);
  CHECK(none.allocate(0) == std::nullopt);
  CHECK(none.largest_free() == 0);
  buddy_allocator x{1024, smallest};
  CHECK(x.allocate(~uint64_t{0}) == std::nullopt);
  CHECK(x.allocate(1025) == std::nullopt);
  auto all = x.allocate(1024);
  REQUIRE(all);
  CHECK_THROWS_AS(x.release(64), error);
  x.release(*all);
  CHECK_THROWS_AS(x.release(*all), error);
  CHECK_THROWS_AS((buddy_allocator{1024, 100}), error);
}
