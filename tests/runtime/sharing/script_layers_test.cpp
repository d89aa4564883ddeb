#include "tests/support/catch.hpp"

#include "runtime/model/script_walk.hpp"
#include "runtime/sharing/native_modules.hpp"
#include "runtime/sharing/script_layers.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/torch/script_files.hpp"
#include "tp/distributions.hpp"

#include <ATen/ops/gelu.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/jit.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

using options = transformer_layer_options;

/// @param file of tests/data/zoo
options layer_of(const std::string& file, const std::string& name) {
  auto root = torch::jit::load(source_file("tests/data/zoo/" + file));
  auto model = walk(root._ivalue());
  auto module = model.find_module(name);
  REQUIRE(module);
  auto native = native_of(model, *module);
  REQUIRE(native);
  CHECK(native->type == "TransformerLayer");
  CHECK(native->doubt == "");
  CHECK(find_distribution(native->type)->refusal(*native, 2) == "");
  return *native->layer;
}

std::vector<std::string>
names_of(const std::vector<options::linear_place>& xs) {
  std::vector<std::string> result;
  for (auto& x : xs)
    result.push_back(x.name);
  return result;
}

/// Knows a function beside those of torch.
struct helper_resolver : torch::jit::NativeResolver {
  std::shared_ptr<torch::jit::SugaredValue>
  resolveValue(const std::string& name, torch::jit::GraphFunction& m,
               const torch::jit::SourceRange& loc) override {
    if (name == "helper")
      return std::make_shared<torch::jit::FunctionValue>(
        &unit->get_function("helper"));
    return NativeResolver::resolveValue(name, m, loc);
  }

  std::shared_ptr<torch::jit::CompilationUnit> unit = torch::jit::compile(
    "def helper(x):\n  return torch.relu(x)\n");
};

/// Of a layer that does what `forward` says.
std::string doubt_of(const std::string& forward,
                     const torch::jit::ResolverPtr& resolver = nullptr) {
  auto unit = std::make_shared<torch::jit::CompilationUnit>();
  auto layer = empty_script("transformers.models.bert.modeling_bert.BertLayer",
                            unit);
  layer.define(forward, resolver);
  auto model = walk(layer._ivalue());
  REQUIRE(is_script_layer(model.modules[0].type));
  return read_script_layer(model, 0).doubt;
}

} // namespace

TEST_CASE("a block of an exported GPT-2 is read from its code",
          "[runtime][model][tensor_parallel]") {
  // Of three versions of transformers, each with other code.
  auto file = GENERATE("hf_gpt2.pt", "../transformers/gpt2_4_50.pt",
                       "../transformers/gpt2_5_24.pt");
  CAPTURE(file);
  auto x = layer_of(file, "model.transformer.h.1");
  CHECK(x.num_attention_heads == 2);
  CHECK(x.pre_layernorm);
  CHECK_FALSE(x.post_layernorm);
  CHECK(x.takes_mask);
  CHECK_FALSE(x.returns_arguments);
  CHECK_FALSE(x.causal); // the mask says it
  CHECK(x.attention_norm.name == "ln_1");
  CHECK(x.output_norm.name == "ln_2");
  CHECK(x.output_norm.eps == 1e-5);
  CHECK(names_of(x.query_key_value) == std::vector<std::string>{"attn.c_attn"});
  CHECK(x.query_key_value[0].inputs_first);
  CHECK(x.attention_output.name == "attn.c_proj");
  CHECK(x.intermediate.name == "mlp.c_fc");
  CHECK(x.output.name == "mlp.c_proj");
  CHECK(x.attention_dropout.name == "attn");
  CHECK(x.attention_output_dropout.name == "attn.resid_dropout");
  CHECK(x.output_dropout.name == "mlp.dropout");
  auto y = torch::linspace(-4, 4, 100, torch::kDouble);
  CHECK(torch::allclose(x.activation(y), at::gelu(y, "tanh"), 1e-6, 1e-6));
}

TEST_CASE("a layer of an exported BERT is read from its code",
          "[runtime][model][tensor_parallel]") {
  auto file = GENERATE("hf_bert.pt", "../transformers/bert_5_24.pt");
  CAPTURE(file);
  auto x = layer_of(file, "model.bert.encoder.layer.1");
  CHECK(x.num_attention_heads == 2);
  CHECK_FALSE(x.pre_layernorm);
  CHECK(x.post_layernorm);
  CHECK(x.takes_mask);
  CHECK(x.attention_norm.name == "attention.output.LayerNorm");
  CHECK(x.attention_norm.eps == 1e-12);
  CHECK(x.output_norm.name == "output.LayerNorm");
  CHECK(names_of(x.query_key_value)
        == std::vector<std::string>{"attention.self.query",
                                    "attention.self.key",
                                    "attention.self.value"});
  CHECK(x.attention_dropout.name == "attention.self");
  CHECK(x.output_dropout.name == "output.dropout");
  auto y = torch::linspace(-4, 4, 100, torch::kDouble);
  CHECK(torch::allclose(x.activation(y), at::gelu(y), 1e-12, 1e-12));
}

TEST_CASE("a layer of an exported RoBERTa is read from its code",
          "[runtime][model][tensor_parallel]") {
  auto x = layer_of("hf_roberta.pt", "model.roberta.encoder.layer.1");
  CHECK(x.num_attention_heads == 4);
  CHECK_FALSE(x.pre_layernorm);
  CHECK(x.post_layernorm);
  CHECK(x.takes_mask);
  CHECK(x.attention_output.name == "attention.output.dense");
  CHECK(x.intermediate.name == "intermediate.dense");
  CHECK(x.output.name == "output.dense");
  CHECK(x.output_norm.name == "output.LayerNorm");
}

TEST_CASE("code that is not a layer's is refused whatever its class is called",
          "[runtime][model][tensor_parallel]") {
  CHECK_THAT(doubt_of("def forward(self, x, mask):\n  return x + mask\n"),
             ContainsSubstring("a half does not end with a linear"));
  CHECK_THAT(doubt_of("def forward(self, x, mask):\n  return torch.relu(x)\n"),
             ContainsSubstring("does not end with a sum but aten::relu"));
  CHECK_THAT(doubt_of("def forward(self, x):\n"
                      "  if bool(x.sum() > 0):\n    x = x + 1\n  return x\n"),
             ContainsSubstring("has branches"));
  CHECK_THAT(doubt_of("def forward(self, x, a, b):\n  return x\n"),
             ContainsSubstring("other arguments"));
  CHECK_THAT(doubt_of("def forward(self, x):\n  return x\n"
                      "def forward1(self, x):\n  return x\n"),
             ContainsSubstring("a method 'forward1' beside forward"));
  CHECK_THAT(doubt_of("def forward(self, x):\n  return helper(x) + x\n",
                      std::make_shared<helper_resolver>()),
             ContainsSubstring("it calls a function; export it"));
  CHECK_FALSE(is_script_layer("my.BertLayer"));
}
