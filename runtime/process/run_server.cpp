#include "runtime/process/run_server.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/process/process.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

namespace smp {

namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds start_limit{20};
constexpr std::chrono::seconds end_limit{2};

/// Beside this program, or where it is installed or built beside this library.
fs::path find_smp_inspect() {
  std::error_code ignored;
  std::vector<fs::path> places{
    fs::read_symlink("/proc/self/exe", ignored).parent_path()};
  Dl_info library{};
  if (::dladdr(reinterpret_cast<void*>(&find_smp_inspect), &library) != 0)
    places.push_back(fs::absolute(library.dli_fname, ignored).parent_path()
                     / "../bin");
  std::string looked;
  for (auto& place : places) {
    auto result = (place / "smp-inspect").lexically_normal();
    if (::access(result.c_str(), X_OK) == 0)
      return result;
    looked += (looked.empty() ? "" : " and ") + result.string();
  }
  throw config_error(
    "monitor.web and monitor.prometheus need the program smp-inspect, which is "
    "not there: "
    + looked
    + "; without these keys, run `smp-inspect RUN_DIR serve` yourself");
}

/// @returns whether there is something to read, or an end, within the limit
bool await_output(int fd, std::chrono::steady_clock::time_point end) {
  auto left = std::chrono::ceil<std::chrono::milliseconds>(
    end - std::chrono::steady_clock::now());
  pollfd x{fd, POLLIN, 0};
  return left.count() > 0 && ::poll(&x, 1, static_cast<int>(left.count())) > 0;
}

} // namespace

std::unique_ptr<run_server> run_server::start(const std::string& run_dir,
                                              const addresses& x) {
  if (x.web.empty() && x.prometheus.empty())
    return nullptr;
  return std::unique_ptr<run_server>{new run_server{run_dir, x}};
}

run_server::run_server(const std::string& run_dir, const addresses& x) {
  spawn_options options;
  options.program = find_smp_inspect().string();
  options.arguments = {"smp-inspect", run_dir, "serve"};
  size_t lines = 0;
  auto add = [&](const char* option, const std::string& address) {
    if (address.empty())
      return;
    options.arguments.insert(options.arguments.end(), {option, address});
    ++lines;
  };
  add("--web", x.web);
  add("--prometheus", x.prometheus);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw config_error("no pipe can be made for smp-inspect");
  output_ = file_descriptor{ends[0]};
  file_descriptor write_end{ends[1]};
  options.out = options.err = write_end.get();
  pid_ = spawn(options);
  write_end.reset();
  // It says where each of them is as soon as it serves.
  auto said = read_lines(lines);
  auto serves = said.starts_with("http://")
                && std::ranges::count(said, '\n')
                     >= static_cast<std::ptrdiff_t>(lines);
  if (!serves) {
    ::kill(-pid_, SIGKILL);
    reap_group(pid_);
    throw config_error("monitor.web, monitor.prometheus: "
                       + (said.empty()
                            ? std::string{"smp-inspect does not answer"}
                            : said.substr(0, said.find('\n'))));
  }
  print_stderr("smp: {} is served at\n{}", run_dir, said);
}

std::string run_server::read_lines(size_t lines) const {
  constexpr size_t longest = 4096;
  std::string result;
  const auto end = std::chrono::steady_clock::now() + start_limit;
  while (static_cast<size_t>(std::ranges::count(result, '\n')) < lines
         && result.size() < longest && await_output(output_.get(), end)) {
    char bytes[512];
    auto n = ::read(output_.get(), bytes, sizeof(bytes));
    if (n <= 0)
      break;
    result.append(bytes, static_cast<size_t>(n));
  }
  return result;
}

run_server::~run_server() {
  ::kill(pid_, SIGTERM);
  // Its end closes the pipe.
  const auto end = std::chrono::steady_clock::now() + end_limit;
  char ignored[512];
  while (await_output(output_.get(), end)
         && ::read(output_.get(), ignored, sizeof(ignored)) > 0) {
    // until then
  }
  ::kill(-pid_, SIGKILL);
  reap_group(pid_);
}

} // namespace smp
