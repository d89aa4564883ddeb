// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"
#include "tests/support/slowness.hpp"

#include <cctype>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <regex>
#include <string>
#include <utility>
#include <vector>

// smp-top on a real terminal, which tmux makes.

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

const std::string endless = endless_gpt("[monitor]\nstall_timeout = 60\n");

/// A terminal in which one command runs.
class terminal {
public:
  terminal(const train_dir& dir, const std::string& command)
    : directory_(dir.path), socket_(dir.path / "tmux") {
    // The last words stay until the terminal goes.
    tmux({"-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "24", "sh",
          "-c", command + "; echo code $?; exec cat"});
  }

  ~terminal() {
    tmux({"kill-server"});
  }

  terminal(const terminal&) = delete;
  terminal& operator=(const terminal&) = delete;

  std::string tmux(std::vector<std::string> words) const {
    words.insert(words.begin(), {"tmux", "-S", socket_});
    program x{
      std::move(words), directory_, {{"TMUX", ""}, {"LC_ALL", "C.UTF-8"}}};
    x.join();
    return x.output();
  }

  void press(const std::string& key) const {
    tmux({"send-keys", key});
  }

  void resize(int width, int height) const {
    tmux({"resize-window", "-x", std::to_string(width), "-y",
          std::to_string(height)});
  }

  std::string text() const {
    return tmux({"capture-pane", "-p"});
  }

  /// @returns the screen as soon as `done`, or after a long time
  std::string until(const std::function<bool(const std::string&)>& done) const {
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds{30};
    for (;;) {
      auto result = text();
      if (done(result) || std::chrono::steady_clock::now() > end)
        return result;
    }
  }

  /// @param parts all of them: a screen may be seen while it is drawn
  template <class... Parts>
  std::string until_it_says(const Parts&... parts) const {
    return until([&](auto& x) { return ((x.find(parts) != x.npos) && ...); });
  }

private:
  std::string directory_;
  std::string socket_;
};

int step_of(const std::string& text) {
  std::smatch found;
  return std::regex_search(text, found, std::regex{"step (\\d+)/1000000"})
           ? std::stoi(found[1])
           : 0;
}

} // namespace

TEST_CASE("smp-top draws a live table, follows keys and the size",
          "[apps][top]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  terminal screen{dir, built_program("smp-top") + " run --interval 0.1"};
  auto first = screen.until([](auto& x) {
    return x.find(" %") != x.npos && x.find("q quit") != x.npos
           && step_of(x) > 0;
  });
  CHECK_THAT(first, ContainsSubstring("run  running  step ")
                      && ContainsSubstring("rank  state")
                      && ContainsSubstring("q quit"));
  auto step = step_of(first);
  REQUIRE(step > 0);
  auto later = screen.until([&](auto& x) { return step_of(x) > step; });
  CHECK(step_of(later) > step);
  // A wide window has room for the last column of a narrow one, and more.
  screen.resize(60, 10);
  auto narrow = screen.until([](auto& x) {
    return x.find("out/s") == x.npos && x.find("q quit") != x.npos;
  });
  CHECK_THAT(narrow, !ContainsSubstring("out/s"));
  screen.resize(140, 30);
  CHECK_THAT(screen.until_it_says("out/s"), ContainsSubstring("out/s"));
  // So few lines that one has to scroll.
  screen.resize(100, 4);
  // Keys that come before the new size have nothing to scroll.
  auto scrolled = [&screen](const char* key, const std::string& part) {
    return screen.until([&](auto& x) {
      auto done = x.find(part) != x.npos;
      if (!done)
        screen.press(key);
      return done;
    });
  };
  CHECK_THAT(scrolled("Down", "   1  "), ContainsSubstring("   1  "));
  CHECK_THAT(scrolled("Up", "running"), ContainsSubstring("running"));
  screen.press("q");
  CHECK_THAT(screen.until_it_says("code 0"), ContainsSubstring("code 0"));
}

