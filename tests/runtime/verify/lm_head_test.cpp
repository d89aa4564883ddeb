// ctest: seconds=16
#include "tests/support/catch.hpp"

#include "runtime/nn/layers.hpp"
#include "runtime/nn/lm_head.hpp"
#include "runtime/train/models/bert.hpp"
#include "tests/support/torch/two_ranks.hpp"
#include "tests/support/torch/verify_jobs.hpp"

#include <torch/nn/modules/embedding.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// The last layer of a language model, shared by words.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

void compare(bool tied, uint64_t pipeline, uint64_t tensor, uint64_t replicas,
             bool same, const std::string& dtype = "float32") {
  auto x = gpt_case(pipeline, "interleaved", 2);
  x.config.model.tied = tied;
  x.config.model.dropout = 0.2;
  x.config.model.vocabulary = 261; // not divided
  x.config.train.dtype = dtype;
  auto& smp = x.config.smp;
  smp.ddp = true;
  smp.prescaled_batch = same;
  smp.tensor_parallel_degree = tensor;
  smp.tensor_parallel_modules = {"lm_head"};
  if (tied)
    smp.tensor_parallel_modules.push_back("transformer.wte");
  x.config.ranks = pipeline * tensor * replicas;
  INFO(x.name << ", tied: " << tied << ", " << tensor << " share, " << replicas
              << " replicas, same samples: " << same << ", " << dtype);
  CHECK(to_text(run_case(x, 5)).starts_with("equal: 5 steps"));
}

/// The last layer of a built-in model, and the table that has its weight.
const std::map<std::string, std::pair<std::string, std::string>> places{
  {"moe", {"lm_head", "transformer.wte"}},
  {"t5", {"lm_head", "shared"}},
  {"bert", {"cls.predictions.decoder", "bert.embeddings.word_embeddings"}},
  {"roberta", {"lm_head.decoder", "roberta.embeddings.word_embeddings"}}};

void compare_model(const std::string& type, bool tied, bool same) {
  auto x = gpt_case(2, "interleaved", 2);
  auto& model = x.config.model;
  model.type = type;
  model.layers = 2;
  model.decoder_layers = 2;
  model.gated = type == "t5"; // no ReLU that rounding decides
  model.tied = tied;
  model.vocabulary = 261;
  auto& smp = x.config.smp;
  smp.ddp = true;
  smp.prescaled_batch = same;
  smp.tensor_parallel_degree = 2;
  auto& [head, table] = places.at(type);
  smp.tensor_parallel_modules = {head};
  if (tied)
    smp.tensor_parallel_modules.push_back(table);
  x.config.ranks = 4;
  INFO(type << ", tied: " << tied << ", same samples: " << same);
  auto text = to_text(run_case(x, 5));
  INFO(text);
  CHECK(text.starts_with("equal: 5 steps"));
}

struct tied_impl : torch::nn::Module {
  tied_impl() {
    register_module("table", table);
    head = submodule<smp::nn::lm_head>(table->weight);
    register_module("head", head);
  }

  Tensor forward(Tensor x, Tensor y) {
    return head(table(x), std::optional{y});
  }

  submodule<torch::nn::Embedding> table{11, 4};
  submodule<smp::nn::lm_head> head = nullptr;
};
TORCH_MODULE_IMPL(tied, tied_impl);

/// The same with a bias that has a name here, too, and perhaps in a linear.
struct biased_impl : torch::nn::Module {
  explicit biased_impl(bool in_linear) {
    register_module("table", table);
    bias = register_parameter("bias", torch::zeros({11}));
    head = submodule<smp::nn::lm_head>(table->weight, cross_entropy_options{},
                                       bias);
    register_module("head", head);
    if (in_linear) {
      other = submodule<tied_linear>(torch::ones({11, 4}), bias);
      register_module("other", other);
    }
  }

  Tensor forward(Tensor x, Tensor y) {
    return head(table(x), std::optional{y});
  }

  submodule<torch::nn::Embedding> table{11, 4};
  Tensor bias;
  submodule<smp::nn::lm_head> head = nullptr;
  submodule<tied_linear> other = nullptr;
};
TORCH_MODULE_IMPL(biased, biased_impl);

