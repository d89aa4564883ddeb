#include "tests/support/catch.hpp"

#include "partition/partitioner.hpp"
#include "partition/trace.hpp"
#include "tests/support/partition_models.hpp"

#include <algorithm>

using namespace smp;
using namespace smp::test;

namespace {

/// A root with three blocks, of which the second comes first.
model_info three_blocks() {
  auto model = make_model({{"", {1, 2, 3}},
                           {"b.0", {}, 0, 0, {"w0"}},
                           {"b.1", {}, 0, 0, {"w1"}},
                           {"b.2", {}, 0, 0, {"w2"}}});
  for (auto& x : model) {
    x.compute.reset();
    for (auto& p : x.parameters)
      p.elements = 100;
  }
  return model;
}

module_trace called(uint64_t first, double seconds, uint64_t activations = 0,
                    uint64_t transfer = 0, uint64_t calls = 1) {
  module_trace result;
  result.calls = calls;
  result.first = first;
  result.seconds = seconds;
  result.activation_bytes = activations;
  result.transfer_bytes = transfer;
  return result;
}

std::vector<uint64_t> children(const module_info& x) {
  std::vector<uint64_t> result;
  for (auto child : x.children)
    result.push_back(child.value);
  return result;
}

bool has(const std::vector<std::string>& xs, const std::string& part) {
  return std::any_of(xs.begin(), xs.end(), [&](auto& x) {
    return x.find(part) != std::string::npos;
  });
}

} // namespace

TEST_CASE("children stand in the order in which they ran",
          "[partition][trace]") {
  auto model = three_blocks();
  trace_result x;
  x.modules = {called(0, 1), called(2, 1), called(1, 1), called(3, 1)};
  apply_trace(model, x, 4);
  CHECK(children(model[0]) == std::vector<uint64_t>{2, 1, 3});
}

TEST_CASE(
  "a list stands where its first child ran, what never ran behind its "
  "neighbour",
  "[partition][trace]") {
  auto model = make_model({{"", {1, 2, 4, 5}},
                           {"head", {}},
                           {"list", {3}},
                           {"list.0", {}},
                           {"unused", {}},
                           {"embed", {}}});
  model[2].container = true;
  trace_result x;
  x.modules = {called(0, 1), called(3, 1), {}, called(2, 1), {}, called(1, 1)};
  apply_trace(model, x, 4);
  CHECK(children(model[0]) == std::vector<uint64_t>{5, 2, 4, 1});
}

TEST_CASE("memory is counted in elements, bytes and calls per call",
          "[partition][trace]") {
  auto model = three_blocks();
  trace_result x;
  x.modules = {called(0, 1), called(1, 1, 4000, 600, 3), called(2, 1),
               called(3, 1)};
  apply_trace(model, x, 2);
  CHECK(model[1].activations == 2000);
  CHECK(own_memory(model[1]) == 2100);
  CHECK(model[1].call_bytes == 200);
  CHECK(model[1].calls == 3);
  x.memory = false;
  auto without = three_blocks();
  apply_trace(without, x, 2);
  CHECK(without[1].activations == 0);
}

TEST_CASE("what is called often crosses often", "[partition][trace]") {
  auto model = three_blocks();
  trace_result x;
  x.modules = {called(0, 1), called(1, 1), called(2, 1, 0, 1000, 5),
               called(3, 1)};
  apply_trace(model, x, 4);
  model[2].pinned_device = 1;
  partition_options options;
  options.manual.devices = 2;
  options.manual.automatic = false;
  auto plan = make_partition(model, options);
  CHECK(plan.score.requests == 5);
  CHECK(plan.score.bytes == 1000);
}

TEST_CASE("modules that look alike take equally long", "[partition][trace]") {
  auto model = three_blocks();
  trace_result x;
  x.modules = {called(0, 0.5), called(1, 1.0), called(2, 1.3), called(3, 9.0)};
  apply_trace(model, x, 4);
  for (size_t i = 1; i <= 3; ++i)
    CHECK(model[i].compute == 1.3); // the median
  CHECK(model[0].compute == 0.5);
  CHECK(step_seconds(model, x) == Catch::Approx(3 * (0.5 + 3 * 1.3)));
  // Another size, and the times are those of another kind of module.
  auto other = three_blocks();
  other[3].parameters[0].elements = 900;
  apply_trace(other, x, 4);
  CHECK(other[3].compute == 9.0);
}

