#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/session/placement.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/two_layers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/optim/sgd.h>

#include <filesystem>
#include <string>
#include <vector>

// A run that goes on from an older checkpoint than the newest (R51).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
namespace fs = std::filesystem;

namespace {

/// Calls `f` on both ranks with the session, the model and its optimizer.
template <class F>
void on_two_ranks(F f) {
  run_virtual_world(2, manual_world(), [&](session& s) {
    distributed_model model{seeded([] { return two_layers{4, 3}; })};
    place_in_turn(model);
    torch::optim::SGD sgd{model->parameters(), 0.1};
    distributed_optimizer optimizer{sgd};
    f(s, model, optimizer);
  });
}

std::vector<uint64_t> steps_in(const fs::path& dir) {
  std::vector<uint64_t> result;
  for (auto& x : complete_checkpoints(dir))
    result.push_back(x.step);
  return result;
}

} // namespace

TEST_CASE("a run from an older checkpoint is not saved beside a newer one",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  auto folder = dir.path / "checkpoints";
  on_two_ranks([&](session&, auto& model, auto& optimizer) {
    model.partition();
    for (uint64_t step : {2, 4})
      save_checkpoint(folder, step, model, {&optimizer});
  });
  std::vector<std::string> told(2);
  on_two_ranks([&](session& s, auto& model, auto& optimizer) {
    auto from = resume_from_checkpoint(folder / "step-2", model, {&optimizer});
    model.partition();
    auto step = from->step + 1;
    told.at(s.rank()) = error_of(
      [&] { save_checkpoint(folder, step, model, {&optimizer}); },
      error_code::config);
    barrier();
    if (s.rank() == 0 && steps_in(folder) != std::vector<uint64_t>{2, 4})
      told[0] += ", but something was changed";
    // Each of the ways out.
    save_checkpoint(dir.path / "branch", step, model, {&optimizer});
    if (s.rank() == 0)
      remove_checkpoint((folder / "step-4").string());
    barrier();
    save_checkpoint(folder, step, model, {&optimizer});
  });
  CHECK(told[0] == told[1]);
  CHECK_THAT(told[0], ContainsSubstring("cannot save step 3: " + folder.string()
                                        + " holds a newer checkpoint, "
                                        + (folder / "step-4").string())
                        && !ContainsSubstring("something was changed"));
  CHECK(steps_in(dir.path / "branch") == std::vector<uint64_t>{3});
  CHECK(steps_in(folder) == std::vector<uint64_t>{2, 3});
}

TEST_CASE("what comes to a step once more is the newest then",
          "[runtime][checkpoint][R51]") {
  scratch_dir dir;
  on_two_ranks([&](session&, auto& model, auto& optimizer) {
    model.partition();
    for (uint64_t step : {2, 4})
      save_checkpoint(dir.path, step, model, {&optimizer});
  });
  on_two_ranks([&](session&, auto& model, auto& optimizer) {
    resume_from_checkpoint(dir.path / "step-2", model, {&optimizer});
    model.partition();
    save_checkpoint(dir.path, 4, model, {&optimizer},
                    {.user_content = {{"again", "yes"}}});
  });
  std::vector<std::string> found(2);
  on_two_ranks([&](session& s, auto& model, auto& optimizer) {
    auto from = resume_from_checkpoint(dir.path, model, {&optimizer});
    if (from && from->user_content.contains("again"))
      found.at(s.rank()) = from->user_content.at("again");
  });
  CHECK(found == std::vector<std::string>{"yes", "yes"});
}
