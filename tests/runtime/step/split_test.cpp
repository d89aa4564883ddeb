#include "tests/support/catch.hpp"

#include "runtime/step/split.hpp"
#include "tests/support/error_of.hpp"

#include <torch/types.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

namespace {

/// Rows 2 and 3 of what has the numbers 0 to 7.
bool is_second(const Tensor& x, int64_t axis = 0) {
  return torch::equal(x.flatten(), torch::tensor({2.0, 3.0}))
         && x.size(axis) == 2;
}

Tensor column() {
  return torch::arange(8.0, torch::kDouble).view({8, 1});
}

/// The part of the second of four microbatches.
template <class T>
T second(const T& x, int64_t axis = 0) {
  return split(x, 4, 1, axis);
}

} // namespace

namespace user {

/// Words of sentences, one after the other, and where each sentence begins.
struct ragged {
  Tensor words;
  std::vector<int64_t> begins;
};

ragged smp_slice(const ragged& x, uint64_t n, uint64_t index, int64_t axis) {
  auto count = x.begins.size() / n;
  auto first = static_cast<int64_t>(index * count);
  auto last = first + static_cast<int64_t>(count);
  auto end = last < static_cast<int64_t>(x.begins.size())
               ? x.begins[static_cast<size_t>(last)]
               : x.words.size(axis);
  auto begin = x.begins[static_cast<size_t>(first)];
  ragged result{x.words.narrow(axis, begin, end - begin), {}};
  for (auto i = first; i < last; ++i)
    result.begins.push_back(x.begins[static_cast<size_t>(i)] - begin);
  return result;
}

/// Samples in a class that smp does not know.
struct unsplit {
  Tensor x;
};

} // namespace user

TEST_CASE("tensors in containers are split where they stand",
          "[runtime][step]") {
  auto x = column();
  CHECK(is_second(second(x)));
  CHECK(is_second(second(x.t(), 1), 1));
  CHECK(is_second(second(x.t(), -1), 1));

  std::map<std::string, Tensor> map{{"x", x}, {"none", Tensor{}}};
  CHECK(is_second(second(map).at("x")));
  CHECK_FALSE(second(map).at("none").defined());
  CHECK(second(map).size() == 2);

  auto tuple = second(std::tuple{x, int64_t{5}, std::string{"whole"}});
  CHECK(is_second(std::get<0>(tuple)));
  CHECK(std::get<1>(tuple) == 5);
  CHECK(std::get<2>(tuple) == "whole");

  auto pair = second(std::pair{x.t(), x.t() + 0}, 1);
  CHECK((is_second(pair.first, 1) && is_second(pair.second, 1)));

  CHECK(is_second(*second(std::optional{x})));
  CHECK_FALSE(second(std::optional<Tensor>{}).has_value());

  std::vector<std::map<int, std::pair<std::optional<Tensor>, double>>> nest{
    {{3, {x, 0.5}}}, {}};
  auto part = second(nest);
  REQUIRE(part.size() == 2);
  CHECK(is_second(*part[0].at(3).first));
  CHECK(part[0].at(3).second == 0.5);
  CHECK(part[1].empty());
}

TEST_CASE("arrays, unordered maps and variants of tensors are split, too",
          "[runtime][step]") {
  auto x = column();
  auto array = second(std::array{x, x + 0});
  CHECK((is_second(array[0]) && is_second(array[1])));
  CHECK(second(std::array<Tensor, 0>{}).empty());
  CHECK(second(std::array<int, 8>{0, 1, 2})[2] == 2); // no tensor

  std::unordered_map<std::string, Tensor> map{{"x", x}, {"none", Tensor{}}};
  CHECK(is_second(second(map).at("x")));
  CHECK_FALSE(second(map).at("none").defined());
  CHECK(second(map).size() == 2);

  using either = std::variant<std::string, Tensor, std::vector<Tensor>, Tensor>;
  CHECK(is_second(std::get<1>(second(either{std::in_place_index<1>, x}))));
  CHECK(is_second(std::get<2>(second(either{std::vector{x}})).at(0)));
  CHECK(is_second(std::get<3>(second(either{std::in_place_index<3>, x}))));
  CHECK(std::get<0>(second(either{"whole"})) == "whole");
  // A part is a new value; what is split stays whole.
  either whole{std::in_place_index<1>, x};
  second(whole);
  CHECK(std::get<1>(whole).is_same(x));

  std::unordered_map<int, std::array<std::variant<int, Tensor>, 2>> nest{
    {3, {x, 5}}};
  auto part = second(nest).at(3);
  CHECK(is_second(std::get<1>(part[0])));
  CHECK(std::get<0>(part[1]) == 5);
}

TEST_CASE("a part of a batch is a view of it", "[runtime][step]") {
  auto x = column();
  second(std::map<std::string, Tensor>{{"x", x}}).at("x").fill_(-1);
  CHECK(x.eq(-1).sum().item<int64_t>() == 2);
}

TEST_CASE("a type of the user's own says how it is split, in containers too",
          "[runtime][step]") {
  user::ragged x{torch::arange(10.0, torch::kDouble), {0, 1, 4, 4}};
  auto whole = std::map<std::string, std::vector<user::ragged>>{{"x", {x, x}}};
  auto first = split(whole, 2, 0, 0).at("x").at(1);
  CHECK(torch::equal(first.words, torch::arange(4.0, torch::kDouble)));
  CHECK(first.begins == std::vector<int64_t>{0, 1});
  auto last = split(whole, 2, 1, 0).at("x").at(0);
  CHECK(torch::equal(last.words, torch::arange(4.0, 10.0, torch::kDouble)));
  CHECK(last.begins == std::vector<int64_t>{0, 0});
}

TEST_CASE("a struct that may hold samples needs a word of its author",
          "[runtime][step]") {
  auto alone = error_of([] { second(user::unsplit{column()}); });
  auto in_list = error_of([] { second(std::vector{user::unsplit{column()}}); });
  for (auto& told : {alone, in_list}) {
    CHECK_THAT(told, ContainsSubstring("does not know how to split a "));
    CHECK_THAT(told, ContainsSubstring("user::unsplit into microbatches: write "
                                       "smp_slice(const "));
    CHECK_THAT(told, ContainsSubstring("step_options::non_split_inputs"));
  }
  // These have none.
  auto number = std::make_shared<int>(7);
  CHECK(second(number) == number);
  CHECK(second(std::string{"whole"}) == "whole");
  CHECK(second([] { return 7; })() == 7);
  CHECK(second(std::function<int()>{[] { return 8; }})() == 8);
  CHECK(second(c10::Device{c10::kCPU}).is_cpu());
  CHECK(second(c10::Scalar{3}).toInt() == 3);
}

TEST_CASE("what cannot be split is refused", "[runtime][step]") {
  auto x = column();
  CHECK_THAT(error_of([&] { split(x, 3, 0, 0); }),
             ContainsSubstring("axis 0 has the size 8, which 3 microbatches"));
  CHECK_THAT(error_of([&] { split(std::optional{x}, 2, 0, 2); }),
             ContainsSubstring("cannot be split along axis 2"));
  CHECK_THAT(error_of([&] { split(std::tuple{torch::ones({})}, 2, 0, 0); }),
             ContainsSubstring("a tensor of 0 axes"));
}
