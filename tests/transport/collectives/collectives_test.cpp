// ctest: timeout=300 processors=2

#include "tests/support/catch.hpp"

#include "tests/support/collective_world.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

/// Small numbers of all elements, so that sums are the same in every type and
/// order.
int value_of(uint64_t call, uint64_t rank, uint64_t index) {
  return static_cast<int>((call * 31 + rank * 17 + index * 7) % 13);
}

/// A call as all its ranks know it.
struct planned {
  uint64_t id = 0;
  collective_call call;
  /// all_to_all of different sizes: rows from (first) to (second), by position
  std::vector<std::vector<uint64_t>> rows;

  uint64_t size() const {
    return call.label.group.size();
  }

  uint64_t count() const {
    return call.what.count();
  }
};

/// What the ranks of a group have to end up with, computed from the definition
/// of each collective.
std::vector<int> wanted(const planned& x, uint64_t self) {
  using enum collective_kind;
  std::vector<int> result;
  auto n = x.count();
  auto rank_at = [&](uint64_t i) { return x.call.label.group[i].value; };
  auto add = [&](uint64_t from, uint64_t begin, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i)
      result.push_back(value_of(x.id, rank_at(from), begin + i));
  };
  auto reduced = [&](uint64_t begin) {
    for (uint64_t i = 0; i < n; ++i) {
      auto y = value_of(x.id, rank_at(0), begin + i);
      for (uint64_t j = 1; j < x.size(); ++j) {
        auto z = value_of(x.id, rank_at(j), begin + i);
        y = x.call.what.op == reduce_op::max ? std::max(y, z) : y + z;
      }
      result.push_back(y);
    }
  };
  auto is_root = self == x.call.what.root;
  switch (x.call.what.kind) {
    case allreduce:
      reduced(0);
      break;
    case reduce:
      if (is_root)
        reduced(0);
      break;
    case reduce_scatter:
      reduced(self * n);
      break;
    case allgather:
    case gather:
      if (is_root || x.call.what.kind == allgather)
        for (uint64_t i = 0; i < x.size(); ++i)
          add(i, 0, n);
      break;
    case all_to_all:
      for (uint64_t i = 0; i < x.size(); ++i) {
        if (x.rows.empty()) {
          add(i, self * n, n);
          continue;
        }
        auto& given = x.rows[i];
        auto before = std::accumulate(
          given.begin(), given.begin() + static_cast<ptrdiff_t>(self),
          uint64_t{0});
        add(i, before * n, given[self] * n);
      }
      break;
    case broadcast:
      add(x.call.what.root, 0, n);
      break;
    case scatter:
      add(x.call.what.root, self * n, n);
      break;
    case barrier:
      break;
  }
  return result;
}

/// Elements of the input of a rank.
uint64_t given_by(const planned& x, uint64_t self) {
  using enum collective_kind;
  switch (x.call.what.kind) {
    case reduce_scatter:
    case scatter:
      return x.size() * x.count();
    case all_to_all:
      return x.count()
             * (x.rows.empty()
                  ? x.size()
                  : std::accumulate(x.rows[self].begin(), x.rows[self].end(),
                                    uint64_t{0}));
    default:
      return x.count();
  }
}

/// One call of one rank, running.
class running_call {
public:
  virtual ~running_call() = default;
  /// @returns what came out wrong
  virtual std::string finish() = 0;
};

template <class T>
class typed_call : public running_call {
public:
  typed_call(collectives& sums, const planned& x, uint64_t rank, bool in_place)
    : what_(x.call.describe()) {
    auto& group = x.call.label.group;
    auto self = static_cast<uint64_t>(
      std::find(group.begin(), group.end(), rank_id{rank}) - group.begin());
    wanted_ = wanted(x, self);
    auto given = given_by(x, self);
    buffers_ = call_buffers<T>::make(given, wanted_.size());
    for (uint64_t i = 0; i < given; ++i)
      buffers_->input[i] = static_cast<T>(value_of(x.id, rank, i));
    auto call = with(x.call, buffers_);
    in_place_ = in_place && given == wanted_.size()
                && x.call.what.kind == collective_kind::allreduce;
    if (in_place_)
      call.output = buffers_->input.data();
    if (!x.rows.empty()) {
      call.what.rows = x.rows[self];
      for (auto& row : x.rows)
        call.rows_taken.push_back(row[self]);
    }
    started_ = sums.start(std::move(call));
  }

