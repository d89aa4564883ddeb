#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/torch.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

/// Fails the rank, and so the test: Catch2's macros are for its own thread.
void require(bool x, const std::string& what) {
  if (!x)
    throw std::runtime_error{"not true: " + what};
}

void require_equal(const Tensor& x, const Tensor& y, const std::string& what) {
  require(x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes()
            && torch::equal(x, y),
          what);
}

template <class F>
void on_ranks(uint64_t ranks, F f) {
  run_virtual_world(ranks, manual_world(ranks), [&](session&) { f(); });
}

/// What a rank gives.
Tensor of_rank(uint64_t rank) {
  return torch::arange(6.0).view({2, 3}) + 10.0 * static_cast<double>(rank);
}

int64_t own() {
  return static_cast<int64_t>(rank());
}

} // namespace

TEST_CASE("tensors are summed, gathered and dealt out over the world",
          "[runtime][tensor_collectives]") {
  on_ranks(3, [] {
    auto x = of_rank(rank());
    auto sum = of_rank(0) + of_rank(1) + of_rank(2);
    auto all = torch::stack({of_rank(0), of_rank(1), of_rank(2)});
    require_equal(allreduce(x), sum, "sum");
    require_equal(allreduce(x, comm_group::world, reduce_op::mean), sum / 3,
                  "mean");
    require_equal(allreduce(x, comm_group::world, reduce_op::max), of_rank(2),
                  "max");
    auto reduced = reduce(x, comm_group::world, 1);
    require(reduced.defined() == (rank() == 1), "reduced where");
    if (rank() == 1)
      require_equal(reduced, sum, "reduced");
    require_equal(allgather(x), all, "allgather");
    auto gathered = gather(x, comm_group::world, 2);
    require(gathered.defined() == (rank() == 2), "gathered where");
    if (rank() == 2)
      require_equal(gathered, all, "gathered");
    require_equal(broadcast(x, comm_group::world, 2), of_rank(2), "broadcast");
    // Of others only the sizes count.
    auto parts = rank() == 1 ? all : torch::empty_like(all);
    require_equal(scatter(parts, comm_group::world, 1), x, "scatter");
    require_equal(reduce_scatter(all), 3 * x, "reduce_scatter");
    auto given = all + 100 * own();
    auto taken = all_to_all(given);
    for (int64_t i = 0; i < 3; ++i)
      require_equal(taken[i], x + 100 * i, "all_to_all");
    require_equal(x, of_rank(rank()), "the input");
  });
}

TEST_CASE("ranks give each other different numbers of rows",
          "[runtime][tensor_collectives]") {
  // Rank i gives rank j i + j rows.
  on_ranks(3, [] {
    auto row = [](int64_t from, int64_t to, int64_t i) {
      return torch::full({2}, from * 100 + to * 10 + i, torch::kLong);
    };
    std::vector<Tensor> rows{torch::empty({0, 2}, torch::kLong)};
    std::vector<Tensor> wanted = rows;
    std::vector<uint64_t> counts;
    for (int64_t j = 0; j < 3; ++j) {
      counts.push_back(rank() + static_cast<uint64_t>(j));
      for (int64_t i = 0; i < own() + j; ++i) {
        rows.push_back(row(own(), j, i).unsqueeze(0));
        wanted.push_back(row(j, own(), i).unsqueeze(0));
      }
    }
    require_equal(all_to_all(torch::cat(rows), counts, counts),
                  torch::cat(wanted), "rows");
  });
}

TEST_CASE("a sum goes into the tensor itself, whatever its strides",
          "[runtime][tensor_collectives]") {
  on_ranks(2, [] {
    auto sum = of_rank(0) + of_rank(1);
    auto x = of_rank(rank());
    auto same = allreduce_(x);
    require(same.is_same(x), "the same tensor");
    require_equal(x, sum, "in place");
    auto base = torch::zeros({3, 4});
    auto view = base.slice(1, 0, 2).t();
    view.copy_(of_rank(rank()));
    allreduce_(view);
    require_equal(view, sum, "a view");
    require(base.slice(1, 2).eq(0).all().item<bool>(), "what is beside it");
  });
}

