// How good partitions are, and whether the objective predicts it:
//
//   bench_partition [--trees=N] [--rounds=N] [--steps=N] [--warmup=N]
//                   [--measure=0]
//
// First both strategies against the best of all assignments, found by brute
// force, on random trees; then on the shapes of real models, where only a bound
// is known: no device can have less than the mean. Last, three models, each
// with two partitions, are trained on two ranks in alternating runs: the one
// that the objective predicts to be faster should be it.

#include "bench/harness.hpp"

#include "partition/partitioner.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/train/models/gpt.hpp"
#include "smp/smp.hpp"
#include "tests/support/gpt_tree.hpp"
#include "tests/support/partition_models.hpp"

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>

namespace smp::bench {

namespace {

using clock = std::chrono::steady_clock;

// -- trees --------------------------------------------------------------------

partition_plan plan_of(const model_info& model, uint32_t devices,
                       partition_strategy strategy,
                       const communication& crossing, double memory_weight) {
  partition_options options;
  options.manual.devices = devices;
  options.memory_weight = memory_weight;
  options.strategy = strategy;
  options.crossing = crossing;
  return make_partition(model, options);
}

/// Tries all assignments with the root on device 0; counts loads and edges that
/// cross on its own. @pre no module shares a parameter
double best_possible(const model_info& model, const partition_plan& plan,
                     const communication& crossing) {
  auto n = model.size();
  auto devices = plan.options.manual.devices;
  std::vector<size_t> parent(n);
  std::vector<double> own(n), price(n);
  for (size_t i = 0; i < n; ++i) {
    own[i] = plan.costs.share(plan.costs.own(plan.tree.node_of(module_id{i})));
    price[i] = crossing.request
               + crossing.byte * static_cast<double>(model[i].call_bytes);
    for (auto child : model[i].children)
      parent[child.value] = i;
  }
  auto best = std::numeric_limits<double>::infinity();
  std::vector<uint32_t> x(n);
  std::vector<double> loads;
  for (;;) {
    loads.assign(devices, 0);
    double value = 0;
    for (size_t i = 0; i < n; ++i) {
      loads[x[i]] += own[i];
      value += i > 0 && x[i] != x[parent[i]] ? price[i] : 0;
    }
    best = std::min(best,
                    value + *std::max_element(loads.begin(), loads.end()));
    size_t i = 1; // next assignment: count up by one
    while (i < n && ++x[i] == devices)
      x[i++] = 0;
    if (i >= n)
      return best;
  }
}

void print_ratios(const char* text, const series& x) {
  auto optimal = std::count_if(x.begin(), x.end(),
                               [](double y) { return y <= 1 + 1e-9; });
  double sum = 0;
  for (auto y : x)
    sum += y;
  auto n = static_cast<double>(x.size());
  fmt::print("  {:<34} {:>7.3f} {:>7.3f} {:>7.3f} {:>8.0f} %\n", text, sum / n,
             quantile(x, 0.9), *std::max_element(x.begin(), x.end()),
             100 * static_cast<double>(optimal) / n);
}

void against_optimum(int64_t trees) {
  struct objective {
    const char* text;
    communication crossing;
  };
  fmt::print(
    "predicted time over the best of all assignments, {} random trees "
    "of 5 to 9 nodes, 2 to 4 devices\n",
    trees);
  fmt::print("  {:<34} {:>7} {:>7} {:>7} {:>10}\n", "", "mean", "p90", "worst",
             "optimal");
  for (auto& [text, crossing] : {objective{"largest load", {}},
                                 objective{"0.3 % per request", {0.003, 1e-6}},
                                 objective{"5 % per request", {0.05, 1e-5}}}) {
    std::mt19937_64 engine{17};
    series paper, balanced;
    for (int64_t i = 0; i < trees; ++i) {
      auto model = test::random_model(engine, 5 + engine() % 5, 20);
      for (auto& x : model)
        x.call_bytes = engine() % 1000;
      auto devices = static_cast<uint32_t>(2 + engine() % 3);
      auto plan = plan_of(model, devices, partition_strategy::balanced,
                          crossing, 0.5);
      auto best = best_possible(model, plan, crossing);
      if (best <= 0)
        continue;
      balanced.push_back(plan.score.predicted / best);
      paper.push_back(plan.paper.predicted / best);
    }
    print_ratios(fmt::format("{}, paper", text).c_str(), paper);
    print_ratios(fmt::format("{}, balanced", text).c_str(), balanced);
  }
}

/// A stack of encoder layers and one of decoder layers, which cost more.
model_info encoder_decoder(uint64_t layers) {
  std::vector<test::module_line> lines{{"", {1, 2, 3, 4}},
                                       {"embed", {}, 30, 0},
                                       {"encoder", {}},
                                       {"decoder", {}},
                                       {"head", {}, 0, 8}};
  for (auto [stack, cost] : {std::pair{2, 10.0}, std::pair{3, 14.0}})
    for (uint64_t i = 0; i < layers; ++i) {
      lines[stack].children.push_back(lines.size());
      lines.push_back(
        {fmt::format("{}.{}", lines[stack].path, i), {}, cost, cost});
    }
  return test::make_model(lines);
}

/// Blocks of attention and eight experts, like a mixture of experts.
model_info experts(uint64_t layers) {
  std::vector<test::module_line> lines{
    {"", {1, 2}}, {"embed", {}, 40, 0}, {"blocks", {}}};
  for (uint64_t i = 0; i < layers; ++i) {
    auto block = lines.size();
    lines[2].children.push_back(block);
    lines.push_back({fmt::format("blocks.{}", i), {}, 1, 1});
    for (int k = 0; k < 9; ++k) {
      lines[block].children.push_back(lines.size());
      lines.push_back(
        {fmt::format("blocks.{}.{}", i, k), {}, k ? 16.0 : 8.0, k ? 1.0 : 6.0});
    }
  }
  return test::make_model(lines);
}

void on_shapes() {
  struct shape {
    const char* text;
    model_info model;
  };
  std::vector<shape> shapes{
    {"GPT, 24 blocks, tied", test::gpt_tree{24, 1024, true}.model},
    {"encoder and decoder, 12 layers", encoder_decoder(12)},
    {"8 experts in 6 blocks", experts(6)}};
  fmt::print("\nlargest load over the mean (and calls that cross)\n  {:<34}",
             "");
  for (auto devices : {2, 4, 8})
    fmt::print(" {:>11} {:>11}", fmt::format("paper {}", devices), "balanced");
  fmt::print("\n");
  for (auto& [text, model] : shapes) {
    fmt::print("  {:<34}", text);
    for (uint32_t devices : {2u, 4u, 8u}) {
      auto plan = plan_of(model, devices, partition_strategy::balanced, {},
                          0.5);
      for (auto& x : {plan.paper, plan.score})
        fmt::print(" {:>6.3f} {:>4}", x.max_load * devices,
                   fmt::format("({})", x.requests));
    }
    fmt::print("\n");
  }
}

// -- models -------------------------------------------------------------------

constexpr uint64_t ranks = 2;
constexpr uint64_t microbatches = 8;

/// The model to train, and where its parts go.
struct subject {
  const char* name;
  const char* partitions[2];
  std::function<void(const arguments&, int partition)> run;
};

/// Trains on two ranks and records step times and the prediction.
template <class M>
void train(const arguments& args, M model, at::Tensor input,
           const std::function<at::Tensor(const at::Tensor&)>& loss_of) {
  distributed_model whole{model};
  auto train_step = step([&](at::Tensor x) {
    auto loss = loss_of(whole(x));
    whole.backward(loss);
    return loss;
  });
  figures result;
  auto warmup = args.number("warmup", 2);
  auto steps = args.number("steps", 8);
  for (int64_t i = 0; i < warmup + steps; ++i) {
    for (auto& x : whole.local_parameters())
      x.mutable_grad() = at::Tensor{};
    auto begin = clock::now();
    train_step(input).reduce_mean();
    if (i >= warmup)
      result.numbers["step"].push_back(
        std::chrono::duration<double>(clock::now() - begin).count());
  }
  if (auto* decision = whole.state().decision()) {
    auto& score = decision->plan.score;
    result.numbers["predicted"] = {score.predicted};
    result.numbers["load"] = {score.max_load};
    result.numbers["requests"] = {static_cast<double>(score.requests)};
    write(result, args.text("file"));
  }
}

/// A GPT whose blocks are placed by `place`.
void run_gpt(const arguments& args, const std::vector<uint32_t>& place) {
  model_sizes config;
  config.layers = static_cast<int64_t>(place.size());
  gpt model{config};
  for (size_t i = 0; i < place.size(); ++i)
    set_partition(*model->transformer->h->ptr(i), place[i]);
  set_partition(*model->named_children()["lm_head"], 0);
  auto tokens = torch::randint(config.vocabulary, {16, config.sequence_length});
  train(args, model, tokens,
        [](const at::Tensor& x) { return x.square().mean(); });
}

/// Layers of these widths.
struct stack_impl : torch::nn::Module {
  stack_impl(const std::vector<int64_t>& widths,
             const std::vector<uint32_t>& place) {
    for (size_t i = 0; i + 1 < widths.size(); ++i) {
      layers->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
      set_partition(*layers->ptr(i), place[i]);
    }
    register_module("layers", layers);
  }

