// ctest: seconds=12 processors=2

#include "tests/support/catch.hpp"

#include "partition/rank_layout.hpp"
#include "tests/support/actors/planned_collective.hpp"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

template <class T>
T any_of(std::mt19937& rng, std::vector<T> xs) {
  return xs[rng() % xs.size()];
}

/// Layouts of a world of this size: pipelines, slices and replicas.
std::vector<rank_layout> layouts_of(uint64_t world) {
  std::vector<rank_layout> result;
  for (uint64_t pipeline = 1; pipeline <= world; ++pipeline)
    for (uint64_t tensor = 1; tensor <= world / pipeline; ++tensor)
      if (world % (pipeline * tensor) == 0)
        for (auto placement : {"cluster", "spread"})
          result.emplace_back(
            layout_config{world, pipeline, tensor, true, placement});
  return result;
}

/// A group of a layout, under the name that a session gives its calls, or any
/// ranks under one of three names, so that numbers of calls come into it.
void choose_group(std::mt19937& rng, uint64_t world, collective_label& x) {
  if (rng() % 2 == 0) {
    auto kind = any_of<group_kind>(rng, {group_kind::world, group_kind::pp,
                                         group_kind::tp, group_kind::rdp,
                                         group_kind::dp, group_kind::mp});
    auto layout = any_of(rng, layouts_of(world));
    x.group = any_of(rng, layout.groups(kind));
    x.name = to_string(kind);
    return;
  }
  for (uint64_t i = 0; i < world; ++i)
    if (rng() % 4 != 0)
      x.group.push_back(rank_id{i});
  if (x.group.empty())
    x.group.push_back(rank_id{rng() % world});
  x.name = any_of<std::string>(rng, {"a", "b", "c"});
}

/// A random group, kind, size and type.
planned_collective random_call(std::mt19937& rng, uint64_t id, uint64_t world,
                               const std::vector<int64_t>& sizes) {
  using enum collective_kind;
  planned_collective x;
  x.id = id;
  choose_group(rng, world, x.call.label);
  x.call.label.microbatch = microbatch_id{rng() % 2};
  auto& what = x.call.what;
  what.kind = collective_kind(rng() % (uint64_t(last_of(what.kind)) + 1));
  what.type = element_type(rng() % (uint64_t(last_of(what.type)) + 1));
  what.op = reduce_op(rng() % (uint64_t(last_of(what.op)) + 1));
  if (what.kind == allreduce || what.kind == reduce
      || what.kind == reduce_scatter)
    while (!can_reduce(what.type, what.op))
      what.type = element_type(rng() % (uint64_t(last_of(what.type)) + 1));
  if (what.kind == reduce || what.kind == gather || what.kind == scatter
      || what.kind == broadcast)
    what.root = rng() % x.size();
  what.shape = {any_of(rng, sizes)};
  if (what.kind == barrier)
    what.shape = {0};
  if (what.kind == all_to_all && rng() % 2 == 0) {
    what.shape = {any_of<int64_t>(rng, {1, 3, 500})};
    x.rows.resize(x.size());
    for (auto& row : x.rows)
      for (uint64_t i = 0; i < x.size(); ++i)
        row.push_back(any_of<uint64_t>(rng, {0, 1, 2, 90}));
  }
  return x;
}

std::vector<planned_collective>
random_calls(std::mt19937& rng, uint64_t count, uint64_t world,
             const std::vector<int64_t>& sizes) {
  std::vector<planned_collective> result;
  for (uint64_t id = 0; id < count; ++id)
    result.push_back(random_call(rng, id, world, sizes));
  return result;
}

