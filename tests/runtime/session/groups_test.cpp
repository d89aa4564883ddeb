#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

/// Something of a user.
struct sample {
  std::string name;
  std::optional<double> score;
  bool operator==(const sample&) const = default;
};

template <class Inspector>
bool inspect(Inspector& f, sample& x) {
  return f.object(x).fields(f.field("name", x.name), f.field("score", x.score));
}

/// Fails the rank, and so the test: Catch2's macros are for its own thread.
void require(bool x, const std::string& what) {
  if (!x)
    throw std::runtime_error{"not true: " + what};
}

/// @returns what the ranks returned, by rank
template <class F>
auto on_ranks(uint64_t ranks, F f) {
  std::vector<decltype(f())> result(ranks);
  std::mutex mutex;
  run_virtual_world(ranks, manual_world(ranks), [&](session& s) {
    auto x = f();
    std::lock_guard guard{mutex};
    result[s.rank()] = std::move(x);
  });
  return result;
}

} // namespace

TEST_CASE("values go round a ring of ranks", "[runtime][groups]") {
  auto got = on_ranks(4, [] {
    auto next = (pp_rank() + 1) % pp_size();
    auto before = (pp_rank() + 3) % pp_size();
    send(sample{"of " + std::to_string(rank()), 0.5 * double(rank())}, next,
         rank_type::pp);
    send("a literal", next);
    send(std::vector<std::pair<int, bool>>{{-3, true}}, next, rank_type::mp);
    using named = std::map<std::string, torch::Tensor>;
    using row = std::tuple<int, std::string, torch::Tensor>;
    send(named{{"x", torch::full({2}, 7)}, {"none", {}}}, next);
    send(row{3, "w", torch::ones({1, 2}).t()}, next);
    send(torch::arange(3), next);
    send(std::unordered_map<int, double>{{1, 0.5}, {2, 0.25}}, next);
    auto x = recv_from<sample>(before, rank_type::pp);
    // The same rank by another name: in the order in which it sent.
    require(recv_from<std::string>(before) == "a literal", "the literal");
    require(recv_from<std::vector<std::pair<int, bool>>>(before)
              == std::vector<std::pair<int, bool>>{{-3, true}},
            "the vector");
    auto got_map = recv_from<named>(before);
    require(got_map.size() == 2 && !got_map.at("none").defined()
              && torch::equal(got_map.at("x"), torch::full({2}, 7)),
            "the map of tensors");
    auto [number, text, column] = recv_from<row>(before);
    require(number == 3 && text == "w"
              && torch::equal(column, torch::ones({2, 1})),
            "the tuple");
    require(torch::equal(recv_from<torch::Tensor>(before), torch::arange(3)),
            "the tensor");
    require(recv_from<std::unordered_map<int, double>>(before).at(2) == 0.25,
            "the unordered map");
    auto all = allgather(std::tuple{rank(), torch::full({1}, int64_t(rank()))});
    require(std::get<1>(all.at(2)).item<int64_t>() == 2, "tuples of all");
    require(broadcast(named{{"y", torch::full({1}, int64_t(rank()))}})
                .at("y")
                .item<int64_t>()
              == 0,
            "the first one's map");
    return x;
  });
  for (uint64_t i = 0; i < 4; ++i) {
    auto before = (i + 3) % 4;
    CHECK(got[i]
          == sample{"of " + std::to_string(before), 0.5 * double(before)});
  }
}

TEST_CASE("all ranks of a group hear whether something is so on any of them",
          "[runtime][groups]") {
  auto got = on_ranks(4, [] {
    auto last = rank() == 3;
    comm_group mine{rank() < 2 ? std::vector<uint64_t>{0, 1}
                               : std::vector<uint64_t>{2, 3}};
    return std::vector<bool>{any_rank(last), any_rank(last, mine),
                             any_rank(false)};
  });
  for (uint64_t i = 0; i < 4; ++i)
    CHECK(got[i] == std::vector<bool>{true, i >= 2, false});
}

TEST_CASE("a rank is counted in the group that its type stands for",
          "[runtime][groups]") {
  // All three ranks are one pipeline; each is alone in the other groups.
  auto got = on_ranks(3, [] {
    for (auto type : {rank_type::tp, rank_type::rdp, rank_type::dp}) {
      send(rank(), 0, type);
      require(recv_from<uint64_t>(0, type) == rank(), "alone");
      require(allgather(rank(), type) == std::vector{rank()}, "gathered");
      require(broadcast(rank(), type) == rank(), "told");
      barrier(type);
      require(error_of([&] { send(1, 1, type); }, error_code::config)
                == std::string{"there is no "} + to_string(type)
                     + "_rank 1; allowed: 0 to 0",
              "the error");
    }
    return error_of([] { recv_from<int>(3, rank_type::pp); },
                    error_code::config);
  });
  CHECK(got
        == std::vector<std::string>(3,
                                    "there is no pp_rank 3; allowed: 0 "
                                    "to 2"));
}

