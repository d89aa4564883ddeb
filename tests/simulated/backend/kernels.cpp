#include "tests/simulated/backend/kernels.hpp"

#include "tests/simulated/backend/failures.hpp"
#include "tests/simulated/backend/sim_device.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/streams.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

namespace smp::sim {

bool is_ours(const at::Tensor& x) {
  return x.defined() && x.device().type() == sim_type;
}

access touching(const at::Tensor& x, bool write) {
  auto bytes = at::detail::computeStorageNbytes(x.sizes(), x.strides(),
                                                x.element_size());
  return {x.const_data_ptr(), bytes, write};
}

// -- twins --------------------------------------------------------------------

at::Tensor twins::operator()(const at::Tensor& x) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
    storage_of(x), c10::DispatchKeySet{c10::DispatchKey::CPU}, x.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(x.storage_offset());
  impl->set_sizes_and_strides(x.sizes(), x.strides());
  return result;
}

c10::Storage twins::storage_of(const at::Tensor& x) {
  auto* from = x.storage().unsafeGetStorageImpl();
  for (const auto& [known, made] : storages_)
    if (known == from)
      return made;
  c10::DataPtr bytes{kernel_view_of(from->mutable_data()),
                     c10::Device{c10::kCPU}};
  c10::Storage made{c10::Storage::use_byte_size_t{}, from->nbytes(),
                    std::move(bytes)};
  storages_.emplace_back(from, made);
  return made;
}

at::Tensor twin(const at::Tensor& x) {
  return twins{}(x);
}

// -- launching ----------------------------------------------------------------

namespace {

/// As Torch's kernels run: below autograd.
void run_kernel(const std::function<void()>& kernel, int threads) {
  if (at::get_num_threads() != threads)
    at::set_num_threads(threads);
  at::AutoDispatchBelowADInplaceOrView below;
  c10::AutoGradMode no_grad{false};
  kernel();
}

} // namespace

c10::Stream stream_for(const at::Tensor& x) {
  auto on = x.device();
  return c10::Stream{c10::Stream::UNSAFE, on, current_stream(on.index())};
}

void queue(const at::Tensor& on, const char* name, std::function<void()> kernel,
           const std::vector<access>& accesses) {
  auto stream = stream_for(on);
  check_device(stream.device_index());
  // As many threads as on the host, because sums have other bits with others.
  auto run = [threads = at::get_num_threads(), kernel = std::move(kernel)] {
    run_kernel(kernel, threads);
  };
  launch(stream.device_index(), stream.id(), name, std::move(run), accesses);
}

void wait_current(const at::Tensor& on, const char* reason) {
  auto stream = stream_for(on);
  wait_stream(stream.device_index(), stream.id(), reason);
  check_device(stream.device_index());
}

} // namespace smp::sim
