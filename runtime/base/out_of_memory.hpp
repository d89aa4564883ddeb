#pragma once

#include <string_view>

namespace smp {

/// LibTorch has no error type for lack of memory: only the allocator's name in
/// the text of an error tells.
inline bool is_out_of_memory(std::string_view text) {
  return text.find("DefaultCPUAllocator") != std::string_view::npos;
}

} // namespace smp
