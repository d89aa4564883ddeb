#include "tests/support/catch.hpp"

#include "tests/support/torch/two_ranks.hpp"

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

// All that a session learns because of a model dies with it: the next one is
// trained as in a session of its own. The modules and steps of both have the
// same numbers, so that what is left of one would be taken for the other's.

using namespace smp;
using namespace smp::test;

namespace {

/// What can be seen of a model's training; numbers without rounding.
struct training {
  std::vector<double> losses;
  std::map<std::string, std::vector<double>> gradients;
  std::vector<std::string> steps;
  std::string partition, order;
  bool operator==(const training&) const = default;
};

template <class Model>
training train(session& s, Model& model) {
  training result;
  auto train_step = step([&model](Tensor x) {
    auto loss = model(x).sum();
    model.backward(loss);
    return loss;
  });
  auto x = torch::arange(12.0).view({4, 3});
  for (int i = 0; i < 5; ++i) {
    result.losses.push_back(
      train_step(x).reduce_mean().template item<double>());
    auto stats = s.last_step();
    result.steps.push_back((stats.replayed ? "replayed " : "")
                           + stats.ran_again);
  }
  for (auto& [name, g] : model.gradients()) {
    auto flat = g.to(torch::kDouble).flatten().contiguous();
    auto* p = flat.template data_ptr<double>();
    result.gradients[name] = {p, p + flat.numel()};
  }
  result.partition = model.partition_text();
  result.order = model.order_text();
  return result;
}

/// Microbatches call its remote module in their order.
training train_first(session& s) {
  auto made = seeded([] {
    auto remote = [](auto& self, Tensor x) { return x * self.weight; };
    auto local = [](auto& self, Tensor x) { return self.there(x * self.here); };
    return caller{remote, local};
  });
  set_stateful(*made->there, "for the test");
  distributed_model model{made};
  return train(s, model);
}

/// The same modules; what is remote returns a tensor of another form.
training train_second(session& s) {
  auto made = seeded([] {
    auto remote = [](auto& self, Tensor x) { return (x * self.weight).sum(); };
    auto local = [](auto& self, Tensor x) { return self.there(x + self.here); };
    return caller{remote, local};
  });
  distributed_model model{made};
  return train(s, model);
}

/// Sessions whose models know something that others must not.
std::map<std::string, std::function<void(session_config&)>> ways() {
  return {
    {"as by default", [](auto&) {}},
    {"calls wait", [](auto& x) { x.fast_mode = false; }},
    {"steps are replayed",
     [](auto& x) {
       x.static_mode = true;
       x.static_steps = 2;
     }},
    {"the order is computed", [](auto& x) { x.deterministic_server = true; }},
  };
}

} // namespace

TEST_CASE("nothing of a model is left for the next one of its session",
          "[runtime][model]") {
  for (auto& [name, set] : ways()) {
    INFO(name);
    auto world = manual_world(2, 2);
    set(world.config);
    std::vector<training> first(2), after(2), alone(2); // by rank
    run_virtual_world(2, world, [&](session& s) {
      first[s.rank()] = train_first(s);
      after[s.rank()] = train_second(s);
    });
    run_virtual_world(2, world,
                      [&](session& s) { alone[s.rank()] = train_second(s); });
    const auto differs = first != alone; // no text of a training
    CHECK(differs);
    for (size_t rank = 0; rank < 2; ++rank) {
      INFO("rank " << rank);
      CHECK(after[rank].losses == alone[rank].losses);
      CHECK(after[rank].gradients == alone[rank].gradients);
      CHECK(after[rank].steps == alone[rank].steps);
      CHECK(after[rank].partition == alone[rank].partition);
      CHECK(after[rank].order == alone[rank].order);
    }
  }
}
