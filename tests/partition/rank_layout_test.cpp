#include "tests/support/catch.hpp"

#include "partition/rank_layout.hpp"

#include "tests/support/error_of.hpp"
#include "transport/error.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;
using smp::test::error_of;

namespace {

using number_groups = std::vector<std::vector<uint64_t>>;

constexpr group_kind kinds[] = {group_kind::world, group_kind::pp,
                                group_kind::tp,    group_kind::rdp,
                                group_kind::dp,    group_kind::mp};

number_groups numbers(const rank_layout& x, group_kind kind) {
  number_groups result;
  for (auto& group : x.groups(kind)) {
    auto& xs = result.emplace_back();
    for (auto member : group)
      xs.push_back(member.value);
  }
  return result;
}

std::string message_of(const layout_config& x) {
  return cause_of([&x] { rank_layout{x}; }, error_code::config);
}

} // namespace

TEST_CASE("the cluster placement of 8 ranks has the groups of the handbook",
          "[partition][rank_layout]") {
  rank_layout uut{{8, 2, 2, true, "cluster"}};
  CHECK(numbers(uut, group_kind::world)
        == number_groups{{0, 1, 2, 3, 4, 5, 6, 7}});
  CHECK(numbers(uut, group_kind::tp)
        == number_groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}});
  CHECK(numbers(uut, group_kind::pp)
        == number_groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}});
  CHECK(numbers(uut, group_kind::rdp)
        == number_groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}});
  CHECK(numbers(uut, group_kind::dp)
        == number_groups{{0, 1, 4, 5}, {2, 3, 6, 7}});
  CHECK(numbers(uut, group_kind::mp)
        == number_groups{{0, 1, 2, 3}, {4, 5, 6, 7}});
}

TEST_CASE("each permutation of DPT places ranks as its letters say",
          "[partition][rank_layout]") {
  // The pp, tp and rdp groups of rank 0 among 2 x 3 x 5 ranks (P, T, D).
  struct row {
    std::string placement;
    std::vector<uint64_t> pp;
    std::vector<uint64_t> tp;
    std::vector<uint64_t> rdp;
  };
  std::vector<row> table{
    {"DPT", {0, 3}, {0, 1, 2}, {0, 6, 12, 18, 24}},
    {"DTP", {0, 1}, {0, 2, 4}, {0, 6, 12, 18, 24}},
    {"PDT", {0, 15}, {0, 1, 2}, {0, 3, 6, 9, 12}},
    {"PTD", {0, 15}, {0, 5, 10}, {0, 1, 2, 3, 4}},
    {"TDP", {0, 1}, {0, 10, 20}, {0, 2, 4, 6, 8}},
    {"TPD", {0, 5}, {0, 10, 20}, {0, 1, 2, 3, 4}},
    {"cluster", {0, 3}, {0, 1, 2}, {0, 6, 12, 18, 24}},
    {"spread", {0, 5}, {0, 10, 20}, {0, 1, 2, 3, 4}},
  };
  for (auto& x : table) {
    INFO(x.placement);
    rank_layout uut{{30, 2, 3, true, x.placement}};
    CHECK(numbers(uut, group_kind::pp).front() == x.pp);
    CHECK(numbers(uut, group_kind::tp).front() == x.tp);
    CHECK(numbers(uut, group_kind::rdp).front() == x.rdp);
  }
}

TEST_CASE("the groups of every kind partition the world",
          "[partition][rank_layout]") {
  for (std::string placement : {"DPT", "DTP", "PDT", "PTD", "TDP", "TPD"})
    for (uint64_t pipeline : {1, 2, 3})
      for (uint64_t tensor : {1, 2, 4})
        for (uint64_t rdp : {1, 3}) {
          auto size = pipeline * tensor * rdp;
          rank_layout uut{{size, pipeline, tensor, true, placement}};
          for (auto kind : kinds) {
            INFO(placement << " " << pipeline << " " << tensor << " " << rdp
                           << " " << to_string(kind));
            std::set<rank_id> seen;
            for (auto& group : uut.groups(kind)) {
              REQUIRE(group.size() == uut.size(kind));
              REQUIRE(std::is_sorted(group.begin(), group.end()));
              for (uint64_t i = 0; i < group.size(); ++i) {
                REQUIRE(seen.insert(group[i]).second);
                REQUIRE(uut.rank(kind, group[i]) == i);
                REQUIRE(uut.members(kind, group[i]) == group);
              }
            }
            REQUIRE(seen.size() == size);
          }
        }
}

TEST_CASE("a rank along an axis is its coordinate, and tp lies within dp",
          "[partition][rank_layout]") {
  for (std::string placement : {"DPT", "DTP", "PDT", "PTD", "TDP", "TPD"}) {
    rank_layout uut{{30, 2, 3, true, placement}};
    std::set<rank_coordinates> seen;
    for (uint64_t i = 0; i < 30; ++i) {
      auto x = rank_id{i};
      auto where = uut.coordinates(x);
      CHECK(seen.insert(where).second);
      CHECK(uut.at(where) == x);
      CHECK(uut.rank(comm_group::pp, x) == where.pp);
      CHECK(uut.rank(comm_group::tp, x) == where.tp);
      CHECK(uut.rank(comm_group::rdp, x) == where.rdp);
      auto tp = uut.members(comm_group::tp, x);
      auto dp = uut.members(comm_group::dp, x);
      CHECK(std::includes(dp.begin(), dp.end(), tp.begin(), tp.end()));
    }
  }
}

