#include "runtime/base/large_block_allocator.hpp"

#include <c10/core/CPUAllocator.h>

#include <cstring>

#include <sys/mman.h>

namespace smp {

namespace {

constexpr size_t large = 1 << 18; // a piece of draw_rows, in float32

struct pages {
  void* begin;
  size_t bytes;
};

/// To the memory profiler, as LibTorch's own allocator does.
void report(void* x, int64_t bytes) {
  c10::reportMemoryUsageToProfiler(x, bytes, 0, 0, c10::Device{c10::kCPU});
}

void unmap(void* x) {
  auto* p = static_cast<pages*>(x);
  report(p->begin, -static_cast<int64_t>(p->bytes));
  ::munmap(p->begin, p->bytes);
  delete p;
}

class page_allocator final : public c10::Allocator {
public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < large)
      return c10::GetDefaultCPUAllocator()->allocate(bytes);
    auto* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) // its error says what is missing
      return c10::GetDefaultCPUAllocator()->allocate(bytes);
    report(p, static_cast<int64_t>(bytes));
    return {p, new pages{p, bytes}, &unmap, c10::Device{c10::kCPU}};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

page_allocator& allocator() {
  static auto& result = *new page_allocator; // outlives all tensors
  return result;
}

} // namespace

large_block_allocator::large_block_allocator()
  : before_(c10::GetCPUAllocator()) {
  c10::SetCPUAllocator(&allocator());
}

large_block_allocator::~large_block_allocator() {
  c10::SetCPUAllocator(before_);
}

} // namespace smp
