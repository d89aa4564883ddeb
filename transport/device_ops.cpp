#include "transport/device_ops.hpp"

#include "transport/error.hpp"
#include "transport/memory/block_pool.hpp"

#include <cstring>
#include <string>
#include <utility>

namespace smp {

namespace {

void check_on_host(device_ref x) {
  if (x != device_ref{})
    throw error{error_code::unsupported,
                "this rank has no device of type " + std::to_string(x.type)};
}

[[noreturn]] void refuse_sums() {
  throw error{error_code::unsupported, "the device of this rank adds nothing"};
}

} // namespace

shared_memory device_ops::share(uint64_t) {
  return {};
}

shared_memory device_ops::open(const std::string&) {
  return {};
}

std::shared_ptr<std::byte> device_ops::allocate_sum(uint64_t) {
  refuse_sums();
}

std::shared_ptr<device_event>
device_ops::combine(const combination&, std::byte*,
                    std::span<const void* const>,
                    const std::shared_ptr<device_event>&) {
  refuse_sums();
}

std::optional<device_ref> host_ops::here(device_ref x) const {
  if (x != device_ref{})
    return std::nullopt;
  return x;
}

std::shared_ptr<std::byte> host_ops::allocate(device_ref where, uint64_t size) {
  check_on_host(where);
  return block_pool{0}.take(size);
}

tensor_ref host_ops::copy(const tensor_ref& from, std::shared_ptr<std::byte> to,
                          device_ref where) {
  check_on_host(from.device);
  check_on_host(where);
  if (from.nbytes > 0)
    std::memcpy(to.get(), from.data, from.nbytes);
  auto result = from;
  result.data = to.get();
  result.owner = std::move(to);
  return result;
}

} // namespace smp
