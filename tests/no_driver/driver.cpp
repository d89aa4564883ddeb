#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <unistd.h>

namespace {

std::string setting(const char* name) {
  const auto* x = std::getenv(name);
  return x != nullptr ? x : "";
}

} // namespace

extern "C" {

int cuDriverGetVersion(int* to) {
  *to = std::stoi(setting("SMP_TEST_CUDA_VERSION"));
  return 0;
}

int cuInit(unsigned) {
  auto how = setting("SMP_TEST_CUDA_INIT");
  if (how == "hang")
    for (;;)
      ::pause();
  if (how == "abort")
    std::abort();
  return how.empty() ? 0 : std::stoi(how);
}

int cuDeviceGetCount(int* to) {
  *to = std::stoi(setting("SMP_TEST_CUDA_GPUS"));
  return 0;
}

int cuDeviceGetName(char* to, int size, int gpu) {
  std::snprintf(to, static_cast<size_t>(size), "GPU of tests %d", gpu);
  return 0;
}

int cuDeviceTotalMem_v2(size_t* to, int gpu) {
  *to = size_t{1000000} * static_cast<size_t>(gpu + 1);
  return 0;
}

int cuGetErrorString(int, const char** to) {
  *to = "an error of tests";
  return 0;
}
}
