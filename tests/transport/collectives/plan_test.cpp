#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "transport/collectives/plan.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

/// A kind of the paper's tables, of `size` ranks with `count` floats each.
collective_call call_of(collective_kind kind, uint64_t size, int64_t count,
                        uint64_t root) {
  collective_call result;
  for (uint64_t i = 0; i < size; ++i)
    result.label.group.push_back(rank_id{i});
  result.label.name = "x";
  result.what.kind = kind;
  result.what.type = element_type::float32;
  result.what.root = root;
  result.what.shape = {kind == collective_kind::barrier ? 0 : count};
  return result;
}

/// What is sent to a piece of a rank, and what that expects.
using edge = std::tuple<uint64_t, uint64_t, uint32_t, uint64_t>;

struct flow {
  std::multiset<edge> sent; // from, to, piece, bytes
  std::multiset<edge> expected;
  std::map<uint64_t, uint64_t> bytes; // sent, by rank
  std::map<uint64_t, uint64_t> cable; // sent to other machines, by machine
};

using places = std::vector<uint64_t>;

/// @param machines of ranks; empty: one
flow flow_of(const collective_call& x, const collective_limits& limits,
             const places& machines = {}) {
  flow result;
  auto where = places_of(x.label.group, machines);
  auto size = x.label.group.size();
  for (uint64_t self = 0; self < size; ++self) {
    auto plan = make_plan(x, self, limits, where);
    auto send = [&](uint64_t to, uint32_t piece, uint64_t bytes) {
      result.sent.emplace(self, to, piece, bytes);
      result.bytes[self] += bytes;
      if (where.of[self] != where.of[to])
        result.cable[where.of[self]] += bytes;
    };
    for (auto& y : plan.sends)
      send(y.to, y.piece, y.range.size);
    std::set<uint32_t> ids;
    for (auto& y : plan.pieces) {
      CHECK(ids.insert(y.id).second);
      for (auto to : y.forward)
        send(to, y.forward_as, y.range.size);
      for (auto from : y.sources)
        if (from != self)
          result.expected.emplace(from, self, y.id, y.range.size);
    }
  }
  return result;
}

/// Ranks on machines: one after the other, by turns, and one machine with most
/// of them.
std::vector<places> placements(uint64_t size) {
  std::vector<places> result{{}};
  for (uint64_t machines : {2, 3, 5})
    for (int how = 0; how < 3; ++how) {
      places x;
      for (uint64_t i = 0; i < size; ++i)
        x.push_back(how == 0   ? i * machines / size
                    : how == 1 ? i % machines
                               : std::min(i, machines - 1));
      result.push_back(std::move(x));
    }
  return result;
}

} // namespace

