#include "runtime/checkpoint/checksum.hpp"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstring>

namespace smp {

namespace {

constexpr uint64_t prime_1 = 0x9E3779B185EBCA87u;
constexpr uint64_t prime_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t prime_3 = 0x165667B19E3779F9u;
constexpr uint64_t prime_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t prime_5 = 0x27D4EB2F165667C5u;

template <class T>
uint64_t load(const uint8_t* from) noexcept {
  T result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

uint64_t mix(uint64_t lane, uint64_t input) noexcept {
  return std::rotl(lane + input * prime_2, 31) * prime_1;
}

uint64_t merge(uint64_t hash, uint64_t lane) noexcept {
  return (hash ^ mix(0, lane)) * prime_1 + prime_4;
}

/// Consumes whole stripes of 32 bytes. @returns their hash
uint64_t mix_stripes(const uint8_t*& at, uint64_t& left) noexcept {
  std::array<uint64_t, 4> lanes{prime_1 + prime_2, prime_2, 0,
                                uint64_t{0} - prime_1};
  for (; left >= 32; left -= 32)
    for (auto& lane : lanes) {
      lane = mix(lane, load<uint64_t>(at));
      at += 8;
    }
  auto result = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7)
                + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
  for (auto lane : lanes)
    result = merge(result, lane);
  return result;
}

} // namespace

uint64_t checksum(const void* data, uint64_t size) noexcept {
  auto* at = static_cast<const uint8_t*>(data);
  auto left = size;
  auto hash = size >= 32 ? mix_stripes(at, left) : prime_5;
  hash += size;
  for (; left >= 8; left -= 8, at += 8)
    hash = std::rotl(hash ^ mix(0, load<uint64_t>(at)), 27) * prime_1 + prime_4;
  for (; left >= 4; left -= 4, at += 4)
    hash = std::rotl(hash ^ (load<uint32_t>(at) * prime_1), 23) * prime_2
           + prime_3;
  for (; left > 0; --left, ++at)
    hash = std::rotl(hash ^ (*at * prime_5), 11) * prime_1;
  hash = (hash ^ (hash >> 33)) * prime_2;
  hash = (hash ^ (hash >> 29)) * prime_3;
  return hash ^ (hash >> 32);
}

std::string to_hex(uint64_t x) {
  return fmt::format("{:016x}", x);
}

} // namespace smp
