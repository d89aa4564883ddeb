#include "tests/support/catch.hpp"

#include "smp/smp.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/markdown.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <iostream>
#include <map>
#include <string>
#include <vector>

// docs/api.md is made of this: its blocks of code stand here, word by word.

using namespace smp::test;

namespace {

/// Fails the rank, and so the test: Catch2's macros are for its own thread.
void require(bool x, const std::string& what) {
  if (!x)
    throw std::runtime_error{"not true: " + what};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool close(const torch::Tensor& x, const torch::Tensor& y) {
  return torch::allclose(x, y, 1e-5, 1e-6);
}

// -- models -------------------------------------------------------------------

struct net_impl : torch::nn::Module {
  net_impl() {
    for (int i = 0; i < 3; ++i)
      layers->push_back(smp::submodule<torch::nn::Linear>(8, 8));
    heads->update({{"mean", smp::submodule<torch::nn::Linear>(8, 1).ptr()},
                   {"spread", smp::submodule<torch::nn::Linear>(8, 1).ptr()}});
    register_module("layers", layers);
    register_module("heads", heads);
  }

  torch::Tensor forward(torch::Tensor x, std::string head) {
    // What a smp::submodule holds. As torch::nn::LinearImpl it is not seen.
    using linear = smp::hooked<torch::nn::LinearImpl>;
    for (auto& layer : *layers)
      x = torch::relu(layer->as<linear>()->forward(x));
    return heads[head]->as<linear>()->forward(x);
  }

  torch::nn::ModuleList layers;
  torch::nn::ModuleDict heads;
};
TORCH_MODULE_IMPL(net, net_impl);

struct gan_impl : torch::nn::Module {
  gan_impl() {
    register_module("generator", generator);
    register_module("critic", critic);
  }

  smp::submodule<torch::nn::Linear> generator{4, 8};
  smp::submodule<torch::nn::Linear> critic{8, 1};
};
TORCH_MODULE_IMPL(gan, gan_impl);

struct sentences {
  std::vector<int64_t> lengths; // of each row
  torch::Tensor words;          // [rows, longest]
};

sentences smp_slice(const sentences& x, uint64_t n, uint64_t index,
                    int64_t axis) {
  auto rows = x.lengths.size() / n;
  auto begin = x.lengths.begin() + static_cast<int64_t>(index * rows);
  return {{begin, begin + static_cast<int64_t>(rows)},
          smp::split(x.words, n, index, axis)};
}

/// The same for reference.
struct plain_net {
  explicit plain_net(const smp::named_tensors& xs)
    : state(xs.begin(), xs.end()) {
    for (auto& [name, x] : state)
      x = x.clone().requires_grad_(true);
  }

  torch::Tensor linear(const std::string& name, const torch::Tensor& x) {
    return torch::linear(x, state.at(name + ".weight"),
                         state.at(name + ".bias"));
  }

  torch::Tensor forward(torch::Tensor x, const std::string& head) {
    for (int i = 0; i < 3; ++i)
      x = torch::relu(linear("layers." + std::to_string(i), x));
    return linear("heads." + head, x);
  }

  std::map<std::string, torch::Tensor> state;
};

/// The net, of which rank 1 has the middle layer and a head.
net make_net() {
  auto result = seeded([] { return net{}; });
  smp::set_partition(*result->layers->ptr(1), 1);
  smp::set_partition(*result->heads["spread"], 1);
  return result;
}

torch::Tensor inputs() {
  return torch::linspace(-1, 1, 64).view({8, 8});
}

torch::Tensor targets() {
  return torch::linspace(1, 2, 8).view({8, 1});
}

} // namespace

// -- what the page shows ------------------------------------------------------

TEST_CASE("docs/api.md shows code that is compiled and run",
          "[runtime][docs]") {
  auto blocks = code_blocks(content_of(source_file("docs/api.md")));
  std::vector<text_lines> sources;
  for (auto path :
       {"tests/runtime/session/api_test.cpp", "examples/train_own_model.cpp"})
    sources.push_back(lines_of(content_of(source_file(path))));
  CHECK(blocks.size() >= 12);
  for (auto& block : blocks) {
    REQUIRE_FALSE(block.empty());
    INFO(block.front());
    CHECK((stands_in(block, sources[0]) || stands_in(block, sources[1])));
  }
}

// -- models -------------------------------------------------------------------

TEST_CASE("modules in lists and dicts run where they were placed",
          "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(2, 2), [](smp::session& s) {
    smp::distributed_model model{make_net()};
    plain_net reference{model.state_dict()};
    auto train_step = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::mse_loss(model(x, "mean"), y)
                  + torch::mse_loss(model(x, "spread"), y);
      model.backward(loss);
      return loss;
    });
    auto x = inputs();
    auto y = targets();
    auto loss = train_step(x, y).reduce_mean();
    auto expected = torch::mse_loss(reference.forward(x, "mean"), y)
                    + torch::mse_loss(reference.forward(x, "spread"), y);
    expected.backward();
    require(close(loss, expected), "the loss");
    for (auto& [name, g] : model.gradients())
      require(close(g, reference.state.at(name).grad()), name);
    // Per microbatch three calls, forward and backward.
    if (s.rank() == 0)
      require(s.last_step().requests == 12, "requests");
    auto names = model.local_module_names();
    require(
      names
        == (s.rank() == 1
              ? std::vector<std::string>{"layers.1", "heads.spread"}
              : std::vector<std::string>{"", "layers", "layers.0", "layers.2",
                                         "heads", "heads.mean"}),
      "who has what");
  });
}

