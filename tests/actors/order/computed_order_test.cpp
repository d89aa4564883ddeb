#include "tests/support/catch.hpp"

#include "actors/order/computed_order.hpp"
#include "actors/order/step_flow.hpp"
#include "actors/protocol/result_name.hpp"
#include "partition/schedule/promised_order.hpp"
#include "tests/support/actors/actor_world.hpp"
#include "transport/bytes.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
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
    order_rules rules{std::vector<service_order>(3, backward_first)};
    rules.forward_alone = forward_alone;
    for (auto& x : ranks) {
      auto note = x->records->note();
      CHECK(note.recorded);
      auto record = x->records->find(note.key, note.step);
      flows.push_back(
        record_of(from_payload<step_flow>(
                    to_payload(flow_of(*record, false, false)), "flow"),
                  {flows.size()}, 5));
    }
    auto policy = make_schedule(schedule, 5, 5);
    auto order = compute_order(flows, {{0}, {1}, {2}}, *policy, rules);
    for (size_t i = 0; i < 3; ++i) {
      auto& records = *ranks[i]->records;
      auto note = records.note();
      auto x = *records.find(note.key, note.step);
      x.order = order.served[i];
      if (i == 0)
        x.admission = order.admission;
      records.choose(note.key, note.step, std::move(x), 0);
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

TEST_CASE("orders are alike whatever the numbers of requests",
          "[actors][static][deterministic][R33]") {
  // A rank that had to wait numbers its next request one higher.
  auto alike = [](std::vector<uint64_t> numbers, std::vector<rank_id> pipeline,
                  std::vector<uint32_t> order) {
    std::vector<step_record> ranks(2);
    for (uint64_t i = 0; i < numbers.size(); ++i) {
      auto& x = ranks[1].executions.emplace_back();
      x.id = {pipeline[0], numbers[i]};
      x.microbatch = {i};
    }
    pipeline_order x;
    x.served.resize(2);
    for (auto i : order)
      x.served[1].push_back({i, 0});
    x.admission = {{{0}, phase::forward}, {{1}, phase::forward}};
    return likeness_of(x, ranks, pipeline);
  };
  auto expected = alike({5, 20, 35}, {{0}, {2}}, {0, 1, 2});
  CHECK(alike({6, 21, 36}, {{1}, {3}}, {0, 1, 2}) == expected);
  CHECK(alike({6, 21, 36}, {{1}, {3}}, {0, 2, 1}) != expected);
  CHECK(alike({6, 21}, {{1}, {3}}, {0, 1}) != expected);
}

TEST_CASE("bytes that are not a flow are refused",
          "[actors][static][deterministic]") {
  step_record x;
  x.microbatches = 1;
  auto& y = x.executions.emplace_back();
  y.id.number = root_request_number({}, {0});
  y.calls.resize(2);
  y.calls[1].number = 1;
  y.calls[1].kind = call_kind::grant;
  y.calls[1].what = phase::backward;
  auto sent = to_payload(flow_of(x, true, false));
  auto read = [](const payload& p) {
    return from_payload<step_flow>(p, "flow");
  };
  CHECK(read(sent).ordered);
  auto back = record_of(read(sent), {2}, 1);
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
                                {{backward_first, backward_first}}),
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
                         {{backward_first, backward_first}});
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
      from_payload<step_flow>(to_payload(flow_of(y, false, true)), "flow"), {},
      2);
  auto order = from_payload<pipeline_order>(to_payload(x.play("simple")),
                                            "order");
  // Promises are not ends of segments, waits are: the second microbatch starts
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

TEST_CASE("an order knows the results of requests that were waited for",
          "[actors][static][deterministic][R38]") {
  // The body waits for what rank 1 makes, passes it on to rank 2 without its
  // content, and fetches it.
  constexpr uint32_t first = 1, second = 2;
  promise_flow x{0};
  x.records.resize(3);
  for (auto& y : x.records)
    y.microbatches = 1;
  auto& body = x.add(0, {rank_id{0}, root_request_number({}, {0})}, 0);
  for (auto number : {first, second}) {
    auto& y = body.calls.emplace_back();
    y.owner = rank_id{number};
    y.number = number;
  }
  auto& fetch = body.calls.emplace_back();
  fetch.kind = call_kind::wait;
  fetch.number = 3;
  fetch.until = {first};
  request_id made{rank_id{0}, first};
  x.add(1, made, 0);
  x.add(2, {rank_id{0}, second}, 0).needs = {
    result_name(rank_id{1}, made, {}, 0)};
  auto policy = make_schedule("simple", 1, 3);
  auto order = compute_order(
    x.records, {{0}, {1}, {2}}, *policy,
    {{backward_first, backward_first, backward_first}});
  CHECK(order.served.at(0)
        == std::vector<served_segment>{{0, 0}, {0, 1}, {0, 2}, {0, 3}});
  CHECK(order.served.at(2) == std::vector<served_segment>{{0, 0}});
}