TEST_CASE("smp-top shows a stopped rank within a second", "[apps][top]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  auto pid = dir.process_of(1);
  terminal screen{dir, built_program("smp-top") + " run"};
  REQUIRE_THAT(screen.until_it_says("bubble"), ContainsSubstring("bubble"));
  // As in inspect_test.cpp: what has to be shown is that it can.
  double took = 0;
  for (int attempt = 0; attempt < 10; ++attempt) {
    slowness machine;
    auto begin = std::chrono::steady_clock::now();
    REQUIRE(::kill(pid, SIGSTOP) == 0);
    auto text = screen.until_it_says("STOPPED ", "rank 1 is stopped");
    CHECK_THAT(text, ContainsSubstring("rank 1 is stopped"));
    std::chrono::duration<double> x = std::chrono::steady_clock::now() - begin;
    took = x.count() / machine.factor();
    REQUIRE(::kill(pid, SIGCONT) == 0);
    screen.until([](auto& y) { return y.find("STOPPED ") == y.npos; });
    if (took < 1.1) // and to look at the screen takes some
      break;
  }
  CHECK(took < 1.1);
  // Keys are heard while nobody answers.
  run.signal(SIGSTOP);
  CHECK_THAT(screen.until_it_says("unreachable", "is stopped"),
             ContainsSubstring("is stopped"));
  screen.press("q");
  CHECK_THAT(screen.until_it_says("code 0"), ContainsSubstring("code 0"));
  run.signal(SIGCONT);
}

TEST_CASE("smp-top ends with the run and says how", "[apps][top]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  terminal screen{dir, built_program("smp-top") + " run"};
  REQUIRE_THAT(screen.until_it_says("bubble"), ContainsSubstring("bubble"));
  run.signal(SIGINT);
  REQUIRE(run.join() == 130);
  auto end = screen.until_it_says("code 3\n", "exit code 130");
  CHECK_THAT(end, ContainsSubstring("code 3")
                    && ContainsSubstring("the run ended with exit code 130"));
}

TEST_CASE("smp-top tells which rank was killed", "[apps][top]") {
  train_dir dir{endless};
  auto run = dir.start({"tiny.toml", "--run-dir", "run"});
  REQUIRE(run.wait_for(" 2/1000000"));
  terminal screen{dir, built_program("smp-top") + " run"};
  REQUIRE_THAT(screen.until_it_says("bubble"), ContainsSubstring("bubble"));
  REQUIRE(::kill(dir.process_of(1), SIGKILL) == 0);
  // The lines of the screen break anywhere.
  auto joined = [](std::string x) {
    std::erase_if(x, [](unsigned char y) { return std::isspace(y); });
    return x;
  };
  const std::string cause = "rank1:killedbysignal9(SIGKILL)";
  auto text = screen.until(
    [&](auto& x) { return joined(x).find(cause) != x.npos; });
  CHECK_THAT(joined(text), ContainsSubstring(cause));
  CHECK(run.join() == 3);
}

TEST_CASE("smp-top goes on while the actors of a rank do not", "[apps][top]") {
  auto [fault, shown] = GENERATE(table<std::string, std::string>(
    {{"blocks", "BLOCKED "}, {"silent", "stall: nothing moved for "}}));
  CAPTURE(fault);
  train_dir dir{endless};
  auto plugin = std::filesystem::canonical(
    built_program("../lib/faulty_schedule.so"));
  auto run = dir.start(
    {"tiny.toml", "--run-dir", "run", "--smp.pipeline=actor",
     "--smp.schedule.plugin=" + plugin.string(), "--smp.schedule.name=faulty",
     "--smp.schedule.options=" + fault, "--monitor.stall_timeout=1"});
  REQUIRE(run.wait_for("ETA")); // the head of the table of steps
  terminal screen{dir, built_program("smp-top") + " run"};
  CHECK_THAT(screen.until_it_says(shown), ContainsSubstring(shown));
  // Keys are heard.
  screen.press("q");
  CHECK_THAT(screen.until_it_says("code 0"), ContainsSubstring("code 0"));
}
