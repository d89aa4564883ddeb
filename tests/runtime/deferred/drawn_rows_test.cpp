#include "tests/support/catch.hpp"

#include "runtime/deferred/drawn_rows.hpp"
#include "tests/support/torch/deferred.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstdint>
#include <functional>
#include <vector>

// Rows of tensors that do not exist against those that LibTorch draws at once.

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

constexpr int64_t most = 1 << 16; // numbers in a piece of small rows

/// @returns what `make` makes in the scope
template <class F>
Tensor made_later(F make) {
  delay_param_initialization scope;
  torch::NoGradGuard no_grad;
  return make();
}

bool can_be_drawn(const Tensor& x) {
  return draw_rows(x, [](int64_t, const Tensor&) {});
}

} // namespace

TEST_CASE("pieces of a tensor have the numbers of the whole",
          "[runtime][delay]") {
  using sizes = std::vector<int64_t>;
  auto type = GENERATE(torch::kFloat, torch::kDouble, torch::kBFloat16);
  auto normal = GENERATE(true, false);
  // The last piece ends within 16 numbers; it would have fewer than 16; rows
  // are not multiples of 16; they are larger than a piece; all is one piece.
  auto of = GENERATE(sizes{2 * most + 35}, sizes{most + 4}, sizes{1100, 7, 19},
                     sizes{40, most + 1}, sizes{50, 70});
  CAPTURE(type, normal, of);
  auto make = [&] {
    auto x = torch::empty(of, type);
    return normal ? x.normal_(0.5, 2) : x.uniform_(-1, 3);
  };
  torch::manual_seed(3);
  auto whole = make();
  auto behind = random_stream::of_default();
  torch::manual_seed(3);
  auto x = made_later(make);
  CHECK(is_deferred(x));
  CHECK(random_stream::of_default() == behind);
  torch::manual_seed(4);
  auto now = random_stream::of_default();
  std::vector<Tensor> pieces;
  int64_t next = 0;
  auto in_order = true;
  auto drawn = draw_rows(x, [&](int64_t first, const Tensor& rows) {
    in_order = in_order && first == next;
    next += rows.size(0);
    pieces.push_back(rows);
  });
  REQUIRE(drawn);
  CHECK(in_order);
  CHECK(random_stream::of_default() == now);
  CHECK(is_deferred(x));
  CHECK(same_bits(torch::cat(pieces), whole));
  CHECK((pieces.size() > 1) == (of != sizes{most + 4} && of != sizes{50, 70}));
  initialise_deferred({x});
  CHECK(same_bits(x, whole));
}

TEST_CASE("what is drawn a piece at a time has a generator of its own",
          "[runtime][delay]") {
  auto generator = [] { return at::detail::createCPUGenerator(8); };
  auto make = [&](at::Generator from) {
    return torch::empty({3000, 50}).normal_(0, 1, from);
  };
  auto mine = generator(), theirs = generator();
  auto whole = make(mine);
  auto x = made_later([&] { return make(theirs); });
  CHECK(torch::randn({3}, mine).equal(torch::randn({3}, theirs)));
  std::vector<Tensor> pieces;
  auto drawn = draw_rows(
    x, [&](int64_t, const Tensor& rows) { pieces.push_back(rows); });
  REQUIRE(drawn);
  CHECK(pieces.size() > 1);
  CHECK(same_bits(torch::cat(pieces), whole));
}

TEST_CASE("what functions draw that make a tensor is drawn in pieces",
          "[runtime][delay]") {
  auto normal = GENERATE(true, false);
  CAPTURE(normal);
  auto make = [&] {
    return normal ? torch::randn({3000, 50}) : torch::rand({3000, 50});
  };
  torch::manual_seed(3);
  auto whole = make();
  auto behind = random_stream::of_default();
  torch::manual_seed(3);
  auto x = made_later(make);
  CHECK(is_deferred(x));
  CHECK(random_stream::of_default() == behind);
  CHECK(metadata_difference(x, whole) == "");
  std::vector<Tensor> pieces;
  auto drawn = draw_rows(
    x, [&](int64_t, const Tensor& rows) { pieces.push_back(rows); });
  REQUIRE(drawn);
  CHECK(pieces.size() > 1);
  CHECK(same_bits(torch::cat(pieces), whole));
}

