#include "runtime/device/device_copies.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/device/device_bytes.hpp"
#include "runtime/device/device_sums.hpp"
#include "transport/bytes.hpp"
#include "transport/error.hpp"
#include "transport/inspect.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include <unistd.h>

namespace smp {

namespace {

/// Keeps `x` for as long as its bytes are used.
std::shared_ptr<std::byte> shared(c10::DataPtr x) {
  auto held = std::make_shared<c10::DataPtr>(std::move(x));
  return {held, static_cast<std::byte*>(held->get())};
}

c10::Device device_of(device_ref x) {
  return {static_cast<c10::DeviceType>(x.type),
          static_cast<c10::DeviceIndex>(x.index)};
}

/// Who asks for a copy knows no error of LibTorch.
template <class F>
auto without_torch_errors(F f) {
  try {
    return f();
  } catch (const c10::OutOfMemoryError&) {
    throw std::bad_alloc{};
  } catch (const c10::Error& e) {
    throw error{error_code::transport,
                std::string{"the device: "} + e.what_without_backtrace()};
  }
}

/// What was shared by sessions that are over, for later ones.
class memory_to_share {
public:
  static memory_to_share& get() {
    // Never destroyed: a session may end with the process.
    static auto& result = *new memory_to_share;
    return result;
  }

  /// @returns null if the device has not that much
  std::shared_ptr<std::byte> take(accelerator& kind, c10::Device device,
                                  uint64_t size) {
    std::unique_lock guard{mutex_};
    const place where{device.type(), device.index(), size};
    auto left = left_.extract(where);
    guard.unlock();
    auto* memory = left.empty() ? kind.allocate_shared(device.index(), size)
                                : left.mapped();
    if (memory == nullptr)
      return nullptr;
    return {static_cast<std::byte*>(memory), [=, this](std::byte* x) {
              std::lock_guard again{mutex_};
              left_.emplace(where, x);
            }};
  }

private:
  using place = std::tuple<c10::DeviceType, c10::DeviceIndex, uint64_t>;

