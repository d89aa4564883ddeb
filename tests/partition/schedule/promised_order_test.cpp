#include "tests/support/catch.hpp"

#include "partition/schedule/checker.hpp"
#include "partition/schedule/promised_order.hpp"
#include "tests/support/partition_models.hpp"

#include <algorithm>
#include <string>

using namespace smp;

namespace {

/// Equal stages, with the returns to device 0 that blocking calls need.
pipeline_program stages_with_returns(uint32_t devices, uint32_t chunks) {
  pipeline_program result;
  result.devices = devices;
  result.chunks = chunks;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk)
    for (uint32_t i = 0; i < devices; ++i) {
      if (i > 1)
        result.chain.push_back({0, 0, 0, 0, false, chunk});
      result.chain.push_back({i, 1.0 / chunks, 2.0 / chunks, 1, false, chunk});
    }
  result.chain.push_back({0, 0, 0, 0, false, chunks - 1});
  return result;
}

double bubble(const std::string& name, const pipeline_program& program,
              uint64_t microbatches, uint64_t active) {
  check_options options;
  options.microbatches = microbatches;
  options.active = active;
  for (uint32_t i = 0; i < program.devices; ++i)
    options.orders.push_back(
      make_promised_order(name, promised_place_of(program, i, microbatches)));
  auto policy = make_schedule(name, microbatches, active);
  return check_schedule(program, *policy, options).bubble;
}

/// What a device serves if everything is ready at once: "F0 B0".
std::string sequence_of(const service_order& order, uint64_t microbatches) {
  std::vector<ready_key> xs;
  for (uint64_t mb = 0; mb < microbatches; ++mb)
    for (auto what : {phase::forward, phase::backward})
      xs.push_back({what, microbatch_id{mb}, 0, 0});
  std::sort(xs.begin(), xs.end(), order);
  std::string result;
  for (auto& x : xs)
    result += (result.empty() ? "" : " ")
              + std::string{x.what == phase::forward ? "F" : "B"}
              + std::to_string(x.microbatch.value);
  return result;
}

} // namespace

TEST_CASE("a head on the first rank keeps it busy all the time",
          "[partition][promised]") {
  // A GPT on two ranks: the last norm, the head and the loss stay on rank 0,
  // which so has the most to do. It starts first and ends last.
  pipeline_program program;
  program.devices = 2;
  program.chain = {
    {0, 6.8, 13.6, 1, false}, {1, 6, 12, 1, false}, {0, 0.6, 1.2, 1, false}};
  program.hop_seconds = 0.1;
  check_options options;
  options.microbatches = 8;
  for (uint32_t i = 0; i < 2; ++i)
    options.orders.push_back(
      make_promised_order("1f1b", promised_place_of(program, i, 8)));
  auto policy = make_schedule("1f1b", 8,
                              default_active_microbatches("1f1b", 8, 2));
  auto report = check_schedule(program, *policy, options);
  CHECK(report.makespan == Catch::Approx(report.busy[0]).margin(1));
}

TEST_CASE("only the last return is left where calls do not wait",
          "[partition][promised]") {
  auto program = promised_program(stages_with_returns(3, 1));
  std::string devices;
  for (auto& x : program.chain)
    devices += std::to_string(x.device);
  CHECK(devices == "0120");
  CHECK(promised_place_of(program, 0, 8).chunk_of
        == std::vector<uint32_t>{0, turn_chunk});
  CHECK(promised_place_of(program, 2, 8).chunk_of == std::vector<uint32_t>{0});
  // A model that was not measured.
  pipeline_program unknown;
  unknown.chain = {
    {0, 0, 0, 0, false}, {1, 0, 0, 0, false}, {0, 0, 0, 0, false}};
  CHECK(promised_program(unknown).chain.size() == 3);
}

TEST_CASE("the last rank is one forward segment ahead of its backward ones",
          "[partition][promised]") {
  auto program = promised_program(stages_with_returns(3, 1));
  auto order = [&](uint32_t device) {
    return make_promised_order("1f1b", promised_place_of(program, device, 4));
  };
  CHECK(sequence_of(order(2), 4) == "F0 F1 B0 F2 B1 F3 B2 B3");
  CHECK(sequence_of(order(1), 4) == "F0 F1 F2 B0 F3 B1 B2 B3");
}

