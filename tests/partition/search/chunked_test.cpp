#include "tests/support/catch.hpp"

#include "partition/partitioner.hpp"
#include "partition/schedule/program.hpp"
#include "tests/support/gpt_tree.hpp"
#include "tests/support/partition_models.hpp"

#include <string>

using namespace smp;
using namespace smp::test;

namespace {

partition_plan chunked(const model_info& model, uint32_t devices,
                       uint32_t chunks) {
  partition_options options;
  options.manual.devices = devices;
  options.chunks = chunks;
  return make_partition(model, options);
}

/// Device and chunk of each block of a GPT: "0.0 1.0 0.1 1.1".
std::string blocks_of(const model_info& model, const partition_plan& plan) {
  std::string result;
  for (size_t i = 0; i < model.size(); ++i)
    if (model[i].type == "smp::gpt_block_impl")
      result += (result.empty() ? "" : " ")
                + std::to_string(plan.module_device[i]) + "."
                + std::to_string(plan.module_chunk[i]);
  return result;
}

} // namespace

TEST_CASE("chunks go round the devices in the order of execution",
          "[partition][chunked]") {
  gpt_tree gpt{8, 192, false};
  CHECK(blocks_of(gpt.model, chunked(gpt.model, 2, 2))
        == "0.0 0.0 1.0 1.0 0.1 0.1 1.1 1.1");
  CHECK(blocks_of(gpt.model, chunked(gpt.model, 2, 4))
        == "0.0 1.0 0.1 1.1 0.2 1.2 0.3 1.3");
  CHECK(blocks_of(gpt.model, chunked(gpt.model, 4, 2))
        == "0.0 1.0 2.0 3.0 0.1 1.1 2.1 3.1");
  // One chunk is the ordinary strategy.
  for (auto x : chunked(gpt.model, 2, 1).module_chunk)
    CHECK(x == 0);
}

TEST_CASE("a work belongs to the chunk of its modules",
          "[partition][chunked]") {
  gpt_tree gpt{8, 192, false};
  auto plan = chunked(gpt.model, 2, 2);
  auto program = make_program(gpt.model, plan, {});
  CHECK(program.chunks == 2);
  std::string chain;
  for (auto& x : program.chain)
    if (x.forward > 0)
      chain += " " + std::to_string(x.device) + "." + std::to_string(x.chunk);
  CHECK(chain.starts_with(" 0.0 1.0 0.1 1.1"));
  auto place = place_of(program, 1, 8);
  CHECK(place.device == 1);
  CHECK(place.devices == 2);
  CHECK(place.microbatches == 8);
  CHECK(place.chunk_of.front() == 0);
  CHECK(place.chunk_of.back() == 1);
}

TEST_CASE("what the root calls last does not cost a request each",
          "[partition][chunked]") {
  gpt_tree gpt{8, 192, false};
  // One call for each chunk of device 1, none for the norm and the head.
  CHECK(chunked(gpt.model, 2, 2).score.requests == 2);
}

TEST_CASE("more chunks than there is to split are fewer chunks",
          "[partition][chunked]") {
  auto model = make_model({{"", {1}, 1, 1}, {"a", {}, 1, 1}});
  auto plan = chunked(model, 2, 8);
  CHECK(plan.module_device == assignment{0, 1});
  CHECK(plan.module_chunk == assignment{0, 0});
}

TEST_CASE("what is pinned stays where it is with chunks too",
          "[partition][chunked]") {
  gpt_tree gpt{8, 192, false};
  for (size_t i = 0; i < gpt.model.size(); ++i)
    if (gpt.model[i].path == "transformer.h.1")
      gpt.model[i].pinned_device = 1;
  auto plan = chunked(gpt.model, 2, 2);
  for (size_t i = 0; i < gpt.model.size(); ++i)
    if (gpt.model[i].path.starts_with("transformer.h.1"))
      CHECK(plan.module_device[i] == 1);
}
