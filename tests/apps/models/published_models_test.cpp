// ctest: seconds=43 label=proof processors=2
#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/process/cores.hpp"
#include "smp/smp.hpp"
#include "tests/support/runs/own_ranks.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/runs/train_dir.hpp"
#include "tests/support/torch/numbers.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <sstream>
#include <thread>

// Models of published collections at the size in which those ship them, with
// nothing in the config but what the README sets, against torch::jit alone. The
// files that ship have the code and the sizes, and each large tensor as one
// element, expanded (tests/data/zoo/README.md). Here they get their numbers,
// and so become larger than every threshold of the code: 4 KB (tensors that
// only their owner reads, and those packed into one message), 64 KB (results of
// a step that travel at once), 1 MB (large allocations) and 16 MB (pieces of a
// transfer).

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

constexpr int steps = 2;
// Microbatches end in any order, and their gradients are added in that order. A
// larger rate makes of such a rounding error in the first step one of 1e-4 in
// the second, where layers are normalised over few rows.
constexpr double rate = 0.002;
constexpr int64_t length = 16; // tokens in a row

struct job {
  std::string model; // in tests/data/zoo/published
  int64_t microbatches;
  int64_t rows; // of a microbatch
  /// That a step sends at least, in bytes, wherever measured times cut it.
  size_t least;
};

// Each microbatch of the first sends logits of 25 MB there and back.
const job distilgpt2{"distilgpt2", 2, 8, 2 * 2 * 25'000'000};
const job llama{"llama_4_layers_tied", 4, 2, 4 * 2 * 4'000'000};
const job resnet{"resnet18", 4, 2, 100'000};

/// Random numbers of the size with which such a tensor usually begins.
Tensor initial(const std::string& name, const Tensor& x) {
  if (!x.is_floating_point())
    return torch::ones(x.sizes(), x.options()).tril_();
  if (x.dim() > 1)
    return torch::randn(x.sizes(), x.options())
      .div_(std::sqrt(static_cast<double>(x.numel() / x.size(0))));
  auto result = torch::randn(x.sizes(), x.options()).mul_(0.02);
  return name.ends_with("weight") ? result.add_(1) : result;
}

/// Gives the tensors of `m` their numbers. @returns how many bytes that are
size_t fill(const torch::jit::Module& m) {
  size_t result = 0;
  torch::NoGradGuard no_grad;
  auto one = [&result](const std::string& name, Tensor x) {
    if (x.storage().nbytes() >= x.nbytes())
      return;
    x.set_data(initial(name, x));
    result += x.nbytes();
  };
  torch::manual_seed(7);
  for (const auto& x : m.named_parameters())
    one(x.name, x.value);
  for (const auto& x : m.named_buffers())
    one(x.name, x.value);
  return result;
}

std::vector<Tensor> words(int64_t rows, int64_t count) {
  auto some = [&] { return torch::randint(3, count, {rows, length}); };
  auto ends = torch::randint(length / 2, length + 1, {rows, 1});
  auto real = torch::arange(length).lt(ends).to(torch::kLong);
  return {some(), real, torch::where(real.eq(1), some(), -100)};
}

std::vector<Tensor> batch_of(const job& x) {
  torch::manual_seed(11);
  auto rows = x.rows * x.microbatches;
  if (x.model == "resnet18")
    return {torch::randn({rows, 3, 96, 96}), torch::randint(0, 1000, {rows})};
  return words(rows, x.model == "distilgpt2" ? 50257 : 32000);
}

/// Writes model.pt and batch.safetensors.
void write_files(const scratch_dir& dir, const job& x) {
  auto file = source_file("tests/data/zoo/published/" + x.model + ".pt");
  auto model = torch::jit::load(file);
  REQUIRE(fill(model) > 40'000'000);
  model.save((dir.path / "model.pt").string());
  named_tensors batch;
  for (auto& y : batch_of(x))
    batch.emplace_back(fmt::format("input{}", batch.size()), y);
  write_safetensors((dir.path / "batch.safetensors").string(), batch);
}

/// What one process makes of it, by torch::jit alone (R36).
struct plain_run {
  plain_run(const scratch_dir& dir, int64_t microbatches, int count = steps)
    : microbatches(microbatches),
      model(torch::jit::load((dir.path / "model.pt").string())) {
    model.train();
    auto batch = all_of(dir.path / "batch.safetensors");
    for (auto& [name, x] : batch) // input0, input1, ...
      inputs.push_back(x.chunk(microbatches));
    for (int step = 0; step < count; ++step)
      train();
  }

  void train() {
    double total = 0;
    outputs.clear();
    for (int64_t i = 0; i < microbatches; ++i) {
      std::vector<c10::IValue> xs;
      for (auto& x : inputs)
        xs.emplace_back(x[i]);
      auto out = model.forward(xs);
      auto loss = out.isTensor() ? out.toTensor()
                                 : out.toTupleRef().elements()[0].toTensor();
      if (out.isTuple())
        outputs.push_back(out.toTupleRef().elements()[1].toTensor().detach());
      total += loss.item<double>();
      (loss / microbatches).backward();
    }
    losses.push_back(total / microbatches);
    torch::NoGradGuard no_grad;
    for (auto& [name, p] : tensors()) {
      if (!p.requires_grad() || !p.grad().defined())
        continue;
      p.sub_(p.grad(), rate);
      Tensor{p}.mutable_grad() = Tensor{};
    }
  }

  /// Parameters and buffers, shared ones under their first name.
  numbers tensors() const {
    numbers result;
    std::set<const void*> seen;
    auto add = [&](const auto& xs) {
      for (const auto& x : xs)
        if (seen.insert(x.value.unsafeGetTensorImpl()).second)
          result.emplace(x.name, x.value);
    };
    add(model.named_parameters());
    add(model.named_buffers());
    return result;
  }

  int64_t microbatches;
  torch::jit::Module model;
  std::vector<std::vector<Tensor>> inputs; // by argument and microbatch
  std::vector<double> losses;
  std::vector<Tensor> outputs; // of the last step, by microbatch
};

Tensor as_tensor(const std::vector<double>& xs) {
  return torch::tensor(xs, torch::kDouble);
}

/// As many threads as each rank has by default: with another number a
/// convolution adds in another order, and a normalisation of few rows makes
/// of a rounding error one of 1e-3 (measured on resnet18).
class rank_threads {
public:
  explicit rank_threads(unsigned ranks) : before_(at::get_num_threads()) {
    auto cores = usable_cores().size();
    at::set_num_threads(static_cast<int>(std::max<size_t>(1, cores / ranks)));
  }

  ~rank_threads() {
    at::set_num_threads(before_);
  }

  rank_threads(const rank_threads&) = delete;
  rank_threads& operator=(const rank_threads&) = delete;

private:
  int before_;
};

/// Trains as default.toml says, and compares with `wanted`.
void check_run(const scratch_dir& dir, const job& x, const plain_run& wanted,
               std::vector<std::string> more) {
  auto out = fmt::format("out-{}", more.size());
  more.insert(more.begin(),
              {built_program("smp-train"), "default.toml", "--run-dir", out});
  program train{std::move(more), dir.path};
  auto code = train.join(std::chrono::seconds{240});
  INFO(fmt::format("{}: {}", x.model, train.output()));
  REQUIRE(code == 0);
  std::vector<double> losses;
  std::istringstream lines{content_of(dir.path / out / "metrics.jsonl")};
  size_t sent = 0;
  for (std::string line; std::getline(lines, line);) {
    auto step = nlohmann::json::parse(line);
    losses.push_back(step["loss"].get<double>());
    CHECK_FALSE(step.contains("ran_again"));
    sent = step["bytes_sent"].get<size_t>();
  }
  CHECK(sent > x.least);
  CHECK(differences({{"losses", as_tensor(losses)}},
                    {{"losses", as_tensor(wanted.losses)}}, false)
        == std::vector<std::string>{});
  CHECK(differences(all_of(dir.path / out / "model.safetensors"),
                    wanted.tensors(), false)
        == std::vector<std::string>{});
}

void check(const job& x, const std::vector<unsigned>& ranks) {
  for (auto n : ranks) {
    scratch_dir dir;
    write_files(dir, x);
    rank_threads same{n};
    plain_run wanted{dir, x.microbatches};
    dir.write("default.toml", script_defaults(n, x.microbatches, rate, steps));
    check_run(dir, x, wanted, {});
  }
}

} // namespace

