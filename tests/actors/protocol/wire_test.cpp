#include "tests/support/catch.hpp"

#include "actors/protocol/wire.hpp"
#include "tests/support/error_of.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

std::vector<std::byte> bytes(const std::string& x) {
  std::vector<std::byte> result(x.size());
  std::memcpy(result.data(), x.data(), x.size());
  return result;
}

tensor_ref tensor(std::vector<float> x) {
  auto data = std::make_shared<std::vector<float>>(std::move(x));
  tensor_ref result;
  result.data = data->data();
  result.nbytes = data->size() * sizeof(float);
  result.shape = {static_cast<int64_t>(data->size())};
  result.owner = data;
  return result;
}

/// A result that rank 3 asked `owner` for with its request 17.
object_id result(uint64_t owner, size_t position) {
  return result_name(rank_id{owner}, {rank_id{3}, 17}, step_id{5}, position);
}

request make_request() {
  return {{rank_id{3}, request_number(step_id{5}, 17)},
          step_id{5},
          microbatch_id{2},
          module_id{40},
          phase::backward,
          {bytes("args"), {tensor({1, 2}), tensor({3})}},
          6,
          true,
          16,
          {result(1, 6), result(2, 0)},
          {result(2, 7)}};
}

failure make_failure() {
  return {error_code::user_code, rank_id{1}, "blocks.3", "boom"};
}

step_report make_report() {
  step_report result{step_id{9}, {}, {}};
  result.values.push_back({bytes("loss"), {tensor({1})}});
  result.values.push_back({});
  result.values.push_back({bytes("x"), {tensor({2}), tensor({3, 4})}});
  return result;
}

step_plan make_plan() {
  return {step_id{4}, step_plan::mode::replay, 77, step_id{2}};
}

/// Every kind of message there is.
std::vector<message> all_messages() {
  std::vector<message> result;
  result.push_back(encode(make_request()));
  result.push_back(encode(response{{rank_id{0}, 7}, {bytes("value"), {}}, {}}));
  result.push_back(encode(response{{rank_id{0}, 7}, {}, make_failure()}));
  result.push_back(encode(microbatch_done{step_id{4}, microbatch_id{1}}));
  result.push_back(encode(step_failed{step_id{4}, make_failure()}));
  result.push_back(encode(forward_over{step_id{4}, 2}));
  result.push_back(encode(make_report()));
  result.push_back(encode(step_report{step_id{4}, {}, make_failure()}));
  result.push_back(encode(make_plan()));
  result.push_back(encode(step_diverged{step_id{4}, "another call"}));
  return result;
}

/// @returns the text of the protocol error, or "no error" if `x` is fine.
std::string refusal(message x) {
  return error_of([&x] { decode(std::move(x)); }, error_code::protocol);
}

/// @returns where the field of `x` that `change` changes begins in its message
template <class T, class F>
size_t place_of(const T& x, F change) {
  auto y = x;
  change(y);
  auto one = encode(x).body.bytes;
  auto other = encode(y).body.bytes;
  return static_cast<size_t>(std::ranges::mismatch(one, other).in1
                             - one.begin());
}

using Catch::Matchers::ContainsSubstring;

} // namespace

TEST_CASE("a request keeps everything on its way", "[actors][wire]") {
  auto x = make_request();
  auto data = x.body.tensors[0].data;
  auto y = std::get<request>(decode(encode(std::move(x))));
  CHECK(y.id == request_id{rank_id{3}, request_number(step_id{5}, 17)});
  CHECK(y.step == step_id{5});
  CHECK(y.microbatch == microbatch_id{2});
  CHECK(y.module == module_id{40});
  CHECK(y.what == phase::backward);
  CHECK(y.start_number == 6);
  CHECK(y.promised);
  CHECK(y.after == 16);
  CHECK(y.needs == std::vector<object_id>{result(1, 6), result(2, 0)});
  CHECK(y.released == std::vector<object_id>{result(2, 7)});
  CHECK(y.body.bytes == bytes("args"));
  REQUIRE(y.body.tensors.size() == 2);
  CHECK(y.body.tensors[0].data == data); // passed through, not copied
}

