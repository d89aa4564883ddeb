#pragma once

#include "transport/fabric.hpp"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace smp::test {

/// @returns bytes that any rank can compute again from the seed.
inline std::vector<std::byte> pattern(uint64_t size, uint64_t seed) {
  std::vector<std::byte> result(size);
  uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
  uint64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    std::memcpy(result.data() + i, &state, 8);
  }
  for (; i < size; ++i)
    result[i] = static_cast<std::byte>(seed + i);
  return result;
}

/// A tensor of bytes that owns them.
inline tensor_ref make_tensor(std::vector<std::byte> bytes) {
  auto owner = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  tensor_ref result;
  result.data = owner->data();
  result.nbytes = owner->size();
  result.dtype = 1;
  result.shape = {static_cast<int64_t>(owner->size())};
  result.owner = owner;
  return result;
}

inline tensor_ref make_tensor(uint64_t size, uint64_t seed) {
  return make_tensor(pattern(size, seed));
}

inline bool same_bytes(const tensor_ref& x, const std::vector<std::byte>& y) {
  return x.nbytes == y.size()
         && (y.empty() || std::memcmp(x.data, y.data(), y.size()) == 0);
}

inline std::vector<std::byte> to_bytes(const std::string& x) {
  auto first = reinterpret_cast<const std::byte*>(x.data());
  return {first, first + x.size()};
}

inline std::string to_text(const std::vector<std::byte>& x) {
  return {reinterpret_cast<const char*>(x.data()), x.size()};
}

inline message make_message(const std::string& text,
                            std::vector<tensor_ref> tensors = {},
                            message_kind kind = message_kind::request) {
  return {kind, {to_bytes(text), std::move(tensors)}};
}

} // namespace smp::test