TEST_CASE("a position names another rank for each kind of group",
          "[partition][rank_layout]") {
  // api.md section 4: 8 ranks, cluster, T = 2, P = 2.
  rank_layout uut{{8, 2, 2, true, "cluster"}};
  auto named = [&](rank_type type, uint64_t position) {
    return uut.named(type, position, rank_id{6}).value;
  };
  CHECK(named(rank_type::world, 1) == 1);
  CHECK(named(rank_type::pp, 0) == 4);
  CHECK(named(rank_type::pp, 1) == 6);
  CHECK(named(rank_type::tp, 1) == 7);
  CHECK(named(rank_type::rdp, 0) == 2);
  CHECK(named(rank_type::dp, 1) == 3);
  CHECK(named(rank_type::mp, 3) == 7);
  CHECK(error_of([&] { named(rank_type::pp, 2); }, error_code::config)
        == "there is no pp_rank 2; allowed: 0 to 1");
  CHECK(error_of([&] { named(rank_type::world, 8); }, error_code::config)
        == "there is no rank 8; allowed: 0 to 7");
}

TEST_CASE("local ranks count on each machine, wherever its ranks are",
          "[partition][rank_layout]") {
  rank_layout uut{{6, 2, 1, true, "cluster"}};
  CHECK(uut.machines() == 1);
  uut.place({"a", "b", "b", "a", "b", "c"});
  CHECK(uut.machines() == 3);
  const uint64_t ranks[] = {0, 0, 1, 1, 2, 0};
  const uint64_t sizes[] = {2, 3, 3, 2, 3, 1};
  for (uint64_t i = 0; i < 6; ++i) {
    CHECK(uut.local_rank(rank_id{i}) == ranks[i]);
    CHECK(uut.local_size(rank_id{i}) == sizes[i]);
  }
  CHECK_THROWS_AS(uut.place({"a", "b"}), error);
  rank_layout alone{{3, 3, 1, false, "cluster"}};
  CHECK(alone.local_rank(rank_id{2}) == 2);
  CHECK(alone.local_size(rank_id{2}) == 3);
}

TEST_CASE("sizes that do not fit are errors that name the keys",
          "[partition][rank_layout]") {
  auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  auto text = message_of({8, 3, 1, true, "cluster"});
  CHECK(has(text, "8 ranks"));
  CHECK(has(text, "smp.pipeline_parallel_degree = 3"));
  text = message_of({8, 2, 3, true, "cluster"});
  CHECK(has(text, "smp.tensor_parallel_degree = 3"));
  text = message_of({8, 2, 2, false, "cluster"});
  CHECK(has(text, "smp.ddp = true"));
  text = message_of({8, 2, 1, false, "cluster"});
  CHECK(has(text, "; start 2, or let the others be replicas: smp.ddp = true"));
  text = message_of({8, 2, 2, true, "DPP"});
  CHECK(has(text, "smp.placement_strategy"));
  CHECK(has(text, "\"cluster\""));
  CHECK(has(message_of({1, 0, 1, false, "cluster"}),
            "smp.pipeline_parallel_degree must be at least 1"));
  CHECK(has(message_of({1, 1, 0, false, "cluster"}),
            "smp.tensor_parallel_degree must be at least 1"));
  CHECK(message_of({0, 1, 1, false, "cluster"}) != "no error");
}

TEST_CASE("a rank outside of the world is refused",
          "[partition][rank_layout]") {
  rank_layout uut{{2, 2, 1, false, "cluster"}};
  CHECK_THROWS_AS(uut.coordinates(rank_id{2}), error);
  CHECK_THROWS_AS(uut.local_rank(rank_id{2}), error);
}

TEST_CASE("a group of ranks that the user names is the same for all of them",
          "[partition][rank_layout]") {
  rank_layout uut{{8, 2, 2, true, "cluster"}};
  comm_group group{{6, 1, 3}};
  CHECK(to_string(group) == "ranks 1, 3, 6");
  CHECK(group == comm_group{{1, 3, 6}});
  CHECK_FALSE(group == comm_group::world);
  CHECK(uut.size(group) == 3);
  CHECK(uut.members(group, rank_id{3}) == group.named_ranks());
  CHECK(uut.rank(group, rank_id{6}) == 2);
  CHECK(uut.named(group, 1, rank_id{6}) == rank_id{3});
  auto refused = [](auto f) { return error_of(f, error_code::config); };
  CHECK(refused([&] { uut.named(group, 3, rank_id{6}); })
        == "there is no rank 3 among ranks 1, 3, 6; allowed: 0 to 2");
  CHECK(refused([&] { uut.members(group, rank_id{0}); })
        == "rank 0 is not in the group of ranks 1, 3, 6");
  CHECK(refused([&] {
          uut.members(comm_group{{0, 8}}, rank_id{0});
        })
        == "a group of ranks 0, 8 among 8 ranks");
  CHECK(refused([] { comm_group{{2, 0, 2}}; }) == "a group has rank 2 twice");
  CHECK(refused([] { comm_group{std::vector<uint64_t>{}}; })
        == "a group has at least one rank");
}