TEST_CASE("a response carries a value or a failure", "[actors][wire]") {
  auto x = std::get<response>(
    decode(encode(response{{rank_id{2}, 8}, {bytes("v"), {tensor({1})}}, {}})));
  CHECK(x.id == request_id{rank_id{2}, 8});
  CHECK(x.body.bytes == bytes("v"));
  CHECK(x.body.tensors.size() == 1);
  CHECK_FALSE(x.error);
  auto y = std::get<response>(
    decode(encode(response{{rank_id{2}, 8}, {}, make_failure()})));
  CHECK(y.error == make_failure());
}

TEST_CASE("a request names results of its own step only", "[actors][wire]") {
  auto x = make_request();
  SECTION("not of another step") {
    ++x.needs[0].generation;
  }
  SECTION("not what another rank asked for") {
    x.released = {result_name(rank_id{1}, {rank_id{2}, 17}, step_id{5}, 0)};
  }
  SECTION("not what has no name") {
    x.needs = {{rank_id{1}, 5, 5}};
  }
  CHECK_THROWS_WITH(encode(std::move(x)),
                    ContainsSubstring("not a result of its own step"));
}

TEST_CASE("a plan and a divergence keep everything", "[actors][wire][R33]") {
  auto x = std::get<step_plan>(decode(encode(make_plan())));
  CHECK(x.step == step_id{4});
  CHECK(x.what == step_plan::mode::replay);
  CHECK(x.key == 77);
  CHECK(x.source == step_id{2});
  auto y = std::get<step_diverged>(
    decode(encode(step_diverged{step_id{4}, "another call"})));
  CHECK(y.step == step_id{4});
  CHECK(y.text == "another call");
}

TEST_CASE("the ends of microbatches and steps keep everything",
          "[actors][wire]") {
  auto x = std::get<microbatch_done>(
    decode(encode(microbatch_done{step_id{4}, microbatch_id{1}})));
  CHECK(x.step == step_id{4});
  CHECK(x.microbatch == microbatch_id{1});
  auto y = std::get<step_failed>(
    decode(encode(step_failed{step_id{6}, make_failure()})));
  CHECK(y.step == step_id{6});
  CHECK(y.error == make_failure());
  auto z = std::get<forward_over>(decode(encode(forward_over{step_id{4}, 2})));
  CHECK(z.step == step_id{4});
  CHECK(z.start_number == 2);
}

TEST_CASE("a report gives each value its own tensors back", "[actors][wire]") {
  auto x = make_report();
  auto msg = encode(x);
  CHECK(msg.kind == message_kind::control);
  auto y = std::get<step_report>(decode(std::move(msg)));
  CHECK(y.step == x.step);
  REQUIRE(y.values.size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(y.values[i].bytes == x.values[i].bytes);
    REQUIRE(y.values[i].tensors.size() == x.values[i].tensors.size());
    for (size_t j = 0; j < x.values[i].tensors.size(); ++j)
      CHECK(y.values[i].tensors[j].data == x.values[i].tensors[j].data);
  }
}

TEST_CASE("a cut message is refused and never read past its end",
          "[actors][wire]") {
  // Headers have these sizes; what follows may have any.
  constexpr size_t id = 16, no_failure = 21, of_failure = 8 + 4;
  std::vector<size_t> header(10);
  header[0] = id + 46 + 2 * 8 + 4 + 8;
  header[1] = id + no_failure;
  header[2] = id + no_failure + of_failure;
  auto messages = all_messages();
  for (size_t i = 0; i < messages.size(); ++i) {
    auto size = messages[i].body.bytes.size();
    for (size_t cut = 0; cut < size; ++cut) {
      auto x = messages[i];
      // A buffer of the exact size, so that AddressSanitizer sees each read.
      x.body.bytes = std::vector<std::byte>{x.body.bytes.begin(),
                                            x.body.bytes.begin()
                                              + static_cast<ptrdiff_t>(cut)};
      auto is_cut = refusal(std::move(x)) != "no error";
      auto must = header[i] == 0 || cut < header[i];
      INFO("message " << i << " cut to " << cut << " of " << size);
      CHECK(is_cut == must);
    }
  }
}

