#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"

#include <ATen/ops/full.h>

#include <sys/fsuid.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

using namespace smp;
using Catch::Matchers::ContainsSubstring;
namespace fs = std::filesystem;

namespace {

/// Saves a checkpoint of two files, keeping two.
void save(const std::string& dir, uint64_t step) {
  auto place = begin_checkpoint(dir, step);
  for (std::string name : {"model-0", "state-0"})
    write_safetensors(place.folder + "/" + name + ".safetensors",
                      {{"x", at::full({300}, static_cast<double>(step))}});
  commit_checkpoint(place, "step " + std::to_string(step));
  remove_old_checkpoints(dir, place, 2);
}

/// Whether all of it is there.
bool is_whole(const checkpoint_place& x) {
  auto expected = at::full({300}, static_cast<double>(x.step));
  for (std::string name : {"model-0", "state-0"})
    if (!read_safetensors(x.folder + "/" + name + ".safetensors")
           .tensors.at(0)
           .second.equal(expected))
      return false;
  return test::content_of(manifest_path(x.folder))
         == "step " + std::to_string(x.step);
}

std::vector<uint64_t> steps_in(const std::string& dir) {
  std::vector<uint64_t> result;
  for (auto& x : complete_checkpoints(dir))
    result.push_back(x.step);
  return result;
}

/// Runs `f` in a process of its own that is killed when it begins its system
/// call number `call`. @returns false if it made fewer
bool killed_at(uint64_t call, const std::function<void()>& f) {
  auto pid = ::fork();
  if (pid == 0) {
    ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    ::raise(SIGSTOP);
    f();
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  REQUIRE(WIFSTOPPED(status));
  // Each call stops twice, at its beginning and at its end.
  for (uint64_t stop = 0; stop + 1 < 2 * call; ++stop) {
    REQUIRE(::ptrace(PTRACE_SYSCALL, pid, nullptr, nullptr) == 0);
    REQUIRE(::waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status)) {
      CHECK(WEXITSTATUS(status) == 0);
      return false;
    }
    REQUIRE(WIFSTOPPED(status));
  }
  ::kill(pid, SIGKILL);
  ::waitpid(pid, &status, 0);
  return true;
}

} // namespace

TEST_CASE("the newest checkpoints stay", "[runtime][checkpoint]") {
  test::scratch_dir scratch;
  auto dir = (scratch.path / "deep/checkpoints").string();
  CHECK(complete_checkpoints(dir).empty());
  CHECK_FALSE(newest_checkpoint(dir));
  for (uint64_t step : {9, 10, 100})
    save(dir, step);
  CHECK(steps_in(dir) == std::vector<uint64_t>{10, 100});
  auto newest = newest_checkpoint(dir);
  REQUIRE(newest);
  CHECK(newest->step == 100);
  CHECK(is_whole(*newest));
  CHECK(newest_checkpoint(dir + "/step-10")->step == 10);
}

TEST_CASE("a step that is saved again replaces nothing before it is whole",
          "[runtime][checkpoint]") {
  test::scratch_dir scratch;
  auto dir = scratch.path.string();
  save(dir, 5);
  auto again = begin_checkpoint(dir, 5);
  CHECK(again.folder == dir + "/step-5-2");
  CHECK(newest_checkpoint(dir)->folder == dir + "/step-5");
  commit_checkpoint(again, "again");
  CHECK(newest_checkpoint(dir)->folder == dir + "/step-5-2");
}

TEST_CASE("what is not smp's stays", "[runtime][checkpoint]") {
  test::scratch_dir scratch;
  auto dir = scratch.path.string();
  constexpr const char* mine[] = {"notes.txt",
                                  "step-x/manifest.json",
                                  "step-1/notes.txt",
                                  "step-1/model-notes.txt",
                                  "step-1/model-.safetensors",
                                  "step-1/state-0.safetensors.backup",
                                  "step-1/model-best.safetensors",
                                  "step-1/manifest.json.old",
                                  "step-01/manifest.json",
                                  "other/manifest.json"};
  for (auto name : mine)
    scratch.write(name, "mine");
  for (uint64_t step : {1, 2, 3, 4})
    save(dir, step);
  CHECK(steps_in(dir) == std::vector<uint64_t>{3, 4});
  for (auto name : mine)
    CHECK(scratch.read(name) == "mine");
}

