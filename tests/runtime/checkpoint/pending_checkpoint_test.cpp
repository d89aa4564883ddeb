#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/checkpoint/pending_checkpoint.hpp"
#include "tests/support/averaged_ranks.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"

#include <torch/optim/adamw.h>

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <unistd.h>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
namespace fs = std::filesystem;

namespace {

/// Holds back whoever syncs a folder: rank 0 does before anything is written
/// to it.
class gate {
public:
  void hold(const std::string& folder) {
    std::unique_lock guard{mutex_};
    held_ = folder;
  }

  void open() {
    hold({});
    opened_.notify_all();
  }

  void pass(const std::string& path) {
    std::unique_lock guard{mutex_};
    // A test that fails must end.
    opened_.wait_for(guard, std::chrono::seconds{60},
                     [&] { return held_.empty() || held_ != path; });
  }

private:
  std::mutex mutex_;
  std::condition_variable opened_;
  std::string held_;
};

gate& disk() {
  static gate result;
  return result;
}

} // namespace

extern "C" int fsync(int fd) {
  std::error_code ignored;
  disk().pass(
    fs::read_symlink("/proc/self/fd/" + std::to_string(fd), ignored).string());
  static auto* const next = reinterpret_cast<int (*)(int)>(
    ::dlsym(RTLD_NEXT, "fsync"));
  return next(fd);
}

namespace {

template <class F>
void run_ranks(const averaged_job& x, F f) {
  run_averaged_ranks<torch::optim::AdamW>(x, 0.1, f);
}

std::map<std::string, std::string> files_of(const fs::path& folder) {
  std::map<std::string, std::string> result;
  for (auto& x : fs::directory_iterator{folder})
    result.emplace(x.path().filename(), content_of(x.path()));
  return result;
}

} // namespace

TEST_CASE("what is trained while a checkpoint is written is not in it",
          "[runtime][checkpoint][R51]") {
  auto x = GENERATE(averaged_job{}, averaged_job{.shards = true, .half = true});
  scratch_dir dir;
  auto at_once = dir.path / "at once", later = dir.path / "later",
       trained = dir.path / "trained";
  std::vector<int> done(averaged_ranks, -1);
  run_ranks(x, [&](session& s, auto& model, auto& optimizer, auto train) {
    train(0);
    optimizer.swap_averages(); // so that weights are swapped for the copy
    save_checkpoint(at_once, 1, model, {&optimizer});
    fs::create_directories(later);
    if (s.rank() == 0)
      disk().hold(later);
    barrier();
    pending_checkpoint pending{later, 1, model, {&optimizer}, {}};
    optimizer.swap_averages();
    train(1);
    train(2);
    done.at(s.rank()) = pending.done();
    barrier();
    disk().open();
    pending.await();
    save_checkpoint(trained, 1, model, {&optimizer});
  });
  CHECK(done == std::vector<int>(averaged_ranks, 0));
  auto expected = files_of(at_once / "step-1");
  auto others = files_of(trained / "step-1");
  CHECK(expected.size() > 4); // of each rank, and a manifest
  for (auto& [name, content] : files_of(later / "step-1")) {
    INFO(name);
    CHECK(content == expected.at(name));
    // What training changes is with the first replica.
    auto of_replica = name.ends_with("2.safetensors")
                      || name.ends_with("3.safetensors");
    CHECK((of_replica || content != others.at(name)));
    expected.erase(name);
  }
  CHECK(expected.empty());
}

TEST_CASE(
  "where memory is short a checkpoint is written before training goes "
  "on",
  "[runtime][checkpoint]") {
  scratch_dir dir;
  std::vector<int> done(averaged_ranks);
  run_ranks({.offloads = true},
            [&](session& s, auto& model, auto& optimizer, auto train) {
              train(0);
              pending_checkpoint pending{dir.path, 1, model, {&optimizer}, {}};
              done.at(s.rank()) = pending.done();
              pending.await();
            });
  CHECK(done == std::vector<int>(averaged_ranks, 1));
}

TEST_CASE("all ranks hear of a checkpoint that one could not write meanwhile",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  std::vector<std::string> told(averaged_ranks), refused(averaged_ranks);
  run_ranks({}, [&](session& s, auto& model, auto& optimizer, auto train) {
    train(0);
    save_checkpoint(dir.path, 5, model, {&optimizer});
    // Another's folder is where rank 1 writes its file.
    if (s.rank() == 0)
      fs::create_directories(dir.path / "step-6/state-1.safetensors/full");
    barrier();
    auto save = [&](uint64_t number) {
      pending_checkpoint pending{dir.path, number, model, {&optimizer}, {}};
      train(1);
      return error_of([&] { pending.await(); }, error_code::config);
    };
    told.at(s.rank()) = save(6);
    refused.at(s.rank()) = save(4); // there is one of a later step
    if (save(7) != "no error")
      told.at(s.rank()) += ", and nothing can be saved later";
  });
  CHECK(told == std::vector<std::string>(averaged_ranks, told[0]));
  CHECK(refused == std::vector<std::string>(averaged_ranks, refused[0]));
  CHECK_THAT(told[0], ContainsSubstring("rank 1")
                        && ContainsSubstring("state-1.safetensors: rename")
                        && !ContainsSubstring("later"));
  CHECK_THAT(refused[0], ContainsSubstring("holds a newer checkpoint"));
  std::vector<uint64_t> found;
  for (auto& x : complete_checkpoints(dir.path))
    found.push_back(x.step);
  CHECK(found == std::vector<uint64_t>{5, 7});
}

TEST_CASE("a session can fail while it writes a checkpoint",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  auto fails = [&] {
    run_ranks({}, [&](session& s, auto& model, auto& optimizer, auto train) {
      train(0);
      save_checkpoint(dir.path, 1, model, {&optimizer});
      if (s.rank() == 0)
        disk().hold(dir.path);
      barrier();
      pending_checkpoint pending{dir.path, 2, model, {&optimizer}, {}};
      barrier();
      disk().open();
      if (s.rank() == 1)
        throw std::runtime_error{"on purpose"};
      for (int64_t i = 1;; ++i)
        train(i);
    });
  };
  CHECK_THROWS_WITH(fails(), ContainsSubstring("on purpose"));
  // Whichever it is, it is whole.
  uint64_t resumed = 0;
  run_ranks({}, [&](session& s, auto& model, auto& optimizer, auto train) {
    auto from = resume_from_checkpoint(dir.path, model, {&optimizer});
    train(0);
    if (s.rank() == 0 && from)
      resumed = from->step;
  });
  CHECK((resumed == 1 || resumed == 2));
}
