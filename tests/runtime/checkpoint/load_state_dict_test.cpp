#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/checkpoint/saved_model.hpp"
#include "runtime/checkpoint/weight_names.hpp"
#include "runtime/train/models/gpt.hpp"
#include "smp/smp.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <nlohmann/json.hpp>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

// A file of whole tensors, of which each rank reads what it owns.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

model_sizes sizes_of_block() {
  model_sizes x;
  x.heads = 4;
  x.width = 8;
  return x;
}

/// Tensors that are cut along each axis, in blocks, and not at all.
struct filed_impl : torch::nn::Module {
  filed_impl() {
    register_module("table", table);
    register_module("wide", wide);
    register_module("block", block);
    register_buffer("scale", torch::ones({}));
  }

  submodule<torch::nn::Embedding> table{21, 3}; // by rows, one more on some
  submodule<torch::nn::Linear> wide{8, 33000};  // more than 1 MB
  submodule<gpt_block> block{sizes_of_block(), 0};
};
TORCH_MODULE_IMPL(filed, filed_impl);

/// Parameters and buffers of a model in one process, with values of their own.
named_tensors given_tensors() {
  named_tensors result;
  filed model;
  auto add = [&](const auto& xs) {
    for (auto& x : xs)
      result.emplace_back(
        x.key(), torch::sin(torch::arange(x.value().numel(), torch::kFloat)
                            + static_cast<double>(result.size()))
                   .view(x.value().sizes()));
  };
  add(model->named_parameters());
  add(model->named_buffers());
  return result;
}

struct filed_grid {
  uint64_t tensor = 1;
  uint64_t pipeline = 1;
};

virtual_world_options world_of_files(const filed_grid& g,
                                     const std::string& optimize) {
  virtual_world_options result;
  auto& x = result.config;
  x.tensor_parallel_degree = g.tensor;
  x.pipeline_parallel_degree = g.pipeline;
  x.optimize = optimize;
  if (g.tensor > 1)
    x.tensor_parallel_modules = {"*"};
  x.ddp = g.tensor > 1;
  x.threads = 1;
  return result;
}

filed make_filed(const filed_grid& g) {
  auto result = seeded([] { return filed{}; });
  set_partition(*result->block, static_cast<uint32_t>(g.pipeline - 1));
  return result;
}

} // namespace

TEST_CASE("ranks of any grid read a file, and write the same",
          "[runtime][state][tensor_parallel]") {
  std::string optimize = GENERATE("speed", "memory");
  auto early = GENERATE(true, false);
  CAPTURE(optimize, early);
  scratch_dir dir;
  auto given = given_tensors();
  const numbers expected{given.begin(), given.end()};
  auto path = dir.path / "0.safetensors";
  write_safetensors(path, given);
  int i = 0;
  for (auto& g : {filed_grid{2, 1}, filed_grid{4, 1}, filed_grid{1, 2},
                  filed_grid{2, 2}, filed_grid{1, 1}}) {
    INFO(g.tensor << " share, " << g.pipeline << " pipeline ranks");
    auto next = dir.path / (std::to_string(++i) + ".safetensors");
    run_virtual_world(g.tensor * g.pipeline, world_of_files(g, optimize),
                      [&](session&) {
                        distributed_model model{make_filed(g)};
                        if (early)
                          load_state_dict(path, model);
                        model.partition();
                        if (!early)
                          load_state_dict(path, model);
                        auto state = model.state_dict();
                        save_state(next, model);
                        assertion_lock held;
                        CHECK(state.size() == expected.size());
                        for (auto& [name, x] : state) {
                          INFO(name);
                          CHECK(torch::equal(x, expected.at(name)));
                        }
                      });
    path = next;
    auto written = all_of(path);
    REQUIRE(written.size() == expected.size());
    for (auto& [name, x] : expected) {
      INFO(name);
      CHECK(torch::equal(written.at(name), x));
    }
  }
}

TEST_CASE("ranks read several files with an index as they read one",
          "[runtime][state][tensor_parallel]") {
  scratch_dir dir;
  auto given = given_tensors();
  const numbers expected{given.begin(), given.end()};
  named_tensors parts[2];
  nlohmann::json index;
  for (size_t k = 0; k < given.size(); ++k) {
    parts[k % 2].push_back(given[k]);
    index["weight_map"][given[k].first] = k % 2 == 0 ? "0.st" : "1.st";
  }
  write_safetensors(dir.path / "0.st", parts[0]);
  write_safetensors(dir.path / "1.st", parts[1]);
  dir.write("model.safetensors.index.json", index.dump());
  filed_grid g{2, 2};
  run_virtual_world(4, world_of_files(g, "speed"), [&](session&) {
    distributed_model model{make_filed(g)};
    load_state_dict(dir.path, model);
    model.partition();
    auto state = model.state_dict();
    assertion_lock held;
    CHECK(state.size() == expected.size());
    for (auto& [name, x] : state) {
      INFO(name);
      CHECK(torch::equal(x, expected.at(name)));
    }
  });
}