TEST_CASE("modules are placed by hand", "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(), [](smp::session&) {
    auto make = [] {
      smp::partition_scope on_1{1}; // what is made here goes to rank 1
      return smp::submodule<torch::nn::Linear>(8, 8);
    };
    net model_with_pins;
    model_with_pins->layers->push_back(make());
    smp::distributed_model model{model_with_pins};
    smp::set_partition(*model->heads["spread"], 1); // with all below it
    smp::set_stateful(*model->layers, "counts its calls");
    smp::set_activation_checkpointing(*model->layers[1]); // keeps less
    model.partition(); // else in the first step, where times are measured
    auto local = smp::pp_rank() == 1 ? 2u : 7u;
    require(model.local_module_names().size() == local, "names");
    require(contains(model.partition_text(), "placed by hand"), "text");
    require(contains(model.order_text(), "counts its calls"), "order");
    require(contains(model.partition_text(), "in backward: layers.1"), "again");
  });
}

// -- values between ranks -----------------------------------------------------

TEST_CASE("ranks tell each other values", "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(), [](smp::session&) {
    std::string said;
    auto best = smp::broadcast(0.25); // what rank 0 has, on all ranks
    auto all = smp::allgather(smp::rank() * 10, smp::comm_group::pp);
    auto done = smp::any_rank(smp::rank() == 1); // on all, if on one
    if (smp::pp_rank() == 0)
      smp::send("epoch 3", 1, smp::rank_type::pp);
    else
      said = smp::recv_from<std::string>(0, smp::rank_type::pp);
    require(best == 0.25, "broadcast");
    require(all == std::vector<uint64_t>{0, 10}, "allgather");
    require(done && !smp::any_rank(false), "any_rank");
    require(said == (smp::pp_rank() == 0 ? "" : "epoch 3"), "recv_from");
  });
}

TEST_CASE("ranks sum and gather tensors", "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(), [](smp::session&) {
    auto x = torch::full({3}, smp::rank() == 0 ? 1.0 : 3.0);
    auto y = x.clone();
    auto sum = smp::allreduce(x); // over the world
    auto mean = smp::allreduce(x, smp::comm_group::pp, smp::reduce_op::mean);
    smp::comm_group pair{{0, 1}}; // these ranks, on each of them alike
    smp::allreduce_(x, pair);     // into x itself
    auto all = smp::allgather(x); // [2, 3]: what each rank has, along axis 0
    auto is = [](const torch::Tensor& a, double b) {
      return a.eq(b).all().item<bool>();
    };
    require(is(sum, 4) && is(mean, 2) && is(x, 4) && is(all, 4), "sums");
    auto first = smp::async::allreduce(x, smp::comm_group::world,
                                       smp::reduce_op::sum, "weights");
    auto second = smp::async::allgather(y);
    auto gathered = second.get();
    auto weights = first.get(); // x may change from here on
    require(is(gathered[0], 1) && is(gathered[1], 3), "gathered");
    require(is(weights, 8), "weights");
  });
}

// -- steps --------------------------------------------------------------------

TEST_CASE("a step splits what it is told to split", "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(2, 2), [](smp::session&) {
    smp::distributed_model model{make_net()};
    plain_net reference{model.state_dict()};
    auto train_step = smp::step(
      [&](std::map<std::string, torch::Tensor> batch, torch::Tensor weight,
          torch::Tensor columns) {
        auto y = model(batch["x"], "mean") + columns.sum(0, true).t();
        auto loss = (weight * (y - batch["y"]).square()).mean();
        model.backward(loss);
        return std::tuple{loss, y};
      },
      {.microbatches = 4,              // instead of those of the session
       .non_split_inputs = {1},        // `weight` goes whole to each microbatch
       .input_split_axes = {{2, 1}}}); // `columns` is split along axis 1
    std::map<std::string, torch::Tensor> batch{{"x", inputs()},
                                               {"y", targets()}};
    auto weight = torch::full({1}, 2.0);
    auto columns = torch::arange(16.0).view({2, 8});
    auto out = train_step(batch, weight, columns);
    auto [loss, unused] = out.reduce_mean(); // of each tensor
    auto [losses, y] = out.concat();         // [4], and [8, 1] as the batch
    auto [sum, also_unused] = out.reduce_sum();
    for (auto& [loss_of_one, y_of_one] : out.outputs()) // by microbatch
      require(loss_of_one.dim() == 0 && y_of_one.size(0) == 2, "outputs");
    auto expected = reference.forward(batch["x"], "mean")
                    + columns.sum(0, true).t();
    require(close(y, expected), "y");
    require(close(loss, (2 * (expected - batch["y"]).square()).mean()), "loss");
    require(losses.sizes() == torch::IntArrayRef{4}, "losses");
    require(close(sum, losses.sum()) && close(loss, losses.mean()), "sums");
    require(std::get<1>(out.stack()).sizes() == torch::IntArrayRef({4, 2, 1}),
            "stack");
  });
}

