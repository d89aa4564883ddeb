#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "tests/support/averaged_ranks.hpp"
#include "tests/support/scratch_dir.hpp"

#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

// Saving and going on between two `swap_averages()`: who evaluates with
// averages saves the best of them there (docs/precision.md).

using namespace smp;
using namespace smp::test;
namespace fs = std::filesystem;

namespace {

using values = std::map<std::string, Tensor>;

/// What each rank is told of the whole model.
struct end_of_run {
  std::vector<values> weights = std::vector<values>(averaged_ranks);
  std::vector<values> averages = std::vector<values>(averaged_ranks);
};

template <class Model>
values values_of(const Model& model) {
  auto xs = model.state_dict();
  return {xs.begin(), xs.end()};
}

template <class F>
void run_ranks(const averaged_job& x, F f) {
  run_averaged_ranks<torch::optim::SGD>(x, 0.5, f);
}

/// Three steps, then a checkpoint of the weights in PATH/outside, and one while
/// they are averages in PATH/inside.
end_of_run save_both(const averaged_job& x, const fs::path& path) {
  end_of_run result;
  run_ranks(x, [&](session& s, auto& model, auto& optimizer, auto train) {
    for (int64_t i = 0; i < 3; ++i)
      train(i);
    save_checkpoint(path / "outside", 3, model, {&optimizer});
    result.weights.at(s.rank()) = values_of(model);
    optimizer.swap_averages();
    save_checkpoint(path / "inside", 3, model, {&optimizer});
    result.averages.at(s.rank()) = values_of(model); // they still are
    optimizer.swap_averages();
    for (auto& [name, y] : values_of(model))
      if (!torch::equal(y, result.weights.at(s.rank()).at(name)))
        throw std::runtime_error{name + " did not come back"};
  });
  return result;
}

/// Goes on from a checkpoint while the parameters are averages, and back.
/// @param trained the session has made steps of its own before
end_of_run go_on_inside(const averaged_job& x, const fs::path& path,
                        bool trained) {
  end_of_run result;
  run_ranks(x, [&](session& s, auto& model, auto& optimizer, auto train) {
    if (trained)
      train(5);
    optimizer.swap_averages();
    resume_from_checkpoint(path, model, {&optimizer});
    model.partition();
    result.averages.at(s.rank()) = values_of(model);
    optimizer.swap_averages();
    result.weights.at(s.rank()) = values_of(model);
  });
  return result;
}

bool same(const std::vector<values>& xs, const std::vector<values>& ys) {
  auto equal = [](const values& a, const values& b) {
    return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
      return x.first == y.first && torch::equal(x.second, y.second);
    });
  };
  return std::ranges::equal(xs, ys, equal);
}

checkpoint_manifest manifest_of(const fs::path& folder) {
  auto path = folder / "step-3/manifest.json";
  return parse_manifest(content_of(path), path);
}

} // namespace

TEST_CASE("a checkpoint of parameters that are averages has the weights",
          "[runtime][checkpoint][precision][R51]") {
  auto shards = GENERATE(false, true);
  auto half = GENERATE(false, true);
  CAPTURE(shards, half);
  scratch_dir dir;
  auto saved = save_both({shards, half}, dir.path);
  REQUIRE_FALSE(saved.weights[0].empty());
  CHECK_FALSE(same(saved.weights, saved.averages));
  // With checksums of all bytes.
  auto outside = manifest_of(dir.path / "outside");
  auto inside = manifest_of(dir.path / "inside");
  REQUIRE(inside.tensors.size() == outside.tensors.size());
  for (size_t i = 0; i < outside.tensors.size(); ++i) {
    INFO(outside.tensors[i].name);
    CHECK((inside.tensors[i] == outside.tensors[i]));
  }
}

TEST_CASE(
  "a run that goes on while parameters are averages has those of the file",
  "[runtime][checkpoint][precision][R51]") {
  auto shards = GENERATE(false, true);
  auto half = GENERATE(false, true);
  CAPTURE(shards, half);
  scratch_dir dir;
  auto saved = save_both({shards, half}, dir.path);
  for (auto trained : {false, true}) {
    INFO("after steps of its own: " << trained);
    auto found = go_on_inside({shards, half}, dir.path / "outside", trained);
    CHECK(same(found.averages, saved.averages));
    CHECK(same(found.weights, saved.weights));
  }
}