  std::string finish() override {
    await(started_);
    auto& result = in_place_ ? buffers_->input : buffers_->output;
    for (size_t i = 0; i < wanted_.size(); ++i)
      if (result[i] != static_cast<T>(wanted_[i]))
        return what_ + ": element " + std::to_string(i) + " of "
               + std::to_string(wanted_.size());
    return {};
  }

private:
  std::string what_;
  std::vector<int> wanted_;
  std::shared_ptr<call_buffers<T>> buffers_;
  bool in_place_ = false;
  started_collective started_;
};

std::unique_ptr<running_call> start(collectives& sums, const planned& x,
                                    uint64_t rank, bool in_place) {
  switch (x.call.what.type) {
    case element_type::uint8:
      return std::make_unique<typed_call<uint8_t>>(sums, x, rank, in_place);
    case element_type::int32:
      return std::make_unique<typed_call<int32_t>>(sums, x, rank, in_place);
    case element_type::int64:
      return std::make_unique<typed_call<int64_t>>(sums, x, rank, in_place);
    case element_type::float64:
      return std::make_unique<typed_call<double>>(sums, x, rank, in_place);
    default:
      return std::make_unique<typed_call<float>>(sums, x, rank, in_place);
  }
}

template <class T>
T any_of(std::mt19937& rng, std::vector<T> xs) {
  return xs[rng() % xs.size()];
}

/// A random group, kind, size and type; three names, so that numbers of calls
/// come into it.
planned random_call(std::mt19937& rng, uint64_t id, uint64_t world,
                    const std::vector<int64_t>& sizes) {
  using enum element_type;
  planned x;
  x.id = id;
  for (uint64_t i = 0; i < world; ++i)
    if (rng() % 4 != 0)
      x.call.label.group.push_back(rank_id{i});
  if (x.call.label.group.empty())
    x.call.label.group.push_back(rank_id{rng() % world});
  x.call.label.name = any_of<std::string>(rng, {"a", "b", "c"});
  x.call.label.microbatch = microbatch_id{rng() % 2};
  auto& what = x.call.what;
  what.kind = collective_kind(rng() % 9);
  what.type = any_of<element_type>(rng,
                                   {uint8, int32, int64, float32, float64});
  what.op = any_of<reduce_op>(rng, {reduce_op::sum, reduce_op::max});
  using enum collective_kind;
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

/// Every rank begins its calls in an order of its own, but for those that only
/// their number tells apart, and then waits in another one.
std::vector<std::string>
run_all(collective_world& w, const std::vector<planned>& calls, unsigned seed) {
  return w.on_all([&](uint64_t rank) {
    std::mt19937 rng{seed * 100 + static_cast<unsigned>(rank)};
    std::vector<const planned*> mine;
    for (auto& x : calls) {
      auto& group = x.call.label.group;
      if (std::count(group.begin(), group.end(), rank_id{rank}) > 0)
        mine.push_back(&x);
    }
    auto order = mine;
    std::shuffle(order.begin(), order.end(), rng);
    // Back to their order where the label is the same.
    for (size_t i = 0; i < order.size(); ++i)
      for (size_t j = i + 1; j < order.size(); ++j)
        if (order[i]->call.label == order[j]->call.label
            && order[i]->id > order[j]->id)
          std::swap(order[i], order[j]);
    std::vector<std::unique_ptr<running_call>> running;
    for (auto x : order)
      running.push_back(start(w.at(rank), *x, rank, rng() % 2 == 0));
    std::shuffle(running.begin(), running.end(), rng);
    for (auto& x : running) {
      auto wrong = x->finish();
      w.expect(wrong.empty(), wrong);
    }
  });
}

/// Small limits, so that every algorithm and many segments come up.
collective_limits small_limits() {
  collective_limits result;
  result.direct = 2000;
  result.direct_ranks = 4;
  result.least_segment = 512;
  result.largest_segment = 4096;
  result.unasked = 1500;
  return result;
}

} // namespace

