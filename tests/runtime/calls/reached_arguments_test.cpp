#include "tests/support/catch.hpp"

#include "runtime/calls/backward_node.hpp"
#include "runtime/calls/reached_arguments.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>
#include <vector>

// R40: which arguments get a gradient from which result, told from the graph
// before any backward.

using namespace smp;

namespace {

namespace ag = torch::autograd;

using positions = std::vector<std::vector<uint32_t>>;

at::Tensor leaf() {
  return at::ones({2}).set_requires_grad(true);
}

ag::Edge edge_of(const at::Tensor& x) {
  return ag::impl::gradient_edge(x);
}

/// A call of another rank with two arguments and two results.
struct remote_pair {
  remote_pair(const at::Tensor& x, const at::Tensor& y, sent_call how) {
    how.arguments.resize(2);
    how.arguments[1].position = 1;
    how.outputs = {0, 1};
    how.num_outputs = 2;
    auto node = std::shared_ptr<backward_node>(
      new backward_node(std::move(how)), ag::deleteNode);
    node->set_next_edges({edge_of(x), edge_of(y)});
    for (auto& result : results)
      ag::create_gradient_edge(result, node);
  }

  std::vector<at::Tensor> results{at::ones({2}), at::ones({2})};
};

} // namespace

TEST_CASE("a result reaches the arguments that it was computed from",
          "[runtime][reached_arguments][R40]") {
  auto x = leaf();
  auto y = leaf();
  auto unused = leaf();
  auto parameter = leaf(); // no argument
  auto got = reached_arguments({edge_of(x * 2 + y * parameter),
                                edge_of(y.detach() * parameter),
                                edge_of((y * y).sum())},
                               {x, at::Tensor{}, unused, y});
  CHECK(got == positions{{0, 3}, {}, {3}});
}

TEST_CASE("an argument that is a result is reached by itself",
          "[runtime][reached_arguments][R40]") {
  auto x = leaf();
  auto y = leaf();
  CHECK(reached_arguments({edge_of(y), ag::Edge{}, edge_of(x)}, {x, y})
        == positions{{1}, {}, {0}});
}

TEST_CASE("without an argument that has a gradient nothing is reached",
          "[runtime][reached_arguments][R40]") {
  auto y = leaf();
  CHECK(reached_arguments({edge_of(y * 2), edge_of(y)}, {at::Tensor{}})
        == positions{{}, {}});
  CHECK(reached_arguments({}, {y}).empty());
}

TEST_CASE("what a call of another rank reaches is what its owner said",
          "[runtime][reached_arguments][R40]") {
  auto x = leaf();
  auto y = leaf();
  sent_call how;
  how.request = std::make_shared<sent_request>();
  positions of_first, of_second, of_sum;
  SECTION("each of another argument") {
    how.request->reaches = {{1}, {0}};
    of_first = {{1}};
    of_second = {{0}};
    // Both results are of one node.
    of_sum = {{0, 1}};
  }
  SECTION("or of none") {
    how.request->reaches = {{}, {1}};
    of_first = {{}};
    of_second = {{1}};
    of_sum = {{1}};
  }
  SECTION("or all, if it said nothing") {
    of_first = of_second = of_sum = {{0, 1}};
  }
  remote_pair call{x, y, how};
  auto reached_by = [&](const at::Tensor& z) {
    return reached_arguments({edge_of(z)}, {x, y});
  };
  CHECK(reached_by(call.results[0] * 3) == of_first);
  CHECK(reached_by(call.results[1] * 3) == of_second);
  CHECK(reached_by(call.results[0] + call.results[1]) == of_sum);
}
