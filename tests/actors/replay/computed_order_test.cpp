// ctest: timeout=120
#include "tests/support/catch.hpp"

#include "actors/protocol/result_name.hpp"
#include "actors/replay/computed_order.hpp"
#include "tests/support/actor_world.hpp"
#include "transport/bytes.hpp"

#include <string>
#include <vector>

using namespace smp;

namespace {

using texts_t = std::vector<std::string>;

struct order_world : actor_world {
  order_world() {
    script[root_module] = {do_call(1, 1),
                           do_call(2, 2),
                           do_grant(),
                           do_call(2, 2, phase::backward),
                           do_call(1, 1, phase::backward),
                           do_return("r")};
    script[{1}] = {do_call(0, 3), do_call(2, 2), do_return("a")};
    script[{2}] = {do_return("b")};
    script[{3}] = {do_return("c")};
  }

  void init(uint64_t seed, const std::string& schedule) {
    actor_world::init({.world_size = 3,
                       .seed = seed,
                       .reorder = true,
                       .schedule = schedule,
                       .active = 5,
                       .records = {.fixed_order = true}});
  }

  /// Does what an engine does after the first step of a kind.
  void compute(const std::string& schedule, bool forward_alone = false) {
    std::vector<step_record> flows;
    std::vector<service_order> orders(3, backward_first);
    for (auto& x : ranks) {
      auto note = x->records->note();
      CHECK(note.recorded);
      auto record = x->records->find(note.key, note.step);
      flows.push_back(record_of(from_payload<step_flow>(
        to_payload(flow_of(*record, false, false)), "flow")));
    }
    auto policy = make_schedule(schedule, 5, 5);
    auto order = compute_order(flows, {{0}, {1}, {2}}, *policy, orders,
                               forward_alone);
    for (size_t i = 0; i < 3; ++i) {
      auto& records = *ranks[i]->records;
      auto note = records.note();
      auto x = *records.find(note.key, note.step);
      x.order = order.served[i];
      if (i == 0)
        x.admission = order.admission;
      records.choose(note.key, note.step, std::move(x));
    }
  }

  /// @returns what the ranks served, by rank
  std::vector<texts_t> served() {
    std::vector<texts_t> result(3);
    for (auto& x : trace)
      if (!x.ends_with("end"))
        result[static_cast<size_t>(x[0] - '0')].push_back(x);
    return result;
  }
};

} // namespace

TEST_CASE("a computed order is the same whatever the timing",
          "[actors][static][deterministic]") {
  auto schedule = GENERATE(as<std::string>{}, "simple", "interleaved", "1f1b");
  std::vector<std::vector<texts_t>> orders;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    INFO(schedule << ", seed " << seed);
    order_world w;
    w.init(seed, schedule);
    CHECK(w.texts(w.step(1, 5)) == texts_t(5, "rab"));
    w.compute(schedule);
    w.trace.clear();
    CHECK(w.texts(w.step(2, 5)) == texts_t(5, "rab"));
    CHECK(w.ranks[1]->records->note().replayed);
    orders.push_back(w.served());
    // It is a pipeline: the second microbatch starts before the first turns.
    CHECK(w.at("0: m0 mb1 start") < w.at("2: m2 mb0 end"));
  }
  for (auto& x : orders)
    CHECK(x == orders.front());
}

TEST_CASE_METHOD(order_world, "the recorded step of a computed order is serial",
                 "[actors][static][deterministic]") {
  init(3, "interleaved");
  step(1, 5);
  for (uint64_t i = 0; i + 1 < 5; ++i)
    CHECK(at("0: m0 mb" + std::to_string(i) + " end")
          < at("0: m0 mb" + std::to_string(i + 1) + " start"));
}

TEST_CASE_METHOD(order_world, "forward phases may be kept apart",
                 "[actors][static][deterministic][R19]") {
  init(3, "1f1b");
  step(1, 5);
  compute("1f1b", true);
  trace.clear();
  CHECK(texts(step(2, 5)) == texts_t(5, "rab"));
  // Module 2 is the last one of a forward phase.
  for (uint64_t i = 0; i + 1 < 5; ++i)
    CHECK(at("2: m2 mb" + std::to_string(i) + " end")
          < at("0: m0 mb" + std::to_string(i + 1) + " start"));
}