TEST_CASE("groups of the layout and of the user each have their own calls",
          "[runtime][tensor_collectives]") {
  on_ranks(4, [] {
    auto ones = torch::ones({5});
    require_equal(allreduce(ones, comm_group::pp), 4 * ones, "pp");
    require_equal(allreduce(ones, comm_group::dp), ones, "alone");
    comm_group half{rank() % 2 == 0 ? std::vector<uint64_t>{2, 0}
                                    : std::vector<uint64_t>{1, 3}};
    auto x = torch::full({2}, own());
    require_equal(allreduce(x, half), torch::full({2}, own() % 2 == 0 ? 2 : 4),
                  "half");
    require(get_group(half)
              == std::vector<uint64_t>{rank() % 2, rank() % 2 + 2},
            "its ranks");
    // Values, too.
    require(allgather(rank(), half) == get_group(half), "values");
    barrier(half);
    auto text = error_of([] { allreduce(torch::ones(1), comm_group{{4}}); },
                         error_code::config);
    require(text == "a group of ranks 4 among 4 ranks", text);
    text = error_of([] { comm_group{{1, 2, 1}}; }, error_code::config);
    require(text == "a group has rank 1 twice", text);
    if (rank() == 0) {
      text = error_of([] { barrier(comm_group{{1, 2}}); }, error_code::config);
      require(text == "rank 0 is not in the group of ranks 1, 2", text);
    }
  });
}

TEST_CASE(
  "collectives of different names are begun in any order and waited for "
  "in any other",
  "[runtime][tensor_collectives][R43]") {
  on_ranks(3, [] {
    std::vector<std::string> names{"a", "b", "c"};
    std::rotate(names.begin(), names.begin() + own(), names.end());
    std::map<std::string, tensor_future> running;
    for (auto& name : names)
      running.emplace(name, async::allreduce(torch::full({1000}, name[0]),
                                             comm_group::world, reduce_op::sum,
                                             name));
    for (auto name : {"c", "a", "b"})
      require_equal(running[name].get(), torch::full({1000}, 3 * name[0]),
                    name);
    require(running["a"].done(), "done");
  });
}

TEST_CASE("what ranks want differently is an error on all of them",
          "[runtime][tensor_collectives][R43]") {
  on_ranks(2, [] {
    auto text = error_of([] { allreduce(torch::ones({own() + 1})); },
                         error_code::protocol);
    require(text.find("allreduce \"world\" of ranks 0, 1: ") == 0, text);
    require(text.find("calls sum allreduce of float32[1]") != text.npos, text);
    require(text.find("calls sum allreduce of float32[2]") != text.npos, text);
    // The next one meets again.
    require_equal(allreduce(torch::ones(1)), torch::full({1}, 2.0), "after");
  });
}

TEST_CASE("what can never work is refused where it is asked for",
          "[runtime][tensor_collectives]") {
  on_ranks(2, [] {
    auto world = comm_group::world;
    auto text = error_of(
      [&] { allreduce(torch::ones(2, torch::kInt), world, reduce_op::mean); },
      error_code::unsupported);
    require(text == "allreduce \"world\" of ranks 0, 1: no mean of int32",
            text);
    text = error_of(
      [&] {
        reduce_scatter(torch::ones({3, 2}));
      },
      error_code::config);
    require(text
              == "reduce_scatter \"world\" of ranks 0, 1: a tensor [2, ...] is "
                 "expected, with a part for each rank, not [3, 2]",
            text);
    text = error_of([&] { allreduce(Tensor{}); }, error_code::config);
    require(text
              == "allreduce \"world\" of ranks 0, 1: the tensor is not defined",
            text);
    text = error_of([&] { broadcast(torch::ones(1), world, 2); },
                    error_code::config);
    require(text == "broadcast \"world\" of ranks 0, 1: there is no root 2",
            text);
    // Together, as numbers that wrap around, they are the two rows there are.
    std::vector<uint64_t> given{~uint64_t{0}, 3};
    std::vector<uint64_t> taken{1, 1};
    text = error_of(
      [&] {
        all_to_all(torch::ones({2, 1}), given, taken);
      },
      error_code::config);
    require(text.find("18446744073709551615 rows are too many") != text.npos,
            text);
    text = error_of(
      [&] {
        all_to_all(torch::ones({2, 1}), taken, given);
      },
      error_code::config);
    require(text.find("rows are too many") != text.npos, text);
    text = error_of([&] { allgather(torch::ones(1).to_sparse()); },
                    error_code::unsupported);
    require(text.find("sparse") != text.npos, text);
  });
}