TEST_CASE("nothing is removed or written behind a symbolic link",
          "[runtime][checkpoint]") {
  test::scratch_dir scratch;
  auto dir = (scratch.path / "here").string();
  auto other = (scratch.path / "elsewhere").string();
  std::filesystem::create_directory(dir);
  save(other, 1);
  save(other, 3); // incomplete there: see below
  std::filesystem::remove(manifest_path(other + "/step-3"));
  for (auto name : {"step-1", "step-3"})
    std::filesystem::create_directory_symlink(other + "/" + name,
                                              dir + "/" + name);
  CHECK(newest_checkpoint(dir)->step == 1); // it may be read
  for (uint64_t step : {2, 3, 4, 5})
    save(dir, step);
  CHECK(scratch.read("elsewhere/step-1/manifest.json") != "");
  CHECK(!std::filesystem::exists(manifest_path(other + "/step-3")));
  CHECK(newest_checkpoint(dir)->step == 5);
  CHECK(std::filesystem::is_symlink(dir + "/step-1"));
  CHECK(std::filesystem::is_symlink(dir + "/step-3"));
}

TEST_CASE("newer checkpoints do not push an older one out",
          "[runtime][checkpoint]") {
  test::scratch_dir scratch;
  auto dir = scratch.path.string();
  for (uint64_t step : {7, 8, 3})
    save(dir, step);
  CHECK(steps_in(dir) == std::vector<uint64_t>{3, 7, 8});
}

TEST_CASE("a folder with a newer checkpoint wants no older one",
          "[runtime][checkpoint]") {
  test::scratch_dir scratch;
  auto dir = scratch.path.string();
  refuse_newer(dir + "/none", 1);
  begin_checkpoint(dir, 9); // never complete
  for (uint64_t step : {7, 8})
    save(dir, step);
  refuse_newer(dir, 8);
  CHECK_THAT(test::error_of([&] { refuse_newer(dir, 7); }),
             ContainsSubstring("holds a newer checkpoint, " + dir + "/step-8"));
}

TEST_CASE("a checkpoint that may not be read is not taken for incomplete",
          "[runtime][checkpoint]") {
  test::scratch_dir scratch;
  auto dir = scratch.path.string();
  for (uint64_t step : {10, 20})
    save(dir, step);
  fs::permissions(dir, fs::perms{0755}); // others may look at all the rest
  auto hidden = dir + GENERATE("", "/step-20");
  fs::permissions(hidden, fs::perms::none);
  // The rights of another user, if this one is root: of this thread only.
  auto before = ::setfsuid(::geteuid() == 0 ? 65534 : ::geteuid());
  auto refusal = "cannot read " + hidden + ": Permission denied";
  auto found = test::error_of([&] { newest_checkpoint(dir); });
  auto saved = test::error_of([&] { refuse_newer(dir, 15); });
  auto hint = way_around(dir + "/step-20");
  ::setfsuid(static_cast<uid_t>(before));
  fs::permissions(hidden, fs::perms::owner_all);
  CHECK_THAT(found, ContainsSubstring(refusal));
  CHECK_THAT(saved, ContainsSubstring(refusal));
  CHECK_THAT(hint, ContainsSubstring(hidden == dir ? "no other checkpoint"
                                                   : dir + "/step-10 is the"));
  CHECK(newest_checkpoint(dir)->step == 20);
}

TEST_CASE("a renamed checkpoint is refused with its right name",
          "[runtime][checkpoint]") {
  refuse_wrong_step("ckpt/step-20", 20);
  refuse_wrong_step("ckpt/step-20-2", 20);
  refuse_wrong_step("ckpt/best", 20);
  CHECK_THAT(test::error_of([] { refuse_wrong_step("ckpt/step-40", 20); }),
             ContainsSubstring("cannot read ckpt/step-40: its manifest is that "
                               "of step 20; a folder of this name holds step "
                               "40: rename it to step-20"));
}

TEST_CASE("a folder that cannot be made is an error", "[runtime][checkpoint]") {
  test::scratch_dir scratch;
  auto file = scratch.write("file", "x");
  CHECK_THAT(test::error_of([&] { begin_checkpoint(file + "/dir", 1); }),
             ContainsSubstring("cannot make " + file + "/dir: "));
}

TEST_CASE("a process killed anywhere while saving leaves a whole checkpoint",
          "[runtime][checkpoint][R51]") {
  uint64_t calls = 0;
  for (bool killed = true; killed; ++calls) {
    test::scratch_dir scratch;
    auto dir = scratch.path.string();
    for (uint64_t step : {10, 20})
      save(dir, step);
    killed = killed_at(calls + 1, [&] { save(dir, 30); });
    INFO("killed at system call " << calls + 1);
    auto newest = newest_checkpoint(dir);
    REQUIRE(newest);
    CHECK((newest->step == 20 || newest->step == 30));
    CHECK((killed || newest->step == 30));
    CHECK(is_whole(*newest));
    save(dir, 30);
    save(dir, 40);
    CHECK(is_whole(*newest_checkpoint(dir)));
    CHECK(std::distance(fs::directory_iterator{dir}, {}) == 2);
  }
  CHECK(calls > 20);
}