/// Every rank begins its calls in an order of its own, but for those that only
/// their number tells apart, and then waits in another one.
std::vector<std::string> run_all(collective_world& w,
                                 const std::vector<planned_collective>& calls,
                                 unsigned seed) {
  return w.on_all([&](uint64_t rank) {
    std::mt19937 rng{seed * 100 + static_cast<unsigned>(rank)};
    std::vector<const planned_collective*> mine;
    for (auto& x : calls)
      if (x.has(rank))
        mine.push_back(&x);
    std::shuffle(mine.begin(), mine.end(), rng);
    // Back to their order where the label is the same.
    for (size_t i = 0; i < mine.size(); ++i)
      for (size_t j = i + 1; j < mine.size(); ++j)
        if (mine[i]->call.label == mine[j]->call.label
            && mine[i]->id > mine[j]->id)
          std::swap(mine[i], mine[j]);
    std::vector<std::unique_ptr<running_collective>> running;
    for (auto x : mine)
      running.push_back(std::make_unique<running_collective>(
        w.at(rank), *x, rank, rng() % 2 == 0));
    std::shuffle(running.begin(), running.end(), rng);
    for (auto& x : running) {
      auto wrong = x->finish();
      w.expect(wrong.empty(), wrong);
    }
  });
}

/// Some ranks here, some there, or all on one machine.
std::vector<uint64_t> random_machines(std::mt19937& rng, uint64_t world) {
  auto machines = rng() % 3 + 1;
  std::vector<uint64_t> result;
  for (uint64_t i = 0; i < world; ++i)
    result.push_back(rng() % machines);
  return result;
}

/// Small limits, so that every algorithm and many segments come up.
collective_limits small_limits() {
  collective_limits result;
  result.direct = 2000;
  result.direct_ranks = 4;
  result.least_segment = 512;
  result.largest_segment = 4096;
  result.unasked = 1500;
  result.ahead = 6000;
  result.ahead_messages = 6;
  return result;
}

} // namespace

TEST_CASE(
  "random collectives of overlapping groups, of every type, give what "
  "they should, in whatever order ranks begin them",
  "[transport][collectives][R43]") {
  auto size = GENERATE(range(uint64_t{2}, uint64_t{9}));
  for (unsigned seed = 1; seed <= 6; ++seed) {
    auto limits = seed % 2 == 0 ? collective_limits{} : small_limits();
    collective_world w{"loopback", size, limits, {seed, true, false}};
    std::mt19937 rng{seed * 10 + static_cast<unsigned>(size)};
    w.place(random_machines(rng, size));
    auto calls = random_calls(rng, 60, size, {0, 1, 5, 333, 1024, 4097});
    INFO("ranks " << size << ", seed " << seed);
    CHECK(run_all(w, calls, seed) == std::vector<std::string>{});
  }
}

