#include "tests/support/catch.hpp"

#include "runtime/calls/entered_modules.hpp"
#include "runtime/calls/messages.hpp"
#include "runtime/model/model_map.hpp"

#include <ATen/ATen.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

// R19: in which modules a request has to wait for its turn.

using namespace smp;

namespace {

using positions = std::vector<uint64_t>;

constexpr uint32_t counts = 1, sequence = 2, reads = 4, plain = 5, declared = 6;

/// The position of the buffer that `counts` has.
constexpr uint32_t counted = 1;

/// The root has a buffer of its own. "sequence" holds a child with a buffer,
/// one that reads the buffer of "counts", one without state and one that says
/// that it has some; the last stands behind a range that ends before it.
walked_model model_with_state() {
  walked_model result;
  auto add = [&](std::string name) -> walked_module& {
    auto& x = result.modules.emplace_back();
    x.names.push_back(std::move(name));
    x.intercepted = result.modules.size() > 1;
    return x;
  };
  auto add_buffer = [&](uint32_t module, std::string name) {
    auto& x = result.tensors.emplace_back();
    x.names.push_back(std::move(name));
    x.tensor = at::ones({2});
    x.is_buffer = true;
    x.modules.push_back(module);
    result.modules[module].tensors.push_back(
      static_cast<uint32_t>(result.tensors.size() - 1));
  };
  add("").children = {counts, sequence};
  add("counts");
  add("sequence").children = {3, reads, plain, declared};
  add("sequence.0");
  add("sequence.1").reads = {counted};
  add("sequence.2");
  add("sequence.3").stateful = "sets its attribute 'calls'";
  add_buffer(0, "steps");
  add_buffer(counts, "counts.n");
  add_buffer(3, "sequence.0.mask");
  return result;
}

struct ordered_model {
  ordered_model() {
    map.replace(model_with_state(), {});
  }

  /// Which modules a forward request enters.
  positions entered(uint32_t module, payload body,
                    phase what = phase::forward) const {
    request x;
    x.module = module_id{module};
    x.what = what;
    x.body = std::move(body);
    positions result;
    for (auto y : entered_modules(map, x))
      result.push_back(y.value);
    return result;
  }

  model_map map{rank_id{0}, 2, model_with_state()};
};

payload call_of(request_kind what, uint32_t first = 0, uint32_t last = 0) {
  forward_request x;
  x.head.what = what;
  x.head.first = first;
  x.head.last = last;
  return to_payload(x);
}

payload asking_for(request_kind what, uint32_t tensor) {
  parameter_request x;
  x.head.what = what;
  x.head.tensor = tensor;
  return to_payload(x);
}

} // namespace

TEST_CASE("a call enters its module if that has state",
          "[runtime][entered_modules][R19]") {
  ordered_model model;
  for (auto what : {request_kind::call, request_kind::method,
                    request_kind::get_attribute, request_kind::set_attribute}) {
    CAPTURE(static_cast<int>(what));
    CHECK(model.entered(counts, call_of(what)) == positions{counts});
    CHECK(model.entered(declared, call_of(what)) == positions{declared});
    CHECK(model.entered(plain, call_of(what)).empty());
  }
}

TEST_CASE("a range enters those of its children that have state",
          "[runtime][entered_modules][R8][R19]") {
  ordered_model model;
  auto what = GENERATE(request_kind::range, request_kind::method_range);
  CHECK(model.entered(sequence, call_of(what, 0, 3)) == positions{3, reads});
  CHECK(model.entered(sequence, call_of(what, 2, 4)) == positions{declared});
  CHECK(model.entered(sequence, call_of(what, 2, 3)).empty());
  // Whoever serves it refuses it.
  CHECK(model.entered(sequence, call_of(what, 3, 9)) == positions{declared});
}

TEST_CASE("a buffer is behind all modules that it orders",
          "[runtime][entered_modules][R14][R19]") {
  ordered_model model;
  for (auto what : {request_kind::read_tensor, request_kind::write_tensor})
    CHECK(model.entered(counts, asking_for(what, counted))
          == positions{counts, reads});
  // Gradients are sums: no order is needed.
  CHECK(model.entered(counts, asking_for(request_kind::add_gradient, counted))
          .empty());
}

TEST_CASE("the step body enters the root, and backward enters nothing",
          "[runtime][entered_modules][R19]") {
  ordered_model model;
  CHECK(model.entered(0, {}) == positions{0});
  CHECK(model.entered(0, {}, phase::backward).empty());
  CHECK(model.entered(counts, call_of(request_kind::call), phase::backward)
          .empty());
  CHECK(model.entered(counts, to_payload(backward_request{})).empty());
}

TEST_CASE("a module that keeps its state is not waited for",
          "[runtime][entered_modules][R19]") {
  ordered_model model;
  // "counts" and what reads from it ran and changed nothing.
  REQUIRE(model.map.order().learn({{}, {counts, reads}}));
  CHECK(model.entered(counts, call_of(request_kind::call)).empty());
  CHECK(model.entered(sequence, call_of(request_kind::range, 0, 4))
        == positions{3, declared});
  CHECK(model.entered(counts, asking_for(request_kind::read_tensor, counted))
          .empty());
}

TEST_CASE("a request that cannot be read enters nothing",
          "[runtime][entered_modules]") {
  ordered_model model;
  payload body;
  body.bytes = {std::byte{0xff}};
  CHECK(model.entered(counts, std::move(body)).empty());
}
