#include "tests/support/catch.hpp"

#include "tests/support/actors/collective_world.hpp"
#include "tests/support/actors/payloads.hpp"
#include "transport/collectives/collective_message.hpp"

#include <future>
#include <random>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

collective_call call_of(const collective_world& w, collective_kind kind,
                        int64_t count, const std::string& name = "x") {
  collective_call x;
  x.label.group = w.all;
  x.label.name = name;
  x.what.kind = kind;
  x.what.type = element_type::float32;
  x.what.shape = {count};
  auto size = static_cast<size_t>(count) * w.all.size();
  return with(std::move(x), call_buffers<float>::make(size, size));
}

/// Starts a call per rank.
/// @returns how each failed. One that has all it needs may be through before it
/// hears of a difference: then the next call of that name tells.
std::vector<failure> outcomes(collective_world& w,
                              std::vector<collective_call> calls) {
  std::vector<started_collective> started;
  for (size_t i = 0; i < calls.size(); ++i)
    started.push_back(w.at(i).start(std::move(calls[i])));
  std::vector<failure> result;
  for (auto& x : started)
    result.push_back(ended(w, x));
  for (size_t i = 0; i < result.size(); ++i)
    if (!result[i])
      result[i] = ended(
        w, w.at(i).start(call_of(w, collective_kind::allreduce, 1)));
  return result;
}

constexpr loopback_options stepped(uint64_t seed) {
  return {seed, true, true};
}

} // namespace

TEST_CASE(
  "ranks that differ in shape, type, operation or root all fail, with "
  "what two of them said",
  "[transport][collectives][R43]") {
  using enum collective_kind;
  auto seed = GENERATE(range(1, 6));
  auto large = GENERATE(false, true);
  collective_world w{"loopback", 4, {}, stepped(uint64_t(seed))};
  if (GENERATE(false, true))
    w.place({0, 0, 1, 1});
  auto count = large ? 100'000 : 3;
  auto number = std::to_string(count);
  std::vector<collective_call> calls;
  for (int i = 0; i < 4; ++i)
    calls.push_back(call_of(w, allreduce, count));
  std::string odd;
  std::string even = "sum allreduce of float32[" + number + "]";
  SECTION("shape") {
    calls[2].what.shape = {count / 3, 3};
    odd = "sum allreduce of float32[" + std::to_string(count / 3) + ", 3]";
  }
  SECTION("type") {
    calls[2].what.type = element_type::int32;
    odd = "sum allreduce of int32[" + number + "]";
  }
  SECTION("operation") {
    calls[2].what.op = reduce_op::max;
    odd = "max allreduce of float32[" + number + "]";
  }
  SECTION("kind") {
    calls[2] = call_of(w, gather, count);
    odd = "gather of float32[" + number + "] with root rank 0";
  }
  SECTION("root of a broadcast") {
    for (auto& x : calls)
      x.what.kind = broadcast;
    calls[2].what.root = 1;
    even = "broadcast of float32[" + number + "] with root rank 0";
    odd = "broadcast of float32[" + number + "] with root rank 1";
  }
  SECTION("root of a gather") {
    for (auto& x : calls)
      x.what.kind = gather;
    calls[2].what.root = 2;
    even = "gather of float32[" + number + "] with root rank 0";
    odd = "gather of float32[" + number + "] with root rank 2";
  }
  for (auto& x : outcomes(w, calls)) {
    INFO(x.describe());
    CHECK(x.code == error_code::protocol);
    using Catch::Matchers::ContainsSubstring;
    CHECK_THAT(x.text, ContainsSubstring("rank 2 calls " + odd)
                         && ContainsSubstring(even));
  }
}

