#include "runtime/device/device_copies.hpp"

#include "runtime/base/fault.hpp"
#include "transport/error.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <new>
#include <string>
#include <utility>

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

at::Tensor bytes_at(const void* x, uint64_t size, device_ref where) {
  return at::for_blob(const_cast<void*>(x), {static_cast<int64_t>(size)})
    .options(at::TensorOptions{at::kByte}.device(device_of(where)))
    .target_device(device_of(where))
    .make_tensor();
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

} // namespace

device_copies::device_copies(std::shared_ptr<accelerator> kind,
                             c10::Device device, c10::Stream compute,
                             const device_lane& out, const device_lane& in)
  : kind_(std::move(kind)),
    device_(device),
    compute_(compute),
    out_(out),
    in_(in) {
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

tensor_ref device_copies::copy(const tensor_ref& from,
                               std::shared_ptr<std::byte> to,
                               device_ref where) {
  if (from.device == device_ref{} && where == device_ref{})
    return host_ops{}.copy(from, std::move(to), where);
  auto& lane = where == device_ref{} ? out_ : in_;
  auto result = from;
  result.data = to.get();
  result.device = where;
  result.ready = without_torch_errors([&] {
    c10::StreamGuard on{lane.work};
    if (from.ready)
      static_cast<const device_point&>(*from.ready).block(lane.work);
    if (from.nbytes > 0)
      bytes_at(to.get(), from.nbytes, where)
        .copy_(bytes_at(from.data, from.nbytes, from.device), true);
    return std::make_shared<device_point>(kind_, lane);
  });
  if (SMP_FAULT("unawaited-arrival") && where != device_ref{})
    result.ready = nullptr;
  if (SMP_FAULT("unawaited-departure") && where == device_ref{})
    result.ready = nullptr;
  result.owner = std::move(to);
  return result;
}

} // namespace smp
