#include "tests/support/torch/script_runs.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/deferred/deferred_script.hpp"
#include "runtime/intercept/script/marks.hpp"
#include "runtime/model/script_walk.hpp"
#include "runtime/session/activation_checkpointing.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/torch/plain_gpt.hpp"
#include "tests/support/torch/random.hpp"

#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>
#include <stdexcept>

namespace smp::test {

namespace {

using torch::Tensor;

constexpr double learning_rate = 0.05;

std::vector<Tensor> batch_of(const script_job& job, int step) {
  if (job.batch)
    return job.batch(step);
  auto x = torch::arange(64.0, torch::kFloat).add(13.0 * (step + 1));
  return {(x * x * 0.37).sin().view({8, 8}) * 2};
}

std::map<std::string, Tensor> to_map(const named_tensors& xs) {
  return {xs.begin(), xs.end()};
}

/// The same tensors as Python's lists: tied ones once, under their first name.
template <class List>
std::map<std::string, Tensor> once(const List& xs) {
  std::map<std::string, Tensor> result;
  std::set<const void*> seen;
  for (auto x : xs)
    if (seen.insert(x.value.unsafeGetTensorImpl()).second)
      result.emplace(x.name, x.value);
  return result;
}

void check_nothing_left(session& s, const distributed_model_base& model) {
  auto& eng = s.internals();
  auto pending = eng.actors().status(std::chrono::seconds{10}).pending;
  if (eng.calls().size() > 0 || pending > 0)
    throw std::runtime_error{
      fmt::format("{} saved calls and {} requests are left on rank {}",
                  eng.calls().size(), pending, s.rank())};
  auto& st = model.state().map();
  for (uint32_t i = 0; i < st.model().tensors.size(); ++i)
    if (!st.owned(i) && st.model().tensors[i].tensor.mutable_grad().defined())
      throw std::runtime_error{"'" + st.tensor_name(i)
                               + "' collected a gradient on rank "
                               + std::to_string(s.rank())};
}

} // namespace

std::string script_file(const std::string& name) {
  auto* root = std::getenv("SMP_SOURCE_DIR");
  return std::string{root ? root : "."} + "/tests/data/script/" + name;
}

script_job zoo_job(const std::string& name) {
  auto file = source_file("tests/data/zoo/" + name);
  auto inputs = read_safetensors(file + ".batch.safetensors");
  std::vector<Tensor> batch;
  while (auto x = inputs.find(fmt::format("input{}", batch.size())))
    batch.push_back(*x);
  script_job result;
  result.path = file + ".pt";
  result.batch = [batch](int) { return batch; };
  return result;
}

namespace {

/// A module of a ModuleList or Sequential.
bool is_item(const walked_module& x) {
  auto& path = x.names.front();
  auto name = path.substr(path.rfind('.') + 1);
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
}

/// Items of the outermost lists go in turn, from the last rank.
std::vector<size_t> by_layers(const walked_model& x, size_t ranks) {
  std::vector<size_t> result(x.modules.size(), 0);
  std::vector<bool> inside(x.modules.size(), false);
  auto next = ranks - 1;
  for (size_t i = 1; i < result.size(); ++i) {
    auto parent = x.modules[i].parent;
    inside[i] = inside[parent] || is_item(x.modules[i]);
    result[i] = result[parent];
    if (inside[i] && !inside[parent]) {
      result[i] = next;
      next = (next + ranks - 1) % ranks;
    }
  }
  return result;
}

} // namespace

void place(session& s, const distributed_model_base& model, spread placement) {
  if (placement == spread::automatic)
    return;
  auto& walked = model.state().model();
  auto count = walked.modules.size();
  auto ranks = s.internals().pipeline().size();
  std::vector<size_t> devices(count, 0);
  for (size_t i = 1; i < count; ++i)
    devices[i] = placement == spread::rank_0      ? 0
                 : placement == spread::scattered ? i % ranks
                                                  : i * ranks / count;
  if (placement == spread::layers)
    devices = by_layers(walked, ranks);
  // What nobody intercepts stays with its parent (R20).
  for (size_t i = 1; i < count; ++i)
    if (auto& m = walked.modules[i];
        m.script == nullptr && m.hooks.empty() && !m.container)
      devices[i] = devices[m.parent];
  // Again and again, for those that are tied to several.
  for (auto changed = true; std::exchange(changed, false);)
    for (auto& t : walked.tensors)
      for (auto m : t.modules)
        if (devices[m] != devices[t.modules.front()]) {
          auto lower = std::min(devices[m], devices[t.modules.front()]);
          devices[m] = devices[t.modules.front()] = lower;
          changed = true;
        }
  for (size_t i = 0; i < count; ++i)
    s.internals().marks().pins[walked.modules[i].identity()] = static_cast<
      uint32_t>(devices[i]);
}

namespace {

/// In a session, which hears what is computed again.
torch::jit::Module load_marked(const script_job& job) {
  // However small the tensors are.
  auto result = job.deferred ? load_deferred_script(job.path, 0)
                             : load_script(job.path);
  for (const auto& x : result.named_modules())
    if (std::ranges::find(job.marked, x.name) != job.marked.end())
      set_activation_checkpointing(x.value);
  return result;
}

} // namespace

script_result run_split(const script_job& job) {
  script_result result;
  std::mutex mutex;
  virtual_world_options world;
  world.config.pipeline_parallel_degree = job.ranks;
  world.config.microbatches = job.microbatches;
  world.config.pipeline = job.pipeline;
  if (job.active > 0)
    world.config.active_microbatches = job.active;
  world.config.threads = 1;
  world.config.fast_mode = job.fast;
  world.config.static_mode = job.replays;
  if (job.replays && !job.fixed_order)
    world.config.static_steps = 1;
  world.config.deterministic_server = job.fixed_order;
  world.config.activation_checkpointing = {job.recompute, job.strategy};
  world.reorder = true;
  run_virtual_world(job.ranks, world, [&](session& s) {
    distributed_model model{load_marked(job)};
    if (s.pp_rank() == 0)
      for (auto& t : model.state().model().tensors)
        result.deferred += is_deferred(t.tensor);
    model.train();
    place(s, model, job.placement);
    model.partition();
    auto* decision = model.state().decision(); // where it was made
    auto recomputed = decision ? decision->checkpointing.chosen.size() : 0;
    auto train_step = step([&](std::vector<Tensor> batch) {
      auto loss = loss_of(model.run("forward", {batch.begin(), batch.end()}));
      model.backward(loss);
      return loss.detach();
    });
    for (int i = 0; i < job.steps; ++i) {
      script_step r;
      r.before = to_map(model.state_dict());
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      r.losses = train_step(batch_of(job, i)).outputs();
      r.gradients = to_map(model.gradients());
      r.after = to_map(model.state_dict());
      r.number = s.internals().drawn_step();
      check_nothing_left(s, model);
      torch::NoGradGuard no_grad;
      for (auto& p : model.local_parameters())
        if (p.grad().defined())
          p.sub_(p.grad(), learning_rate);
      std::unique_lock guard{mutex};
      result.requests += s.last_step().requests;
      if (s.pp_rank() == 0) {
        result.replayed += s.last_step().replayed;
        result.ran_again += !s.last_step().ran_again.empty();
        result.recomputed = recomputed;
        result.steps.push_back(std::move(r));
      }
    }
  });
  return result;
}

namespace {

/// The file's model in plain LibTorch, and what was found to differ from it.
class plain_run {
public:
  explicit plain_run(const script_job& job)
    : job_(job),
      model_(torch::jit::load(job.path)),
      parameters_(once(model_.named_parameters(true))) {
    model_.train();
    auto walked = walk(model_._ivalue());
    for (auto& m : walked.modules)
      numbers_.name(m.identity(), m.names.front());
    mark_methods(classes_of(walked));
  }