TEST_CASE("a module that was not called costs as much time as its parameters",
          "[partition][trace]") {
  auto model = three_blocks();
  model[3].parameters[0].elements = 300;
  trace_result x;
  x.modules = {called(0, 0), called(1, 1.0), called(2, 1.0), {}};
  apply_trace(model, x, 4);
  CHECK(*model[3].compute == Catch::Approx(3.0));
  auto notes = explain_trace(model, x);
  CHECK(has(notes, "did not call module b.2"));
  // Without times, or with no call at all, each module counts the same.
  for (auto with_times : {true, false}) {
    auto blind = three_blocks();
    trace_result nothing;
    nothing.times = with_times;
    nothing.modules.resize(4);
    if (!with_times)
      nothing.modules = x.modules;
    apply_trace(blind, nothing, 4);
    CHECK_FALSE(blind[1].compute.has_value());
    CHECK(step_seconds(blind, nothing) == 0);
  }
}

TEST_CASE("below a millisecond each call takes equally long",
          "[partition][trace]") {
  trace_result x;
  x.modules = {called(0, 1e-5), called(1, 1e-4, 0, 0, 2), called(2, 3e-4), {}};
  auto model = three_blocks();
  apply_trace(model, x, 4);
  const std::vector<double> shares{0.2, 0.4, 0.2, 0.2};
  for (size_t i = 0; i < 4; ++i)
    CHECK(*model[i].compute == Catch::Approx(1e-3 * shares[i]));
  // Whatever was measured.
  auto other = three_blocks();
  x.modules[2].seconds = 8e-4;
  apply_trace(other, x, 4);
  for (size_t i = 0; i < 4; ++i)
    CHECK(other[i].compute == model[i].compute);
  CHECK(step_seconds(model, x) == Catch::Approx(3e-3));
  CHECK(describe_trace(x, step_seconds(model, x))
        == "time and memory measured on the CPU; less than 1 ms forward per "
           "microbatch is noise, so each call counts the same");
  // Nor what the code around the model took the one time that it ran.
  x.modules[0].seconds = 0.05;
  x.repeated_seconds = 9e-4;
  apply_trace(other, x, 4);
  for (size_t i = 0; i < 4; ++i)
    CHECK(other[i].compute == model[i].compute);
  x.repeated_seconds = 0;
  x.modules[0].seconds = 1e-5;
  // Two blocks of half a millisecond are not noise any more.
  x.modules[1].seconds = 5e-4;
  apply_trace(other, x, 4);
  CHECK(other[1].compute != model[1].compute);
}

TEST_CASE("why a trace ended early is said, and where", "[partition][trace]") {
  auto model = three_blocks();
  trace_result x;
  x.modules = {called(0, 1), called(1, 1), {}, {}};
  x.failure = "no such operator";
  x.failed = module_id{2};
  auto notes = explain_trace(model, x);
  REQUIRE(notes.size() == 1);
  CHECK(notes[0].find("module b.1 cannot be traced (no such operator)") == 0);
  CHECK(has(notes, "the cost of 2 modules"));
  x.failed.reset();
  CHECK(has(explain_trace(model, x), "the step cannot be traced to its end"));
  x = {};
  x.modules = {called(0, 1), called(1, 1), called(2, 1), called(3, 1)};
  CHECK(explain_trace(model, x).empty());
  x.modules[2].on_gpu = true;
  CHECK(has(explain_trace(model, x),
            "module b.1 cannot run on the CPU: traced on the GPU"));
}

TEST_CASE("what ranks exchange for a module moves the cut",
          "[partition][trace]") {
  auto model = make_model({{"", {1, 2, 3}, 0, 10e-3},
                           {"a", {}, 0, 10e-3},
                           {"b", {}, 0, 20e-3},
                           {"c", {}, 0, 40e-3}});
  auto plan = [&] {
    partition_options options;
    options.manual.devices = 2;
    options.memory_weight = 0;
    options.step_seconds = step_seconds(model, {});
    options.crossing = communication::from_times(options.step_seconds);
    return make_partition(model, options);
  };
  // 40 ms are on each device in forward; a step takes three times as long.
  auto before = plan();
  CHECK(before.options.step_seconds == Catch::Approx(0.24));
  CHECK(before.module_device == assignment{0, 0, 0, 1});
  CHECK(before.score.predicted == Catch::Approx(0.5 + 400e-6 / 0.24));
  // 600 MB at 5 GB/s take 120 ms, a third of them in forward: 60 ms each.
  CHECK(add_exchange(model[2], 600e6) == Catch::Approx(0.12));
  auto after = plan();
  CHECK(*model[2].compute == Catch::Approx(60e-3));
  CHECK(after.options.step_seconds == Catch::Approx(0.36));
  CHECK(after.module_device == assignment{0, 0, 1, 0});
  CHECK(after.loads[0] == Catch::Approx(0.5));
  CHECK(after.loads[1] == Catch::Approx(0.5));
  CHECK(after.score.predicted == Catch::Approx(0.5 + 400e-6 / 0.36));
}

TEST_CASE("a module without a time gets none by what it exchanges",
          "[partition][trace]") {
  module_info x;
  CHECK(add_exchange(x, 1e9) == 0);
  CHECK_FALSE(x.compute);
}