TEST_CASE("types of the user's own are split by smp_slice", "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(2, 2), [](smp::session& s) {
    smp::distributed_model model{make_net()};
    auto evaluate = smp::step([&](sentences x) {
      torch::NoGradGuard no_grad;
      auto y = model(x.words, "spread");
      return torch::tensor(x.lengths) + 0 * y.sum().to(torch::kLong);
    });
    sentences x;
    if (s.rank() == 0)
      x = {{5, 4, 3, 2, 7, 6, 1, 8}, inputs()};
    auto lengths = evaluate(x).concat();
    require(torch::equal(lengths,
                         torch::tensor({5, 4, 3, 2, 7, 6, 1, 8}, torch::kLong)),
            "lengths in order");
  });
}

TEST_CASE("an error of a step is the same on all ranks, and the next one runs",
          "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(2, 2), [](smp::session& s) {
    smp::distributed_model model{make_net()};
    auto train_step = smp::step([&](torch::Tensor x) {
      auto loss = model(x, "spread").mean();
      model.backward(loss);
      return loss;
    });
    std::string told;
    try {
      train_step(torch::ones({8, 9})); // the model takes eight columns
    } catch (const smp::error& e) {
      told = e.what();
    }
    for (auto& p : model->parameters())
      p.mutable_grad() = torch::Tensor{};
    train_step(inputs());
    require(contains(told, "rank 0") && contains(told, "8x8"), told);
    require(s.last_step().seconds > 0, "seconds");
  });
}

TEST_CASE("a session tells what the last step was", "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(2, 2), [](smp::session& session) {
    smp::distributed_model model{make_net()};
    auto evaluate = smp::step([&](torch::Tensor x) {
      torch::NoGradGuard no_grad;
      return model(x, "spread").mean();
    });
    require(session.last_step().seconds == 0, "none before the first one");
    evaluate(inputs());
    smp::step_stats stats = session.last_step(); // of this rank
    if (!stats.ran_again.empty())
      std::cerr << "step ran again: " << stats.ran_again << '\n';
    require(stats.seconds > 0 && stats.ran_again.empty(), "what it took");
    require((stats.requests > 0) == (session.rank() == 0), "who asked");
  });
}

// -- training -----------------------------------------------------------------

TEST_CASE("a model is trained, evaluated and frozen", "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(2, 2), [](smp::session&) {
    smp::distributed_model model{make_net()};
    torch::optim::AdamW adamw{model->parameters(), 1e-2};
    smp::distributed_optimizer optimizer{adamw}; // before the first step
    auto train_step = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::mse_loss(model(x, "spread"), y);
      model.backward(loss);
      return loss;
    });
    auto evaluate = smp::step([&](torch::Tensor x, torch::Tensor y) {
      torch::NoGradGuard no_grad;
      return torch::mse_loss(model(x, "spread"), y);
    });
    auto train = [&](int steps) {
      for (int i = 0; i < steps; ++i) {
        optimizer.zero_grad();
        train_step(inputs(), targets());
        if (smp::any_nonfinite(model)) // on any rank
          continue;
        smp::clip_grad_norm_(model, 1.0); // the norm over all ranks
        optimizer.step();
      }
    };
    auto held_out = [&] {
      model.eval(); // on every rank
      auto loss = evaluate(inputs(), targets()).reduce_mean();
      model.train();
      return loss.item<double>();
    };
    auto before = held_out();
    train(10);
    auto after = held_out();
    require(after < before, "it learns");
    auto frozen = model.state_dict();
    for (auto& p : model->layers->parameters()) // on every rank
      p.requires_grad_(false);
    train(3);
    auto changed = model.state_dict();
    for (size_t i = 0; i < frozen.size(); ++i)
      require(torch::equal(frozen[i].second, changed[i].second)
                == !frozen[i].first.starts_with("heads.spread"),
              frozen[i].first);
    require(held_out() != after, "the head goes on");
  });
}

