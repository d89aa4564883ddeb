// libsmp_cuda.so: makes the device "cuda" known to smp. All that LibTorch's
// classes for any device can do is in libsmp, so this is small, and the only
// part that needs the CUDA runtime.

#include "runtime/device/accelerator.hpp"

#include <c10/util/Exception.h>

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

namespace smp {

namespace {

void check(cudaError_t x) {
  if (x == cudaSuccess)
    return;
  (void)cudaGetLastError(); // told now
  throw c10::AcceleratorError(
    {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, x,
    std::string{"CUDA error: "} + cudaGetErrorString(x));
}

void CUDART_CB call(void* x) {
  std::unique_ptr<std::function<void()>> f{
    static_cast<std::function<void()>*>(x)};
  (*f)();
}

class cuda_accelerator final : public accelerator {
public:
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }

  void notify(c10::Stream x, std::function<void()> f) override {
    auto kept = std::make_unique<std::function<void()>>(std::move(f));
    check(cudaLaunchHostFunc(static_cast<cudaStream_t>(x.native_handle()), call,
                             kept.get()));
    (void)kept.release(); // `call` has it
  }
};

const bool added = [] {
  add_accelerator("cuda", std::make_shared<cuda_accelerator>());
  return true;
}();

} // namespace

} // namespace smp
