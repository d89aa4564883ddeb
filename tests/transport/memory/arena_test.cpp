#include "tests/support/catch.hpp"

#include "tests/support/runs/resident_pages.hpp"
#include "transport/memory/arena.hpp"

#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

using namespace smp;
using namespace smp::test;

TEST_CASE("an arena deals out blocks until there are none, and says so",
          "[transport][arena]") {
  arena x{1 << 20};
  auto a = x.take(300000);
  auto b = x.take(500000);
  REQUIRE(a);
  REQUIRE(b);
  std::memset(a.get(), 1, 300000);
  std::memset(b.get(), 2, 500000);
  CHECK(x.contains(a.get()));
  CHECK(x.contains(b.get() + 499999));
  CHECK_FALSE(x.contains(&x));
  CHECK(x.take(1) == nullptr);
  auto full = x.status();
  CHECK(full.capacity == 1 << 20);
  CHECK(full.used == 1 << 20);
  CHECK(full.wanted == 800000);
  CHECK(full.blocks == 2);
  CHECK(full.refused == 1);
  CHECK(full.largest_free == 0);
  CHECK(full.fragmentation() == 0);
  a.reset();
  b.reset();
  auto empty = x.status();
  CHECK(empty.used == 0);
  CHECK(empty.high_water == 1 << 20);
  CHECK(empty.largest_free == 1 << 20);
}

TEST_CASE("all of an arena is touched when it is made", "[transport][arena]") {
  arena x{4 << 20};
  CHECK(untouched_pages(x.memory().get(), x.status().capacity) == 0);
}

TEST_CASE("fragmentation is what lies outside of the largest free block",
          "[transport][arena]") {
  arena x{8 * arena::alignment};
  std::vector<std::shared_ptr<std::byte>> blocks;
  for (int i = 0; i < 8; ++i)
    blocks.push_back(x.take(1));
  for (size_t i : {0, 2, 4, 6})
    blocks[i].reset();
  CHECK(x.status().fragmentation() == 0.75);
  CHECK(x.take(2 * arena::alignment) == nullptr);
  blocks[1].reset();
  CHECK(x.status().fragmentation() == Catch::Approx(0.6));
}

TEST_CASE("blocks may outlive their arena", "[transport][arena]") {
  std::optional<arena> x{1 << 16};
  auto block = x->take(5000);
  auto all = x->memory();
  x.reset();
  std::memset(block.get(), 7, 5000);
  CHECK(std::to_integer<int>(*all) == 7);
}

TEST_CASE("threads never get the same memory", "[transport][arena]") {
  arena x{1 << 18};
  auto work = [&](unsigned me) {
    std::mt19937 random{me};
    for (int i = 0; i < 3000; ++i) {
      auto size = 1 + random() % 40000;
      auto block = x.take(size);
      if (!block)
        continue;
      std::memset(block.get(), static_cast<int>(me), size);
      for (size_t k = 0; k < size; k += 997)
        if (std::to_integer<unsigned>(block.get()[k]) != me)
          return false;
    }
    return true;
  };
  bool right[3] = {};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 3; ++i)
    threads.emplace_back([&, i] { right[i] = work(i + 1); });
  for (auto& t : threads)
    t.join();
  CHECK((right[0] && right[1] && right[2]));
  CHECK(x.status().used == 0);
}

TEST_CASE("an arena of no size has no block", "[transport][arena]") {
  arena x{0};
  CHECK(x.take(1) == nullptr);
  CHECK_FALSE(x.contains(nullptr));
  CHECK(x.status().fragmentation() == 0);
}
