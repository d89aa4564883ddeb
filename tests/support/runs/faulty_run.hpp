#pragma once

// Runs in which a rank is killed or stopped while it does what others wait for.
// The test's program starts itself as a launcher, and that one as the ranks;
// both are hidden test cases. Test and ranks talk by files in a folder.

#include "tests/support/catch.hpp"

#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/process_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp::test {

/// Longer than any machine needs to notice something, and no measure of speed.
inline constexpr std::chrono::seconds patience{30};

// -- a rank -------------------------------------------------------------------

inline std::string variable(const char* name) {
  auto result = std::getenv(name);
  return result != nullptr ? result : "";
}

/// Writes a file that the test, and other ranks, look for.
inline void note(const std::string& name, const std::string& text = "") {
  auto path = variable("TEST_DIR") + '/' + name;
  std::ofstream{path + ".new"} << text;
  std::filesystem::rename(path + ".new", path);
}

inline bool is_told(const std::string& name) {
  return std::filesystem::exists(variable("TEST_DIR") + '/' + name);
}

// -- the test -----------------------------------------------------------------

class faulty_run {
public:
  using milliseconds = std::chrono::milliseconds;

  /// @param launcher a hidden test case, which gets `environment`, and in
  /// TEST_DIR the folder
  faulty_run(const std::string& launcher, uint64_t ranks, uint64_t victim,
             std::map<std::string, std::string> environment)
    : victim_(victim), processes_(ranks) {
    std::filesystem::create_directory(dir_.path / "shm");
    environment["TEST_DIR"] = dir_.path;
    environment["UCX_POSIX_DIR"] = dir_.path / "shm";
    launcher_.emplace(this_program(launcher), dir_.path,
                      std::move(environment));
  }

  /// Waits for a file of a rank. @returns what it holds
  std::string await(const std::string& name) {
    auto path = dir_.path / name;
    auto end = std::chrono::steady_clock::now() + patience;
    while (!std::filesystem::exists(path)) {
      auto over = std::chrono::steady_clock::now() > end || launcher_is_gone();
      // Its last one may have come just before it went.
      if (over && !std::filesystem::exists(path))
        FAIL("waited for " << name << '\n' << output());
      let_pass(milliseconds{1});
    }
    return dir_.read(name);
  }

  void signal(uint64_t rank, int number) {
    REQUIRE(::kill(process(rank), number) == 0);
  }

  /// It may be gone.
  void try_to_kill(uint64_t rank) {
    ::kill(process(rank), SIGKILL);
  }

  /// Of those who are left, the most, in cores.
  double busy(milliseconds window) {
    std::vector<double> before;
    for (uint64_t i = 0; i < processes_.size(); ++i)
      before.push_back(cpu_seconds_of(process(i)));
    auto begin = std::chrono::steady_clock::now();
    let_pass(window);
    std::chrono::duration<double> passed = std::chrono::steady_clock::now()
                                           - begin;
    double result = 0;
    for (uint64_t i = 0; i < processes_.size(); ++i)
      result = std::max(result, cpu_seconds_of(process(i)) - before[i]);
    return result / passed.count();
  }

  /// What was under way when a rank stopped comes to its end first.
  bool comes_to_rest() {
    for (int attempt = 0; attempt < 20; ++attempt)
      if (busy(milliseconds{500}) < 0.3)
        return true;
    return false;
  }

  /// How a rank that nobody ended came to its end.
  void check_survivor(uint64_t rank, int code, const std::string& cause) {
    auto at = std::to_string(rank);
    CHECK(await("end-" + at) == std::to_string(code));
    if (code != 0)
      CHECK_THAT(await("heard-" + at),
                 Catch::Matchers::ContainsSubstring(cause));
  }

  void check_survivors(int code, const std::string& cause) {
    for (uint64_t i = 0; i < processes_.size(); ++i)
      if (i != victim_)
        check_survivor(i, code, cause);
  }

  /// The end of all, after which nothing is left. @returns the exit code
  int end() {
    auto code = launcher_->join(patience);
    for (uint64_t i = 0; i < processes_.size(); ++i)
      CHECK(is_gone(process(i)));
    CHECK(std::filesystem::is_empty(dir_.path / "shm"));
    return code;
  }

  void check_end(int code, const std::string& told) {
    CHECK(end() == code);
    CHECK_THAT(output(), Catch::Matchers::ContainsSubstring(told));
  }

  void tell(const std::string& name) {
    dir_.write(name, "");
  }

  const std::filesystem::path& folder() const {
    return dir_.path;
  }

  bool has(const std::string& name) const {
    return std::filesystem::exists(dir_.path / name);
  }

private:
  pid_t process(uint64_t rank) {
    auto& result = processes_.at(rank);
    if (result == 0)
      result = std::stoi(await("begin-" + std::to_string(rank)));
    return result;
  }

  /// It waits for its parent, this process.
  bool launcher_is_gone() const {
    auto x = state_of_process(launcher_->pid());
    return x && x->ended();
  }

  std::string output() {
    launcher_->wait_for("\1", milliseconds{100}); // reads all that there is
    auto result = launcher_->output();
    for (auto& x : std::filesystem::directory_iterator{dir_.path})
      result += x.path().filename().string() + ' ';
    for (uint64_t i = 0; i < processes_.size(); ++i) {
      auto log = dir_.path / fmt::format("logs/log-{}.txt", i);
      if (std::filesystem::exists(log))
        result += fmt::format("\n-- rank {}\n{}", i, content_of(log));
    }
    return result;
  }

  scratch_dir dir_;
  std::optional<program> launcher_;
  uint64_t victim_;
  std::vector<pid_t> processes_;
};

} // namespace smp::test