TEST_CASE(
  "in a step, calls of a microbatch meet those of the same one, and "
  "who waits lets the rank go on",
  "[runtime][tensor_collectives]") {
  // One token for both ranks: a wait that kept it would never end.
  auto world = manual_world(2, 4);
  run_virtual_world(2, world, [&](session&) {
    auto remote = [](function_impl& m, Tensor x) {
      return x * m.weight + allreduce(x.detach());
    };
    auto local = [](caller_impl& m, Tensor x) {
      auto sent = async::allreduce(10 * x);
      auto y = m.there(x * m.here);
      return y + sent.get();
    };
    distributed_model model{seeded([&] { return caller{remote, local}; })};
    auto train_step = step([&](Tensor x) {
      auto y = model(x);
      model.backward(y.sum());
      return y.detach();
    });
    for (int i = 0; i < 3; ++i) {
      auto x = torch::arange(12.0).view({4, 3});
      auto out = train_step(x).concat();
      // The sum of 2 x on rank 1 and 10 x on rank 0, twice.
      require_equal(out, 2 * x + 2 * 12 * x, "output");
    }
  });
}

TEST_CASE("a wait that can never end tells which rank is not there",
          "[runtime][tensor_collectives]") {
  auto world = manual_world(2);
  std::string text;
  try {
    run_virtual_world(2, world, [&](session&) {
      auto remote = [](function_impl& m, Tensor x) { return x * m.weight; };
      auto local = [](caller_impl& m, Tensor x) {
        return m.there(allreduce(x, comm_group::pp, reduce_op::sum, "lonely"));
      };
      distributed_model model{seeded([&] { return caller{remote, local}; })};
      step([&](Tensor x) { return model(x).sum(); })(torch::ones({1, 3}));
    });
  } catch (const error& e) {
    text = e.what();
    CHECK(e.code() == error_code::stalled);
  }
  CHECK_THAT(text, ContainsSubstring("rank 0 (the step body, microbatch 0, "
                                     "forward) waits for allreduce \"lonely\" "
                                     "of ranks 0, 1 (not joined by rank 1)"));
}

TEST_CASE("a rank that fails its step fails what others wait for in it",
          "[runtime][tensor_collectives]") {
  auto world = manual_world(2, 2);
  run_virtual_world(2, world, [&](session&) {
    auto remote = [](function_impl& m, Tensor x) {
      if (x[0][0].item<double>() == 2)
        throw std::runtime_error{"not this one"};
      return x * m.weight + allreduce(x.detach());
    };
    auto local = [](caller_impl& m, Tensor x) {
      auto sent = async::allreduce(x);
      auto y = m.there(x * m.here);
      return y + sent.get();
    };
    distributed_model model{seeded([&] { return caller{remote, local}; })};
    auto train_step = step([&](Tensor x) { return model(x).sum(); });
    auto text = error_of(
      [&] {
        train_step(torch::ones({2, 3}));
      },
      error_code::user_code);
    require(text.find("not this one") != text.npos, text);
    auto x = torch::full({2, 3}, 3.0);
    auto sum = train_step(x).reduce_sum();
    require_equal(sum, (2 * x + 2 * (x + 2 * x)).sum(), "the next step");
  });
}