TEST_CASE("values that are scaled after they were drawn are scaled in pieces",
          "[runtime][delay]") {
  const std::vector<std::function<Tensor()>> makers{
    [] {
      return torch::randn({3000, 50}) * 0.02;
    },
    [] {
      return torch::rand({3000, 50}, torch::kBFloat16) / 7;
    },
    [] {
      return torch::empty({3000, 50}).normal_().mul_(2).div_(3);
    },
    [] {
      auto x = torch::empty({3000, 50}, torch::kDouble).uniform_();
      x[2].fill_(9);
      auto y = x.mul(torch::tensor(0.3)).div_(5);
      x.zero_(); // `y` is not what `x` is now
      y[4].zero_();
      return y;
    }};
  for (auto& make : makers) {
    CAPTURE(&make - makers.data());
    torch::manual_seed(3);
    auto whole = make();
    torch::manual_seed(3);
    auto x = made_later(make);
    std::vector<Tensor> pieces;
    auto drawn = draw_rows(
      x, [&](int64_t, const Tensor& rows) { pieces.push_back(rows); });
    REQUIRE(drawn);
    CHECK(pieces.size() > 1);
    CHECK(same_bits(torch::cat(pieces), whole));
    CHECK(is_deferred(x));
  }
}

TEST_CASE("rows that are set after they were drawn are set in their pieces",
          "[runtime][delay]") {
  // The last one of a piece, the first one of the next, and the last of all.
  auto row = GENERATE(as<int64_t>{}, 1303, 1304, -1);
  CAPTURE(row);
  auto make = [&] {
    auto x = torch::empty({3000, 50});
    x[5].fill_(4); // is drawn over
    x.normal_();
    x[row].zero_(); // as of a padding
    x[7].fill_(2);
    x[7].fill_(3);
    return x;
  };
  torch::manual_seed(3);
  auto whole = make();
  torch::manual_seed(3);
  auto x = made_later(make);
  std::vector<Tensor> pieces;
  auto drawn = draw_rows(
    x, [&](int64_t, const Tensor& rows) { pieces.push_back(rows); });
  REQUIRE(drawn);
  REQUIRE(pieces.size() > 2);
  CHECK(pieces[0].size(0) == 1304);
  CHECK(same_bits(torch::cat(pieces), whole));
  CHECK(is_deferred(x));
}

TEST_CASE("rows of what something else made are not drawn",
          "[runtime][delay]") {
  auto empty = [] { return torch::empty({100, 60}); };
  CHECK(can_be_drawn(made_later([&] { return empty().mul_(2).normal_(); })));
  CHECK_FALSE(can_be_drawn(torch::ones({100, 60})));
  CHECK_FALSE(can_be_drawn(made_later([] { return torch::ones({100, 60}); })));
  CHECK_FALSE(can_be_drawn(made_later([] {
    return torch::randint(9, {100, 60});
  })));
  CHECK_FALSE(
    can_be_drawn(made_later([&] { return empty().normal_().exp_(); })));
  CHECK_FALSE(can_be_drawn(
    made_later([&] { return empty().normal_() * torch::ones({60}); })));
  CHECK_FALSE(can_be_drawn(
    made_later([&] { return empty().normal_() * empty().normal_(); })));
  // The product has no gaps, but what was drawn has.
  CHECK_FALSE(can_be_drawn(made_later([] {
    return torch::empty({100, 120}).slice(1, 0, 60).normal_() * 2;
  })));
  CHECK_FALSE(can_be_drawn(made_later([&] {
    auto x = empty().normal_();
    x[1].mul_(2);
    return x;
  })));
  CHECK_FALSE(can_be_drawn(made_later([&] {
    auto x = empty().normal_();
    x[1][2].zero_(); // of a row one number
    return x;
  })));
  CHECK_FALSE(can_be_drawn(made_later([&] {
    auto x = empty().normal_();
    x.select(1, 3).zero_();
    return x;
  })));
  CHECK_FALSE(can_be_drawn(made_later([&] {
    auto x = empty();
    x.t().normal_();
    return x;
  })));
  CHECK_FALSE(can_be_drawn(made_later([&] { return empty().t().normal_(); })));
}