  std::mutex mutex_;
  std::multimap<place, void*> left_;
};

/// What other ranks are told of shared memory. One of the same process uses it
/// as it is: drivers do not open what their own process exported.
struct sharing {
  int64_t process = 0;
  uint64_t address = 0;
  uint64_t size = 0;
  device_ref device;
  std::string exported;
};

template <class Inspector>
bool inspect(Inspector& f, sharing& x) {
  return f.object(x).fields(
    f.field("process", x.process), f.field("address", x.address),
    f.field("size", x.size), f.field("device", x.device),
    f.field("exported", x.exported));
}

} // namespace

device_copies::device_copies(std::shared_ptr<accelerator> kind,
                             c10::Device device, c10::Stream compute,
                             const device_lane& out, const device_lane& in,
                             const device_lane& sums)
  : kind_(std::move(kind)),
    device_(device),
    compute_(compute),
    out_(out),
    in_(in),
    sums_(sums),
    watch_(std::make_shared<device_watch>(sums.watch)) {
  // nop
}

std::optional<device_ref> device_copies::here(device_ref x) const {
  if (x == device_ref{})
    return x;
  if (x.type != static_cast<uint8_t>(device_.type()))
    return std::nullopt;
  return device_ref{x.type, device_.index()};
}

std::shared_ptr<std::byte> device_copies::allocate(device_ref where,
                                                   uint64_t size) {
  // Of a tensor without elements, too, there is an address.
  auto bytes = std::max<uint64_t>(size, 1);
  if (where == device_ref{})
    return without_torch_errors([&] {
      auto make = [&] {
        return shared(at::getHostAllocator(device_.type())->allocate(bytes));
      };
      if (SMP_FAULT("early-reuse")) {
        // Of one test: all its tensors are as large as the first.
        static auto one = make();
        return one;
      }
      return make();
    });
  if (where != here(where))
    throw error{error_code::unsupported,
                "this rank has no device " + device_of(where).str()};
  return without_torch_errors([&] {
    c10::StreamGuard on{in_.work};
    auto* allocator = c10::getDeviceAllocator(device_.type());
    auto result = allocator->allocate(bytes);
    if (!SMP_FAULT("unrecorded-stream"))
      allocator->recordStream(result, compute_);
    return shared(std::move(result));
  });
}

shared_memory device_copies::share(uint64_t size) {
  return without_torch_errors([&]() -> shared_memory {
    c10::DeviceGuard on{device_};
    auto total = c10::getDeviceAllocator(device_.type())
                   ->getMemoryInfo(device_.index())
                   .second;
    size = std::min<uint64_t>(size, total / 16);
    auto bytes = memory_to_share::get().take(*kind_, device_, size);
    if (!bytes)
      return {};
    auto exported = kind_->export_shared(bytes.get());
    if (exported.empty())
      return {};
    device_ref where{static_cast<uint8_t>(device_.type()), device_.index()};
    byte_writer out;
    out.put(sharing{::getpid(), reinterpret_cast<uint64_t>(bytes.get()), size,
                    where, exported});
    auto handle = out.take();
    shared_size_ = size;
    shared_ = bytes.get();
    return {std::move(bytes),
            size,
            where,
            {reinterpret_cast<const char*>(handle.data()), handle.size()}};
  });
}

shared_memory device_copies::open(const std::string& handle) {
  auto x = byte_reader{std::as_bytes(std::span{handle}), "shared memory"}
             .get<sharing>("handle");
  if (x.device.type != static_cast<uint8_t>(device_.type()))
    return {};
  if (x.process == ::getpid())
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    return {{std::shared_ptr<void>{}, reinterpret_cast<std::byte*>(x.address)},
            x.size,
            x.device,
            handle};
  return without_torch_errors([&]() -> shared_memory {
    c10::DeviceGuard on{device_};
    auto* memory = kind_->open_shared(device_.index(), x.exported);
    if (memory == nullptr)
      return {};
    return {{static_cast<std::byte*>(memory),
             [kind = kind_](std::byte* y) { kind->close_shared(y); }},
            x.size,
            *here(x.device),
            handle};
  });
}

const device_lane& device_copies::lane_to(const std::byte* to,
                                          device_ref where) const {
  const std::byte* begin = shared_;
  auto is_shared = begin != nullptr && to >= begin
                   && to < begin + shared_size_.load();
  return where == device_ref{} || is_shared ? out_ : in_;
}

tensor_ref device_copies::copy(const tensor_ref& from,
                               std::shared_ptr<std::byte> to,
                               device_ref where) {
  if (from.device == device_ref{} && where == device_ref{})
    return host_ops{}.copy(from, std::move(to), where);
  auto& lane = lane_to(to.get(), where);
  auto result = from;
  result.data = to.get();
  result.device = where;
  result.ready = without_torch_errors([&] {
    c10::StreamGuard on{lane.work};
    if (from.ready)
      static_cast<const device_point&>(*from.ready).block(lane.work);
    if (from.nbytes > 0)
      bytes_at(to.get(), from.nbytes, device_of(where))
        .copy_(bytes_at(from.data, from.nbytes, device_of(from.device)), true);
    return std::make_shared<device_point>(kind_, lane);
  });
  if (SMP_FAULT("unawaited-arrival") && &lane == &in_)
    result.ready = nullptr;
  if (SMP_FAULT("unawaited-departure") && &lane == &out_)
    result.ready = nullptr;
  result.owner = std::move(to);
  return result;
}

std::shared_ptr<std::byte> device_copies::allocate_sum(uint64_t size) {
  return without_torch_errors([&] {
    c10::StreamGuard on{sums_.work};
    auto* allocator = c10::getDeviceAllocator(device_.type());
    return shared(allocator->allocate(std::max<uint64_t>(size, 1)));
  });
}

std::shared_ptr<device_event>
device_copies::combine(const combination& x, std::byte* to,
                       std::span<const void* const> inputs,
                       const std::shared_ptr<device_event>& after) {
  return without_torch_errors([&] {
    c10::StreamGuard on{sums_.work};
    if (after && !SMP_FAULT("early-sum"))
      static_cast<const device_point&>(*after).block(sums_.work);
    combine_on(device_, x, to, inputs);
    return std::make_shared<device_point>(kind_, sums_, watch_);
  });
}

void device_copies::order_sums_before(c10::Stream x) const {
  c10::Event now{x.device_type()};
  now.record(sums_.work);
  now.block(x);
}

} // namespace smp
