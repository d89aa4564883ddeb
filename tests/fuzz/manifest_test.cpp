// The manifest of a checkpoint: a file that users move, merge and edit.

#include "tests/fuzz/target.hpp"

#include "runtime/checkpoint/manifest.hpp"
#include "transport/error.hpp"

#include <stdexcept>
#include <string>

using namespace smp;
using namespace smp::test;

namespace {

fuzz_bytes bytes_of(const std::string& x) {
  auto begin = reinterpret_cast<const std::byte*>(x.data());
  return {begin, begin + x.size()};
}

/// A weight in two pieces, its optimizer's state, a buffer of two replicas.
checkpoint_manifest two_ranks() {
  checkpoint_manifest x;
  x.step = 17;
  x.pipeline = 2;
  x.ranks = 4;
  x.drawn_steps = 17;
  x.settings = {{"model.type", "gpt"}, {"smp.seed", "1"}};
  x.user_content = {{"epoch", "3"}};
  x.partition = {{"", 0}, {"h.0", 1}};
  x.optimizers = {{"AdamW", {{{"lr", 1e-3}, {"eps", 1e-8}}}, {{"h.0.w", 0}}}};
  x.files = {{"rank0.safetensors", 4096, 0}, {"rank1.safetensors", 512, 1}};
  auto halves = [](const char* a, const char* b) {
    return std::vector<tensor_piece>{{a, "", 0, {0, 0}, {2, 3}, 0xfeed},
                                     {b, "#1", 0, {2, 0}, {2, 3}, 0xbeef}};
  };
  auto pieces = halves("rank0.safetensors", "rank1.safetensors");
  x.tensors = {
    {tensor_role::parameter, "h.0.w", "F32", {4, 3}, pieces},
    {tensor_role::optimizer, "optimizer0/exp_avg/h.0.w", "F32", {4, 3}, pieces},
    {tensor_role::buffer,
     "mean",
     "F64",
     {2},
     {{"rank0.safetensors", "", 0, {0}, {2}, 1},
      {"rank1.safetensors", "", 1, {0}, {2}, 2}}},
    {tensor_role::random,
     "random/0",
     "U8",
     {},
     {{"rank0.safetensors", "", 0, {}, {}, 3}}}};
  return x;
}

std::vector<fuzz_bytes> manifest_seeds() {
  return {bytes_of(to_json({})), bytes_of(to_json(two_ranks()))};
}

bool reads_manifest(std::span<const std::byte> x) {
  std::string text{reinterpret_cast<const char*>(x.data()), x.size()};
  checkpoint_manifest read;
  try {
    read = parse_manifest(text, "manifest.json");
  } catch (const error&) {
    return false;
  }
  // What is accepted can be written, and then means the same.
  if (!(parse_manifest(to_json(read), "again") == read))
    throw std::logic_error{"a manifest changes when it is written again"};
  return true;
}

} // namespace

SMP_FUZZ_TARGET(
  "a damaged manifest of a checkpoint is refused, or means what it says",
  (fuzz_target{"manifest", manifest_seeds, reads_manifest, 20'000}))