TEST_CASE("a microbatch that turns around goes first",
          "[partition][promised]") {
  auto returns = stages_with_returns(3, 1);
  // As the head of a language model that stays with its caller.
  returns.chain.back().forward = GENERATE(0.0, 0.5);
  auto program = promised_program(returns);
  for (auto name : {"simple", "interleaved", "1f1b", "list"}) {
    auto order = make_promised_order(name, promised_place_of(program, 0, 4));
    ready_key start{phase::forward, microbatch_id{0}, 1, 0};
    ready_key loss{phase::forward, microbatch_id{3}, 2, 1};
    ready_key turn{phase::backward, microbatch_id{3}, 3, 0};
    ready_key back{phase::backward, microbatch_id{0}, 4, 1};
    for (auto& x : {start, back})
      for (auto& y : {loss, turn}) {
        CHECK(order(y, x));
        CHECK_FALSE(order(x, y));
      }
  }
}

TEST_CASE("schedules have the bubble of the textbook if calls do not wait",
          "[partition][promised]") {
  for (uint32_t p : {2, 4})
    for (uint32_t v : {1, 2})
      for (uint64_t m : {8, 16})
        for (double hop : {0.0, 0.02})
          for (std::string name : {"simple", "interleaved", "1f1b"}) {
            if (v > 1)
              name = "interleaved_1f1b";
            INFO(name << ", " << p << " stages, " << m << " microbatches, hop "
                      << hop);
            auto program = promised_program(stages_with_returns(p, v));
            program.hop_seconds = hop;
            auto slots = static_cast<double>(v * m + p - 1);
            // One hop more than stages each way are on the way of the first
            // microbatch and of the last one.
            auto margin = 0.005 + 2 * hop * (v * p + 2) / (3 * slots / v);
            CHECK(
              bubble(name, program, m, default_active_microbatches(name, m, p))
              == Catch::Approx((p - 1) / slots).margin(margin));
          }
}

TEST_CASE("a caller that takes each result on its way stands in the chain",
          "[partition][promised]") {
  // The code on device 0 computes with the result of device 1 before it calls
  // device 2.
  auto waiting = stages_with_returns(3, 1);
  REQUIRE(waiting.chain.size() == 5);
  waiting.chain[2].waits = true;
  auto program = promised_program(waiting);
  REQUIRE(program.chain.size() == 5);
  CHECK(promised_program(stages_with_returns(3, 1)).chain.size() == 4);
  CHECK(promised_place_of(program, 0, 8).chunk_of
        == std::vector<uint32_t>{0, turn_chunk, turn_chunk});
  // Device 0 may be busy when the result comes, with work that cannot be
  // interrupted: so the bubble is larger, though the work is the same.
  auto straight = promised_program(stages_with_returns(3, 1));
  for (auto name : {"1f1b", "interleaved"})
    CHECK(bubble(name, program, 8, 6) > bubble(name, straight, 8, 6) + 0.01);
  // Alone on its way a microbatch waits for nobody.
  CHECK(bubble("1f1b", program, 1, 6) == Catch::Approx(2.0 / 3));
}

TEST_CASE("a module with state costs the way back to its caller",
          "[partition][promised]") {
  // root(0) calls a(1) and then b(2); each takes 1 s forward and 2 s backward,
  // a hop half a second.
  auto model = test::make_model(
    {{"", {1, 2}, 0, 1}, {"a", {}, 0, 1}, {"b", {}, 0, 1}});
  model[1].pinned_device = 1;
  model[2].pinned_device = 2;
  partition_options options;
  options.manual.devices = 3;
  options.manual.automatic = false;
  program_times times;
  times.step_seconds = 9;
  times.hop_seconds = 0.5;
  auto predicted = [&] {
    auto plan = make_partition(model, options);
    auto program = promised_program(make_program(model, plan, times));
    return bubble("1f1b", program, 1, 1);
  };
  // 9 s of work on 3 devices, and 3 hops each way: 0 to 1 to 2 to 0.
  CHECK(predicted() == Catch::Approx(1 - 9 / (3 * (9 + 6 * 0.5))));
  model[1].keeps_state = true;
  // 4 hops each way: 0 to 1 to 0 to 2 to 0.
  CHECK(predicted() == Catch::Approx(1 - 9 / (3 * (9 + 8 * 0.5))));
}
