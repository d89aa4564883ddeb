#include "runtime/device/cuda_libraries.hpp"

#include "runtime/device/accelerator.hpp"
#include "runtime/device/cuda_driver.hpp"

#include <ATen/detail/CUDAHooksInterface.h>

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>

#include <dlfcn.h>

namespace smp {

namespace {

namespace fs = std::filesystem;

/// @returns the folder of the library that has a function
template <class F>
fs::path folder_of(F* function) {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(function), &info) == 0)
    return {};
  return fs::path{info.dli_fname}.parent_path();
}

/// Stays loaded until the process ends.
/// @returns why not; empty if it is loaded
std::string load(const fs::path& library) {
  if (::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr)
    return {};
  return ::dlerror();
}

/// @returns why not; empty if LibTorch has GPUs now
std::string load_libraries(const cuda_driver& driver) {
  auto torch = folder_of(&at::detail::getCUDAHooks) / "libtorch_cuda.so";
  if (!fs::exists(torch))
    return fmt::format(
      "{} is not there, which LibTorch needs for GPUs: "
      "`SMP_CUDA=1 ./dev build` loads it (2.5 GB)",
      torch.string());
  // Sums in cuBLAS that do not depend on what else runs; read when it is
  // loaded.
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
  if (auto why = load(torch); !why.empty())
    return "LibTorch's part for GPUs cannot be loaded: " + why;
  if (auto why = load(folder_of(&add_accelerator) / "libsmp_cuda.so");
      !why.empty())
    return "smp's part for GPUs cannot be loaded: " + why;
  if (at::detail::getCUDAHooks().hasCUDA())
    return {};
  if (!driver.problem.empty())
    return driver.problem;
  return "LibTorch was used before its part for GPUs was loaded, and has none "
         "since: call smp::init first in main, before anything of LibTorch";
}

cuda_libraries find() {
  const auto* given = std::getenv("SMP_CUDA");
  const std::string_view wish = given != nullptr ? given : "";
  cuda_libraries result;
  auto driver = ask_cuda_driver();
  result.expected = driver.version > 0 || wish == "1";
  result.why_not = driver.problem.empty() || wish == "1"
                     ? load_libraries(driver)
                     : driver.problem;
  result.usable = result.why_not.empty();
  return result;
}

} // namespace

const cuda_libraries& load_cuda() {
  static const auto result = find();
  return result;
}

} // namespace smp
