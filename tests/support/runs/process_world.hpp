#pragma once

// Ranks that are processes of their own, without anything above the fabric.

#include "tests/support/catch.hpp"

#include "tests/support/actors/cluster.hpp"
#include "tests/support/runs/child_process.hpp"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace smp::test {

/// Hidden, in tests/transport/ucx/processes_test.cpp.
inline constexpr const char* rank_case = "a rank in a process of its own";

// -- addresses ----------------------------------------------------------------
// A packet holds all addresses: u32 size and bytes of each.

inline std::string join_addresses(const std::vector<std::string>& xs) {
  std::string result;
  for (auto& x : xs) {
    auto size = static_cast<uint32_t>(x.size());
    result.append(reinterpret_cast<const char*>(&size), sizeof size);
    result += x;
  }
  return result;
}

inline std::vector<std::string> split_addresses(const std::string& x) {
  std::vector<std::string> result;
  for (size_t i = 0; i < x.size();) {
    uint32_t size = 0;
    std::memcpy(&size, x.data() + i, sizeof size);
    result.push_back(x.substr(i + sizeof size, size));
    i += sizeof size + size;
  }
  return result;
}

// -- the world ----------------------------------------------------------------

/// Rank 0 is this process, the others are children.
struct process_world {
  process_world(const std::string& kind, uint64_t size, const std::string& role,
                const std::map<std::string, std::string>& more = {},
                tensor_places* places = nullptr)
    : rank{rank_id{0}, size, cluster::options_for(kind)} {
    if (places != nullptr)
      rank.place_with(*places);
    for (uint64_t i = 1; i < size; ++i) {
      auto environment = more;
      environment["SMP_TEST_RANK"] = std::to_string(i);
      environment["SMP_TEST_SIZE"] = std::to_string(size);
      environment["SMP_TEST_KIND"] = kind;
      environment["SMP_TEST_ROLE"] = role;
      others.push_back(std::make_unique<child_process>(rank_case, environment));
    }
    std::vector<std::string> addresses{rank.address()};
    for (auto& x : others) {
      auto address = x->hear();
      REQUIRE(address);
      addresses.push_back(*address);
    }
    for (auto& x : others)
      x->tell(join_addresses(addresses));
    rank.start(addresses, heard);
    for (auto& x : others)
      REQUIRE(x->hear() == "ready");
  }

  ~process_world() {
    rank.stop(std::chrono::seconds{0});
  }

  child_process& other(uint64_t x = 1) {
    return *others[x - 1];
  }

  /// Says something to rank 1, in the role of an echo, and hears it again: now
  /// both are connected.
  void greet() {
    rank.send(rank_id{1}, make_message("x"));
    REQUIRE(heard.wait_messages(1));
  }

  /// Ends all in order.
  void finish() {
    for (auto& x : others)
      x->tell("quit");
    rank.stop(std::chrono::seconds{10});
    for (auto& x : others)
      CHECK(x->join() == 0);
    CHECK(heard.losses().empty());
  }

  inbox heard;
  std::vector<std::unique_ptr<child_process>> others;
  ucx_fabric rank;
};

} // namespace smp::test