TEST_CASE(
  "what ranks send is what the others expect, in every algorithm and "
  "wherever they are",
  "[transport][collective_plan]") {
  size_t plans = 0;
  for (int kind = 0; kind <= int(last_of(collective_kind{})); ++kind)
    for (uint64_t size = 1; size <= 12; ++size)
      for (uint64_t root = 0; root < size; root += 3)
        for (int64_t count : {0, 1, 100, 99'999})
          for (auto& machines : placements(size)) {
            auto x = call_of(collective_kind(kind), size, count, root);
            auto y = flow_of(x, {}, machines);
            INFO(to_string(x.what.kind) << " of " << size << ", root " << root
                                        << ", " << count << " elements");
            CHECK(y.sent == y.expected);
            ++plans;
          }
  CHECK(plans > 10'000);
}

TEST_CASE("the sum of a piece has all of the group in it, once",
          "[transport][collective_plan]") {
  // Who is in what a rank has made, if all others are in what they made.
  using enum collective_kind;
  for (auto kind : {allreduce, reduce, reduce_scatter})
    for (uint64_t size : {3, 4, 7, 12})
      for (auto& machines : placements(size)) {
        auto x = call_of(kind, size, 99'999, size / 2);
        auto where = places_of(x.label.group, machines);
        std::vector<collective_plan> plans;
        for (uint64_t self = 0; self < size; ++self)
          plans.push_back(make_plan(x, self, {}, where));
        // What rank `from` gives to a piece of another: its input, or what it
        // made for that.
        auto given = [&](uint64_t from, uint64_t to, uint32_t id) {
          for (auto& y : plans[from].pieces)
            for (auto next : y.forward)
              if (next == to && y.forward_as == id && !y.last_sum)
                return y.sources;
          return places{from};
        };
        for (uint64_t self = 0; self < size; ++self)
          for (auto& y : plans[self].pieces) {
            if (y.sources.size() == 1 || !y.last_sum)
              continue;
            std::multiset<uint64_t> in;
            for (auto from : y.sources)
              for (auto i :
                   from == self ? places{self} : given(from, self, y.id))
                in.insert(i);
            std::multiset<uint64_t> all;
            for (uint64_t i = 0; i < size; ++i)
              all.insert(i);
            CHECK(in == all);
          }
      }
}

TEST_CASE("what crosses the cable does so once per machine and direction",
          "[transport][collective_plan][R48]") {
  using enum collective_kind;
  constexpr uint64_t count = 1 << 20;
  constexpr double bytes = 4 * count;
  auto machines = GENERATE(places{0, 0, 1, 1}, places{0, 1, 0, 1},
                           places{0, 0, 0, 0, 1, 1, 1, 1}, places{0, 1, 1, 1},
                           places{0, 0, 1, 1, 2, 2}, places{0, 1, 1, 2, 2, 2});
  auto size = machines.size();
  auto where = places_of(call_of(allreduce, size, 1, 0).label.group, machines);
  auto others = static_cast<double>(where.members.size() - 1);
  auto cable = [&](collective_kind kind, uint64_t root = 0) {
    return flow_of(call_of(kind, size, count, root), {}, machines).cable;
  };
  // Parts begin at whole cache lines.
  auto check_near = [&](uint64_t crossing, double wanted) {
    CHECK(std::abs(static_cast<double>(crossing) - wanted) <= 0.001 * bytes);
  };
  auto all = static_cast<double>(size);
  for (uint64_t m = 0; m < where.members.size(); ++m) {
    auto here = static_cast<double>(where.members[m].size());
    INFO("machine " << m << " of " << where.members.size() << ", " << here
                    << " of " << size << " ranks");
    // Its share of the sums of others, and the sums of its own share.
    check_near(cable(allreduce)[m],
               bytes * ((all - here) + here * others) / all);
    check_near(cable(reduce_scatter)[m], bytes * (all - here));
    check_near(cable(allgather)[m], bytes * here * others);
    // Rank 0 is on machine 0.
    check_near(cable(reduce)[m], m == 0 ? 0 : bytes);
    auto far = all - static_cast<double>(where.members[0].size());
    check_near(cable(broadcast)[m],
               m == 0 ? bytes : bytes * (others - 1) * here / far);
  }
}

TEST_CASE(
  "where machines have one rank each, or what is sent is small, they "
  "are not told apart",
  "[transport][collective_plan]") {
  for (auto kind : {collective_kind::allreduce, collective_kind::broadcast,
                    collective_kind::allgather}) {
    auto large = call_of(kind, 4, 1 << 20, 0);
    CHECK(flow_of(large, {}, {0, 1, 2, 3}).sent == flow_of(large, {}).sent);
    auto small = call_of(kind, 4, 1 << 10, 0);
    CHECK(flow_of(small, {}, {0, 0, 1, 1}).sent == flow_of(small, {}).sent);
  }
}

TEST_CASE("a large sum or broadcast costs a rank twice its size",
          "[transport][collective_plan]") {
  for (auto kind : {collective_kind::allreduce, collective_kind::reduce,
                    collective_kind::broadcast})
    for (uint64_t size : {3, 4, 8, 16}) {
      auto y = flow_of(call_of(kind, size, 1 << 20, 1), {});
      INFO(to_string(kind) << " of " << size);
      for (auto& [rank, bytes] : y.bytes)
        CHECK(bytes <= (8u << 20) + 4096);
    }
}

TEST_CASE("between two, what a root gives or takes goes over the wire once",
          "[transport][collective_plan]") {
  for (auto kind : {collective_kind::reduce, collective_kind::broadcast})
    for (uint64_t root : {0, 1}) {
      auto y = flow_of(call_of(kind, 2, 1 << 20, root), {});
      auto from = kind == collective_kind::reduce ? 1 - root : root;
      REQUIRE(y.sent.size() == 1);
      CHECK(y.bytes.at(from) == 4u << 20);
    }
}

TEST_CASE("segments on devices have megabytes, a few for each part",
          "[transport][collective_plan]") {
  auto segment = [](int64_t count, bool on_device) {
    auto x = call_of(collective_kind::allreduce, 2, count, 0);
    x.what.on_device = on_device;
    return make_plan(x, 0, {}, places_of(x.label.group, {})).segment;
  };
  CHECK(segment(4 << 20, false) == 256 << 10);
  CHECK(segment(4 << 20, true) == 2 << 20);
  CHECK(segment(64 << 20, true) == 4 << 20);
  CHECK(segment(1, true) == 1 << 20);
}

TEST_CASE("where every rank is a root, each sends the others theirs once",
          "[transport][collective_plan]") {
  constexpr int64_t count = 1 << 18;
  for (uint64_t size : {2, 3, 4, 8, 16}) {
    std::map<uint64_t, uint64_t> sent;
    for (uint64_t root = 0; root < size; ++root) {
      auto x = call_of(collective_kind::reduce, size, count, root);
      x.what.every_root = true;
      auto y = flow_of(x, {});
      CHECK(y.sent == y.expected);
      for (auto& [rank, bytes] : y.bytes)
        sent[rank] += bytes;
    }
    CHECK(sent.size() == size);
    for (auto& [rank, bytes] : sent)
      CHECK(bytes == (size - 1) * 4 * count);
  }
}

TEST_CASE("a small sum takes one step among few, a tree among many",
          "[transport][collective_plan]") {
  auto few = flow_of(call_of(collective_kind::allreduce, 4, 10, 0), {});
  CHECK(few.sent.size() == 12);
  auto many = flow_of(call_of(collective_kind::allreduce, 32, 10, 0), {});
  CHECK(many.sent.size() == 62);
  auto barrier = flow_of(call_of(collective_kind::barrier, 32, 0, 0), {});
  CHECK(barrier.sent.size() == 62);
}

TEST_CASE("a call that can never work is refused before it begins",
          "[transport][collective_plan]") {
  auto text_of = [](const collective_call& x, uint64_t self) {
    return error_of([&] { x.check(rank_id{self}); });
  };
  auto x = call_of(collective_kind::reduce, 3, 10, 2);
  CHECK(text_of(x, 1) == "no error");
  CHECK_THAT(text_of(x, 3),
             Catch::Matchers::EndsWith("rank 3 is not in the group"));
  x.what.root = 3;
  CHECK(text_of(x, 0) == "reduce \"x\" of ranks 0, 1, 2: there is no root 3");
  x.what.root = 0;
  x.what.type = element_type::int32;
  x.what.op = reduce_op::mean;
  CHECK_THAT(text_of(x, 0), Catch::Matchers::EndsWith("no mean of int32"));
  x.what.kind = collective_kind::all_to_all;
  x.what.rows = {1, 2, 3};
  CHECK_THAT(text_of(x, 0), Catch::Matchers::EndsWith(
                              "3 numbers of rows each way are expected"));
  x.rows_taken = {1, 1, 1};
  CHECK(text_of(x, 0) == "no error");
}