TEST_CASE("a root that is through is told at the end what was wrong",
          "[transport][collectives]") {
  using enum collective_kind;
  auto in_step = GENERATE(false, true);
  collective_world w{"loopback", 2, {}, stepped(1)};
  std::vector<collective_call> calls;
  for (int i = 0; i < 2; ++i) {
    calls.push_back(call_of(w, broadcast, 3 + i));
    if (in_step) {
      calls.back().label.step = step_id{1};
      calls.back().label.microbatch = microbatch_id{0};
    }
  }
  CHECK(!ended(w, w.at(0).start(calls[0])));
  CHECK(!w.at(0).untold());
  auto other = ended(w, w.at(1).start(calls[1]));
  w.network.run();
  CHECK(other.code == error_code::protocol);
  CHECK(!w.at(1).untold());
  // A step that fails on one rank fails on all.
  if (in_step) {
    CHECK(!w.at(0).untold());
    return;
  }
  CHECK_THAT(w.at(0).untold().text,
             Catch::Matchers::ContainsSubstring("broadcast of float32[3]")
               && Catch::Matchers::ContainsSubstring("float32[4]"));
  // The next call of that name tells it, so the end does not.
  CHECK(ended(w, w.at(0).start(call_of(w, allreduce, 1))).code
        == error_code::protocol);
  CHECK(!w.at(0).untold());
}

TEST_CASE("rows that one gives and another does not take fail on all ranks",
          "[transport][collectives]") {
  collective_world w{"loopback", 3, {}, stepped(1)};
  std::vector<collective_call> calls;
  for (int i = 0; i < 3; ++i) {
    calls.push_back(call_of(w, collective_kind::all_to_all, 2));
    calls.back().what.rows = {1, 1, 1};
    calls.back().rows_taken = {1, 1, 1};
  }
  calls[0].what.rows[2] = 0;
  for (auto& x : outcomes(w, calls)) {
    CHECK(x.code == error_code::protocol);
    CHECK(x.text
          == "all_to_all \"x\" of ranks 0, 1, 2: rank 0 gives 0 rows where "
             "rank 2 takes 1");
  }
}

TEST_CASE("a lost rank fails all its collectives by name, and only those",
          "[transport][collectives]") {
  collective_world w{"loopback", 3, {}, stepped(1)};
  auto a = w.at(0).start(call_of(w, collective_kind::allreduce, 5, "a"));
  auto b = w.at(0).start(call_of(w, collective_kind::barrier, 0, "b"));
  auto pair = call_of(w, collective_kind::allreduce, 1, "pair");
  pair.label.group = {rank_id{0}, rank_id{1}};
  auto c = w.at(0).start(pair);
  auto other = w.at(1).start(pair);
  w.network.kill({error_code::rank_down, rank_id{2}, {}, "killed"});
  w.network.run();
  CHECK(failure_of(a).describe() == "rank 2: killed");
  CHECK(failure_of(b).describe() == "rank 2: killed");
  CHECK(!failure_of(c));
  CHECK(!failure_of(other));
  auto later = w.at(1).start(call_of(w, collective_kind::allgather, 1, "l"));
  CHECK(failure_of(later).describe() == "rank 2: killed");
}

