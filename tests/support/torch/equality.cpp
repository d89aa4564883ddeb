#include "tests/support/torch/equality.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/train/models/gpt.hpp"
#include "tests/support/torch/plain_gpt.hpp"
#include "tests/support/torch/random.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <mutex>
#include <stdexcept>

namespace smp::test {

namespace {

using torch::Tensor;

constexpr int64_t vocabulary = 256, length = 8, layers = 4, heads = 4;
constexpr int64_t width = 64, batch = 24;
constexpr int num_steps = 5;
constexpr double learning_rate = 1e-3;

std::pair<Tensor, Tensor> make_batch(int step) {
  auto rows = torch::arange(batch * (length + 1)).add(step * 7919);
  auto x = (rows * rows % 251 + rows % 5).view({batch, length + 1});
  return {x.narrow(1, 0, length), x.narrow(1, 1, length)};
}

Tensor loss_of(const Tensor& logits, const Tensor& y) {
  return torch::nn::functional::cross_entropy(logits.reshape({-1, vocabulary}),
                                              y.reshape({-1}));
}

gpt make_model(double dropout) {
  // Virtual ranks share the process's generator.
  static std::mutex mutex;
  std::unique_lock guard{mutex};
  torch::manual_seed(7);
  model_sizes sizes;
  sizes.vocabulary = vocabulary;
  sizes.sequence_length = length;
  sizes.layers = layers;
  sizes.heads = heads;
  sizes.width = width;
  sizes.dropout = dropout;
  return gpt{sizes};
}

std::map<std::string, Tensor> to_map(const named_tensors& xs) {
  return {xs.begin(), xs.end()};
}

void check_nothing_left(session& s) {
  auto calls = s.internals().calls().size();
  auto pending = s.internals()
                   .actors()
                   .status(std::chrono::seconds{10})
                   .pending;
  if (calls > 0 || pending > 0)
    throw std::runtime_error{
      fmt::format("{} saved calls and {} requests are left on rank {}", calls,
                  pending, s.rank())};
}

} // namespace

std::vector<step_numbers> run_steps(session& s, uint64_t microbatches,
                                    double dropout) {
  std::vector<step_numbers> result;
  distributed_model model{make_model(dropout)};
  torch::optim::AdamW adamw{model->parameters(),
                            torch::optim::AdamWOptions(learning_rate)};
  distributed_optimizer optimizer{adamw};
  auto body = [&](Tensor x, Tensor y) {
    auto loss = loss_of(model(x), y);
    model.backward(loss);
    return loss;
  };
  auto train_step = step(body, step_options{.microbatches = microbatches});
  model.partition();
  for (int i = 0; i < num_steps; ++i) {
    auto [x, y] = make_batch(i);
    step_numbers r;
    r.before = to_map(model.state_dict());
    optimizer.zero_grad();
    r.losses = train_step(x, y).outputs();
    r.gradients = to_map(model.gradients());
    optimizer.step();
    r.after = to_map(model.state_dict());
    r.number = s.internals().drawn_step();
    check_nothing_left(s);
    if (s.pp_rank() == 0)
      result.push_back(std::move(r));
  }
  return result;
}

namespace {

/// @returns where `got`, a parameter after a step, is not the bits of `p`
std::string bit_difference(const Tensor& got, const Tensor& p) {
  if (torch::equal(got, p.detach()))
    return {};
  auto difference = (got - p.detach()).abs();
  auto where = difference.flatten().argmax().item<int64_t>();
  return fmt::format(
    "is not bit-equal: {} of {} elements, at most {} at {}: "
    "{} instead of {}, gradient {}",
    difference.ne(0).sum().item<int64_t>(), p.numel(),
    difference.max().item<double>(), where, got.flatten()[where].item<double>(),
    p.detach().flatten()[where].item<double>(),
    p.grad().flatten()[where].item<double>());
}

} // namespace

std::vector<std::string> differences(const std::vector<step_numbers>& steps,
                                     uint64_t seed, uint64_t microbatches,
                                     double dropout) {
  std::vector<std::string> result;
  plain_gpt plain{vocabulary, length, layers, heads, width, dropout};
  one_process_numbers numbers;
  auto parameters = plain.named();
  std::vector<Tensor> ordered;
  for (auto& [name, p] : parameters)
    ordered.push_back(p);
  torch::optim::AdamW adamw{ordered, torch::optim::AdamWOptions(learning_rate)};
  if (steps.size() != num_steps)
    result.push_back(fmt::format("{} steps were recorded", steps.size()));
  for (size_t i = 0; i < steps.size(); ++i) {
    auto& r = steps[i];
    if (r.before.size() != parameters.size()
        || r.gradients.size() != parameters.size()
        || r.losses.size() != microbatches) {
      result.push_back(
        fmt::format("step {}: {} parameters, {} gradients, {} "
                    "losses",
                    i, r.before.size(), r.gradients.size(), r.losses.size()));
      return result;
    }
    {
      torch::NoGradGuard no_grad;
      for (auto& [name, p] : parameters)
        p.copy_(r.before.at(name));
    }
    plain.zero_grad();
    auto [x, y] = make_batch(static_cast<int>(i));
    auto m = static_cast<int64_t>(microbatches);
    for (int64_t k = 0; k < m; ++k) {
      numbers.start(seed, r.number, static_cast<uint64_t>(k));
      auto part = [&](const Tensor& t) {
        return t.narrow(0, k * batch / m, batch / m);
      };
      auto loss = loss_of(plain.forward(part(x)), part(y));
      (loss / static_cast<double>(m)).backward();
      if (excess(r.losses[static_cast<size_t>(k)], loss.detach()) > 0)
        result.push_back(fmt::format("step {}, microbatch {}: loss", i, k));
    }
    for (auto& [name, p] : parameters) {
      if (auto e = excess(r.gradients.at(name), p.grad()); e > 0)
        result.push_back(
          fmt::format("step {}: gradient of {}, {} too far", i, name, e));
      p.mutable_grad() = r.gradients.at(name);
    }
    adamw.step();
    for (auto& [name, p] : parameters)
      if (auto text = bit_difference(r.after.at(name), p); !text.empty())
        result.push_back(fmt::format("step {}: updated {} {}", i, name, text));
  }
  return result;
}

// -- files --------------------------------------------------------------------

void save(const std::string& path, const std::vector<step_numbers>& steps) {
  named_tensors all;
  for (size_t i = 0; i < steps.size(); ++i) {
    auto add = [&](const char* what, const std::map<std::string, Tensor>& xs) {
      for (auto& [name, x] : xs)
        all.emplace_back(fmt::format("{}/{}/{}", i, what, name),
                         x.contiguous());
    };
    auto number = static_cast<int64_t>(steps[i].number);
    add("number", {{"", torch::tensor(number)}});
    add("before", steps[i].before);
    add("gradients", steps[i].gradients);
    add("after", steps[i].after);
    add("losses", {{"", torch::stack(steps[i].losses)}});
  }
  write_safetensors(path, all);
}

std::vector<step_numbers> load(const std::string& path) {
  std::map<size_t, step_numbers> steps;
  for (auto& [key, x] : read_safetensors(path).tensors) {
    auto first = key.find('/');
    auto second = key.find('/', first + 1);
    auto& r = steps[std::stoul(key.substr(0, first))];
    auto what = key.substr(first + 1, second - first - 1);
    auto name = key.substr(second + 1);
    if (what == "number")
      r.number = static_cast<uint64_t>(x.item<int64_t>());
    else if (what == "losses")
      r.losses = x.unbind();
    else if (what == "before")
      r.before.emplace(name, x);
    else if (what == "gradients")
      r.gradients.emplace(name, x);
    else
      r.after.emplace(name, x);
  }
  std::vector<step_numbers> result;
  for (auto& [i, r] : steps)
    result.push_back(std::move(r));
  return result;
}

} // namespace smp::test
