// ctest: seconds=12 label=multiprocess alone

// Collectives of four ranks on two "machines": network namespaces of this one.

#include "tests/support/catch.hpp"

#include "smp/smp.hpp"
#include "tests/support/runs/machines.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

using torch::Tensor;

namespace {

constexpr int64_t ranks = 4;
constexpr int64_t numbers = 2 << 20; // that a rank gives, of 4 bytes
constexpr int calls = 8;

/// What a rank gives to a call: whole numbers, so that sums are exact.
Tensor given(int64_t rank, int call) {
  return torch::arange(numbers, torch::kLong)
    .mul(7 * rank + 3)
    .add(call)
    .remainder(251)
    .to(torch::kFloat);
}

/// What each of the ranks has to get, by position, computed from what all give.
std::vector<Tensor> wanted(const std::string& kind, int call) {
  std::vector<Tensor> all;
  for (int64_t i = 0; i < ranks; ++i)
    all.push_back(given(i, call));
  auto stacked = torch::stack(all);
  if (kind == "allreduce")
    return std::vector(ranks, stacked.sum(0));
  if (kind == "reduce")
    return {stacked.sum(0), {}, {}, {}};
  if (kind == "broadcast")
    return std::vector(ranks, all[0]);
  if (kind == "allgather")
    return std::vector(ranks, stacked);
  auto parts = stacked.sum(0).view({ranks, -1});
  return parts.unbind(0);
}

Tensor run(const std::string& kind, const Tensor& x) {
  if (kind == "allreduce")
    return allreduce(x);
  if (kind == "reduce")
    return reduce(x);
  if (kind == "broadcast")
    return broadcast(x);
  if (kind == "allgather")
    return allgather(x);
  return reduce_scatter(x.view({ranks, -1}));
}

} // namespace

TEST_CASE("rank of collectives over machines", "[.rank]") {
  session_config config;
  config.pipeline_parallel_degree = ranks;
  config.threads = 1;
  config.trusted_network = true;
  config.keys = "keys";
  session s{config};
  std::string kind = std::getenv("TEST_KIND");
  auto self = static_cast<int64_t>(s.rank());
  for (int i = 0; i < calls; ++i) {
    auto result = run(kind, given(self, i));
    auto all = wanted(kind, i);
    auto& mine = all[s.rank()];
    if (result.defined() != mine.defined()
        || (mine.defined() && !torch::equal(result, mine)))
      throw std::runtime_error{kind + " came out wrong"};
  }
}

TEST_CASE(
  "a collective of two machines is right, and sends what it must over "
  "the cable, once",
  "[runtime][machines][R48]") {
  // In sizes of what a rank gives: what machine 0 sends, and machine 1.
  auto [kind, first, second] = GENERATE(
    table<std::string, double, double>({{"allreduce", 1, 1},
                                        {"reduce", 0, 1},
                                        {"reduce_scatter", .5, .5},
                                        {"broadcast", 1, 0},
                                        {"allgather", 2, 2}}));
  CAPTURE(kind);
  scratch_dir dir;
  machines two{2};
  program keys{{built_program("smp-train"), "keys", "keys"}, dir.path};
  REQUIRE(keys.join() == 0);
  const std::vector before{two.bytes_sent(0), two.bytes_sent(1)};
  std::vector<std::unique_ptr<program>> running;
  for (size_t i = 0; i < ranks; ++i)
    running.emplace_back(new program(two.start(
      i / 2, this_program("rank of collectives over machines"), dir.path,
      {{"RANK", std::to_string(i)},
       {"LOCAL_RANK", std::to_string(i % 2)},
       {"LOCAL_WORLD_SIZE", "2"},
       {"WORLD_SIZE", std::to_string(ranks)},
       {"MASTER_ADDR", two.name(0)},
       {"MASTER_PORT", "29400"},
       {"TEST_KIND", kind}})));
  for (auto& x : running) {
    auto code = x->join();
    INFO(x->output());
    REQUIRE(code == 0);
  }
  // Beside headers, acknowledgements and the control plane.
  constexpr double whole = double{calls} * numbers * sizeof(float);
  for (auto [machine, share] : {std::pair{0, first}, {1, second}}) {
    auto sent = static_cast<double>(two.bytes_sent(size_t(machine))
                                    - before[size_t(machine)]);
    INFO("machine " << machine << " sent " << sent / whole);
    CHECK(sent >= share * whole);
    CHECK(sent <= share * whole + .1 * whole);
  }
}
