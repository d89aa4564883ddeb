#include "transport/stacks/process_stacks.hpp"

#include "transport/process_state.hpp"
#include "transport/stacks/stack_signal.hpp"
#include "transport/stacks/symbols.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <system_error>

#include <unistd.h>

namespace smp {

namespace {

using stack_clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

/// One thread has this long; it needs microseconds, and a processor.
constexpr auto thread_limit = 300ms;
/// A thread that no signal wakes may still be about to come back.
constexpr auto uninterruptible_limit = 20ms;
/// All threads together.
constexpr auto threads_limit = 1500ms;
/// The same question of another rank in this process.
constexpr auto turn_limit = 2s;

std::string content(const std::string& path) {
  std::ifstream file{path};
  return {std::istreambuf_iterator<char>{file}, {}};
}

std::string state_word(char letter) {
  switch (letter) {
    case 'R':
      return "running";
    case 'S':
    case 'I':
      return "sleeping";
    case 'D':
      return "in an uninterruptible call";
    case 'T':
    case 't':
      return "stopped";
    default:
      return "ended";
  }
}

/// What the kernel says of a thread, see proc(5).
struct thread_facts {
  explicit thread_facts(pid_t id)
    : dir(fmt::format("/proc/self/task/{}/", id)) {
    auto text = content(dir + "stat");
    auto begin = text.find('(');
    auto end = text.rfind(')');
    if (end == std::string::npos)
      return;
    name = text.substr(begin + 1, end - begin - 1);
    std::istringstream rest{text.substr(end + 1)};
    rest >> letter;
    std::string field;
    for (int i = 4; i < 14; ++i)
      rest >> field;
    uint64_t user = 0;
    uint64_t system = 0;
    rest >> user >> system;
    cpu_seconds = static_cast<double>(user + system)
                  / static_cast<double>(::sysconf(_SC_CLK_TCK));
    auto status = content(dir + "status");
    constexpr std::string_view key = "\nSigBlk:\t";
    if (auto at = status.find(key); at != std::string::npos)
      std::from_chars(status.data() + at + key.size(),
                      status.data() + status.size(), blocked, 16);
  }

  bool blocks(int signal) const {
    return (blocked >> (signal - 1) & 1) != 0;
  }

  /// What it does in the kernel, if that tells.
  std::string wait() const {
    auto result = content(dir + "wchan");
    return result.empty() || result == "0" ? std::string{} : " in " + result;
  }

  std::string dir;
  std::string name;
  char letter = 'X';
  double cpu_seconds = 0;
  uint64_t blocked = 0;
};

std::vector<pid_t> threads_of_this_process() {
  std::vector<pid_t> result;
  std::error_code ignored;
  for (auto& x :
       std::filesystem::directory_iterator{"/proc/self/task", ignored})
    result.push_back(std::stoi(x.path().filename().string()));
  // The main thread has the number of the process.
  std::ranges::sort(result, {}, [](pid_t x) {
    return std::pair{x != ::getpid(), x};
  });
  return result;
}

/// @returns the frames of what an interpreter wrote
std::vector<std::string> lines_of(const std::string& script) {
  std::vector<std::string> result;
  std::istringstream in{script};
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("  ")) // else it is a heading
      result.push_back(line.substr(2));
  return result;
}

struct asked_thread {
  thread_stack shown;
  std::vector<uintptr_t> frames;

  bool is_like(const asked_thread& x) const {
    return frames == x.frames && shown.name == x.shown.name
           && shown.state == x.shown.state && shown.problem == x.shown.problem
           && shown.script == x.shown.script;
  }
};

/// @returns nothing if it has ended
std::optional<asked_thread> ask(pid_t id, stack_clock::time_point deadline) {
  thread_facts facts{id};
  if (facts.letter == 'X')
    return std::nullopt;
  asked_thread result;
  auto& shown = result.shown;
  shown.ids = {static_cast<uint64_t>(id)};
  shown.name = facts.name;
  shown.state = state_word(facts.letter);
  shown.cpu_seconds = facts.cpu_seconds;
  if (facts.blocks(stack_signal())) {
    shown.problem = "it blocks signals" + facts.wait();
    return result;
  }
  auto limit = facts.letter == 'D'
                 ? stack_clock::duration{uninterruptible_limit}
                 : stack_clock::duration{thread_limit};
  auto* probe = script_probe_in_use();
  auto raw = ask_thread(id, probe != nullptr && !facts.blocks(probe->signal),
                        std::min(stack_clock::now() + limit, deadline));
  if (!raw)
    return std::nullopt;
  shown.problem = raw->problem;
  if (!raw->problem.empty())
    shown.problem += facts.wait();
  shown.script = lines_of(raw->script);
  shown.cut = raw->cut;
  result.frames = std::move(raw->frames);
  return result;
}

void fold(std::vector<asked_thread>& to, asked_thread x) {
  auto i = std::ranges::find_if(to, [&](auto& y) { return y.is_like(x); });
  if (i == to.end()) {
    to.push_back(std::move(x));
    return;
  }
  i->shown.ids.push_back(x.shown.ids.front());
  i->shown.cpu_seconds += x.shown.cpu_seconds;
}

} // namespace

process_stacks stacks_of_this_process() {
  static std::timed_mutex one_at_a_time; // ranks may be threads of a process
  process_stacks result;
  result.pid = static_cast<uint64_t>(::getpid());
  result.host = host_name();
  std::unique_lock guard{one_at_a_time, turn_limit};
  result.problem = guard ? take_stack_signal()
                         : "another question is being answered: ask again";
  if (!result.problem.empty())
    return result;
  result.problem = script_probe_problem();
  std::vector<asked_thread> threads;
  auto deadline = stack_clock::now() + threads_limit;
  for (auto id : threads_of_this_process())
    if (auto x = ask(id, deadline))
      fold(threads, std::move(*x));
  std::set<uintptr_t> addresses;
  for (auto& x : threads)
    addresses.insert(x.frames.begin(), x.frames.end());
  auto frames = frames_at(addresses);
  for (auto& x : threads) {
    for (auto address : x.frames)
      x.shown.frames.push_back(frames.at(address));
    result.threads.push_back(std::move(x.shown));
  }
  return result;
}

} // namespace smp
