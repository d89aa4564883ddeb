// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <csignal>
#include <filesystem>
#include <string>

// A rank that is killed just when UCX made a file of shared memory leaves it.
// Our launcher removes it; so do the ranks of others, which have none.

using namespace smp::test;

namespace {

struct shared_folder : train_dir {
  shared_folder() : train_dir(endless_gpt()) {
    std::filesystem::create_directory(path / "shm");
  }

  program start_rank(int rank, std::vector<std::string> more = {}) const {
    more.insert(more.begin(),
                {"tiny.toml", "--ranks", "2", "--run-dir", "run"});
    auto variables = of_two_under_mpirun(rank);
    variables["UCX_POSIX_DIR"] = path / "shm";
    return start(more, variables);
  }

  /// As the kernel keeps it when its maker is gone.
  void leave_segment() {
    write("shm/ucx_shm_posix_dead", "x");
  }

  bool is_clean() const {
    return std::filesystem::is_empty(path / "shm");
  }
};

} // namespace

TEST_CASE_METHOD(shared_folder,
                 "Ranks of another launcher remove what a lost one left",
                 "[apps][faults]") {
  auto rank_0 = start_rank(0);
  auto rank_1 = start_rank(1);
  REQUIRE(rank_0.wait_for(" 2/1000000"));
  leave_segment();
  auto lost = GENERATE(0, 1);
  (lost == 0 ? rank_0 : rank_1).signal(SIGKILL);
  CHECK(rank_0.join() == (lost == 0 ? -SIGKILL : 3));
  CHECK(rank_1.join() == (lost == 1 ? -SIGKILL : 3));
  CHECK(is_clean());
}

TEST_CASE_METHOD(shared_folder, "So they do where not all joined",
                 "[apps][faults]") {
  leave_segment();
  auto rank_0 = start_rank(0);
  auto rank_1 = start_rank(1, {"--smp.seed=77"});
  CHECK(rank_0.join() == 2);
  CHECK(rank_1.join() == 2);
  CHECK(is_clean());
}

TEST_CASE_METHOD(shared_folder,
                 "A process that leaves in order looks for nothing",
                 "[apps][faults]") {
  leave_segment();
  auto rank_0 = start_rank(0, {"--train.steps=2"});
  auto rank_1 = start_rank(1, {"--train.steps=2"});
  CHECK(rank_0.join() == 0);
  CHECK(rank_1.join() == 0);
  CHECK_FALSE(is_clean());
}