TEST_CASE("distilgpt2 trains with default settings", "[apps][zoo]") {
  check(distilgpt2, {2});
}

TEST_CASE("a tied LLaMA trains with default settings", "[apps][zoo]") {
  check(llama, {2});
}

TEST_CASE("resnet18 trains with default settings", "[apps][zoo]") {
  check(resnet, {2, 4});
}

TEST_CASE("a tied LLaMA is shared by two tensor-parallel ranks",
          "[apps][zoo][tensor_parallel]") {
  scratch_dir dir;
  write_files(dir, llama);
  rank_threads same{2};
  plain_run wanted{dir, llama.microbatches};
  // Of the microbatches, each rank has half.
  dir.write("default.toml",
            script_defaults(1, llama.microbatches / 2, rate, steps));
  check_run(dir, llama, wanted,
            {"--smp.ddp=true", "--smp.tensor_parallel_degree=2",
             "--tensor_parallel.modules=[\"*\"]"});
}

// -- results of a step --------------------------------------------------------

TEST_CASE("rank of a step that returns large results", "[.rank]") {
  std::string dir = std::getenv("TEST_DIR");
  session_config settings;
  settings.pipeline_parallel_degree = 2;
  settings.microbatches = llama.microbatches;
  session s{settings};
  distributed_model model{load_script(dir + "/model.pt")};
  model.train();
  auto train_step = step([&](Tensor x, Tensor mask, Tensor y) {
    auto out = model(x, mask, y);
    auto loss = loss_of(out);
    model.backward(loss);
    return std::pair{loss, out.toTupleRef().elements()[1].toTensor()};
  });
  auto batch = all_of(dir + "/batch.safetensors");
  auto [losses, logits] = train_step(batch.at("input0"), batch.at("input1"),
                                     batch.at("input2"))
                            .concat();
  write_safetensors(fmt::format("{}/rank-{}.safetensors", dir, s.rank()),
                    {{"losses", losses}, {"logits", logits}});
}

TEST_CASE("a step returns what a published model predicts to all ranks",
          "[apps][zoo]") {
  scratch_dir dir;
  write_files(dir, llama);
  require_case(dir, "rank of a step that returns large results", 2);
  rank_threads same{2};
  plain_run wanted{dir, llama.microbatches, 1};
  auto logits = torch::cat(wanted.outputs);
  REQUIRE(logits.nbytes() > static_cast<size_t>(llama.microbatches) * 65536);
  for (auto rank : {0, 1}) {
    auto got = all_of(dir.path / fmt::format("rank-{}.safetensors", rank));
    CHECK(
      differences({{"logits", got.at("logits")}}, {{"logits", logits}}, false)
      == std::vector<std::string>{});
    CHECK(std::abs(got.at("losses").mean().item<double>() - wanted.losses[0])
          < 1e-5 * wanted.losses[0]);
  }
}
