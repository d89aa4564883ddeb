// libsmp_cuda.so: makes the device "cuda" known to smp. All that LibTorch's
// classes for any device can do is in libsmp, so this is small, and the only
// part that needs the CUDA runtime.

#include "runtime/device/accelerator.hpp"

#include <c10/util/Exception.h>

#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <string>
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

  void* allocate_shared(c10::DeviceIndex, size_t bytes) override {
    void* result = nullptr;
    auto problem = cudaMalloc(&result, bytes);
    if (problem != cudaErrorMemoryAllocation)
      check(problem);
    else
      (void)cudaGetLastError();
    return result;
  }

  std::string export_shared(void* x) override {
    exported_memory result{};
    int device = 0;
    check(cudaGetDevice(&device));
    check(cudaDeviceGetPCIBusId(result.bus, sizeof(result.bus), device));
    if (cudaIpcGetMemHandle(&result.handle, x) != cudaSuccess) {
      (void)cudaGetLastError();
      return {};
    }
    return {reinterpret_cast<const char*>(&result), sizeof(result)};
  }

  void* open_shared(c10::DeviceIndex device,
                    const std::string& exported) override {
    exported_memory x{};
    if (exported.size() != sizeof(x))
      return nullptr;
    std::memcpy(&x, exported.data(), sizeof(x));
    void* result = nullptr;
    if (!reaches(device, x.bus)
        || cudaIpcOpenMemHandle(&result, x.handle,
                                cudaIpcMemLazyEnablePeerAccess)
             != cudaSuccess) {
      (void)cudaGetLastError();
      return nullptr;
    }
    return result;
  }

  void close_shared(void* opened) override {
    (void)cudaIpcCloseMemHandle(opened);
  }

private:
  /// Plain bytes.
  struct exported_memory {
    cudaIpcMemHandle_t handle;
    char bus[32]; // of the device, which has other numbers in other processes
  };

  /// @param bus of the other device, which this process may not see
  static bool reaches(c10::DeviceIndex device, const char* bus) {
    int other = 0;
    if (cudaDeviceGetByPCIBusId(&other, bus) != cudaSuccess)
      return false;
    int can = 0;
    return other == device
           || (cudaDeviceCanAccessPeer(&can, device, other) == cudaSuccess
               && can != 0);
  }
};

const bool added = [] {
  add_accelerator("cuda", std::make_shared<cuda_accelerator>());
  return true;
}();

} // namespace

} // namespace smp