TEST_CASE("names of other programs become those of the model",
          "[runtime][state]") {
  const std::set<std::string> known{
    "transformer.wte.weight", "transformer.h.0.attn.c_attn.bias",
    "transformer.h.1.attn.c_attn.bias", "lm_head.weight"};
  auto named = [&](const std::vector<std::string>& in_file,
                   const std::string& prefix = "") {
    std::vector<tensor_outline> xs;
    for (auto& x : in_file) {
      auto& shape = xs.emplace_back(tensor_outline{x, at::kFloat, {}}).shape;
      if (!x.ends_with("masked_bias"))
        shape = {1, 1, 8, 8};
    }
    return names_in_model(xs, known, prefix, "x.st");
  };
  using names = std::vector<std::string>;
  // The model's own, and one that it does not know: reported by others.
  CHECK(named({"lm_head.weight", "other"}) == names{"lm_head.weight", "other"});
  // As GPT2Model, not GPT2LMHeadModel, calls them.
  CHECK(named({"wte.weight", "h.0.attn.c_attn.bias", "lm_head.weight"})
        == names{"transformer.wte.weight", "transformer.h.0.attn.c_attn.bias",
                 "lm_head.weight"});
  CHECK(named({"wte.weight", "transformer.h.0.attn.c_attn.bias"}).front()
        == "wte.weight");
  // Parts of it, each of which would complete them.
  CHECK(named({"attn.c_attn.bias"}) == names{"attn.c_attn.bias"});
  // Buffers that the model computes.
  CHECK(named({"h.0.attn.c_attn.bias", "h.0.attn.bias", "h.0.attn.masked_bias"})
        == names{"transformer.h.0.attn.c_attn.bias", "", ""});
  CHECK(named({"h.0.attn.masked_bias", "h.0.attn.odd"})
        == names{"", "h.0.attn.odd"});
  // What has wrapped the model.
  const names wrapped{"module.transformer.wte.weight", "module.lm_head.weight"};
  auto advice = error_of([&] { named(wrapped); }, error_code::config);
  CHECK(advice
        == "cannot load x.st: all its names begin with \"module.\", and those "
           "of the model do not; write train.init_prefix = \"module.\"");
  CHECK(named(wrapped, "module.")
        == names{"transformer.wte.weight", "lm_head.weight"});
  CHECK_THAT(error_of([&] { named({"a.model.wte.weight"}); }),
             ContainsSubstring("write train.init_prefix = \"a.model.\""));
  CHECK(named({"a.model.wte.weight"}, "a.model.")
        == names{"transformer.wte.weight"});
  CHECK_THAT(error_of([&] { named(wrapped, "modul_"); }),
             ContainsSubstring("none of its names begins with "
                               "train.init_prefix = \"modul_\""));
}

TEST_CASE("a wrong file is refused as a whole, with all that is wrong",
          "[runtime][state][tensor_parallel]") {
  auto early = GENERATE(true, false);
  CAPTURE(early);
  scratch_dir dir;
  std::string right = dir.path / "right.safetensors";
  std::string wrong = dir.path / "wrong.safetensors";
  auto given = given_tensors();
  write_safetensors(right, given);
  const numbers expected{given.begin(), given.end()};
  for (auto& [name, x] : given)
    if (name == "table.weight")
      name = "tabel.weight";
    else if (name == "wide.bias")
      x = torch::ones({5, 2});
  std::erase_if(given, [](auto& x) { return x.first == "scale"; });
  write_safetensors(wrong, given);
  filed_grid g{2, 2};
  run_virtual_world(4, world_of_files(g, "speed"), [&](session&) {
    distributed_model model{make_filed(g)};
    if (!early)
      model.partition();
    auto told = error_of([&] { load_state_dict(wrong, model); },
                         error_code::config);
    auto absent = error_of([&] { load_state_dict(wrong + ".no", model); },
                           error_code::config);
    model.partition();
    auto before = model.state_dict();
    load_state_dict(right, model);
    auto after = model.state_dict();
    assertion_lock held;
    CHECK(told.starts_with("cannot load " + wrong + ": "));
    for (auto* part :
         {"2 missing ('scale', 'table.weight')",
          "1 not in the model ('tabel.weight': did you mean 'table.weight'?)",
          "1 of another shape ('wide.bias': [5, 2] instead of [33000])",
          "; nothing was loaded"})
      CHECK_THAT(told, ContainsSubstring(part));
    CHECK_THAT(absent, ContainsSubstring(wrong + ".no"));
    for (auto& [name, x] : before)
      if (name == "scale")
        CHECK(x.item<float>() == 1);
      else
        CHECK_FALSE(torch::equal(x, expected.at(name)));
    for (auto& [name, x] : after)
      CHECK(torch::equal(x, expected.at(name)));
  });
}