TEST_CASE(
  "random collectives of overlapping groups give what they should, in "
  "whatever order ranks begin them",
  "[transport][collectives]") {
  auto size = GENERATE(range(2, 9));
  for (unsigned seed = 1; seed <= 6; ++seed) {
    auto limits = seed % 2 == 0 ? collective_limits{} : small_limits();
    collective_world w{
      "loopback", static_cast<uint64_t>(size), limits, {seed, true, false}};
    std::mt19937 rng{seed * 10 + static_cast<unsigned>(size)};
    std::vector<planned> calls;
    for (uint64_t id = 0; id < 60; ++id)
      calls.push_back(random_call(rng, id, static_cast<uint64_t>(size),
                                  {0, 1, 5, 333, 1024, 4097}));
    INFO("seed " << seed);
    CHECK(run_all(w, calls, seed) == std::vector<std::string>{});
  }
}

TEST_CASE("the same over UCX, with sizes of all its ways to send",
          "[transport][collectives]") {
  auto kind = GENERATE(as<std::string>(), "shm", "tcp");
  auto size = GENERATE(as<uint64_t>(), 2, 3, 8);
  collective_world w{kind, size};
  std::mt19937 rng{static_cast<unsigned>(size)};
  std::vector<planned> calls;
  for (uint64_t id = 0; id < 40; ++id)
    calls.push_back(
      random_call(rng, id, size, {0, 1, 33, 1025, 9'000, 70'001, 300'000}));
  CHECK(run_all(w, calls, 1) == std::vector<std::string>{});
}

TEST_CASE("a sum of more than 64 MB arrives over shared memory",
          "[transport][collectives]") {
  collective_world w{"shm", 2};
  constexpr size_t count = (68 << 20) / sizeof(float);
  auto wrong = w.on_all([&](uint64_t rank) {
    auto buffers = call_buffers<float>::make(count, 0);
    for (size_t i = 0; i < count; ++i)
      buffers->input[i] = static_cast<float>((i + rank) % 1001);
    collective_call x;
    x.label.group = w.all;
    x.label.name = "grads";
    x.what.kind = collective_kind::allreduce;
    x.what.type = element_type::float32;
    x.what.shape = {count};
    x = with(std::move(x), buffers);
    x.output = buffers->input.data();
    await(w.at(rank).start(std::move(x)));
    size_t wrong = 0;
    for (size_t i = 0; i < count; ++i)
      wrong += buffers->input[i]
               != static_cast<float>(i % 1001 + (i + 1) % 1001);
    w.expect(wrong == 0, std::to_string(wrong) + " elements");
  });
  CHECK(wrong == std::vector<std::string>{});
}

TEST_CASE(
  "sums of floating point numbers have the same bits on all ranks and "
  "in every run: those of adding in the order of the group",
  "[transport][collectives]") {
  auto count = GENERATE(as<size_t>(), 100, 5'000, 200'000);
  constexpr uint64_t size = 4;
  auto value = [](uint64_t rank, size_t i) {
    auto x = static_cast<float>((i * 2654435761u + rank * 40503u) % 1000003u);
    return x * (rank % 2 == 0 ? 1e-3f : -3.7e2f);
  };
  std::vector<float> sum(count);
  for (size_t i = 0; i < count; ++i) {
    sum[i] = value(0, i);
    for (uint64_t rank = 1; rank < size; ++rank)
      sum[i] += value(rank, i);
  }
  for (unsigned seed = 1; seed <= 3; ++seed) {
    collective_world w{"loopback", size, {}, {seed, true, false}};
    auto wrong = w.on_all([&](uint64_t rank) {
      auto buffers = call_buffers<float>::make(count, count);
      for (size_t i = 0; i < count; ++i)
        buffers->input[i] = value(rank, i);
      collective_call x;
      x.label.group = w.all;
      x.label.name = "grads";
      x.what.kind = collective_kind::allreduce;
      x.what.type = element_type::float32;
      x.what.shape = {static_cast<int64_t>(count)};
      await(w.at(rank).start(with(std::move(x), buffers)));
      w.expect(buffers->output == sum, "rank " + std::to_string(rank));
    });
    CHECK(wrong == std::vector<std::string>{});
  }
}