  torch::Tensor forward(torch::Tensor x) {
    return layers->forward(x);
  }

  torch::nn::Sequential layers;
};
TORCH_MODULE_IMPL(stack, stack_impl);

void run_stack(const arguments& args, const std::vector<int64_t>& widths,
               const std::vector<uint32_t>& place, int64_t batch) {
  train(args, stack{widths, place}, torch::randn({batch, widths[0]}),
        [](const at::Tensor& x) { return x.square().mean(); });
}

const std::vector<subject>& subjects() {
  static const std::vector<subject> result{
    {"GPT of 4 blocks",
     {"2 and 2 blocks", "1 and 3 blocks"},
     [](const arguments& args, int partition) {
       run_gpt(args, partition == 0 ? std::vector<uint32_t>{0, 0, 1, 1}
                                    : std::vector<uint32_t>{0, 1, 1, 1});
     }},
    {"16 equal thin layers",
     {"two halves", "alternating"},
     [](const arguments& args, int partition) {
       std::vector<uint32_t> place;
       for (uint32_t i = 0; i < 16; ++i)
         place.push_back(partition == 0 ? i / 8 : i % 2);
       run_stack(args, std::vector<int64_t>(17, 256), place, 512);
     }},
    {"funnel, 2048 to 32",
     {"by cost", "by number of layers"},
     [](const arguments& args, int partition) {
       // Each layer costs a quarter of the one before it.
       run_stack(args, {2048, 2048, 1024, 512, 256, 128, 64, 32},
                 partition == 0 ? std::vector<uint32_t>{0, 1, 1, 1, 1, 1, 1}
                                : std::vector<uint32_t>{0, 0, 0, 1, 1, 1, 1},
                 1024);
     }}};
  return result;
}

void measure(const scratch& dir, const arguments& args) {
  fmt::print(
    "\ntwo partitions of a model on two ranks, {} microbatches, in "
    "runs that take turns\n",
    microbatches);
  fmt::print("  {:<22} {:<20} {:>6} {:>6} {:>9} {:>9} {:>9}\n", "model",
             "partition", "load", "calls", "predicted", "min", "median");
  int agree = 0;
  for (size_t i = 0; i < subjects().size(); ++i) {
    auto& x = subjects()[i];
    figures found[2];
    for (int64_t round = 0; round < args.number("rounds", 3); ++round)
      for (int k = 0; k < 2; ++k)
        found[k].add(run_fresh(dir, ranks, fmt::format("{} {}", i, k), args));
    for (int k = 0; k < 2; ++k)
      fmt::print(
        "  {:<22} {:<20} {:>6.3f} {:>6.0f} {:>9.3f} {:>7.1f}ms "
        "{:>7.1f}ms\n",
        k == 0 ? x.name : "", x.partitions[k], median(found[k]["load"]),
        median(found[k]["requests"]), median(found[k]["predicted"]),
        1e3 * minimum(found[k]["step"]), 1e3 * median(found[k]["step"]));
    auto sign = [&](auto f, const char* name) {
      return f(found[0][name]) < f(found[1][name]);
    };
    agree += sign(median, "predicted") == sign(minimum, "step");
    std::fflush(stdout);
  }
  fmt::print("  predicted the faster partition of {} of {} models\n", agree,
             subjects().size());
}

void run_subject(const arguments& args) {
  auto what = args.text("run");
  session_config setup;
  setup.pipeline_parallel_degree = ranks;
  setup.microbatches = microbatches;
  setup.threads = 1;
  setup.memory_weight = 0; // the objective is time
  session s{setup};
  torch::manual_seed(1);
  auto space = what.find(' ');
  subjects()
    .at(std::stoul(what.substr(0, space)))
    .run(args, std::stoi(what.substr(space + 1)));
}

void run(const arguments& args) {
  if (!args.text("run").empty())
    return run_subject(args);
  against_optimum(args.number("trees", 300));
  on_shapes();
  scratch dir;
  if (args.number("measure", 1) != 0)
    measure(dir, args);
}

} // namespace

} // namespace smp::bench

int main(int argc, char** argv) {
  return smp::bench::run_main(argc, argv, smp::bench::run);
}