TEST_CASE("the same over UCX, with sizes of all its ways to send",
          "[transport][collectives]") {
  auto kind = GENERATE(as<std::string>(), "shm", "tcp");
  auto size = GENERATE(range(uint64_t{2}, uint64_t{9}));
  CAPTURE(kind, size);
  collective_world w{kind, size};
  std::mt19937 rng{static_cast<unsigned>(size)};
  w.place(random_machines(rng, size));
  auto calls = random_calls(rng, 40, size,
                            {0, 1, 33, 1025, 9'000, 70'001, 300'000});
  CHECK(run_all(w, calls, 1) == std::vector<std::string>{});
}

namespace {

/// A call of all ranks in which the larger of input and output, of somebody,
/// has more than 64 MB.
planned_collective large_call(const collective_world& w, uint64_t id,
                              collective_kind kind, bool has_parts,
                              element_type type) {
  planned_collective x;
  x.id = id;
  x.call.label.group = w.all;
  x.call.label.name = "large " + std::to_string(id);
  x.call.what.kind = kind;
  x.call.what.type = type;
  auto count = (66 << 20) / size_of(type) + 1;
  x.call.what.shape = {
    static_cast<int64_t>(has_parts ? count / w.all.size() + 1 : count)};
  return x;
}

} // namespace

TEST_CASE("more than 64 MB arrive over UCX, two calls at a time",
          "[transport][collectives]") {
  using enum collective_kind;
  auto kind = GENERATE(as<std::string>(), "shm", "tcp");
  auto size = GENERATE(as<uint64_t>(), 2, 3);
  CAPTURE(kind, size);
  collective_world w{kind, size};
  for (auto& calls : std::vector<std::vector<planned_collective>>{
         {large_call(w, 0, allreduce, false, element_type::float64),
          large_call(w, 1, all_to_all, true, element_type::int64)},
         {large_call(w, 2, reduce_scatter, true, element_type::int64),
          large_call(w, 3, allgather, true, element_type::complex64)},
         {large_call(w, 4, broadcast, false, element_type::float64),
          large_call(w, 5, reduce, false, element_type::float64)}})
    CHECK(run_all(w, calls, 1) == std::vector<std::string>{});
}

TEST_CASE("more than 64 MB are gathered, scattered and halves compared",
          "[transport][collectives]") {
  using enum collective_kind;
  auto kind = GENERATE(as<std::string>(), "loopback", "shm");
  CAPTURE(kind);
  collective_world w{kind, 2};
  auto gathered = large_call(w, 0, gather, true, element_type::complex128);
  gathered.call.what.root = 1;
  auto scattered = large_call(w, 1, scatter, true, element_type::int64);
  auto largest = large_call(w, 2, allreduce, false, element_type::float16);
  largest.call.what.op = reduce_op::max;
  CHECK(run_all(w, {gathered, scattered, largest}, 1)
        == std::vector<std::string>{});
}

namespace {

float mixed_value(uint64_t rank, size_t i) {
  auto x = static_cast<float>((i * 2654435761u + rank * 40503u) % 1000003u);
  return x * (rank % 2 == 0 ? 1e-3f : -3.7e2f);
}

/// Four ranks add `wanted.size()` numbers up, in several runs; all of them have
/// to get exactly what is wanted.
void check_bits(const std::vector<float>& wanted,
                const std::vector<uint64_t>& machines) {
  auto count = wanted.size();
  for (unsigned seed = 1; seed <= 3; ++seed) {
    collective_world w{"loopback", 4, {}, {seed, true, false}};
    w.place(machines);
    auto wrong = w.on_all([&](uint64_t rank) {
      auto buffers = call_buffers<float>::make(count, count);
      for (size_t i = 0; i < count; ++i)
        buffers->input[i] = mixed_value(rank, i);
      collective_call x;
      x.label.group = w.all;
      x.label.name = "grads";
      x.what.kind = collective_kind::allreduce;
      x.what.type = element_type::float32;
      x.what.shape = {static_cast<int64_t>(count)};
      await(w.at(rank).start(with(std::move(x), buffers)));
      w.expect(buffers->output == wanted, "rank " + std::to_string(rank));
    });
    CHECK(wrong == std::vector<std::string>{});
  }
}

} // namespace

TEST_CASE(
  "sums of floating point numbers have the same bits on all ranks and "
  "in every run: those of adding in the order of the group",
  "[transport][collectives][R30]") {
  auto count = GENERATE(as<size_t>(), 100, 5'000, 200'000);
  std::vector<float> sum(count);
  for (size_t i = 0; i < count; ++i) {
    sum[i] = mixed_value(0, i);
    for (uint64_t rank = 1; rank < 4; ++rank)
      sum[i] += mixed_value(rank, i);
  }
  check_bits(sum, {});
}

TEST_CASE(
  "between machines they are those of adding the sums of the other "
  "machines to the numbers of that which makes the part",
  "[transport][collectives][R30]") {
  constexpr size_t count = 200'000; // four parts of whole cache lines
  std::vector<float> sum(count);
  for (size_t i = 0; i < count; ++i) {
    auto x = [i](uint64_t rank) { return mixed_value(rank, i); };
    sum[i] = i < count / 2 ? x(0) + x(1) + (x(2) + x(3))
                           : x(0) + x(1) + x(2) + x(3);
  }
  check_bits(sum, {0, 0, 1, 1});
}
