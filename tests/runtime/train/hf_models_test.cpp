// The built-in models against what Hugging Face's computed, see
// tests/data/hf/make_references.py.

#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/train/models/moe.hpp"
#include "runtime/train/trainable.hpp"
#include "tests/support/torch/plain_gpt.hpp"

#include <nlohmann/json.hpp>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

using namespace smp::test;

namespace {

using shapes = std::map<std::string, std::vector<int64_t>>;

/// One file of references.
class reference {
public:
  explicit reference(const std::string& name) {
    auto* root = std::getenv("SMP_SOURCE_DIR");
    REQUIRE(root != nullptr);
    file_ = smp::read_safetensors(std::string{root} + "/tests/data/hf/" + name
                                  + ".safetensors");
  }

  const torch::Tensor* find(const std::string& name) const {
    return file_.find(name);
  }

  /// Every name of the state dict, tied ones too.
  shapes names() const {
    return nlohmann::json::parse(file_.metadata.at("names")).get<shapes>();
  }

  smp::batch inputs() const {
    smp::batch result;
    while (auto* x = file_.find("input/" + std::to_string(result.size())))
      result.push_back(*x);
    return result;
  }

private:
  smp::safetensors_file file_;
};

shapes names_of(torch::nn::Module& model) {
  shapes result;
  for (auto& item : model.named_parameters())
    result[item.key()] = item.value().sizes().vec();
  for (auto& item : model.named_buffers())
    result[item.key()] = item.value().sizes().vec();
  return result;
}

/// Takes over the weights, runs forward and backward, and compares everything.
template <class Loss>
void compare(torch::nn::Module& model, const reference& expected, Loss&& loss) {
  CHECK(names_of(model) == expected.names());
  std::map<std::string, torch::Tensor> parameters;
  for (auto& item : model.named_parameters())
    parameters.emplace(item.key(), item.value());
  for (auto& [name, x] : parameters) {
    torch::NoGradGuard guard;
    // A tied weight stands under one of its names.
    for (auto& [other, y] : parameters)
      if (y.is_same(x))
        if (auto* value = expected.find("weight/" + other))
          x.copy_(*value);
  }
  auto found = loss();
  found.backward();
  CHECK(excess(found.detach(), *expected.find("loss")) <= 0);
  size_t compared = 0;
  for (auto& [name, x] : parameters)
    if (auto* gradient = expected.find("gradient/" + name)) {
      INFO(name);
      REQUIRE(x.grad().defined());
      CHECK(excess(x.grad(), *gradient) <= 0);
      ++compared;
    }
  CHECK(compared > 5);
}

smp::train_config small(const char* type) {
  smp::train_config result;
  result.model.type = type;
  result.model.layers = 2;
  result.model.heads = 2;
  result.model.width = 16;
  result.model.vocabulary = 40;
  result.model.sequence_length = 10;
  return result;
}

void compare(const smp::train_config& config, const char* file) {
  reference expected{file};
  auto model = smp::make_trainable(config);
  auto& root = dynamic_cast<smp::nn_trainable&>(*model).root();
  compare(root, expected, [&] { return model->loss(expected.inputs()); });
}

} // namespace

TEST_CASE("The GPT has the names and the numbers of GPT2LMHeadModel",
          "[runtime][models]") {
  auto config = small("gpt");
  config.model.tied = true;
  compare(config, "gpt2");
}

TEST_CASE("The BERT has the names and the numbers of BertForMaskedLM",
          "[runtime][models]") {
  auto config = small("bert");
  config.model.feed_forward = 40;
  compare(config, "bert");
}

TEST_CASE("The RoBERTa has the names and the numbers of RobertaForMaskedLM",
          "[runtime][models]") {
  auto config = small("roberta");
  config.model.feed_forward = 40;
  compare(config, "roberta");
}

TEST_CASE("The T5 has the names and the numbers of T5ForConditionalGeneration",
          "[runtime][models]") {
  auto config = small("t5");
  config.model.decoder_layers = 3;
  config.model.head_size = 6;
  config.model.feed_forward = 24;
  config.model.relative_buckets = 8;
  config.model.relative_distance = 12;
  compare(config, "t5");
  config.model.gated = true;
  config.model.tied = false;
  compare(config, "t5_v1_1");
}

TEST_CASE(
  "A mixture of experts has the names and the numbers of "
  "SwitchTransformersSparseMLP",
  "[runtime][models]") {
  reference expected{"switch_mlp"};
  smp::model_sizes sizes;
  sizes.width = 8;
  sizes.feed_forward = 12;
  smp::moe_mlp model{sizes};
  auto xs = expected.inputs();
  compare(*model, expected,
          [&] { return (std::get<0>(model(xs[0])) * xs[1]).sum(); });
}
