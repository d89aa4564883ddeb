#include "runtime/device/cuda_driver.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string_view>

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace smp {

namespace {

// -- the driver's interface, of which no header is needed ---------------------

constexpr int no_device = 100; // CUDA_ERROR_NO_DEVICE

class driver_library {
public:
  /// @returns nothing if there is no driver
  bool open() {
    library_ = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library_ != nullptr;
  }

  /// @returns its error, or -1 if it has no function of that name
  template <class... Ts>
  int call(const char* name, Ts... xs) {
    using function = int (*)(Ts...);
    auto f = reinterpret_cast<function>(::dlsym(library_, name));
    return f != nullptr ? f(xs...) : -1;
  }

  std::string describe(int problem) {
    const char* text = nullptr;
    if (call("cuGetErrorString", problem, &text) != 0 || text == nullptr)
      text = "no text";
    return fmt::format("error {}, {}", problem, text);
  }

private:
  void* library_ = nullptr;
};

std::string version_text(int x) {
  return fmt::format("{}.{}", x / 1000, x % 1000 / 10);
}

/// @returns lines: "version N", "gpu BYTES NAME", "problem TEXT"
std::string ask() {
  driver_library driver;
  if (!driver.open())
    return "problem this machine has no NVIDIA driver (libcuda.so.1)\n";
  int version = 0;
  if (auto x = driver.call("cuDriverGetVersion", &version); x != 0)
    return fmt::format("problem the NVIDIA driver fails: {}\n",
                       driver.describe(x));
  auto result = fmt::format("version {}\n", version);
  if (version < needed_cuda_version)
    return result
           + fmt::format(
             "problem the NVIDIA driver is made for CUDA {}, and {} "
             "is needed: install driver 580 or a later one\n",
             version_text(version), version_text(needed_cuda_version));
  int count = 0;
  auto failed = driver.call("cuInit", 0U);
  if (failed == 0)
    failed = driver.call("cuDeviceGetCount", &count);
  if (failed == no_device || (failed == 0 && count == 0))
    return result
           + "problem the NVIDIA driver sees no GPU (CUDA_VISIBLE_DEVICES "
             "may hide them)\n";
  for (int i = 0; failed == 0 && i < count; ++i) {
    char name[256] = "";
    size_t bytes = 0;
    failed = driver.call("cuDeviceGetName", &*name,
                         static_cast<int>(sizeof(name)), i);
    if (failed == 0)
      failed = driver.call("cuDeviceTotalMem_v2", &bytes, i);
    result += fmt::format("gpu {} {}\n", bytes, name);
  }
  if (failed != 0)
    result += fmt::format("problem the NVIDIA driver fails: {}\n",
                          driver.describe(failed));
  return result;
}

// -- the process that asks ----------------------------------------------------

[[noreturn]] void answer(int to) {
  // Whoever waits for the answer may be killed.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // Nor do handlers of this program tell of the end of another one.
  for (auto fatal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL})
    ::signal(fatal, SIG_DFL);
  auto text = ask();
  for (size_t sent = 0; sent < text.size();) {
    auto n = ::write(to, text.data() + sent, text.size() - sent);
    if (n <= 0)
      break;
    sent += static_cast<size_t>(n);
  }
  ::_exit(0);
}

/// Reads until the other side closes.
/// @returns false if it does not before `limit`
bool read_all(int from, std::string& to, std::chrono::milliseconds limit) {
  using clock = std::chrono::steady_clock;
  const auto end = clock::now() + limit;
  for (;;) {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(end
                                                             - clock::now());
    ::pollfd x{from, POLLIN, 0};
    auto ready = left.count() > 0
                   ? ::poll(&x, 1, static_cast<int>(left.count()))
                   : 0;
    if (ready < 0 && errno == EINTR)
      continue;
    if (ready <= 0)
      return false;
    char buffer[4096];
    auto n = ::read(from, buffer, sizeof(buffer));
    if (n == 0)
      return true;
    if (n > 0)
      to.append(buffer, static_cast<size_t>(n));
    else if (errno != EINTR)
      return false;
  }
}

cuda_driver read_answer(const std::string& text) {
  cuda_driver result;
  std::istringstream lines{text};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words{line};
    std::string what;
    words >> what;
    if (what == "version") {
      words >> result.version;
    } else if (what == "gpu") {
      auto& gpu = result.gpus.emplace_back();
      words >> gpu.memory >> std::ws;
      std::getline(words, gpu.name);
    } else if (what == "problem") {
      words >> std::ws;
      std::getline(words, result.problem);
    }
  }
  if (!result.problem.empty())
    result.gpus.clear();
  else if (result.gpus.empty())
    result.problem = "the NVIDIA driver ends the process that asks for GPUs";
  return result;
}

} // namespace

cuda_driver ask_cuda_driver(std::chrono::milliseconds limit) {
  cuda_driver result;
  if (const auto* wish = std::getenv("SMP_CUDA");
      wish != nullptr && std::string_view{wish} == "0") {
    result.problem = "SMP_CUDA = 0 in the environment";
    return result;
  }
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    result.problem = fmt::format("cannot ask the NVIDIA driver: {}",
                                 std::strerror(errno));
    return result;
  }
  auto child = ::fork();
  if (child == 0)
    answer(ends[1]);
  ::close(ends[1]);
  std::string text;
  if (child < 0)
    result.problem = fmt::format("cannot ask the NVIDIA driver: {}",
                                 std::strerror(errno));
  else if (read_all(ends[0], text, limit))
    result = read_answer(text);
  else
    result.problem = fmt::format("the NVIDIA driver did not answer for {:g} s",
                                 std::chrono::duration<double>{limit}.count());
  ::close(ends[0]);
  if (child > 0) {
    ::kill(child, SIGKILL);
    while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  return result;
}

} // namespace smp
