#pragma once

#include <string_view>

namespace smp {

/// LibTorch has no error of its own for lack of memory: only the text of one
/// tells it, by the name of the allocator.
inline bool is_out_of_memory(std::string_view text) {
  return text.find("DefaultCPUAllocator") != std::string_view::npos;
}

} // namespace smp
