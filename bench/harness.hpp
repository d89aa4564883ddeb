#pragma once

// What the benchmarks share. A measurement is only valid in a fresh process:
// allocator, arenas and thread pools carry over from what ran before. So a
// benchmark starts its own program again for each measured run, and gets the
// numbers back through a file.

#include "runtime/device/cuda_libraries.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/launcher.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <unistd.h>

namespace smp::bench {

// -- numbers ------------------------------------------------------------------

using series = std::vector<double>;

/// x: not empty, q: 0 to 1
inline double quantile(series x, double q) {
  std::sort(x.begin(), x.end());
  auto last = static_cast<double>(x.size() - 1);
  return x[static_cast<size_t>(last * q + 0.5)];
}

inline double median(series x) {
  return quantile(std::move(x), 0.5);
}

inline double minimum(const series& x) {
  return *std::min_element(x.begin(), x.end());
}

/// The result of a measured run: numbers by name, and a text for people.
struct figures {
  std::map<std::string, series> numbers;
  std::string text;

  /// Appends the result of another run of the same kind.
  void add(const figures& x) {
    for (auto& [name, values] : x.numbers) {
      auto& mine = numbers[name];
      mine.insert(mine.end(), values.begin(), values.end());
    }
    if (text.empty())
      text = x.text;
  }

  const series& operator[](const std::string& name) const {
    auto i = numbers.find(name);
    if (i == numbers.end() || i->second.empty())
      throw std::runtime_error{"a run told no '" + name + "'"};
    return i->second;
  }
};

inline void write(const figures& x, const std::string& path) {
  std::ofstream out{path};
  for (auto& [name, values] : x.numbers) {
    out << name;
    for (auto y : values)
      out << fmt::format(" {}", y);
    out << '\n';
  }
  out << '\n' << x.text;
}

inline figures read_figures(const std::string& path) {
  std::ifstream in{path};
  figures result;
  for (std::string line; std::getline(in, line) && !line.empty();) {
    std::istringstream words{line};
    std::string name;
    words >> name;
    auto& values = result.numbers[name];
    for (double x = 0; words >> x;)
      values.push_back(x);
  }
  result.text.assign(std::istreambuf_iterator<char>{in}, {});
  return result;
}

// -- arguments ----------------------------------------------------------------

/// --key=value and nothing else.
class arguments {
public:
  arguments(int argc, char** argv) {
    for (int i = 1; i < argc; ++i)
      set(argv[i]);
  }

  void set(const std::string& x) {
    auto eq = x.find('=');
    if (!x.starts_with("--") || eq == std::string::npos)
      throw std::runtime_error{"'" + x + "': --key=value expected"};
    values_[x.substr(2, eq - 2)] = x.substr(eq + 1);
  }

  std::string text(const std::string& key, std::string fallback = {}) const {
    auto i = values_.find(key);
    return i == values_.end() ? fallback : i->second;
  }

  int64_t number(const std::string& key, int64_t fallback) const {
    auto x = text(key);
    return x.empty() ? fallback : std::stoll(x);
  }

  /// The same arguments for a program to be started.
  std::vector<std::string> all() const {
    std::vector<std::string> result;
    for (auto& [key, value] : values_)
      result.push_back("--" + key + "=" + value);
    return result;
  }

private:
  std::map<std::string, std::string> values_;
};

/// --device=NAME: where all runs compute, e.g. cuda.
inline std::string device_name(const arguments& x) {
  return x.text("device", "cpu");
}

// -- runs ---------------------------------------------------------------------

/// A directory for the files of one benchmark, removed at its end.
class scratch {
public:
  scratch() {
    std::string name = std::filesystem::temp_directory_path()
                       / "smp-bench-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr)
      throw std::runtime_error{name + ": cannot be made"};
    path_ = name;
  }

  ~scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  scratch(const scratch&) = delete;
  scratch& operator=(const scratch&) = delete;

  std::filesystem::path operator/(const std::string& x) const {
    return path_ / x;
  }

private:
  std::filesystem::path path_;
};

inline std::string own_program() {
  return std::filesystem::read_symlink("/proc/self/exe");
}

/// Starts a program as `ranks` processes with these arguments and --file=FILE,
/// and waits for them. One of them writes its figures to the file.
inline figures run_program(const scratch& dir, uint64_t ranks,
                           std::vector<std::string> command, arguments args) {
  const std::string file = dir / "figures";
  std::filesystem::remove(file);
  args.set("--file=" + file);
  launch_options options;
  options.ranks = ranks;
  options.command = std::move(command);
  // The programs compared with begin no session, and end by themselves.
  options.join_limit = std::chrono::hours{1};
  for (auto& x : args.all())
    options.command.push_back(x);
  if (auto code = launch(options); code != 0)
    throw std::runtime_error{
      fmt::format("a run of {} ended with code {}", options.command[0], code)};
  return read_figures(file);
}

/// Starts this program again, with --run=RUN.
inline figures run_fresh(const scratch& dir, uint64_t ranks,
                         const std::string& run, arguments args) {
  args.set("--run=" + run);
  return run_program(dir, ranks, {own_program()}, std::move(args));
}

/// The body of `main`.
/// @returns the exit code
inline int run_main(int argc, char** argv, void (*run)(const arguments&)) {
  prepare_process(argc, argv);
  try {
    const arguments all{argc, argv};
    if (device_name(all) == "cuda")
      load_cuda();
    run(all);
    return 0;
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}: {}\n", own_program(), e.what());
    return 2;
  }
}

// -- who else is there --------------------------------------------------------

/// Processes that want a core, averaged over a minute by the kernel.
inline double machine_load() {
  double result[1] = {0};
  return ::getloadavg(result, 1) == 1 ? result[0] : 0;
}

/// @returns how long threads of this process were ready but had no core, in
/// seconds: on a shared machine, the part of a time that is due to others
inline double waited_for_a_core() {
  double result = 0;
  std::error_code ignored;
  namespace fs = std::filesystem;
  for (auto& x : fs::directory_iterator{"/proc/self/task", ignored}) {
    std::ifstream in{x.path() / "schedstat"};
    double executed = 0, waited = 0;
    if (in >> executed >> waited)
      result += waited * 1e-9;
  }
  return result;
}

} // namespace smp::bench
