#pragma once

// The same damage in every run, for seconds.

#include "tests/fuzz/target.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/mutations.hpp"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>

namespace smp::test {

/// Inputs that broke something once.
inline std::vector<fuzz_bytes> found_inputs(const fuzz_target& x) {
  namespace fs = std::filesystem;
  std::vector<fuzz_bytes> result;
  auto root = std::getenv("SMP_SOURCE_DIR");
  if (root == nullptr)
    throw std::runtime_error("SMP_SOURCE_DIR is not set; ctest sets it");
  auto folder = fs::path{root} / "tests/fuzz/found" / x.name;
  if (!fs::exists(folder))
    return result;
  for (auto& entry : fs::directory_iterator{folder}) {
    std::ifstream in{entry.path(), std::ios::binary};
    std::vector<char> text{std::istreambuf_iterator<char>{in}, {}};
    auto first = reinterpret_cast<const std::byte*>(text.data());
    result.emplace_back(first, first + text.size());
  }
  return result;
}

/// Reads what is right, which has to be accepted, then every beginning of it,
/// then damaged forms of it.
inline void read_damaged(const fuzz_target& x) {
  auto seeds = x.seeds();
  REQUIRE_FALSE(seeds.empty());
  for (auto& seed : seeds) {
    REQUIRE(x.accepts(seed));
    for (size_t size = 0; size < seed.size(); ++size)
      x.accepts(std::span{seed}.first(size));
  }
  for (auto& input : found_inputs(x))
    x.accepts(input);
  std::mt19937_64 engine{1};
  int refused = 0;
  for (int i = 0; i < x.inputs; ++i) {
    auto input = seeds[engine() % seeds.size()];
    for (auto n = engine() % 4; n < 4; ++n) // up to sixteen changes
      input = mutated(std::move(input), engine);
    refused += x.accepts(input) ? 0 : 1;
  }
  CHECK(refused > 0);
}

} // namespace smp::test
