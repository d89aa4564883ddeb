#include "tests/simulated/driver/segments.hpp"

#include "tests/simulated/driver/files.hpp"
#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/race_checker.hpp"
#include "tests/simulated/driver/stream.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace smp::sim {

namespace {

// ThreadSanitizer leaves little address space: not more than needed.
constexpr size_t region_size = size_t{16} << 30;
constexpr auto whole_size = region_size * max_devices;

char* reserve() {
  auto* begin = mmap(nullptr, whole_size, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED)
    fail("reserving address space");
  return static_cast<char*>(begin);
}

size_t whole_segments(size_t bytes) {
  bytes = std::max<size_t>(bytes, 1);
  return (bytes + segment_size - 1) / segment_size * segment_size;
}

} // namespace

segment_table::segment_table() : reserved_(reserve()), views_(reserve()) {
  for (size_t i = 0; i < spaces_.size(); ++i) {
    spaces_[i].next = region_size * i;
    spaces_[i].end = region_size * (i + 1);
  }
}

void* segment_table::make(int device, size_t bytes) {
  bytes = whole_segments(bytes);
  std::lock_guard guard{mutex_};
  auto& owner = of(device);
  if (owner.used + bytes > config().capacity)
    return nullptr;
  auto file = make_shared_file("sim-device", bytes);
  owner.used += bytes;
  return map({device, place(owner, bytes), bytes, file, false});
}

void* segment_table::import(int device, size_t bytes, int file) {
  std::lock_guard guard{mutex_};
  return map({device, place(of(device), bytes), bytes, file, true});
}

void segment_table::release(void* begin) {
  std::lock_guard guard{mutex_};
  auto found = segments_.find(
    static_cast<size_t>(static_cast<char*>(begin) - reserved_));
  if (found == segments_.end())
    throw std::runtime_error{
      "simulated device: freeing what was not allocated"};
  auto gone = found->second;
  mmap(views_ + gone.offset, gone.size, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  close(gone.file);
  if (!gone.imported)
    of(gone.device).used -= gone.size;
  of(gone.device).retired.push_back(gone);
  segments_.erase(found);
}

std::optional<segment> segment_table::find(const void* address) {
  if (device_of(address) < 0)
    return {};
  auto offset = static_cast<size_t>(static_cast<const char*>(address)
                                    - reserved_);
  std::lock_guard guard{mutex_};
  auto found = segments_.upper_bound(offset);
  if (found == segments_.begin())
    return {};
  --found;
  if (offset >= found->second.offset + found->second.size)
    return {};
  return found->second;
}

int segment_table::device_of(const void* address) const {
  auto offset = static_cast<const char*>(address) - reserved_;
  if (offset < 0 || static_cast<size_t>(offset) >= whole_size)
    return -1;
  return static_cast<int>(static_cast<size_t>(offset) / region_size);
}

void* segment_table::view_of(const void* address) const {
  return views_ + (static_cast<const char*>(address) - reserved_);
}

size_t segment_table::used(int device) {
  std::lock_guard guard{mutex_};
  return of(device).used;
}

// Addresses are used again only when there are no new ones left: a stale device
// pointer stays stale.
size_t segment_table::place(space& owner, size_t bytes) {
  auto with_guard = bytes + segment_size; // nothing is behind a segment
  if (owner.end - owner.next >= with_guard)
    return std::exchange(owner.next, owner.next + with_guard);
  auto found = std::find_if(owner.retired.begin(), owner.retired.end(),
                            [&](auto& x) { return x.size == bytes; });
  if (found == owner.retired.end())
    throw std::runtime_error{"simulated device: out of address space"};
  auto offset = found->offset;
  owner.retired.erase(found);
  return offset;
}

void* segment_table::map(const segment& made) {
  if (mmap(views_ + made.offset, made.size, PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_FIXED, made.file, 0)
      == MAP_FAILED)
    fail("mapping device memory");
  segments_.emplace(made.offset, made);
  checker().know(begin_of(made), made.size);
  return begin_of(made);
}

segment_table& segments() {
  static auto* const only = new segment_table;
  return *only;
}

// -- for everybody ------------------------------------------------------------

void* raw_allocate(int device, size_t bytes) {
  no_host_function("allocating memory");
  return segments().make(device, bytes);
}

void raw_free(void* begin) {
  no_host_function("freeing memory");
  count_host_wait("freeing memory");
  settle_device(device_of(begin));
  if (auto found = segments().find(begin))
    checker().forget(begin, found->size);
  segments().release(begin);
}

int device_of(const void* address) {
  return segments().device_of(address);
}

void* kernel_view_of(const void* address) {
  if (address == nullptr)
    return nullptr;
  if (device_of(address) < 0)
    throw std::runtime_error{"simulated device: not a device address"};
  return segments().view_of(address);
}

memory_handle export_memory(const void* inside) {
  auto found = segments().find(inside);
  if (!found)
    throw std::runtime_error{"simulated device: not device memory"};
  auto offset = static_cast<const char*>(inside)
                - static_cast<const char*>(segments().begin_of(*found));
  return {getpid(), found->file, found->size, static_cast<uint64_t>(offset)};
}

void* import_memory(int device, const memory_handle& handle) {
  if (handle.process == getpid())
    throw std::runtime_error{"simulated device: memory of the same process"};
  auto file = open_shared_file(handle.process, handle.file);
  return static_cast<char*>(segments().import(device, handle.size, file))
         + handle.offset;
}

void close_memory(void* inside) {
  auto found = segments().find(inside);
  raw_free(found ? segments().begin_of(*found) : inside);
}

} // namespace smp::sim