  void compare(int step, const script_step& x) {
    step_ = step;
    start_from(x);
    run(x);
    compare_gradients(x);
    compare_state(x);
  }

  void differ(const std::string& what) {
    result.push_back(fmt::format("step {}: {}", step_, what));
  }

  std::vector<std::string> result;

private:
  /// A module may put other tensors into its slots.
  std::map<std::string, Tensor> state() const {
    auto xs = once(model_.named_buffers(true));
    xs.insert(parameters_.begin(), parameters_.end());
    return xs;
  }

  void start_from(const script_step& x) {
    torch::NoGradGuard no_grad;
    for (auto& [name, y] : state()) {
      if (step_ == 0 && !torch::equal(y, x.before.at(name)))
        differ(name + " is not what the file has");
      y.copy_(x.before.at(name));
    }
    for (auto& [name, p] : parameters_) {
      auto q = p;
      q.mutable_grad() = Tensor{};
    }
  }

  void run(const script_step& x) {
    torch::jit::GraphOptimizerEnabledGuard off{false};
    auto m = static_cast<int64_t>(job_.microbatches);
    if (x.losses.size() != job_.microbatches)
      differ(fmt::format("{} losses", x.losses.size()));
    for (int64_t k = 0; k < m; ++k) {
      numbers_.start(1, x.number, static_cast<uint64_t>(k));
      std::vector<c10::IValue> inputs;
      for (auto& y : batch_of(job_, step_))
        inputs.emplace_back(y.chunk(m, 0).at(static_cast<size_t>(k)));
      auto out = model_.forward(inputs);
      auto loss = out.isTuple() ? out.toTupleRef().elements()[0].toTensor()
                                : out.toTensor();
      (loss / static_cast<double>(m)).backward();
      if (auto e = excess(x.losses.at(static_cast<size_t>(k)), loss.detach());
          e > 0)
        differ(fmt::format("loss of microbatch {}, {} too far", k, e));
    }
  }

