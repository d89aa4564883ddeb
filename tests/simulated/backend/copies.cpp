#include "tests/simulated/backend/copies.hpp"

#include "tests/simulated/backend/allocators.hpp"
#include "tests/simulated/backend/kernels.hpp"
#include "tests/simulated/driver/events.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/streams.hpp"

#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

namespace smp::sim {

namespace {

/// A tensor on the same bytes that does not hold them.
at::Tensor borrowed(const at::Tensor& x) {
  return at::from_blob(x.mutable_data_ptr(), x.sizes(), x.strides(),
                       x.options());
}

/// The pinned block stays until what `user` has been given so far.
void keep_pinned(const at::Tensor& pinned, c10::Stream user) {
  const auto& data = pinned.storage().data_ptr();
  pinned_allocator().record_event(data.get(), data.get_context(), user);
}

void host_to_device(const at::Tensor& from, const at::Tensor& to,
                    bool non_blocking) {
  constexpr auto* name = "copy from host";
  auto later = from.is_pinned() && from.dtype() == to.dtype();
  // As CUDA stages it.
  auto source = later ? borrowed(from) : from.to(to.scalar_type(), false, true);
  queue(to, name, [source, to = twin(to)] { to.copy_(source); },
        {touching(to, true)});
  if (later)
    keep_pinned(from, stream_for(to));
  if (!non_blocking)
    wait_current(to, name);
}

void device_to_host(const at::Tensor& from, const at::Tensor& to,
                    bool non_blocking) {
  constexpr auto* name = "copy to host";
  auto later = non_blocking && to.is_pinned();
  // Who looks too early shall see it.
  if (later && config().poison && to.is_contiguous())
    std::memset(to.mutable_data_ptr(), 0xff, to.nbytes());
  queue(from, name,
        [into = borrowed(to), from = twin(from)] { into.copy_(from); },
        {touching(from, false)});
  if (later)
    keep_pinned(to, stream_for(from));
  else
    wait_current(from, name);
}

/// The current stream of `later` goes on when that of `earlier` has come here.
void follow(const at::Tensor& later, const at::Tensor& earlier) {
  if (later.device() == earlier.device())
    return;
  auto here = make_event();
  auto from = stream_for(earlier), to = stream_for(later);
  record(here, from.device_index(), from.id());
  wait(here, to.device_index(), to.id());
}

void device_to_device(const at::Tensor& from, const at::Tensor& to) {
  follow(from, to);
  twins twin_of;
  queue(from, "copy",
        [from = twin_of(from), to = twin_of(to)] { to.copy_(from); },
        {touching(from, false), touching(to, true)});
  follow(to, from);
}

} // namespace

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to,
                     bool non_blocking) {
  if (to.numel() == 0)
    return to;
  auto source = from.sizes() == to.sizes() ? from : from.expand_as(to);
  if (!is_ours(from))
    host_to_device(source, to, non_blocking);
  else if (!is_ours(to))
    device_to_host(source, to, non_blocking);
  else
    device_to_device(source, to);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& x) {
  auto host = at::empty({}, x.options().device(at::kCPU));
  copy_from(x.reshape({}), host, false);
  return at::_local_scalar_dense(host);
}

} // namespace smp::sim
