#include "runtime/process/allocated_bytes.hpp"

#include <malloc.h>

namespace smp {

uint64_t allocated_bytes() {
  auto x = ::mallinfo2();
  return x.uordblks + x.hblkhd;
}

} // namespace smp
