#include "runtime/launch/stopped_ranks.hpp"

#include "runtime/files/file_io.hpp"
#include "runtime/launch/environment.hpp"
#include "transport/error.hpp"
#include "transport/process_state.hpp"

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>

namespace smp {

namespace {

/// @param environment as in /proc/PID/environ, "NAME=VALUE" and a zero each
std::optional<rank_environment>
place_in_environment(const std::string& environment) {
  auto find = [&](const char* name) -> const char* {
    auto wanted = std::string{name} + '=';
    for (size_t i = 0; i < environment.size();
         i = environment.find('\0', i) + 1) {
      auto rest = std::string_view{environment}.substr(i);
      if (rest.starts_with(wanted))
        return rest.data() + wanted.size();
      if (environment.find('\0', i) == std::string::npos)
        break;
    }
    return nullptr;
  };
  try {
    return read_place_in_run(find);
  } catch (const error&) { // not a rank of ours
    return std::nullopt;
  }
}

/// @param wanted takes a pid; other processes' environments are not read
template <class F>
std::vector<rank_process> find_ranks(const std::string& run_id, F wanted) {
  std::vector<rank_process> result;
  std::error_code ignored;
  for (auto& process : std::filesystem::directory_iterator{"/proc", ignored}) {
    auto pid = std::atoll(process.path().filename().c_str());
    if (pid <= 0 || !wanted(pid))
      continue;
    // That of another user's process cannot be read.
    auto text = try_read((process.path() / "environ").string());
    auto place = text ? place_in_environment(*text) : std::nullopt;
    if (place && place->run_id == run_id)
      result.push_back({pid, rank_id{place->rank}});
  }
  return result;
}

} // namespace

std::vector<rank_process> ranks_here(const std::string& run_id) {
  return find_ranks(run_id, [](int64_t) { return true; });
}

std::vector<rank_id> stopped_ranks_here(const std::string& run_id) {
  auto is_stopped = [](int64_t pid) {
    auto state = state_of_process(pid);
    // Only 'T': a debugger ('t') may hold a process as long as it likes.
    return state && state->letter == 'T';
  };
  std::vector<rank_id> result;
  for (auto& x : find_ranks(run_id, is_stopped))
    result.push_back(x.rank);
  return result;
}

} // namespace smp