TEST_CASE("state is taken and loaded under the names of the model",
          "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(), [](smp::session& s) {
    smp::distributed_model model{make_net()};
    model.partition();
    auto everything = model.state_dict(); // on all ranks together
    auto mine = model.local_state_dict(); // what this rank owns
    for (auto& [name, x] : everything)
      x.zero_();
    model.load_state_dict(everything); // each rank takes what it owns
    require(everything.size() == 10, "all");
    require(mine.size() == (s.rank() == 0 ? 6u : 4u), "mine");
    for (auto& [name, x] : model.state_dict())
      require(x.eq(0).all().item<bool>(), name);
    for (auto& [name, x] : mine)
      require(!x.eq(0).all().item<bool>(), name + " is a copy");
  });
}

// -- two networks -------------------------------------------------------------

TEST_CASE("two networks are one module", "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(2, 2), [](smp::session&) {
    auto made = seeded([] { return gan{}; });
    smp::set_partition(*made->critic, 1);
    smp::distributed_model model{made};
    plain_net reference{model.state_dict()};
    torch::optim::SGD sgd_g{model->generator->parameters(), 0.1};
    torch::optim::SGD sgd_c{model->critic->parameters(), 0.1};
    smp::distributed_optimizer of_generator{sgd_g};
    smp::distributed_optimizer of_critic{sgd_c};

    auto train_critic = smp::step([&](torch::Tensor real, torch::Tensor z) {
      auto fake = model->generator(z).detach();
      auto loss = (torch::softplus(model->critic(fake))
                   + torch::softplus(-model->critic(real)))
                    .mean();
      model.backward(loss);
      return loss;
    });
    auto train_generator = smp::step([&](torch::Tensor z) {
      auto loss = torch::softplus(-model->critic(model->generator(z))).mean();
      model.backward(loss);
      return loss;
    });

    auto real = inputs();
    auto z = inputs().slice(1, 0, 4);
    for (int i = 0; i < 3; ++i) {
      of_critic.zero_grad();
      train_critic(real, z);
      of_critic.step();
      of_generator.zero_grad();
      train_generator(z);
      of_generator.step();
    }

    auto update = [&](const std::string& name, const torch::Tensor& loss) {
      for (auto& [path, x] : reference.state)
        x.mutable_grad() = torch::Tensor{};
      loss.backward();
      torch::NoGradGuard no_grad;
      for (auto& [path, x] : reference.state)
        if (path.starts_with(name))
          x.sub_(0.1 * x.grad());
    };
    for (int i = 0; i < 3; ++i) {
      auto fake = reference.linear("generator", z).detach();
      update("critic", (torch::softplus(reference.linear("critic", fake))
                        + torch::softplus(-reference.linear("critic", real)))
                         .mean());
      auto y = reference.linear("critic", reference.linear("generator", z));
      update("generator", torch::softplus(-y).mean());
    }
    for (auto& [name, x] : model.state_dict())
      require(close(x, reference.state.at(name)), name);
  });
}

// -- what bypasses smp --------------------------------------------------------

TEST_CASE("what bypasses smp is right or an error", "[runtime][docs]") {
  smp::run_virtual_world(2, manual_world(2, 1), [](smp::session& s) {
    smp::distributed_model model{make_net()};
    auto x = inputs();
    model.partition();
    auto run = [&](const std::function<torch::Tensor(torch::Tensor)>& f) {
      return smp::step(f)(x).concat();
    };
    auto told_by = [&](const std::function<torch::Tensor(torch::Tensor)>& f) {
      return error_of([&] { run(f); });
    };
    // Of rank 1.
    auto* module = model->layers->ptr(1)->as<torch::nn::LinearImpl>();
    plain_net reference{model.state_dict()};
    // Its body runs here, with parameters that are fetched.
    auto y = run([&](torch::Tensor x) { return module->forward(x); });
    require(close(y, reference.linear("layers.1", x)), "by another type");
    y = run([&](torch::Tensor x) { return x + module->bias; });
    require(close(y, x + reference.state.at("layers.1.bias")), "a parameter");
    auto told = told_by([&](torch::Tensor x) {
      auto loss = model(x, "mean").mean();
      loss.backward();
      return loss;
    });
    require(contains(told, "model.backward"), told);
    told = told_by([&](torch::Tensor x) {
      torch::NoGradGuard no_grad;
      module->bias.add_(1);
      return x;
    });
    require(contains(told, "change it inside the module that owns it"), told);
    if (s.rank() == 0) {
      told = error_of([&] { model(x, "mean"); });
      require(contains(told, "inside a step (smp::step) only"), told);
      told = error_of([&] { module->bias.sum(); });
      require(contains(told, "model.state_dict()"), told);
    }
    told = error_of([&] { model.backward(torch::ones({})); });
    require(contains(told, "outside a step body"), told);
  });
}