/// @param make a model
/// @param tensor of that, one that two ranks may share
/// @returns the partition print, and what each rank has of the tensor
template <class Make, class Get>
std::pair<std::string, std::vector<int64_t>>
placed(const std::vector<std::string>& modules, Make make, Get tensor) {
  std::pair<std::string, std::vector<int64_t>> result{{}, {0, 0}};
  std::mutex mutex;
  virtual_world_options world;
  world.config.tensor_parallel_degree = 2;
  world.config.tensor_parallel_modules = modules;
  world.config.ddp = true;
  world.config.threads = 1;
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{seeded(make)};
    model.partition();
    std::unique_lock guard{mutex};
    result.second[s.rank()] = tensor(model).size(0);
    if (s.rank() == 0)
      result.first = model.partition_text();
  });
  return result;
}

} // namespace

TEST_CASE("a GPT whose words are shared computes what one process does",
          "[runtime][verify][tensor_parallel][R59]") {
  for (auto tied : {false, true})
    for (auto same : {false, true}) {
      compare(tied, 1, 2, 1, same);
      compare(tied, 2, 2, 1, same);
      compare(tied, 1, 2, 2, same);
    }
  compare(true, 1, 4, 1, false);
  compare(true, 2, 2, 1, false, "bfloat16");
}

TEST_CASE("other language models share their words, too",
          "[runtime][verify][tensor_parallel][R59]") {
  for (auto same : {false, true}) {
    compare_model("t5", false, same);
    compare_model("t5", true, same);
    compare_model("moe", false, same);
    compare_model("moe", true, same);
    compare_model("bert", false, same);
    compare_model("bert", true, same);
    compare_model("roberta", false, same);
    compare_model("roberta", true, same);
  }
}

TEST_CASE("a table and a head with one weight are cut alike or not at all",
          "[runtime][tensor_parallel][R59]") {
  auto make = [] { return tied{}; };
  auto weight = [](auto& model) { return model->table->weight; };
  auto [text, rows] = placed({"*"}, make, weight);
  CHECK_THAT(text,
             ContainsSubstring("Embedding shared by 2 ranks by rows: table")
               && ContainsSubstring("LMHead shared by 2 ranks by words: head"));
  CHECK(rows == std::vector<int64_t>{6, 5});
  std::tie(text, rows) = placed({"head"}, make, weight);
  CHECK_THAT(text, ContainsSubstring("LMHead not shared, as 'table.weight' "
                                     "belongs to other modules, too; give "
                                     "each its own, or name all, if they are "
                                     "tables and the last layer of a language "
                                     "model: head"));
  CHECK(rows == std::vector<int64_t>{11, 11});
}

TEST_CASE("the bias of a head is cut by its words, also under a name above it",
          "[runtime][tensor_parallel][R59]") {
  auto bias = [](auto& model) { return model->bias; };
  auto [text, rows] = placed(
    {"*"}, [] { return biased{false}; }, bias);
  CHECK_THAT(text,
             ContainsSubstring("Embedding shared by 2 ranks by rows: table")
               && ContainsSubstring("LMHead shared by 2 ranks by words: head"));
  CHECK(rows == std::vector<int64_t>{6, 5});
  // Else who computes with it past the head would have a part.
  std::tie(text, rows) = placed(
    {"*"}, [] { return biased{true}; }, bias);
  CHECK_THAT(text, ContainsSubstring("LMHead not shared, as")
                     && !ContainsSubstring("Embedding shared"));
  CHECK(rows == std::vector<int64_t>{11, 11});
}

TEST_CASE("no rank has all words of the last layer of a BERT and a RoBERTa",
          "[runtime][tensor_parallel][R59]") {
  model_sizes sizes;
  sizes.vocabulary = 11;
  sizes.layers = 1;
  sizes.heads = 2;
  sizes.width = 8;
  sizes.loss_in_head = true;
  sizes.tied = GENERATE(false, true);
  auto modules_of = [&](const char* type) {
    auto& [head, table] = places.at(type);
    return sizes.tied ? std::vector{head, table} : std::vector{head};
  };
  auto [text, rows] = placed(
    modules_of("bert"), [&] { return bert{sizes}; },
    [](auto& model) { return model->head->predictions->bias; });
  CHECK_THAT(text, ContainsSubstring("LMHead shared by 2 ranks by words: "
                                     "cls.predictions.decoder"));
  CHECK(rows == std::vector<int64_t>{6, 5});
  std::tie(text, rows) = placed(
    modules_of("roberta"), [&] { return roberta{sizes}; },
    [](auto& model) { return model->head->bias; });
  CHECK_THAT(text, ContainsSubstring("LMHead shared by 2 ranks by words: "
                                     "lm_head.decoder"));
  CHECK(rows == std::vector<int64_t>{6, 5});
}