TEST_CASE("an order in which something needed is never made is refused",
          "[actors][static][deterministic][R38]") {
  promise_flow x{1};
  auto& needs = x.records[1].executions[0].needs;
  needs = {result_name(rank_id{1}, {rank_id{0}, promise_number({}, 9)}, {}, 0)};
  CHECK_THROWS_AS(x.play("simple"), error);
}

// -- what a fixed order costs -------------------------------------------------

namespace {

/// Equal stages, stage s on rank s % ranks. Those of rank 0 run in the step
/// body, which calls the others and waits for the last one of each chunk. As
/// code does that asks for sizes first, it waits twice.
class balanced_flow {
public:
  balanced_flow(uint32_t ranks, uint32_t chunks, uint32_t microbatches,
                bool promised)
    : ranks_(ranks),
      chunks_(chunks),
      microbatches_(microbatches),
      promised_(promised),
      records_(ranks) {
    for (auto& x : records_)
      x.microbatches = microbatches;
    for (uint32_t m = 0; m < microbatches; ++m)
      add_microbatch(m);
  }

  /// With the returns to rank 0 that calls need which wait.
  pipeline_program program() const {
    pipeline_program result;
    result.devices = ranks_;
    result.chunks = chunks_;
    for (uint32_t s = 0; s < ranks_ * chunks_; ++s) {
      if (s % ranks_ > 1)
        result.chain.push_back({0, 0, 0, 0, false, s / ranks_});
      result.chain.push_back(
        {s % ranks_, 1.0 / chunks_, 2.0 / chunks_, 0, false, s / ranks_});
    }
    result.chain.push_back({0, 0, 0, 0, false, chunks_ - 1});
    return promised_ ? promised_program(result) : result;
  }

  order_rules rules(const std::string& name) const {
    order_rules result;
    result.program = program();
    for (uint32_t i = 0; i < ranks_; ++i)
      result.service.push_back(
        promised_ ? make_promised_order(
          name, promised_place_of(result.program, i, microbatches_))
                  : make_service_order(
                    name, place_of(result.program, i, microbatches_)));
    return result;
  }

  uint64_t active(const std::string& name) const {
    return default_active_microbatches(name, microbatches_, ranks_);
  }

  pipeline_order order(const std::string& name) const {
    std::vector<rank_id> pipeline;
    for (uint32_t i = 0; i < ranks_; ++i)
      pipeline.push_back({i});
    auto policy = make_schedule(name, microbatches_, active(name));
    return compute_order(records_, pipeline, *policy, rules(name));
  }

  /// @returns when the last rank is done if each does what comes next in
  /// `order` as soon as what it needs is there, or 0 if some wait for ever
  double makespan(const pipeline_order& order) const {
    std::map<place, double> ends;
    std::vector<size_t> next(ranks_);
    std::vector<double> free(ranks_);
    for (auto moved = true; std::exchange(moved, false);)
      for (uint32_t i = 0; i < ranks_; ++i)
        for (; next[i] < order.served.at(i).size(); ++next[i]) {
          auto& x = order.served[i][next[i]];
          place here{i, x.execution, x.segment};
          auto& what = works_.at(here);
          auto done = [&](auto& y) { return ends.contains(y); };
          if (!std::ranges::all_of(what.needs, done))
            break;
          for (auto& y : what.needs)
            free[i] = std::max(free[i], ends[y]);
          ends[here] = free[i] += what.seconds;
          moved = true;
        }
    return ends.size() == works_.size() ? std::ranges::max(free) : 0;
  }

private:
  using place = std::tuple<uint32_t, uint32_t, uint32_t>;

  struct piece {
    double seconds = 0;
    std::vector<place> needs;
  };

