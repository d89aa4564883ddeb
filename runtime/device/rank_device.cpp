#include "runtime/device/rank_device.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/device/cuda_libraries.hpp"
#include "runtime/device/device_copies.hpp"
#include "runtime/device/storage_copies.hpp"
#include "transport/error.hpp"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <future>
#include <set>
#include <utility>

namespace smp {

using c10::impl::VirtualGuardImpl;

namespace {

device_lane make_lane(c10::Device x) {
  VirtualGuardImpl device{x.type()};
  return {device.getStreamFromGlobalPool(x), device.getStreamFromGlobalPool(x)};
}

} // namespace

rank_device::rank_device(std::shared_ptr<accelerator> kind,
                         c10::DeviceIndex index)
  : kind_(std::move(kind)),
    device_(kind_->type(), index),
    compute_(make_lane(device_)),
    memory_total_(c10::getDeviceAllocator(device_.type())
                    ->getMemoryInfo(device_.index())
                    .second),
    copies_(std::make_shared<device_copies>(
      kind_, device_, compute_.work, make_lane(device_), make_lane(device_),
      make_lane(device_))),
    watch_(compute_.watch) {
  // nop
}

rank_device::~rank_device() = default;

void rank_device::enter_thread() const {
  VirtualGuardImpl device{device_.type()};
  device.setDevice(device_);
  device.exchangeStream(compute_.work);
}

void rank_device::leave_thread() const {
  VirtualGuardImpl device{device_.type()};
  try {
    copies_->order_sums_before(compute_.work);
  } catch (const c10::AcceleratorError&) {
    // Nothing runs there any more.
  }
  auto done = std::make_shared<std::promise<void>>();
  when_reached([done] { done->set_value(); });
  constexpr std::chrono::minutes limit{5};
  if (done->get_future().wait_for(limit) != std::future_status::ready)
    print_stderr(
      "smp: what was launched on {} is not done after {} minutes; "
      "nothing waits for it any more\n",
      device_.str(), limit.count());
  device.exchangeStream(device.getDefaultStream(device_));
}

std::shared_ptr<device_event> rank_device::point() const {
  return std::make_shared<device_point>(kind_, compute_);
}

void rank_device::when_reached(std::function<void()> f) const {
  try {
    watch_.when_reached([x = point()](auto g) { x->then(std::move(g)); }, f);
  } catch (const c10::AcceleratorError&) {
    f();
  }
}

void rank_device::settle() const {
  VirtualGuardImpl{device_.type()}.synchronizeStream(compute_.work);
}

// -- time ---------------------------------------------------------------------

void rank_device::begin_span() const {
  auto timed = c10::EventFlag::BACKEND_DEFAULT;
  std::pair span{c10::Event{device_.type(), timed},
                 c10::Event{device_.type(), timed}};
  span.first.record(compute_.work);
  std::lock_guard guard{mutex_};
  spans_.push_back(std::move(span));
}

void rank_device::end_span() const {
  look_at_memory();
  std::lock_guard guard{mutex_};
  if (spans_.empty())
    return;
  try {
    spans_.back().second.record(compute_.work);
  } catch (const c10::AcceleratorError&) {
    // Of a device that has failed, no time counts.
  }
}

std::chrono::nanoseconds rank_device::take_busy() const {
  std::lock_guard guard{mutex_};
  std::chrono::duration<double, std::milli> result{0};
  for (auto& [begin, end] : std::exchange(spans_, {}))
    if (end.was_marked_for_recording())
      result += std::chrono::duration<double, std::milli>{
        begin.elapsedTime(end)};
  return std::chrono::duration_cast<std::chrono::nanoseconds>(result);
}

// -- memory -------------------------------------------------------------------

rank_device::memory rank_device::look_at_memory() const {
  auto* allocator = c10::getDeviceAllocator(device_.type());
  if (!allocator->initialized()) // it knows no device before its first use
    return last_memory();
  auto bytes = allocator->getDeviceStats(device_.index()).allocated_bytes[0];
  memory_now_ = static_cast<uint64_t>(bytes.current);
  memory_peak_ = static_cast<uint64_t>(bytes.peak);
  return last_memory();
}

rank_device::memory rank_device::last_memory() const noexcept {
  return {memory_now_, memory_peak_, memory_total_};
}

std::shared_ptr<device_ops> rank_device::copies() const {
  return copies_;
}

std::shared_ptr<storage_copies> rank_device::make_storage_copies() const {
  return std::make_shared<storage_copies>(
    kind_, compute_.work, make_lane(device_), make_lane(device_));
}

// -- points -------------------------------------------------------------------

device_point::device_point(std::shared_ptr<accelerator> kind,
                           const device_lane& lane,
                           std::shared_ptr<device_watch> watch)
  : kind_(std::move(kind)),
    watch_(lane.watch),
    event_(lane.work.device_type()),
    failures_(std::move(watch)) {
  c10::StreamGuard on{lane.work};
  event_.record(lane.work);
}

void device_point::then(std::function<void()> f) {
  if (failures_)
    failures_->when_reached([this](auto g) { notify(std::move(g)); },
                            std::move(f));
  else
    notify(std::move(f));
}

void device_point::notify(std::function<void()> f) {
  try {
    c10::StreamGuard on{watch_};
    event_.block(watch_);
    kind_->notify(watch_, std::move(f));
  } catch (const c10::AcceleratorError&) {
    // Who must know asks `device_watch`.
  }
}

// -- choice -------------------------------------------------------------------

namespace {

/// @returns the name of the device that `wanted` stands for
std::string named_device(const std::string& wanted, uint64_t local_rank) {
  if (wanted != "auto" && wanted != "cuda")
    return wanted;
  auto& cuda = load_cuda();
  if (cuda.usable)
    return "cuda";
  if (wanted == "cuda")
    throw config_error("smp.device = 'cuda': " + cuda.why_not);
  if (cuda.expected && local_rank == 0)
    print_stderr("smp: this computes on the CPU: {}\n", cuda.why_not);
  return "cpu";
}

} // namespace

std::shared_ptr<rank_device> choose_device(const std::string& wanted,
                                           uint64_t local_rank) {
  auto name = named_device(wanted, local_rank);
  if (name == "cpu")
    return nullptr;
  auto kind = find_accelerator(name);
  if (!kind) {
    std::set<std::string> names{"auto", "cpu", "cuda"};
    names.merge(accelerator_names());
    throw config_error(
      fmt::format("smp.device = '{}': there is no such device here, only {}",
                  wanted, fmt::join(names, ", ")));
  }
  // Else LibTorch does so with the first tensor there, which may be too late
  // for those who ask its allocators.
  at::globalContext().lazyInitDevice(kind->type());
  auto count = static_cast<uint64_t>(
    VirtualGuardImpl{kind->type()}.deviceCount());
  if (count == 0)
    throw config_error(
      fmt::format("smp.device = '{}': this machine has none", wanted));
  return std::make_shared<rank_device>(
    kind, static_cast<c10::DeviceIndex>(local_rank % count));
}

} // namespace smp
