#include "runtime/checkpoint/checkpoint_lock.hpp"

#include "runtime/files/folder_lock.hpp"
#include "runtime/session/session.hpp"
#include "runtime/step/model_state.hpp"
#include "transport/process_state.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

#include <unistd.h>

namespace smp {

namespace {

/// @returns "run runs/x, process 12 on host a"
std::string name_of_this_run() {
  auto dir = session::current().run_dir();
  std::error_code ignored;
  auto whole = std::filesystem::absolute(dir, ignored).string();
  return fmt::format("{}process {} on host {}",
                     dir.empty() ? "" : "run " + whole + ", ", ::getpid(),
                     host_name());
}

} // namespace

void lock_checkpoints(const std::string& dir, model_state& state) {
  std::error_code ignored;
  // Of a relative path that does not exist yet it would stay relative.
  auto whole = std::filesystem::absolute(dir, ignored);
  auto key = std::filesystem::weakly_canonical(whole, ignored).string();
  auto& locks = state.locks();
  if (!locks.contains(key))
    locks.emplace(key, folder_lock{dir, name_of_this_run()});
}

} // namespace smp
