#include "tests/support/catch.hpp"

#include "tests/support/actors/collective_world.hpp"
#include "transport/collectives/sent_ahead.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

using memory = std::shared_ptr<call_buffers<float>>;

constexpr size_t segment_floats = 16 << 10; // 64 KB

constexpr loopback_options by_hand{1, true, true};

memory filled(size_t count, float x) {
  auto result = call_buffers<float>::make(count, count);
  std::fill(result->input.begin(), result->input.end(), x);
  return result;
}

collective_call call_of(const collective_world& w, collective_kind kind,
                        const std::string& name, const memory& of_rank) {
  collective_call x;
  x.label.group = w.all;
  x.label.name = name;
  x.what.kind = kind;
  x.what.type = element_type::float32;
  x.what.shape = {static_cast<int64_t>(of_rank->input.size())};
  return with(std::move(x), of_rank);
}

} // namespace

TEST_CASE("to each rank goes as much as it may have to keep, until it is there",
          "[transport][collectives]") {
  sent_ahead x{{3, 100}};
  rank_id a{1}, b{2};
  CHECK(x.add(a, 60));
  CHECK_FALSE(x.add(a, 41));
  CHECK(x.add(a, 40));
  CHECK(x.add(a, 0));
  CHECK_FALSE(x.add(a, 0)); // a fourth message
  CHECK(x.add(b, 100));
  x.remove(a, {3, 100});
  CHECK(x.add(a, 100));
}

TEST_CASE(
  "what was sent of a call that is over counts until the other is "
  "there, or its step is over",
  "[transport][collectives]") {
  sent_ahead x{{1, 100}};
  rank_id to{1};
  collective_label call{{rank_id{0}, to}, "x", step_id{0}, {}, {}, 4};
  auto other = call;
  other.number = 5;
  REQUIRE(x.add(to, 7));
  x.leave(call, to, {1, 7});
  x.joined(other, to);
  x.joined(call, rank_id{0});
  x.step_over(step_id{3});
  CHECK_FALSE(x.add(to, 0));
  x.joined(call, to);
  CHECK(x.add(to, 0));
  call.step = step_id{4};
  x.leave(call, to, {1, 0});
  x.step_over(step_id{3});
  CHECK_FALSE(x.add(to, 0));
  x.step_over(step_id{4});
  CHECK(x.add(to, 0));
  // It ended later than its step.
  x.leave(call, to, {1, 0});
  CHECK(x.add(to, 0));
}

TEST_CASE("a root that is many calls ahead of a late rank ends well",
          "[transport][collectives][R43]") {
  using enum collective_kind;
  collective_world w{"loopback", 2, {}, by_hand};
  constexpr size_t calls = 1500; // 94 MB
  std::vector<memory> given;
  for (int i = 0; i < 4; ++i)
    given.push_back(filled(segment_floats, static_cast<float>(i + 1)));
  std::vector<started_collective> early;
  for (size_t i = 0; i < calls; ++i)
    early.push_back(
      w.at(0).start(call_of(w, broadcast, "x", given[i % given.size()])));
  w.network.run();
  // What the late one keeps, and words without tensors.
  CHECK(w.fabric_of(1).stats().bytes_received < uint64_t{9} << 20);
  auto taken = filled(segment_floats, 0);
  for (size_t i = 0; i < calls; ++i) {
    auto late = w.at(1).start(call_of(w, broadcast, "x", taken));
    REQUIRE(!ended(w, late));
    REQUIRE(taken->output == given[i % given.size()]->input);
  }
  for (auto& x : early)
    CHECK(!ended(w, x));
}

TEST_CASE("a rank that is many calls ahead of a late root ends well",
          "[transport][collectives][R43]") {
  using enum collective_kind;
  collective_world w{"loopback", 2, {}, by_hand};
  constexpr size_t calls = 1100; // 69 MB
  auto given = filled(segment_floats, 2);
  std::vector<started_collective> early;
  for (size_t i = 0; i < calls; ++i)
    early.push_back(w.at(1).start(call_of(w, reduce, "x", given)));
  w.network.run();
  CHECK(w.fabric_of(0).stats().bytes_received < uint64_t{9} << 20);
  const std::vector<float> wanted(segment_floats, 5);
  for (size_t i = 0; i < calls; ++i) {
    auto root = filled(segment_floats, 3);
    auto late = w.at(0).start(call_of(w, reduce, "x", root));
    REQUIRE(!ended(w, late));
    REQUIRE(root->output == wanted);
  }
  for (auto& x : early)
    CHECK(!ended(w, x));
}

TEST_CASE("ranks that are both ahead, in calls of other names, still meet",
          "[transport][collectives][R43]") {
  using enum collective_kind;
  auto kind = GENERATE(as<collective_kind>(), allreduce, broadcast, reduce,
                       barrier);
  CAPTURE(to_string(kind));
  collective_limits limits;
  limits.ahead_messages = 8;
  collective_world w{"loopback", 2, limits, by_hand};
  // More than the other may keep, in messages.
  constexpr int calls = 40;
  auto one = filled(1, 1);
  auto start = [&](uint64_t rank, const std::string& side, int i) {
    return w.at(rank).start(
      call_of(w, allreduce, side + std::to_string(i), filled(1, 1)));
  };
  std::vector<started_collective> all;
  for (int i = 0; i < calls; ++i) {
    all.push_back(start(0, "a", i));
    all.push_back(start(1, "b", i));
  }
  w.network.run();
  auto two = filled(1, 2);
  auto first = w.at(0).start(call_of(w, kind, "x", one));
  w.network.run();
  auto second = w.at(1).start(call_of(w, kind, "x", two));
  CHECK(!ended(w, first));
  CHECK(!ended(w, second));
  if (kind == allreduce || kind == reduce)
    CHECK(one->output[0] == 3);
  if (kind == allreduce)
    CHECK(two->output[0] == 3);
  if (kind == broadcast)
    CHECK(two->output[0] == 1);
  for (int i = calls - 1; i >= 0; --i) {
    all.push_back(start(1, "a", i));
    all.push_back(start(0, "b", i));
  }
  for (auto& x : all)
    CHECK(!ended(w, x));
}