  void compare_gradients(const script_step& x) {
    for (auto& [name, p] : parameters_) {
      auto found = x.gradients.find(name);
      auto expected = p.grad();
      // Once TorchScript has fused an operation, what is detached from the
      // loss gets zeros instead of nothing, as eager PyTorch gives it.
      if (!expected.defined() && found != x.gradients.end()
          && torch::equal(found->second, torch::zeros_like(found->second)))
        continue;
      if ((found != x.gradients.end()) != expected.defined())
        differ(expected.defined() ? "no gradient of " + name
                                  : "a gradient of " + name);
      else if (expected.defined())
        if (auto e = excess(found->second, expected); e > 0)
          differ(fmt::format("gradient of {}, {} too far", name, e));
    }
  }

  void compare_state(const script_step& x) {
    for (auto& [name, y] : state())
      if (!x.after.contains(name))
        differ("no " + name + " in the state");
      else if (auto e = excess(x.after.at(name).to(torch::kDouble),
                               y.detach().to(torch::kDouble));
               e > 0)
        differ(fmt::format("{} after the step, {} too far", name, e));
  }

  const script_job& job_;
  torch::jit::Module model_;
  std::map<std::string, Tensor> parameters_;
  one_process_numbers numbers_;
  int step_ = 0;
};

} // namespace

std::vector<std::string> differences(const script_job& job,
                                     const script_result& seen) {
  plain_run plain{job};
  if (seen.steps.size() != static_cast<size_t>(job.steps))
    plain.differ(fmt::format("{} steps were recorded", seen.steps.size()));
  for (int i = 0; i < static_cast<int>(seen.steps.size()); ++i)
    plain.compare(i, seen.steps[static_cast<size_t>(i)]);
  return plain.result;
}

} // namespace smp::test
