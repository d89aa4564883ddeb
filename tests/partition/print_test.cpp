#include "tests/support/catch.hpp"

#include "partition/print.hpp"
#include "tests/support/gpt_tree.hpp"
#include "tests/support/partition_models.hpp"
#include "tests/support/t5_tree.hpp"

#include <algorithm>

using namespace smp;
using namespace smp::test;

namespace {

partition_options on(uint32_t devices) {
  partition_options result;
  result.manual.devices = devices;
  return result;
}

std::string shown(const model_info& model, const partition_options& options) {
  return print_partition(model, make_partition(model, options));
}

auto num_lines(const std::string& x) {
  return std::count(x.begin(), x.end(), '\n');
}

/// Of the longest line, in characters.
size_t width_of(const std::string& x) {
  size_t result = 0;
  size_t here = 0;
  for (auto c : x)
    if (c == '\n')
      here = 0;
    else if ((c & 0xc0) != 0x80) // not within a character
      result = std::max(result, ++here);
  return result;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

} // namespace

TEST_CASE("a GPT on two devices prints as a tree that fits the screen",
          "[partition][print]") {
  gpt_tree gpt{8, 192, true};
  CHECK(
    shown(gpt.model, on(2))
    == R"(partition: 104 modules over 2 devices, strategy balanced, memory weight 0.8
  module                       type            params     cost  device
  model                        gpt             3.63 M  100.0 %  0       ████████
    transformer                gpt_tr..ormer   3.58 M   97.3 %  0       ███████▊
      wpe                      Embedding       24,576    0.7 %  0
      drop                     Dropout              -    0.2 %  0
      h                        Sequential      3.56 M   96.0 %  0       ███████▋
        0-3                    4 x gpt_block   1.78 M   47.9 %  0       ███▉
        4-7                    4 x gpt_block   1.78 M   47.9 %  1       ███▉
      ln_f                     LayerNorm          384    0.2 %  0
    transformer.wte = lm_head  Embedding       49,152    2.5 %  0       ▎
load of  0  52.1 %  ██████████▍
         1  47.9 %  █████████▋
largest load 52.1 % (even: 50.0 %), 1 call crosses per microbatch and phase
note: lm_head runs on device 0 with transformer.wte: they share parameter
      transformer.wte.weight
)");
}

TEST_CASE(
  "a GPT of eight blocks takes less than 30 lines on any number of "
  "devices",
  "[partition][print]") {
  auto tied = GENERATE(true, false);
  gpt_tree gpt{8, 192, tied};
  for (uint32_t devices = 1; devices <= 16; ++devices)
    for (auto strategy :
         {partition_strategy::paper, partition_strategy::balanced}) {
      auto options = on(devices);
      options.strategy = strategy;
      auto text = shown(gpt.model, options);
      INFO(text);
      CHECK(num_lines(text) < 34);
      CHECK(width_of(text) <= 80);
      for (uint32_t device = 0; device < devices; ++device)
        CHECK(has(text, " " + std::to_string(device) + " "));
    }
}

TEST_CASE("a model on one device is one line", "[partition][print]") {
  gpt_tree gpt{8, 192, false};
  auto text = shown(gpt.model, on(1));
  CHECK(has(text, "104 modules over 1 device,"));
  CHECK(num_lines(text) == 5);
  CHECK(has(text, "0 calls cross"));
}

TEST_CASE("what rounds up to a thousand has the next unit",
          "[partition][print]") {
  auto model = make_model({{"", {1}, 1, 1, {"w"}}, {"a", {}, 1, 1}});
  model[0].parameters[0].elements = 999'700'000;
  model[1].pinned_device = 1;
  model[1].call_bytes = 999'800;
  auto text = shown(model, on(2));
  CHECK(has(text, " 1 B "));
  CHECK(has(text, "1 call crosses with 1 MB"));
}

TEST_CASE("the figure of T5-11B can be recognised", "[partition][print][T5]") {
  auto options = on(8);
  options.strategy = partition_strategy::paper;
  options.memory_weight = 0.2;
  auto text = shown(load_t5(), options);
  CHECK(has(text, "shared and 3 that share with it"));
  CHECK(has(text, "0-7"));
  CHECK(has(text, "19-23                        5 x module   12.5 %  2"));
  CHECK(has(text, "load of  0  10.7 %    1  13.1 %"));
  CHECK(has(text,
            "encoder.embed_tokens, decoder.embed_tokens and lm_head run on "
            "device 0\n      with shared: they share"));
}

TEST_CASE("small parts give way to those that are on other devices",
          "[partition][print][T5]") {
  auto options = on(8);
  options.memory_weight = 1;
  options.crossing = {};
  auto text = shown(load_t5(), options);
  INFO(text);
  CHECK_FALSE(has(text, "final_layer_norm"));
  CHECK(has(text, "and 6 small ones with their parents"));
  for (auto part : {"0-5 ", "6-11 ", "13-18 ", "19-23 "})
    CHECK(has(text, part));
  CHECK(width_of(text) <= 80);
}

TEST_CASE("a tree given as data prints without types and parameters",
          "[partition][print]") {
  auto model = make_model(
    {{"", {1, 2}, 5, 5}, {"a", {}, 3, 1}, {"b", {}, 2, 4}});
  for (auto& x : model)
    x.type.clear();
  CHECK(has(shown(model, on(2)),
            "  module     cost  device\n"
            "  model   100.0 %  0       ████"));
}

TEST_CASE("where costs come from is said, and long notes are wrapped",
          "[partition][print]") {
  gpt_tree gpt{4, 192, false};
  for (auto& x : gpt.model)
    if (x.path.ends_with(".mlp"))
      x.not_interceptable
        = "its calls cannot be seen; declare it as "
          "smp::submodule<gpt_mlp> or put it into a "
          "Sequential";
  auto options = on(2);
  options.basis = "measured on the CPU";
  auto text = shown(gpt.model, options);
  CHECK(has(text, "\ncosts: measured on the CPU\n"));
  CHECK(has(text, "parents: its calls\n      cannot be seen; declare"));
  CHECK(width_of(text) <= 80);
}

TEST_CASE("levels that do not fit are folded, with their devices",
          "[partition][print]") {
  gpt_tree gpt{8, 192, false};
  auto plan = make_partition(gpt.model, on(4));
  print_options options;
  options.max_lines = 6;
  auto text = print_partition(gpt.model, plan, options);
  INFO(text);
  CHECK(has(text, "96.0 %  0-3"));
  CHECK_FALSE(has(text, "gpt_block"));
  CHECK(has(text, "small ones with their parents"));
  options.max_lines = 2;
  text = print_partition(gpt.model, plan, options);
  CHECK(has(text, "and 1 more"));
}

TEST_CASE("a model of any size prints a bounded number of lines",
          "[partition][print]") {
  std::mt19937_64 engine{1};
  auto model = random_model(engine, 5000, 100);
  for (auto& x : model)
    if (engine() % 100 == 0)
      x.not_interceptable = "reason " + std::to_string(engine());
  CHECK(num_lines(shown(model, on(64))) < 50);
}

TEST_CASE("colours are asked for and mark the device", "[partition][print]") {
  gpt_tree gpt{2, 192, false};
  auto plan = make_partition(gpt.model, on(2));
  CHECK_FALSE(has(print_partition(gpt.model, plan), "\x1b"));
  print_options options;
  options.colour = true;
  auto text = print_partition(gpt.model, plan, options);
  CHECK(has(text, "\x1b[36m0"));
  CHECK(has(text, "\x1b[33m1"));
  // Without the escapes it is the same text.
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\x1b')
      i = text.find('m', i);
    else
      plain += text[i];
  CHECK(plain == print_partition(gpt.model, plan));
}

TEST_CASE("manual placement and what cannot be intercepted are said",
          "[partition][print][R20]") {
  gpt_tree gpt{4, 192, false};
  for (auto& x : gpt.model)
    if (x.path.ends_with(".mlp"))
      x.not_interceptable = "write smp::submodule<gpt_mlp> for mlp";
  auto options = on(2);
  options.manual.automatic = false;
  auto text = shown(gpt.model, options);
  CHECK(has(text, "over 2 devices, placed by hand"));
  CHECK(has(text, "warning: device 1 stays idle: nothing is placed there"));
  CHECK(has(text,
            "note: transformer.h.0.mlp and 3 like it stay with their parents: "
            "write\n      smp::submodule<gpt_mlp> for mlp"));
}

TEST_CASE("what keeps microbatches in order is said",
          "[partition][print][R19]") {
  gpt_tree gpt{4, 192, false};
  for (auto& x : gpt.model)
    if (x.path.ends_with(".mlp"))
      x.ordered = "buffers mean, var";
  CHECK(has(shown(gpt.model, on(2)), "microbatches pass transformer.h.0.mlp"));
  CHECK(has(shown(gpt.model, on(2)), "mean, var"));
  CHECK_FALSE(has(shown(gpt.model, on(1)), "mean, var"));
}
