#include "runtime/launch/shared_segments.hpp"

#include "runtime/files/file_io.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/stopped_ranks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <vector>

#include <sys/ipc.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

namespace smp {

namespace fs = std::filesystem;

namespace {

/// In bytes: UCX begins with 4.2 MB for a rank and grows by as much.
constexpr uint64_t room_of_a_rank = uint64_t{10} << 20;

constexpr std::string_view segment_prefix = "ucx_shm_posix_";

/// When this process began, and how much earlier another rank may have begun.
/// Older files belong to another run, perhaps in a container whose processes
/// are not visible from here.
const std::time_t process_begun = std::time(nullptr);
constexpr std::time_t segment_head_start = 60;

/// @returns files of UCX in `folder`, by their names
std::set<std::string> segments_since(const std::string& folder,
                                     std::time_t since) {
  std::set<std::string> result;
  std::error_code ignored;
  for (auto& x : fs::directory_iterator{folder, ignored}) {
    struct stat info {};
    auto name = x.path().filename().string();
    if (name.starts_with(segment_prefix)
        && ::lstat(x.path().c_str(), &info) == 0 && S_ISREG(info.st_mode)
        && info.st_uid == ::geteuid() && info.st_ctime >= since)
      result.insert(name);
  }
  return result;
}

/// @param maps content of /proc/PID/maps, in which a file name ends the line or
/// is followed by " (deleted)"
bool is_mapped(const std::string& name, const std::string& maps) {
  for (auto i = maps.find('/' + name); i != maps.npos;
       i = maps.find('/' + name, i + 1))
    if (auto end = i + 1 + name.size();
        end == maps.size() || maps[end] == '\n' || maps[end] == ' ')
      return true;
  return false;
}

/// Removes the names of files that a process has open or mapped.
void keep_unused(const fs::path& process, std::set<std::string>& names) {
  std::error_code ignored;
  auto maps = try_read((process / "maps").string()).value_or("");
  std::erase_if(names, [&](auto& x) { return is_mapped(x, maps); });
  for (auto& fd : fs::directory_iterator{process / "fd", ignored}) {
    auto target = fs::read_symlink(fd.path(), ignored).filename().string();
    names.erase(target);
  }
}

bool is_number(const std::string& x) {
  return std::all_of(x.begin(), x.end(),
                     [](char c) { return c >= '0' && c <= '9'; });
}

} // namespace

std::string shared_memory_folder() {
  auto* dir = std::getenv("UCX_POSIX_DIR");
  return dir != nullptr && *dir != '\0' ? dir : "/dev/shm";
}

uint64_t held_by_run(const std::string& folder, const std::string& run_id) {
  struct stat where {};
  if (::stat(folder.c_str(), &where) != 0)
    return 0;
  std::map<ino_t, uint64_t> sizes;
  std::error_code ignored;
  for (auto& x : ranks_here(run_id))
    for (auto& fd : fs::directory_iterator{
           fs::path{"/proc"} / std::to_string(x.pid) / "fd", ignored}) {
      // Peers open it through the descriptor: the name is gone at once.
      struct stat info {};
      auto target = fs::read_symlink(fd.path(), ignored).filename().string();
      if (target.starts_with(segment_prefix)
          && ::stat(fd.path().c_str(), &info) == 0
          && info.st_dev == where.st_dev)
        sizes[info.st_ino] = static_cast<uint64_t>(info.st_blocks) * 512;
    }
  uint64_t result = 0;
  for (auto& [file, size] : sizes)
    result += size;
  return result;
}

std::optional<std::string>
no_room_for_shared_memory(const std::string& folder, uint64_t ranks,
                          const std::string& run_id) {
  rlimit files{};
  if (::getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur < room_of_a_rank)
    return fmt::format("files may have no more than {} bytes (ulimit -f)",
                       static_cast<uint64_t>(files.rlim_cur));
  struct statvfs info {};
  uint64_t held = 0;
  // What a rank takes between two looks would count twice, or never.
  constexpr int looks = 20;
  for (int i = 0; i < looks; ++i) {
    auto before = run_id.empty() ? 0 : held_by_run(folder, run_id);
    if (::statvfs(folder.c_str(), &info) != 0)
      return fmt::format("there is no {}", folder);
    held = run_id.empty() ? 0 : held_by_run(folder, run_id);
    if (held == before)
      break;
  }
  auto size = info.f_blocks * info.f_frsize;
  auto left = info.f_bavail * info.f_frsize + held;
  if (left >= ranks * room_of_a_rank)
    return std::nullopt;
  return fmt::format(
    "{} has {} MB, of which {} are free; {} rank{} of this "
    "machine need {}",
    folder, size >> 20, left >> 20, ranks, ranks == 1 ? "" : "s",
    ranks * room_of_a_rank >> 20);
}

bool system_v_has_room(uint64_t ranks) {
  auto id = ::shmget(IPC_PRIVATE, ranks * room_of_a_rank, IPC_CREAT | 0600);
  if (id == -1)
    return false;
  ::shmctl(id, IPC_RMID, nullptr);
  return true;
}

void remove_dead_segments(const std::string& folder, std::time_t since) {
  auto names = segments_since(folder, since);
  if (names.empty())
    return;
  std::error_code ignored;
  for (auto& process : fs::directory_iterator{"/proc", ignored})
    if (is_number(process.path().filename().string()))
      keep_unused(process.path(), names);
  for (auto& name : names)
    ::unlink((fs::path{folder} / name).c_str());
}

void remove_segments_of_lost_ranks() {
  try {
    auto here = read_rank_environment();
    if (here && !here->supervised)
      remove_dead_segments(shared_memory_folder(),
                           process_begun - segment_head_start);
  } catch (const std::exception&) {
    // The environment is wrong, so no run began, or nothing can be read here.
  }
}

} // namespace smp