TEST_CASE("bytes that are no flow are refused",
          "[actors][static][deterministic]") {
  step_record x;
  x.microbatches = 1;
  auto& y = x.executions.emplace_back();
  y.calls.resize(2);
  y.calls[1].kind = call_kind::grant;
  y.calls[1].what = phase::backward;
  auto sent = to_payload(flow_of(x, true, false));
  auto read = [](const payload& p) {
    return from_payload<step_flow>(p, "flow");
  };
  CHECK(read(sent).ordered);
  auto back = record_of(read(sent));
  REQUIRE(back.executions.size() == 1);
  REQUIRE(back.executions[0].calls.size() == 2);
  CHECK(back.executions[0].calls[1].kind == call_kind::grant);
  CHECK(back.executions[0].calls[1].what == phase::backward);
  for (size_t i = 0; i < sent.bytes.size(); ++i) {
    auto cut = sent;
    cut.bytes.resize(i);
    CHECK_THROWS_AS(read(cut), error);
  }
  sent.bytes.resize(sent.bytes.size() + 8);
  CHECK_THROWS_AS(read(sent), error);
  auto flow = flow_of(x, true, false);
  flow.executions.push_back(flow.executions[0]);
  CHECK_THROWS_AS(record_of(flow), error);
  flow.executions.pop_back();
  flow.executions[0].microbatch = microbatch_id{1};
  CHECK_THROWS_AS(record_of(flow), error);
}

TEST_CASE("records that do not belong together are refused",
          "[actors][static][deterministic]") {
  step_record x;
  x.microbatches = 1;
  auto& y = x.executions.emplace_back();
  y.id = {rank_id{0}, uint64_t{1} << 63};
  y.calls.push_back({call_kind::remote, 1, rank_id{1}, {}, {}, {}, {}, {}});
  x.by_id.emplace(y.id, 0);
  step_record other;
  other.microbatches = 1;
  auto policy = make_schedule("interleaved", 1, 1);
  CHECK_THROWS_AS(compute_order({x, other}, {{0}, {1}}, *policy,
                                {backward_first, backward_first}, false),
                  error);
}

// -- promises -----------------------------------------------------------------

namespace {

/// Each microbatch on rank 0 sends rank 1 two promises, the second of which
/// needs the result of the first, waits for both, and turns around.
struct promise_flow {
  explicit promise_flow(uint32_t microbatches) : records(2) {
    for (auto& x : records)
      x.microbatches = microbatches;
    for (uint32_t m = 0; m < microbatches; ++m) {
      auto& body = add(0, {rank_id{0}, root_request_number({}, {m})}, m);
      auto first = promise(body, 2 * m + 1), second = promise(body, 2 * m + 2);
      auto& wait = body.calls.emplace_back();
      wait.kind = call_kind::wait;
      wait.number = 2 * m + 1;
      wait.until = {first.number, second.number};
      auto& grant = body.calls.emplace_back();
      grant.kind = call_kind::grant;
      grant.number = 2 * m + 2;
      grant.what = phase::backward;
      // The second one is there first.
      auto& x = add(1, second, m);
      x.promised = true;
      x.after = first.number;
      x.needs = {result_name(rank_id{1}, first, {}, 0)};
      add(1, first, m).promised = true;
    }
  }

  recorded_execution& add(size_t rank, request_id id, uint64_t m) {
    auto& to = records[rank];
    to.by_id.emplace(id, static_cast<uint32_t>(to.executions.size()));
    auto& result = to.executions.emplace_back();
    result.id = id;
    result.microbatch = microbatch_id{m};
    return result;
  }

  static request_id promise(recorded_execution& from, uint32_t number) {
    auto& x = from.calls.emplace_back();
    x.kind = call_kind::promise;
    x.owner = rank_id{1};
    x.number = promise_bit | number;
    return {rank_id{0}, promise_number({}, number)};
  }

  pipeline_order play(const std::string& schedule) {
    auto policy = make_schedule(schedule, records[0].microbatches, 2);
    return compute_order(records, {{0}, {1}}, *policy,
                         {backward_first, backward_first}, false);
  }

  std::vector<step_record> records;
};

} // namespace

TEST_CASE("an order with promises starts what has what it needs",
          "[actors][static][deterministic][R38]") {
  promise_flow x{2};
  // They travel as well.
  for (auto& y : x.records)
    y = record_of(
      from_payload<step_flow>(to_payload(flow_of(y, false, true)), "flow"));
  auto order = from_payload<pipeline_order>(to_payload(x.play("simple")),
                                            "order");
  // Promises are no ends of segments, waits are: the second microbatch starts
  // where the first one waits. Backward phases come last.
  CHECK(order.served.at(0)
        == std::vector<served_segment>{
          {0, 0}, {1, 0}, {0, 1}, {1, 1}, {0, 2}, {1, 2}});
  CHECK(order.served.at(1)
        == std::vector<served_segment>{{1, 0}, {0, 0}, {3, 0}, {2, 0}});
  order = x.play("interleaved");
  CHECK(order.served.at(0)
        == std::vector<served_segment>{
          {0, 0}, {1, 0}, {0, 1}, {0, 2}, {1, 1}, {1, 2}});
}

TEST_CASE("an order in which something needed is never made is refused",
          "[actors][static][deterministic][R38]") {
  promise_flow x{1};
  auto& needs = x.records[1].executions[0].needs;
  needs = {result_name(rank_id{1}, {rank_id{0}, promise_number({}, 9)}, {}, 0)};
  CHECK_THROWS_AS(x.play("simple"), error);
}