namespace {

/// How far apart neighbours of a group are.
struct strides {
  const char* placement;
  uint64_t tp, pp, rdp;
};

/// @returns the two ranks, so far apart, of which `rank` is one
std::vector<uint64_t> line_of(uint64_t rank, uint64_t by) {
  auto first = rank - (rank / by % 2) * by;
  return {first, first + by};
}

} // namespace

TEST_CASE("ranks are counted in each group of a grid",
          "[runtime][groups][tensor_parallel]") {
  auto x = GENERATE(strides{"cluster", 1, 2, 4}, strides{"spread", 4, 2, 1});
  CAPTURE(x.placement);
  auto world = manual_world(2);
  world.config.tensor_parallel_degree = 2;
  world.config.ddp = true;
  world.config.placement_strategy = x.placement;
  std::atomic<int> ranks = 0;
  run_virtual_world(8, world, [&](session& s) {
    auto check = [&](const rank_type& type, std::vector<uint64_t> group,
                     uint64_t position, uint64_t size) {
      std::ranges::sort(group);
      auto name = std::string{to_string(type)};
      require(size == group.size(), name + "_size");
      require(group.at(position) == s.rank(), name + "_rank");
      auto next = (position + 1) % size;
      auto before = (position + size - 1) % size;
      send(s.rank(), next, type);
      require(recv_from<uint64_t>(before, type) == group[before],
              "sent in " + name);
      require(allgather(s.rank(), type) == group, "gathered in " + name);
      require(broadcast(s.rank(), type, size - 1) == group.back(),
              "told in " + name);
      barrier(type);
      require(error_of([&] { send(1, size, type); }, error_code::config)
                == fmt::format("there is no {}_rank {}; allowed: 0 to {}", name,
                               size, size - 1),
              "the error in " + name);
    };
    check(rank_type::tp, line_of(s.rank(), x.tp), tp_rank(), tp_size());
    check(rank_type::rdp, line_of(s.rank(), x.rdp), rdp_rank(), rdp_size());
    check(rank_type::pp, line_of(s.rank(), x.pp), pp_rank(), pp_size());
    std::vector<uint64_t> dp, mp;
    for (auto y : line_of(s.rank(), x.tp)) {
      for (auto z : line_of(y, x.rdp))
        dp.push_back(z);
      for (auto z : line_of(y, x.pp))
        mp.push_back(z);
    }
    check(rank_type::dp, dp, dp_rank(), dp_size());
    check(rank_type::mp, mp, mp_rank(), mp_size());
    ++ranks;
  });
  CHECK(ranks == 8);
}

TEST_CASE("all ranks get what one of them says, however they ask",
          "[runtime][groups]") {
  auto got = on_ranks(3, [] {
    auto first = broadcast("from " + std::to_string(rank()));
    auto second = pp_rank() == 1 ? recv_from<std::string>(2, rank_type::pp)
                                 : broadcast("then " + std::to_string(rank()),
                                             comm_group::pp, 2);
    auto nobody = error_of([] { broadcast(1.0, comm_group::world, 3); },
                           error_code::config);
    return first + ", " + second + ", " + nobody;
  });
  CHECK(got
        == std::vector<std::string>(3,
                                    "from 0, then 2, there is no rank "
                                    "3; allowed: 0 to 2"));
}

TEST_CASE("values are gathered by their position in the group",
          "[runtime][groups]") {
  auto got = on_ranks(3, [] {
    return allgather(std::vector{rank(), 7 * rank()}, comm_group::pp);
  });
  for (auto& all : got)
    CHECK(all == std::vector<std::vector<uint64_t>>{{0, 0}, {1, 7}, {2, 14}});
}

TEST_CASE("a value of another type is refused by both names",
          "[runtime][groups]") {
  auto got = on_ranks(2, [] {
    // Eight bytes each: they could be read.
    if (rank() == 0)
      send(1.5, 1);
    auto one = rank() == 0 ? "no error"
                           : error_of([] { recv_from<uint64_t>(0); },
                                      error_code::protocol);
    auto all = rank() == 0
                 ? error_of([] { allgather(1.5); }, error_code::protocol)
                 : error_of([] { allgather(uint64_t{1}); },
                            error_code::protocol);
    return one + "; " + all;
  });
  CHECK(got[0]
        == "no error; rank 1: allgather: it sent unsigned long where rank 0 "
           "takes double");
  CHECK(got[1]
        == "rank 0: recv_from: it sent double where rank 1 takes unsigned "
           "long; rank 0: allgather: it sent double where rank 1 takes "
           "unsigned long");
}

TEST_CASE("ranks that all wait for a value end at once, with whom they ask",
          "[runtime][groups]") {
  auto got = on_ranks(2, [] {
    return error_of([] { recv_from<double>(1 - pp_rank(), rank_type::pp); },
                    error_code::stalled);
  });
  for (auto& told : got) {
    CHECK_THAT(told, ContainsSubstring("rank 0 waits for exchange \"smp.send\" "
                                       "from rank 1"));
    CHECK_THAT(told, ContainsSubstring("rank 1 waits for exchange \"smp.send\" "
                                       "from rank 0"));
  }
}
