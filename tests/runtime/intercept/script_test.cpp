#include "tests/support/catch.hpp"

#include "runtime/step/model_state.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/script_runs.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>

// TorchScript models, split: their numbers are those of the same file run as it
// is.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

/// Runs the job and compares. @returns what differs
std::string compare(const script_job& job) {
  auto got = run_split(job);
  return fmt::format("{}", fmt::join(differences(job, got), "\n"));
}

script_job job_of(const std::string& file, uint64_t ranks, spread placement,
                  uint64_t microbatches = 2) {
  script_job result;
  result.path = script_file(file);
  result.ranks = ranks;
  result.placement = placement;
  result.microbatches = microbatches;
  return result;
}

} // namespace

TEST_CASE("a scripted model split over ranks has the numbers of one process",
          "[runtime][script]") {
  auto ranks = GENERATE(1, 2, 4);
  auto placement = GENERATE(spread::scattered, spread::contiguous,
                            spread::automatic);
  CHECK(compare(job_of("mlp.pt", static_cast<uint64_t>(ranks), placement))
        == "");
}

TEST_CASE("a traced model split over ranks has the numbers of one process",
          "[runtime][script]") {
  auto ranks = GENERATE(2, 4);
  auto placement = GENERATE(spread::scattered, spread::contiguous);
  CHECK(compare(job_of("traced.pt", static_cast<uint64_t>(ranks), placement))
        == "");
}

TEST_CASE("code that mixes types has the numbers of one process",
          "[runtime][script]") {
  // TorchScript's own gradient of it fails from the second call on.
  auto ranks = GENERATE(1, 2);
  CHECK(
    compare(job_of("mixed.pt", static_cast<uint64_t>(ranks), spread::scattered))
    == "");
}

TEST_CASE(
  "code that reads parameters of other modules has the numbers of one "
  "process",
  "[runtime][script][R14]") {
  auto ranks = GENERATE(2, 4);
  auto placement = GENERATE(spread::scattered, spread::contiguous);
  CHECK(compare(job_of("reads.pt", static_cast<uint64_t>(ranks), placement))
        == "");
}

TEST_CASE("buffers and attributes of other modules are written at their owners",
          "[runtime][script][R14]") {
  auto ranks = GENERATE(2, 4);
  auto placement = GENERATE(spread::scattered, spread::contiguous);
  auto job = job_of("writes.pt", static_cast<uint64_t>(ranks), placement, 4);
  job.active = GENERATE(1u, 2u, 0u); // 0: all of them
  CAPTURE(ranks, job.active);
  CHECK(compare(job) == "");
}

TEST_CASE("state that changes while code runs stays at its owner",
          "[runtime][script][R14][R20]") {
  // A batch norm used twice; statistics changed from outside by an operation
  // that does not say so; a list in an attribute.
  auto file = GENERATE("norms.pt", "statistics.pt", "books.pt");
  auto ranks = GENERATE(2, 4);
  auto job = job_of(file, static_cast<uint64_t>(ranks), spread::scattered, 4);
  job.active = GENERATE(1u, 2u, 0u); // 0: all of them
  CAPTURE(file, ranks, job.active);
  CHECK(compare(job) == "");
}

TEST_CASE("what a callee does to its arguments reaches the caller",
          "[runtime][script][R12]") {
  auto file = GENERATE("lists.pt", "views.pt", "named.pt");
  auto ranks = GENERATE(2, 4);
  auto placement = GENERATE(spread::scattered, spread::contiguous);
  CHECK(compare(job_of(file, static_cast<uint64_t>(ranks), placement)) == "");
}

TEST_CASE("children of a scripted Sequential on one rank are one request",
          "[runtime][script][R8]") {
  auto requests = [](spread placement) {
    auto job = job_of("mlp.pt", 2, placement, 1);
    job.steps = 1;
    return run_split(job).requests;
  };
  // Rank 1 has the last four children of body and the three heads; each
  // request has its backward.
  CHECK(requests(spread::contiguous) == 2 * (1 + 3));
}

// -- what is refused ----------------------------------------------------------

namespace {

/// @returns the error of the first step on every rank, if they agree
std::string refusal_of(const script_job& job) {
  try {
    run_split(job);
  } catch (const std::exception& err) {
    return err.what();
  }
  return "no error";
}

} // namespace