  void add_microbatch(uint32_t m) {
    body_ = add(0, {rank_id{0}, root_request_number({}, {m})}, m);
    segment_ = 0;
    last_ = {0, body_, 0};
    works_[last_];
    std::vector<uint64_t> all;
    for (uint32_t c = 0; c < chunks_; ++c)
      run_chunk(m, phase::forward, all);
    if (promised_)
      stop(call_kind::wait, phase::forward, all);
    stop(call_kind::grant, phase::backward);
    last_ = {0, body_, segment_};
    for (uint32_t c = chunks_; c-- > 0;)
      run_chunk(m, phase::backward, all);
  }

  /// The body runs its stage before the others, or after them backward.
  void run_chunk(uint32_t m, phase what, std::vector<uint64_t>& all) {
    auto forward = what == phase::forward;
    auto seconds = (forward ? 1.0 : 2.0) / chunks_;
    if (forward)
      works_[{0, body_, segment_}].seconds = seconds;
    for (uint32_t i = 1; i < ranks_; ++i)
      call(m, forward ? i : ranks_ - i, what, seconds, all);
    if (promised_ && ranks_ > 1) {
      stop(call_kind::wait, what, {all.back()});
      stop(call_kind::wait, what, {all.back()});
    }
    if (!forward)
      works_[{0, body_, segment_}].seconds = seconds;
    last_ = {0, body_, segment_};
  }

  void call(uint32_t m, uint32_t owner, phase what, double seconds,
            std::vector<uint64_t>& all) {
    auto number = ++number_ | (promised_ ? promise_bit : 0);
    auto& x = body().calls.emplace_back();
    x.kind = promised_ ? call_kind::promise : call_kind::remote;
    x.owner = rank_id{owner};
    x.number = number;
    x.what = what;
    auto execution = add(owner, {rank_id{0}, request_number({}, number)}, m);
    auto& to = records_[owner].executions[execution];
    to.what = what;
    to.promised = promised_;
    if (auto [rank, from, segment] = last_; rank != 0 && promised_)
      to.needs = {
        result_name(rank_id{rank}, records_[rank].executions[from].id, {}, 0)};
    // The body may be further than where it computed what is needed.
    works_[{owner, execution, 0}] = {seconds,
                                     {last_, place{0, body_, segment_}}};
    last_ = {owner, execution, 0};
    all.push_back(request_number({}, number));
    if (!promised_)
      works_[{0, body_, ++segment_}].needs = {last_};
  }

  void stop(call_kind kind, phase what, std::vector<uint64_t> until = {}) {
    auto& x = body().calls.emplace_back();
    x.kind = kind;
    x.number = ++number_;
    x.what = what;
    x.until = std::move(until);
    works_[{0, body_, ++segment_}].needs = {last_};
  }

  uint32_t add(uint32_t rank, request_id id, uint64_t m) {
    auto& to = records_[rank];
    auto result = static_cast<uint32_t>(to.executions.size());
    to.by_id.emplace(id, result);
    auto& x = to.executions.emplace_back();
    x.id = id;
    x.microbatch = microbatch_id{m};
    return result;
  }

  recorded_execution& body() {
    return records_[0].executions[body_];
  }

  uint32_t ranks_, chunks_, microbatches_;
  bool promised_;
  std::vector<step_record> records_;
  uint32_t number_ = 0; // of the last call
  std::map<place, piece> works_;
  // Of the microbatch that is added:
  uint32_t body_ = 0;
  uint32_t segment_ = 0;
  place last_; // what made the value that moves through
};

} // namespace

TEST_CASE("a fixed order has the bubble of the textbook on equal stages",
          "[actors][static][deterministic]") {
  for (uint32_t p : {2, 4})
    for (uint32_t v : {1, 2})
      for (uint32_t m : {4, 8, 16, 32})
        for (std::string name : {"simple", "interleaved", "1f1b"}) {
          if (v > 1)
            name = "interleaved_1f1b";
          INFO(name << ", " << p << " ranks, " << m << " microbatches");
          // Narayanan et al. 2021, section 2.2.
          auto bubble = double(p - 1) / (v * m + p - 1);
          auto shortest = 3.0 * m / (1 - bubble);
          balanced_flow promised{p, v, m, true};
          CHECK(promised.makespan(promised.order(name))
                == Catch::Approx(shortest).margin(1e-9));
          // Where calls wait, rank 0 may be busy with a stage of its own when
          // a result comes that another rank waits for.
          balanced_flow waiting{p, v, m, false};
          auto took = waiting.makespan(waiting.order(name));
          CHECK(took > shortest - 1e-9);
          CHECK(took < 1.07 * shortest);
        }
}
