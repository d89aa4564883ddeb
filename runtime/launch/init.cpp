#include "runtime/launch/init.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/device/cuda_libraries.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/error_exit.hpp"
#include "runtime/launch/launcher.hpp"
#include "runtime/launch/run_dir.hpp"
#include "runtime/launch/run_outcome.hpp"
#include "transport/error.hpp"

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace smp {

namespace {

/// @returns the value of `FLAG VALUE` or `FLAG=VALUE`
std::optional<std::string_view> option_value(int argc, char** argv,
                                             std::string_view flag) {
  for (int i = 1; i < argc; ++i) {
    std::string_view x = argv[i];
    if (x == flag)
      return i + 1 < argc ? std::string_view{argv[i + 1]} : std::string_view{};
    if (x.starts_with(flag) && x.size() > flag.size() && x[flag.size()] == '=')
      return x.substr(flag.size() + 1);
  }
  return std::nullopt;
}

uint64_t number_of_ranks(std::string_view text) {
  uint64_t result = 0;
  auto* last = text.data() + text.size();
  auto [end, problem] = std::from_chars(text.data(), last, result);
  if (problem != std::errc{} || end != last || result == 0)
    throw config_error("--ranks " + std::string{text}
                       + ": expected a number of ranks, 1 or more");
  return result;
}

/// Whether nothing of value would be lost: the run failed before the end of its
/// first step, or ended well without a session.
bool is_no_run(const run_outcome& x) {
  return x.reached == run_stage::start
         || (x.reached == run_stage::session && x.exit_code != 0);
}

/// Creates the directory that the user names, or one for several ranks: a
/// single rank shows all its output on the console.
/// @returns the directory; empty: the run has none
std::string own_run_dir(int argc, char** argv, uint64_t ranks) {
  auto wanted = option_value(argc, argv, "--run-dir");
  if (!wanted) {
    auto name = std::filesystem::path{argv[0]}.filename().string();
    return ranks > 1 ? make_run_dir({}, name) : std::string{};
  }
  if (wanted->empty() || wanted->starts_with("--"))
    throw config_error("--run-dir: expected a directory");
  std::string path{*wanted};
  if (auto end = read_run_outcome(path); end && is_no_run(*end)) {
    print_stderr(
      "smp: the run in {} ended before its first step was over; it "
      "is overwritten\n",
      path);
    remove_launcher_files(path);
  }
  // The program may leave other files there, which are not known here.
  claim_run_dir(path, {"log-0.txt", "end.json"});
  return make_run_dir(path, {});
}

/// A program that only printed its help left nothing that the
/// console did not show.
void remove_if_nothing_began(const std::string& run_dir) {
  auto end = read_run_outcome(run_dir);
  if (!end || end->exit_code != 0 || end->reached != run_stage::start)
    return;
  remove_launcher_files(run_dir);
  std::error_code not_empty;
  if (std::filesystem::remove(run_dir, not_empty))
    print_stderr("smp: run dir {} is removed: no rank began a session\n",
                 run_dir);
}

} // namespace

void init(int argc, char** argv) {
  prepare_process(argc, argv);
  end_on_uncaught_errors();
  auto ranks = option_value(argc, argv, "--ranks");
  // Not in the launcher, and before the program can use LibTorch.
  auto here = ranks ? read_rank_environment() : std::nullopt;
  if (!ranks || here)
    load_cuda();
  if (!ranks)
    return;
  if (here) {
    // stdout is a log or a pipe to our launcher, where each line must show at
    // once, as on the console.
    if (here->supervised)
      std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    return;
  }
  launch_options x;
  x.ranks = number_of_ranks(*ranks);
  x.log_dir = own_run_dir(argc, argv, x.ranks);
  if (!x.log_dir.empty())
    print_stderr("smp: run dir {}\n", x.log_dir);
  auto code = launch(x);
  if (!x.log_dir.empty() && !option_value(argc, argv, "--run-dir"))
    remove_if_nothing_began(x.log_dir);
  exit_at_once(code);
}

} // namespace smp