TEST_CASE(
  "an in-place change of a parameter of another rank is refused by name",
  "[runtime][script][R14]") {
  auto text = refusal_of(job_of("parameter_changed.pt", 2, spread::scattered));
  CHECK_THAT(text, ContainsSubstring("rank 0"));
  CHECK_THAT(text, ContainsSubstring("'fc.weight'"));
  CHECK_THAT(text, ContainsSubstring("rank 1 owns"));
  // The refusal's advice.
  auto inside = job_of("parameter_changed.pt", 2, spread::rank_0);
  inside.fast = std::nullopt;
  CHECK(compare(inside) == "");
}

TEST_CASE("a tensor with gradient in a module of another rank is refused",
          "[runtime][script][R14]") {
  auto text = refusal_of(job_of("gradient_stored.pt", 2, spread::scattered));
  CHECK_THAT(text, ContainsSubstring("attribute 'last' of 'keep'"));
  CHECK_THAT(text, ContainsSubstring("rank 1 owns"));
  CHECK(compare(job_of("gradient_stored.pt", 2, spread::rank_0)) == "");
}

TEST_CASE("a list of a module of another rank is not changed from outside",
          "[runtime][script]") {
  auto text = refusal_of(job_of("book_changed.pt", 2, spread::scattered));
  CHECK_THAT(text, ContainsSubstring("'history' of 'book'"));
  CHECK_THAT(text, ContainsSubstring("rank 1 owns"));
  auto job = job_of("book_changed.pt", 2, spread::rank_0);
  job.active = 1;
  CHECK(compare(job) == "");
}

TEST_CASE("tasks of TorchScript are refused over several ranks",
          "[runtime][script]") {
  CHECK_THAT(refusal_of(job_of("forks.pt", 2, spread::scattered)),
             ContainsSubstring("torch.jit.fork"));
  CHECK(compare(job_of("forks.pt", 1, spread::rank_0)) == "");
}

TEST_CASE("an object of a script class does not cross ranks",
          "[runtime][script]") {
  auto text = refusal_of(job_of("objects.pt", 2, spread::scattered));
  CHECK_THAT(text, ContainsSubstring("argument 0"));
  CHECK_THAT(text, ContainsSubstring("Box"));
  CHECK(compare(job_of("objects.pt", 2, spread::rank_0)) == "");
}

TEST_CASE(
  "an exception in a split model names its rank and module, and the "
  "session goes on",
  "[runtime][script][R6]") {
  auto ranks = GENERATE(1, 2, 3);
  virtual_world_options world;
  world.config.pipeline_parallel_degree = static_cast<uint64_t>(ranks);
  world.config.threads = 1;
  std::set<std::string> texts;
  std::mutex mutex;
  run_virtual_world(static_cast<uint64_t>(ranks), world, [&](session& s) {
    distributed_model model{load_script(script_file("fails.pt"))};
    place(s, model, spread::scattered);
    auto train_step = step([&](torch::Tensor x) {
      auto loss = loss_of(model(x));
      model.backward(loss);
      return loss.detach();
    });
    auto wrong = torch::full({2, 8}, 1000.0);
    auto right = torch::ones({2, 8});
    for (int i = 0; i < 2; ++i) {
      try {
        train_step(wrong);
      } catch (const error& err) {
        std::unique_lock guard{mutex};
        texts.insert(err.what());
        if (err.code() != error_code::user_code)
          throw;
      }
      auto loss = train_step(right).reduce_mean();
      if (!std::isfinite(loss.item<double>()))
        throw std::runtime_error{"no loss after an error"};
    }
  });
  REQUIRE(texts.size() == 1); // the same on every rank
  CHECK_THAT(*texts.begin(), ContainsSubstring(", module body.1: "));
  CHECK_THAT(*texts.begin(),
             ContainsSubstring("the first element is too large"));
  CHECK(texts.begin()->find('\n') == std::string::npos);
  CHECK(texts.begin()->find("TorchScript interpreter") == std::string::npos);
}

