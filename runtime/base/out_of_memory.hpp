#pragma once

#include <string_view>

namespace smp {

/// LibTorch has no error type for lack of memory of the host: only the
/// allocator's name in the text of an error tells. Those of devices say it.
inline bool is_out_of_memory(std::string_view text) {
  return text.find("DefaultCPUAllocator") != std::string_view::npos
         || text.find("out of memory") != std::string_view::npos;
}

} // namespace smp
