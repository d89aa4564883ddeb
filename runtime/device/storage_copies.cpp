#include "runtime/device/storage_copies.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/device/device_bytes.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <future>
#include <utility>

namespace smp {

namespace {

at::Tensor range_of(const c10::Storage& x, uint64_t offset, uint64_t bytes) {
  return bytes_at(static_cast<const char*>(x.data()) + offset, bytes,
                  x.device());
}

c10::Storage storage_over(c10::DataPtr memory, uint64_t bytes) {
  return {c10::Storage::use_byte_size_t{}, bytes, std::move(memory), nullptr,
          false};
}

} // namespace

lent_storage::lent_storage(c10::Storage memory,
                           std::shared_ptr<device_point> done,
                           c10::Stream compute)
  : memory_(std::move(memory)), done_(std::move(done)), compute_(compute) {
  // nop
}

lent_storage::~lent_storage() {
  if (!memory_ || SMP_FAULT("early-eviction"))
    return;
  try {
    done_->block(compute_);
  } catch (const std::exception&) {
    // The device has failed: nothing runs there any more.
  }
}

c10::Storage lent_storage::take() {
  if (!SMP_FAULT("unawaited-return"))
    done_->block(compute_);
  return std::exchange(memory_, {});
}

storage_copies::storage_copies(std::shared_ptr<accelerator> kind,
                               c10::Stream compute, const device_lane& out,
                               const device_lane& in)
  : kind_(std::move(kind)), compute_(compute), out_(out), in_(in) {
  // nop
}

c10::Storage storage_copies::pinned(uint64_t bytes) const {
  auto* allocator = at::getHostAllocator(compute_.device_type());
  return storage_over(allocator->allocate(bytes), bytes);
}

storage_copies::departure storage_copies::to_host(c10::Storage from,
                                                  uint64_t offset,
                                                  uint64_t bytes) const {
  auto copy = pinned(bytes);
  c10::Event now{compute_.device_type()};
  now.record(compute_);
  c10::StreamGuard on{out_.work};
  now.block(out_.work);
  range_of(copy, 0, bytes).copy_(range_of(from, offset, bytes), true);
  auto done = std::make_shared<device_point>(kind_, out_);
  auto lent = std::make_unique<lent_storage>(std::move(from), done, compute_);
  if (SMP_FAULT("early-eviction"))
    lent = nullptr;
  return {std::move(copy), std::move(done), std::move(lent)};
}

std::unique_ptr<lent_storage>
storage_copies::to_device(const c10::Storage& from, uint64_t bytes,
                          uint64_t gap, const device_point* ready) const {
  c10::Storage to;
  c10::Event left{compute_.device_type()};
  {
    c10::StreamGuard on{compute_};
    auto* allocator = c10::getDeviceAllocator(compute_.device_type());
    to = storage_over(allocator->allocate(gap + bytes), gap + bytes);
    left.record(compute_);
  }
  c10::StreamGuard on{in_.work};
  if (!SMP_FAULT("early-return"))
    left.block(in_.work);
  if (ready)
    ready->block(in_.work);
  range_of(to, gap, bytes).copy_(range_of(from, 0, bytes), true);
  return std::make_unique<lent_storage>(
    std::move(to), std::make_shared<device_point>(kind_, in_), compute_);
}

std::shared_ptr<device_point>
storage_copies::overwrite(const c10::Storage& from, const c10::Storage& to,
                          uint64_t offset, uint64_t bytes) const {
  c10::Event left{compute_.device_type()};
  left.record(compute_);
  c10::StreamGuard on{in_.work};
  if (!SMP_FAULT("early-overwrite"))
    left.block(in_.work);
  range_of(to, offset, bytes).copy_(range_of(from, 0, bytes), true);
  auto done = std::make_shared<device_point>(kind_, in_);
  if (!SMP_FAULT("unawaited-overwrite"))
    done->block(compute_);
  return done;
}

void storage_copies::await(device_point& x) const {
  constexpr std::chrono::milliseconds between_looks{500};
  auto reached = std::make_shared<std::promise<void>>();
  auto there = reached->get_future();
  x.then([reached] { reached->set_value(); });
  c10::impl::VirtualGuardImpl device{compute_.device_type()};
  while (there.wait_for(between_looks) != std::future_status::ready)
    device.queryStream(out_.watch);
}

} // namespace smp
