#include "tests/support/catch.hpp"

#include "runtime/data/batch_numbers.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <numeric>
#include <set>
#include <vector>

namespace {

using numbers = std::vector<uint64_t>;

numbers count_to(uint64_t n) {
  numbers result(n);
  std::iota(result.begin(), result.end(), uint64_t{0});
  return result;
}

numbers order_of(uint64_t seed, uint64_t pass, uint64_t n) {
  smp::shuffled_order order{seed, pass, n};
  numbers result;
  for (uint64_t i = 0; i < n; ++i)
    result.push_back(order.at(i));
  return result;
}

numbers sorted(numbers xs) {
  std::sort(xs.begin(), xs.end());
  return xs;
}

} // namespace

TEST_CASE("A shuffled order has each number once, however many there are",
          "[runtime][data]") {
  for (uint64_t n : {1, 2, 3, 17, 255, 256, 257, 1024, 1025, 5000}) {
    CAPTURE(n);
    auto order = order_of(7, 3, n);
    CHECK(sorted(order) == count_to(n));
    CHECK((n < 17 || order != count_to(n)));
  }
}

TEST_CASE("Each seed and each pass has an order of its own",
          "[runtime][data]") {
  std::set<numbers> orders;
  for (uint64_t seed : {1, 2, 3})
    for (uint64_t pass = 0; pass < 20; ++pass)
      orders.insert(order_of(seed, pass, 50));
  CHECK(orders.size() == 60);
  CHECK(order_of(2, 5, 50) == order_of(2, 5, 50));
}

TEST_CASE("Over many passes all orders are equally frequent",
          "[runtime][data]") {
  std::map<numbers, int> counts;
  for (uint64_t pass = 0; pass < 6000; ++pass)
    ++counts[order_of(1, pass, 3)];
  CHECK(counts.size() == 6);
  // 1000 each, standard deviation 29.
  for (auto& [order, count] : counts)
    CHECK(std::abs(count - 1000) < 200);
}

TEST_CASE("Places of an order know nothing of their neighbours",
          "[runtime][data]") {
  // In an order that is drawn, about one number stands at its own place, and
  // about one behind the number below it.
  const uint64_t n = 1000;
  int same = 0, following = 0;
  for (uint64_t pass = 0; pass < 100; ++pass) {
    auto order = order_of(5, pass, n);
    for (uint64_t i = 0; i < n; ++i)
      same += order[i] == i;
    for (uint64_t i = 1; i < n; ++i)
      following += order[i] == order[i - 1] + 1;
  }
  // 100 each, standard deviation 10.
  CHECK(std::abs(same - 100) < 70);
  CHECK(std::abs(following - 100) < 70);
}

TEST_CASE("An order of more numbers than memory has room for is one, too",
          "[runtime][data]") {
  const auto n = (uint64_t{1} << 40) + 1;
  smp::shuffled_order order{1, 0, n};
  std::set<uint64_t> seen;
  uint64_t largest = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    auto x = order.at(n - 1 - i);
    CHECK(x < n);
    seen.insert(x);
    largest = std::max(largest, x);
  }
  CHECK(seen.size() == 1000);
  CHECK(largest > n / 2);
}

TEST_CASE("What comes at a position does not depend on where one begins",
          "[runtime][data]") {
  auto whole = smp::shuffled_rows(4, 0, 70, 10);
  REQUIRE(whole.size() == 70);
  for (uint64_t step : {1, 2, 4, 7, 23, 35}) {
    CAPTURE(step);
    numbers together;
    for (uint64_t first = 0; first < 70; first += step) {
      auto n = std::min(step, 70 - first);
      auto part = smp::shuffled_rows(4, first, n, 10);
      together.insert(together.end(), part.begin(), part.end());
    }
    CHECK(together == whole);
  }
  // Seven passes, each with all of them.
  for (auto pass = whole.begin(); pass != whole.end(); pass += 10)
    CHECK(sorted({pass, pass + 10}) == count_to(10));
  CHECK_FALSE(
    std::equal(whole.begin(), whole.begin() + 10, whole.begin() + 10));
}

TEST_CASE("Held-out samples are spaced evenly, each as often as others",
          "[runtime][data]") {
  CHECK(smp::even_rows(0, 1, 4, 8) == numbers{0, 2, 4, 6});
  CHECK(smp::even_rows(0, 2, 3, 6) == numbers{0, 1, 2});
  CHECK(smp::even_rows(1, 2, 3, 6) == numbers{3, 4, 5});
  CHECK(smp::even_rows(0, 2, 4, 4) == numbers{0, 0, 1, 1});
  CHECK(smp::even_rows(1, 2, 4, 4) == numbers{2, 2, 3, 3});
  CHECK(smp::even_rows(0, 1, 5, 3) == numbers{0, 0, 1, 1, 2});
}