TEST_CASE("whoever waits is told who is not there and who owes data",
          "[transport][collectives]") {
  collective_world w{"loopback", 3, {}, stepped(1)};
  auto in_module = call_of(w, collective_kind::allreduce, 5);
  in_module.place = "net.wte";
  auto x = w.at(1).start(in_module);
  auto why = x.why.now();
  CHECK(why.subject.what == wait_subject::kind::collective);
  CHECK(why.subject.name == x.why.subject.name);
  CHECK(why.subject.group.size() == 3);
  CHECK(why.what
        == "allreduce \"x\" of ranks 0, 1, 2 in net.wte (not joined by rank 0, "
           "rank 2)");
  CHECK(why.from == rank_id{0});
  auto y = w.at(0).start(call_of(w, collective_kind::allreduce, 5));
  w.network.run();
  why = x.why.now();
  CHECK(
    why.what
    == "allreduce \"x\" of ranks 0, 1, 2 in net.wte (not joined by rank 2)");
  CHECK(why.from == rank_id{2});
  // The first segments of a large one are on their way, the rest is not asked
  // for.
  auto pair = call_of(w, collective_kind::broadcast, 100'000, "large");
  pair.label.group = {rank_id{0}, rank_id{1}};
  auto z = w.at(1).start(pair);
  w.network.run();
  CHECK(z.why.now().from == rank_id{0});
  auto root = w.at(0).start(pair);
  CHECK(!ended(w, z));
  CHECK(!ended(w, root));
  CHECK_FALSE(x.done->done());
}

TEST_CASE("between machines too, somebody tells who is not there",
          "[transport][collectives]") {
  auto absent = GENERATE(range(uint64_t{0}, uint64_t{4}));
  collective_world w{"loopback", 4, {}, stepped(1)};
  w.place({0, 0, 1, 1});
  std::vector<started_collective> started;
  for (uint64_t i = 0; i < 4; ++i)
    if (i != absent)
      started.push_back(
        w.at(i).start(call_of(w, collective_kind::allreduce, 100'000)));
  auto name = "(not joined by rank " + std::to_string(absent) + ')';
  std::string texts;
  // Nobody misses a rank that came, and somebody the one that did not.
  auto is_told = [&] {
    texts.clear();
    bool told = false;
    bool wrong = false;
    for (auto& x : started) {
      auto why = x.why.now();
      auto& text = why.what;
      texts += text + '\n';
      auto names = text.find(name) != text.npos && why.from == rank_id{absent};
      told = told || names;
      wrong = wrong || (!names && text.find("not joined") != text.npos);
    }
    return told && !wrong;
  };
  auto deadline = inbox::clock::now() + patience;
  while (!is_told() && inbox::clock::now() < deadline)
    w.network.run();
  INFO(texts);
  CHECK(is_told());
  auto last = w.at(absent).start(
    call_of(w, collective_kind::allreduce, 100'000));
  CHECK(!ended(w, last));
  for (auto& x : started)
    CHECK(!ended(w, x));
}

TEST_CASE("a rank that is ahead leaves only little with one that is behind",
          "[transport][collectives][R43]") {
  collective_world w{"loopback", 2, {}, stepped(1)};
  auto early = w.at(0).start(call_of(w, collective_kind::broadcast, 4 << 20));
  w.network.run();
  CHECK_FALSE(early.done->done());
  CHECK(w.fabric_of(1).stats().bytes_received <= (64 << 10) + 1000);
  auto late = w.at(1).start(call_of(w, collective_kind::broadcast, 4 << 20));
  CHECK(!ended(w, early));
  CHECK(!ended(w, late));
}

TEST_CASE("a rank that is too far ahead is cut off, by name",
          "[transport][collectives][R43]") {
  collective_world w{"loopback", 2, {}, stepped(1)};
  auto call = call_of(w, collective_kind::broadcast, 16 << 10);
  auto bytes = make_tensor(64 << 10, 1);
  // What a correct rank would have kept until it is asked for.
  auto with_bytes = GENERATE(false, true);
  auto count = with_bytes ? 300 : 10'000;
  for (int i = 0; i < count; ++i) {
    call.label.number = static_cast<uint64_t>(i);
    collective_writer writer{call.label, call.what};
    w.fabric_of(0).send(rank_id{1}, with_bytes ? writer.segment({0, 0}, bytes)
                                               : writer.joined());
  }
  w.network.run();
  auto x = failure_of(
    w.at(1).start(call_of(w, collective_kind::broadcast, 16 << 10)));
  CHECK(x.rank == rank_id{0});
  CHECK_THAT(x.text, Catch::Matchers::ContainsSubstring(
                       "it is too far ahead in collectives"));
}

TEST_CASE("what no correct rank sends fails what is waited for, and no more",
          "[transport][collectives]") {
  collective_world w{"loopback", 3, {}, stepped(1)};
  auto waiting = call_of(w, collective_kind::allgather, 4);
  auto started = w.at(0).start(waiting);
  collective_writer good{waiting.label, waiting.what};
  auto bytes = make_tensor(16, 1);
  auto bad = GENERATE(range(0, 7));
  std::vector<message> messages{
    {message_kind::collective, {to_bytes("nonsense"), {}}},
    good.segment({9, 0}, bytes),                    // no such piece
    good.segment({2, 0}, bytes),                    // not its own
    good.segment({1, 8}, bytes),                    // no such place
    good.segment({1, 0}, make_tensor(12, 1)),       // too short
    good.segment({1, 0}, bytes),                    // twice, see below
    {message_kind::collective, good.joined().body}, // with a tensor
  };
  auto x = messages[static_cast<size_t>(bad)];
  if (bad == 6)
    x.body.tensors.push_back(bytes);
  if (bad == 5)
    w.fabric_of(1).send(rank_id{0}, x);
  w.fabric_of(1).send(rank_id{0}, x);
  w.network.run();
  REQUIRE(started.done->done());
  auto why = failure_of(started);
  CHECK(why.code == error_code::protocol);
  CHECK(why.rank == rank_id{1});
  // Others go on.
  auto pair = call_of(w, collective_kind::allreduce, 1);
  pair.label.group = {rank_id{0}, rank_id{2}};
  auto a = w.at(0).start(pair);
  auto b = w.at(2).start(pair);
  w.network.run();
  CHECK(!failure_of(a));
  CHECK(!failure_of(b));
}

TEST_CASE("damaged messages of collectives never do harm",
          "[transport][collectives]") {
  collective_world w{"loopback", 3, {}, stepped(1)};
  auto call = call_of(w, collective_kind::all_to_all, 4);
  call.what.rows = {1, 1, 1};
  call.rows_taken = {1, 1, 1};
  collective_writer writer{call.label, call.what};
  std::mt19937 rng{3};
  size_t refused = 0;
  for (const auto& original :
       {writer.joined(), writer.segment({1, 0}, make_tensor(16, 1)),
        writer.failed({error_code::internal, rank_id{1}, {}, "x"})}) {
    for (int round = 0; round < 1000; ++round) {
      auto x = original;
      auto& bytes = x.body.bytes;
      for (int i = 0; i < 3; ++i)
        bytes[rng() % bytes.size()] = static_cast<std::byte>(rng());
      if (round % 3 == 0)
        bytes.resize(rng() % bytes.size());
      try {
        read_collective(x, rank_id{1}, rank_id{0});
      } catch (const error& e) {
        CHECK(e.code() == error_code::protocol);
        ++refused;
      }
      collectives fresh{w.fabric_of(0)};
      auto started = fresh.start(call);
      fresh.deliver(rank_id{1}, std::move(x));
    }
  }
  CHECK(refused > 500);
  w.network.run();
}

TEST_CASE("a step that failed takes its collectives along, and no others",
          "[transport][collectives]") {
  collective_world w{"loopback", 2, {}, stepped(1)};
  auto in_step = [&](uint64_t step, const std::string& name) {
    auto x = call_of(w, collective_kind::allreduce, 3, name);
    x.label.step = step_id{step};
    x.label.microbatch = microbatch_id{0};
    return x;
  };
  // Rank 1 gets further than rank 0 before it hears of the failure.
  auto a = w.at(0).start(in_step(7, "a"));
  auto b = w.at(1).start(in_step(7, "b"));
  auto outside = w.at(0).start(call_of(w, collective_kind::barrier, 0));
  w.network.run();
  for (uint64_t rank : {0, 1})
    w.at(rank).step_failed(step_id{7},
                           {error_code::user_code, rank_id{1}, {}, "no"});
  CHECK(ended(w, a).describe() == "rank 1: no");
  CHECK(ended(w, b).describe() == "rank 1: no");
  CHECK(ended(w, w.at(0).start(in_step(7, "b"))).text == "no");
  for (uint64_t rank : {0, 1})
    w.at(rank).step_over(step_id{7});
  // What is left of that step meets nobody.
  auto c = w.at(1).start(in_step(8, "b"));
  auto d = w.at(0).start(in_step(8, "b"));
  CHECK(!ended(w, c));
  CHECK(!ended(w, d));
  CHECK_FALSE(outside.done->done());
  auto other = w.at(1).start(call_of(w, collective_kind::barrier, 0));
  CHECK(!ended(w, other));
  CHECK(!ended(w, outside));
}

TEST_CASE("what runs is cancelled at the end", "[transport][collectives]") {
  started_collective x;
  {
    collective_world w{"loopback", 2};
    x = w.at(0).start(call_of(w, collective_kind::barrier, 0));
  }
  CHECK(failure_of(x).code == error_code::cancelled);
}
