#include "tests/support/catch.hpp"

#include "transport/collectives/plan.hpp"

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

using namespace smp;

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
};

flow flow_of(const collective_call& x, const collective_limits& limits) {
  flow result;
  auto size = x.label.group.size();
  for (uint64_t self = 0; self < size; ++self) {
    auto plan = make_plan(x, self, limits);
    auto send = [&](uint64_t to, uint32_t piece, uint64_t bytes) {
      result.sent.emplace(self, to, piece, bytes);
      result.bytes[self] += bytes;
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

} // namespace

TEST_CASE("what ranks send is what the others expect, in every algorithm",
          "[transport][collective_plan]") {
  size_t plans = 0;
  for (int kind = 0; kind <= int(last_of(collective_kind{})); ++kind)
    for (uint64_t size = 1; size <= 12; ++size)
      for (uint64_t root = 0; root < size; root += 3)
        for (int64_t count : {0, 1, 100, 99'999}) {
          auto x = call_of(collective_kind(kind), size, count, root);
          auto y = flow_of(x, {});
          INFO(to_string(x.what.kind) << " of " << size << ", root " << root
                                      << ", " << count << " elements");
          CHECK(y.sent == y.expected);
          ++plans;
        }
  CHECK(plans > 1000);
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
  auto text_of = [](const collective_call& x, uint64_t self) -> std::string {
    try {
      x.check(rank_id{self});
    } catch (const error& e) {
      return e.what();
    }
    return {};
  };
  auto x = call_of(collective_kind::reduce, 3, 10, 2);
  CHECK(text_of(x, 1).empty());
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
                              "3 numbers of rows each way are wanted"));
  x.rows_taken = {1, 1, 1};
  CHECK(text_of(x, 0).empty());
}