TEST_CASE("changed bytes give another message or a protocol error",
          "[actors][wire]") {
  std::minstd_rand rng{1};
  size_t refused = 0;
  for (auto& original : all_messages()) {
    auto size = original.body.bytes.size();
    for (size_t pos = 0; pos < size; ++pos)
      for (int bit = 0; bit < 8; ++bit) {
        auto x = original;
        x.body.bytes[pos] ^= static_cast<std::byte>(1 << bit);
        refused += refusal(std::move(x)) != "no error";
      }
    for (int round = 0; round < 500; ++round) {
      auto x = original;
      for (int i = 0; i < 4; ++i)
        x.body.bytes[rng() % size] = static_cast<std::byte>(rng());
      x.kind = static_cast<message_kind>(rng() % 5);
      refused += refusal(std::move(x)) != "no error";
    }
  }
  CHECK(refused > 0);
}

TEST_CASE("a refused message names the field", "[actors][wire]") {
  auto x = encode(make_request());
  auto at = place_of(make_request(),
                     [](auto& y) { y.microbatch = microbatch_id{3}; });
  x.body.bytes.resize(at + 5);
  CHECK_THAT(refusal(x),
             ContainsSubstring(fmt::format("malformed request: microbatch at "
                                           "byte {}: 8 bytes wanted, 5 left",
                                           at)));
  x = encode(make_request());
  at = place_of(make_request(), [](auto& y) { y.what = phase::forward; });
  x.body.bytes[at] = std::byte{2};
  CHECK_THAT(refusal(x), ContainsSubstring(fmt::format(
                           "phase at byte {}: there is no value 2", at)));
  response failed{{}, {}, make_failure()};
  x = encode(failed);
  at = place_of(failed, [](auto& y) { y.error.code = error_code::config; });
  x.body.bytes[at] = std::byte{99};
  CHECK_THAT(refusal(x), ContainsSubstring("error.code"));
  x = encode(microbatch_done{});
  x.body.bytes.push_back({});
  CHECK_THAT(refusal(x), ContainsSubstring("1 bytes too many"));
  x = encode(microbatch_done{});
  x.body.tensors.push_back(tensor({1}));
  CHECK_THAT(refusal(x), ContainsSubstring("1 tensors too many"));
  x = encode(step_failed{step_id{1}, {}});
  CHECK_THAT(refusal(x), ContainsSubstring("there is none"));
  x.kind = message_kind::exchange;
  CHECK_THAT(refusal(x), ContainsSubstring("not for the MODULE SERVER"));
}

TEST_CASE("a report that promises too much is refused before it allocates",
          "[actors][wire]") {
  auto x = encode(make_report());
  auto count = place_of(make_report(), [](auto& y) { y.values.pop_back(); });
  std::fill_n(x.body.bytes.begin() + static_cast<ptrdiff_t>(count),
              sizeof(uint32_t), std::byte{0xff});
  CHECK_THAT(refusal(x), ContainsSubstring("values at byte ")
                           && ContainsSubstring(": claims"));
  x = encode(make_report());
  x.body.tensors.pop_back();
  CHECK_THAT(refusal(x),
             ContainsSubstring("values.tensors at byte")
               && ContainsSubstring("claims 2 tensors, but only 1"));
  x = encode(make_report());
  x.body.tensors.push_back(tensor({1}));
  CHECK_THAT(refusal(x), ContainsSubstring("1 tensors too many"));
}