TEST_CASE("a trace that has the rows of a batch in it fails by that name",
          "[runtime][script]") {
  virtual_world_options world;
  world.config.pipeline_parallel_degree = 2;
  world.config.microbatches = 4;
  world.config.threads = 1;
  std::set<std::string> texts;
  std::mutex mutex;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{load_script(script_file("rows.pt"))};
    place(s, model, spread::scattered);
    auto train_step = step([&](torch::Tensor x) {
      auto loss = loss_of(model(x));
      model.backward(loss);
      return loss.detach();
    });
    auto text = error_of(
      [&] {
        train_step(torch::ones({8, 8}));
      },
      error_code::user_code);
    train_step(torch::ones({32, 8})); // as it advises
    std::unique_lock guard{mutex};
    texts.insert(text);
  });
  REQUIRE(texts.size() == 1);
  CHECK_THAT(*texts.begin(),
             ContainsSubstring("module turned: ")
               && ContainsSubstring("its code has the size 8 as a number, and "
                                    "a batch has 8 rows, but a microbatch 2"));
}

TEST_CASE("a file that cannot be split says why and how to export it",
          "[runtime][script]") {
  auto text = [](const std::string& name) {
    return test::error_of([&] { load_script(script_file(name)); },
                          error_code::config);
  };
  CHECK_THAT(text("none.pt"), ContainsSubstring("no such file"));
  auto says = [&](const std::string& name, const std::string& what) {
    CHECK_THAT(text(name), ContainsSubstring(what));
    CHECK_THAT(text(name), ContainsSubstring("torch.jit.script"));
  };
  says("export.py", "not a TorchScript file");
  says("frozen.pt", "frozen");
  says("inlined.pt", "inlining");
  says("state_dict.pt", "no code");
  says("exported.pt2", "torch.export");
}

// -- the library's side -------------------------------------------------------

TEST_CASE("names of a script model are those of Python", "[runtime][script]") {
  run_virtual_world(1, {}, [](session&) {
    distributed_model model{load_script(script_file("norms.pt"))};
    std::string names;
    for (auto& [name, x] : model.local_named_parameters())
      names += name + " ";
    if (names != "fc.weight fc.bias bn.weight bn.bias out.weight out.bias ")
      throw std::runtime_error{names};
    names.clear();
    for (auto& [name, x] : model.state_dict())
      names += name + " ";
    if (names
        != "fc.weight fc.bias bn.weight bn.bias out.weight out.bias "
           "bn.running_mean bn.running_var bn.num_batches_tracked ")
      throw std::runtime_error{names};
  });
}

TEST_CASE("what a rank does not own holds no memory and can be loaded",
          "[runtime][script][R14]") {
  virtual_world_options world;
  world.config.pipeline_parallel_degree = 2;
  world.config.threads = 1;
  run_virtual_world(2, world, [](session& s) {
    distributed_model model{load_script(script_file("mlp.pt"))};
    place(s, model, spread::scattered);
    auto before = model.state_dict();
    model.partition();
    auto& st = model.state().map();
    uint64_t owned = 0;
    for (uint32_t i = 0; i < st.model().tensors.size(); ++i) {
      auto& t = st.model().tensors[i].tensor;
      owned += st.owned(i);
      if (!st.owned(i) && t.storage().nbytes() > 0)
        throw std::runtime_error{"bytes of " + st.tensor_name(i)};
    }
    if (owned == 0 || owned == st.model().tensors.size())
      throw std::runtime_error{"nothing is split"};
    for (auto& [name, x] : before)
      x.mul_(2.0);
    model.load_state_dict(before);
    for (auto& [name, x] : model.state_dict())
      if (!torch::equal(x, std::ranges::find(before, name,
                                             &named_tensors::value_type::first)
                             ->second))
        throw std::runtime_error{"state of " + name};
  });
}

TEST_CASE("train and eval reach all copies of a module", "[runtime][script]") {
  virtual_world_options world;
  world.config.pipeline_parallel_degree = 2;
  world.config.threads = 1;
  run_virtual_world(2, world, [](session& s) {
    distributed_model model{load_script(script_file("norms.pt"))};
    place(s, model, spread::scattered);
    auto evaluate = step([&](torch::Tensor x) {
      torch::NoGradGuard no_grad;
      return loss_of(model(x));
    });
    auto statistics = [&] {
      auto xs = model.state_dict();
      return xs.at(6).second; // bn.running_mean
    };
    model.partition();
    auto x = torch::arange(64.0, torch::kFloat).view({8, 8});
    model.eval();
    evaluate(x);
    if (!torch::equal(statistics(), torch::zeros({8})))
      throw std::runtime_error{"evaluation changed the statistics"};
    model.train();
    evaluate(x);
    if (torch::equal(statistics(), torch::zeros({8})))
      throw std::runtime_error{"training did not change the statistics"};
  });
}
