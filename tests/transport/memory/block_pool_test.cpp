#include "tests/support/catch.hpp"

#include "transport/memory/block_pool.hpp"

#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <vector>

using namespace smp;

TEST_CASE("blocks of any size are aligned and writable to their last byte",
          "[transport][block_pool]") {
  block_pool pool{1 << 20};
  for (uint64_t size : {0ull, 1ull, 64ull, 65ull, 255ull, 257ull, 8192ull,
                        8257ull, 100000ull, (1ull << 20) + 1}) {
    auto block = pool.take(size);
    CHECK(reinterpret_cast<uintptr_t>(block.get()) % block_pool::alignment
          == 0);
    std::memset(block.get(), 0xAB, size);
  }
}

TEST_CASE("a block is given out again after its last owner",
          "[transport][block_pool]") {
  block_pool pool{1 << 20};
  auto block = pool.take(100000);
  auto address = block.get();
  auto second_owner = block;
  block.reset();
  CHECK(pool.kept() == 0);
  CHECK(pool.take(100000).get() != address);
  second_owner.reset();
  CHECK(pool.kept() > 100000);
  // About the same size fits as well.
  auto kept = pool.kept();
  auto again = pool.take(99000);
  CHECK(pool.kept() < kept);
}

TEST_CASE("a pool keeps no more than its limit", "[transport][block_pool]") {
  block_pool pool{100 * 1024};
  std::vector<std::shared_ptr<std::byte>> blocks;
  for (int i = 0; i < 10; ++i)
    blocks.push_back(pool.take(32 * 1024));
  blocks.clear();
  CHECK(pool.kept() == 96 * 1024);
}

TEST_CASE("a block outlives its pool", "[transport][block_pool]") {
  std::shared_ptr<std::byte> block;
  {
    block_pool pool{1 << 20};
    block = pool.take(4096);
  }
  std::memset(block.get(), 1, 4096);
}

TEST_CASE("an absurd size is out of memory, not undefined",
          "[transport][block_pool]") {
  block_pool pool{0};
  CHECK_THROWS_AS(pool.take(~uint64_t{0}), std::bad_alloc);
  CHECK_THROWS_AS(pool.take(uint64_t{1} << 62), std::bad_alloc);
}

TEST_CASE("threads share a pool", "[transport][block_pool]") {
  block_pool pool{1 << 20};
  auto work = [&pool](int seed) {
    for (int i = 0; i < 500; ++i) {
      auto size = static_cast<uint64_t>(1 + (i * 977 + seed * 131) % 20000);
      auto block = pool.take(size);
      std::memset(block.get(), seed, size);
    }
  };
  std::thread a{work, 1};
  std::thread b{work, 2};
  a.join();
  b.join();
  CHECK(pool.kept() <= (1 << 20));
}
