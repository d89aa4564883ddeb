#include "tests/support/catch.hpp"

#include "runtime/offload/file_slots.hpp"

#include <map>
#include <random>
#include <vector>

using namespace smp;

namespace {

constexpr auto page = file_slots::granule;

using slot = file_slots::slot;

} // namespace

TEST_CASE("a file begins empty and grows by what is missing", "[R57]") {
  file_slots x;
  CHECK(!x.take(1));
  CHECK(x.missing(1) == page);
  CHECK(x.missing(page + 1) == 2 * page);
  x.grow(2 * page);
  CHECK(x.size() == 2 * page);
  CHECK(x.missing(2 * page) == 0);
  CHECK(x.take(page + 1) == slot{0, 2 * page});
  CHECK(x.in_use() == 2 * page);
  CHECK(!x.take(1));
}

TEST_CASE("what is free at the end of a file counts when it grows", "[R57]") {
  file_slots x;
  x.grow(3 * page);
  auto first = x.take(page);
  CHECK(x.missing(3 * page) == page);
  x.give_back(*first);
  CHECK(x.missing(3 * page) == 0);
}

TEST_CASE("the free part that fits best is taken", "[R57]") {
  file_slots x;
  x.grow(8 * page);
  auto a = x.take(3 * page);
  auto b = x.take(page);
  auto c = x.take(2 * page);
  CHECK(x.take(2 * page) == slot{6 * page, 2 * page});
  x.give_back(*a);
  x.give_back(*c);
  CHECK(x.take(2 * page) == *c);
  CHECK(x.take(page) == slot{0, page});
  x.give_back(*b);
  CHECK(x.take(3 * page) == slot{page, 3 * page});
}

TEST_CASE("neighbours that are free become one", "[R57]") {
  for (auto order : std::vector<std::vector<size_t>>{
         {0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}}) {
    file_slots x;
    x.grow(3 * page);
    std::vector<slot> xs{*x.take(1), *x.take(1), *x.take(1)};
    for (auto i : order)
      x.give_back(xs[i]);
    CHECK(x.in_use() == 0);
    CHECK(x.take(3 * page) == slot{0, 3 * page});
  }
}

TEST_CASE("slots in use never overlap", "[R57]") {
  std::mt19937 random{7};
  file_slots x;
  std::vector<slot> used;
  for (int i = 0; i < 2000; ++i) {
    if (!used.empty() && random() % 2 == 0) {
      auto k = random() % used.size();
      x.give_back(used[k]);
      used.erase(used.begin() + static_cast<int64_t>(k));
      continue;
    }
    auto bytes = 1 + random() % (5 * page);
    auto missing = x.missing(bytes);
    x.grow(missing);
    auto y = x.take(bytes);
    REQUIRE(y);
    CHECK(y->bytes >= bytes);
    used.push_back(*y);
  }
  std::map<uint64_t, uint64_t> sorted;
  uint64_t sum = 0;
  for (auto& y : used) {
    sorted.emplace(y.offset, y.bytes);
    sum += y.bytes;
  }
  CHECK(sum == x.in_use());
  REQUIRE(sorted.size() == used.size());
  uint64_t end = 0;
  for (auto [offset, bytes] : sorted) {
    CHECK(offset >= end);
    end = offset + bytes;
  }
  CHECK(end <= x.size());
}

TEST_CASE("steps that are alike find the same slots", "[R57]") {
  file_slots x;
  uint64_t length = 0;
  for (int step = 0; step < 20; ++step) {
    // Microbatches overlap: one is given back while the next one comes.
    std::vector<std::vector<slot>> microbatches;
    for (int m = 0; m < 6; ++m) {
      auto& mine = microbatches.emplace_back();
      for (uint64_t bytes : {9 * page, 3 * page, page, 3 * page}) {
        x.grow(x.missing(bytes));
        mine.push_back(*x.take(bytes));
      }
      if (m >= 2)
        for (auto& y : microbatches[static_cast<size_t>(m) - 2])
          x.give_back(y);
    }
    for (size_t m = 4; m < 6; ++m)
      for (auto& y : microbatches[m])
        x.give_back(y);
    CHECK(x.in_use() == 0);
    if (step == 0)
      length = x.size();
    CHECK(x.size() == length);
  }
}
