#include "runtime/process/control_group.hpp"

#include "runtime/files/file_io.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <sstream>
#include <string_view>
#include <vector>

namespace smp {

namespace {

template <class T>
std::optional<T> number_in(const std::string& text) {
  T result{};
  auto end = text.data() + text.size();
  auto [rest, problem] = std::from_chars(text.data(), end, result);
  if (problem != std::errc{} || rest == text.data())
    return std::nullopt; // "max" as well
  return result;
}

std::optional<uint64_t> number_of_file(const std::string& path) {
  auto text = try_read(path);
  return text ? number_in<uint64_t>(*text) : std::nullopt;
}

/// @returns the number behind `name` in a file of lines "NAME NUMBER", behind
/// which there may be a unit
std::optional<uint64_t> entry_of(const std::string& path,
                                 std::string_view name) {
  std::istringstream words{try_read(path).value_or("")};
  for (std::string word; words >> word;)
    if (word == name && words >> word)
      return number_in<uint64_t>(word);
  return std::nullopt;
}

template <class T>
void limit(std::optional<T>& x, const std::optional<T>& other) {
  if (other && (!x || *other < *x))
    x = other;
}

/// @returns the folder of the group and those above it, down to `root`. A
/// container sees the groups from its own one on, but may be told of a path
/// from outside.
std::vector<std::string> folders(const std::string& root, std::string path) {
  std::vector<std::string> result;
  for (; path.size() > 1; path.erase(path.rfind('/')))
    result.push_back(root + path);
  result.push_back(root);
  return result;
}

/// @param used all of it, also what holds files
/// @param files what the kernel can drop
std::optional<uint64_t> room_in(std::optional<uint64_t> limit,
                                std::optional<uint64_t> used,
                                std::optional<uint64_t> files) {
  if (!limit || !used)
    return std::nullopt;
  auto needed = *used - std::min(*used, files.value_or(0));
  return *limit - std::min(*limit, needed);
}

// -- version 2 ----------------------------------------------------------------

void read_unified(control_group& x, const std::string& root,
                  const std::string& path) {
  for (auto& folder : folders(root, path)) {
    auto bytes = number_of_file(folder + "/memory.max");
    limit(x.memory, bytes);
    limit(x.free_memory,
          room_in(bytes, number_of_file(folder + "/memory.current"),
                  entry_of(folder + "/memory.stat", "inactive_file")));
    // "QUOTA PERIOD" in microseconds; the quota may be "max".
    std::istringstream cpu{try_read(folder + "/cpu.max").value_or("")};
    double quota = 0;
    double period = 0;
    if (cpu >> quota >> period && period > 0)
      limit(x.cpus, std::optional{quota / period});
    // That of the innermost group counts: what others have is not ours.
    if (!x.oom_kills)
      x.oom_kills = entry_of(folder + "/memory.events", "oom_kill");
  }
}

// -- version 1 ----------------------------------------------------------------

void read_memory(control_group& x, const std::string& root,
                 const std::string& path) {
  constexpr uint64_t no_limit = uint64_t{1} << 62; // about; it says a number
  for (auto& folder : folders(root, path)) {
    auto bytes = number_of_file(folder + "/memory.limit_in_bytes");
    if (bytes && *bytes < no_limit) {
      limit(x.memory, bytes);
      limit(x.free_memory,
            room_in(bytes, number_of_file(folder + "/memory.usage_in_bytes"),
                    entry_of(folder + "/memory.stat", "total_inactive_file")));
    }
    if (!x.oom_kills)
      x.oom_kills = entry_of(folder + "/memory.oom_control", "oom_kill");
  }
}

void read_cpu(control_group& x, const std::string& root,
              const std::string& path) {
  for (auto& folder : folders(root, path)) {
    auto quota = number_of_file(folder + "/cpu.cfs_quota_us"); // or -1
    auto period = number_of_file(folder + "/cpu.cfs_period_us");
    if (quota && period && *period > 0)
      limit(x.cpus, std::optional{static_cast<double>(*quota)
                                  / static_cast<double>(*period)});
  }
}

} // namespace

control_group read_control_group(const control_group_files& x) {
  control_group result;
  // "NUMBER:CONTROLLERS:PATH", in version 2 without controllers.
  std::istringstream lines{try_read(x.own).value_or("")};
  for (std::string line; std::getline(lines, line);) {
    auto first = line.find(':');
    auto second = first == std::string::npos ? first
                                             : line.find(':', first + 1);
    if (second == std::string::npos)
      continue;
    auto path = line.substr(second + 1);
    auto all = ',' + line.substr(first + 1, second - first - 1) + ',';
    if (all == ",,")
      read_unified(result, x.root, path);
    if (all.find(",memory,") != std::string::npos)
      read_memory(result, x.root + "/memory", path);
    if (all.find(",cpu,") != std::string::npos)
      read_cpu(result, x.root + "/cpu", path);
  }
  return result;
}

std::optional<uint64_t> memory_left(const control_group& x,
                                    const std::string& meminfo) {
  auto result = x.free_memory;
  if (auto kilobytes = entry_of(meminfo, "MemAvailable:"))
    limit(result, std::optional{*kilobytes * 1024});
  return result;
}

std::optional<uint64_t> share_of_cpus(const control_group& x, uint64_t n) {
  if (!x.cpus)
    return std::nullopt;
  auto share = *x.cpus / static_cast<double>(std::max<uint64_t>(n, 1));
  return std::max<uint64_t>(1, static_cast<uint64_t>(share));
}

std::string why_killed(const control_group& before, const control_group& now) {
  if (!now.oom_kills || *now.oom_kills <= before.oom_kills.value_or(0))
    return {};
  if (!now.memory)
    return ", as the machine had no more memory";
  return fmt::format(
    ", as its control group (container, batch job) may use no more than {} MB "
    "of memory (docs/large_models.md)",
    *now.memory / 1'000'000);
}

} // namespace smp
