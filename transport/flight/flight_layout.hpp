#pragma once

// The memory of a `flight_record`: a header, names, then slots in a ring.

#include "transport/flight/flight_event.hpp"

#include <array>
#include <cstddef>
#include <cstdint>

namespace smp::flight {

inline constexpr std::array<char, 8> magic{'s', 'm', 'p', 'f',
                                           'l', 'y', '0', '1'};

inline constexpr size_t page = 4096;

/// Room for the paths of some twenty thousand modules; untouched pages cost
/// nothing.
inline constexpr size_t names_capacity = size_t{1} << 20;

struct header {
  std::array<char, 8> magic;
  uint64_t rank;
  uint64_t pid;
  int64_t epoch;
  std::array<char, 64> host;
  std::array<char, 64> clock;
  /// Bytes of the part with names, and events that there is room for.
  uint64_t names_size;
  uint64_t slots;
  /// Of them so many are used. Written with release.
  uint64_t names_used;
  /// Events that were noted so far.
  uint64_t next;
};

static_assert(sizeof(header) <= page);

/// Precedes the bytes of a name, which are padded to 8.
struct name_head {
  uint32_t key;
  uint32_t size;
};

inline constexpr size_t words_of_event = sizeof(flight_event)
                                         / sizeof(uint64_t);

struct slot {
  /// 0: never used; odd: being written; else twice the number of its event,
  /// from 1.
  uint64_t stamp;
  std::array<uint64_t, words_of_event> words;
};

static_assert(sizeof(slot) == 64);

inline constexpr size_t padded(size_t x) {
  return (x + 7) / 8 * 8;
}

} // namespace smp::flight
