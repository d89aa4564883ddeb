#include "runtime/session/step.hpp"

#include "actors/order/order_book.hpp"
#include "runtime/base/fnv_hash.hpp"
#include "runtime/collectives/tensor_collectives.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/trace/tracer.hpp"
#include "runtime/session/form_comparison.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/values/tensor_bridge.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Type.h>

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace smp {

namespace {

/// The inputs of running steps, by address, and their slices. These have write
/// counters of their own: code that writes into the slice of one microbatch
/// must not seem to change what autograd keeps of another one.
class sliced_inputs {
public:
  using slice = std::pair<at::Tensor, int64_t>; // and its counter at first

  static sliced_inputs& get() {
    static auto& result = *new sliced_inputs; // outlives all steps
    return result;
  }

  void begin(const at::Tensor& x) {
    std::lock_guard guard{mutex_};
    ++inputs_[x.unsafeGetTensorImpl()].steps;
  }

  void end(const at::Tensor& x) {
    std::lock_guard guard{mutex_};
    auto i = inputs_.find(x.unsafeGetTensorImpl());
    if (i != inputs_.end() && --i->second.steps == 0)
      inputs_.erase(i);
  }

  /// @returns `part`, or the same with a counter of its own
  at::Tensor add(const at::Tensor& x, const at::Tensor& part) {
    std::lock_guard guard{mutex_};
    auto i = inputs_.find(x.unsafeGetTensorImpl());
    if (i == inputs_.end())
      return part;
    auto own = part.variable_data();
    i->second.slices.emplace_back(own, own._version());
    return own;
  }

  bool written(const at::Tensor& x) {
    std::lock_guard guard{mutex_};
    auto i = inputs_.find(x.unsafeGetTensorImpl());
    return i != inputs_.end()
           && std::ranges::any_of(i->second.slices, [](auto& y) {
                return y.first._version() != y.second;
              });
  }

private:
  struct input {
    size_t steps = 0;
    std::vector<slice> slices = {};
  };

  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, input> inputs_;
};

bool is_counted(const at::Tensor& x) {
  return x.defined() && !x.is_inference();
}

} // namespace

at::Tensor slice_tensor(const at::Tensor& x, uint64_t n, uint64_t index,
                        int64_t axis) {
  if (!x.defined())
    return x;
  if (axis < 0)
    axis += x.dim();
  if (axis < 0 || axis >= x.dim())
    throw error{error_code::config,
                "a tensor of " + std::to_string(x.dim())
                  + " axes cannot be split along axis " + std::to_string(axis)
                  + "; name the argument in non_split_inputs or give "
                    "input_split_axes"};
  auto size = x.size(axis);
  auto parts = static_cast<int64_t>(n);
  if (size % parts != 0)
    throw error{error_code::config,
                "axis " + std::to_string(axis) + " has the size "
                  + std::to_string(size) + ", which " + std::to_string(parts)
                  + " microbatches (smp.microbatches) do not divide; leave an "
                    "incomplete last batch out (a DataLoader's drop_last), or "
                    "choose a divisor"};
  auto length = size / parts;
  auto part = x.narrow(axis, static_cast<int64_t>(index) * length, length);
  if (auto* trace = tracer::current())
    return trace->input(part);
  return is_counted(x) && !x.requires_grad() ? sliced_inputs::get().add(x, part)
                                             : part;
}

void refuse_to_split(const std::type_info& type) {
  throw config_error(fmt::format(
    "smp does not know how to split a {} into microbatches: write "
    "smp_slice(const {}&, uint64_t n, uint64_t index, int64_t axis) in its "
    "namespace, or name the argument in step_options::non_split_inputs if "
    "each microbatch is to get all of it",
    c10::demangle(type.name()), c10::demangle(type.name())));
}

namespace detail {

at::Tensor tensor_of(const std::vector<int64_t>& xs) {
  return at::tensor(xs, at::kLong);
}

at::Tensor tensor_of(const std::vector<double>& xs) {
  return at::tensor(xs, at::kDouble);
}

at::Tensor sum_of::operator()(const std::vector<at::Tensor>& xs) const {
  auto result = xs.front().clone();
  for (size_t i = 1; i < xs.size(); ++i)
    result.add_(xs[i]);
  return result;
}

int64_t sum_of::operator()(const std::vector<int64_t>& xs) const {
  return std::accumulate(xs.begin(), xs.end(), int64_t{0});
}

double sum_of::operator()(const std::vector<double>& xs) const {
  return std::accumulate(xs.begin(), xs.end(), 0.0);
}

at::Tensor mean_of::operator()(const std::vector<at::Tensor>& xs) const {
  return sum_of{}(xs).div(static_cast<double>(xs.size()));
}

double mean_of::operator()(const std::vector<int64_t>& xs) const {
  return (*this)(std::vector<double>(xs.begin(), xs.end()));
}

double mean_of::operator()(const std::vector<double>& xs) const {
  return sum_of{}(xs) / static_cast<double>(xs.size());
}

void refuse_to_combine() {
  throw error{error_code::user_code,
              "only some microbatches returned a value, so they have no mean, "
              "sum or sequence: take them one by one from "
              "step_output::outputs()"};
}

at::Tensor concat_of::operator()(const std::vector<at::Tensor>& xs) const {
  // Scalars have no axis: the result is their sequence.
  return xs.front().dim() == 0 ? at::stack(xs) : at::cat(xs, axis);
}

at::Tensor stack_of::operator()(const std::vector<at::Tensor>& xs) const {
  return at::stack(xs);
}

void check_positions(const step_options& x, size_t count) {
  auto check = [count](const std::string& option, size_t position) {
    if (position >= count)
      throw error{error_code::config,
                  "step_options::" + option + " has argument "
                    + std::to_string(position) + ", but the step has "
                    + std::to_string(count) + ", which count from 0"};
  };
  for (auto position : x.non_split_inputs)
    check("non_split_inputs", position);
  for (auto& [position, axis] : x.input_split_axes) {
    check("input_split_axes", position);
    if (x.non_split_inputs.contains(position))
      throw error{error_code::config,
                  "step_options::input_split_axes has an axis for argument "
                    + std::to_string(position)
                    + ", which is not split (non_split_inputs)"};
  }
}

bool computes_on_device() {
  // A trace runs the modules before they are moved.
  return !rank_context::current_device().is_cpu() && !tracer::current();
}

std::vector<at::Tensor> on_device(std::vector<at::Tensor> xs) {
  for (auto& x : xs)
    x = x.to(rank_context::current_device(), /*non_blocking=*/true);
  return xs;
}

void bad_argument(size_t position, const error& err) {
  auto cause = err.cause();
  cause.text = "argument " + std::to_string(position)
               + " of the step: " + cause.text;
  throw error{std::move(cause)};
}

bool needs_signature() {
  auto& rank = session::current().internals();
  return rank.pp_rank() == 0 && rank.records().active();
}

namespace {

/// Not where it lies: modules find it on the device of the rank in any case.
void add_form(fnv_hash& to, const at::Tensor& t) {
  to.add(static_cast<uint64_t>(t.scalar_type()));
  to.add(static_cast<uint64_t>(t.dim()));
  for (auto n : t.sizes())
    to.add(static_cast<uint64_t>(n));
}

/// Adds at most `most` numbers of `t`, evenly spaced, including the last.
void add_some_numbers(fnv_hash& to, const at::Tensor& t) {
  constexpr int64_t most = 1024;
  if (t.layout() != c10::kStrided || t.numel() == 0)
    return;
  at::NoGradGuard no_grad;
  auto all = t.detach().reshape(-1);
  auto every = (all.numel() + most - 1) / most;
  auto some = all.slice(0, (all.numel() - 1) % every, all.numel(), every)
                .to(c10::kCPU)
                .contiguous();
  to.add(std::string_view{static_cast<const char*>(some.const_data_ptr()),
                          some.nbytes()});
}

} // namespace

uint64_t signature(size_t function, const packer& arguments) {
  fnv_hash result;
  result.add(function);
  for (auto& t : arguments.tensors()) {
    add_form(result, t);
    for (auto n : dense_strides(t))
      result.add(static_cast<uint64_t>(n));
  }
  return result.get();
}

namespace {

/// Tells whether tensor-parallel ranks share modules of the model.
bool shares_modules() {
  auto& state = session::current().internals().state();
  return state && state->map().any_shared();
}

void compare_numbers(const packer& arguments) {
  fnv_hash hash;
  for (auto& t : arguments.tensors()) {
    add_form(hash, t);
    add_some_numbers(hash, t);
  }
  auto mine = at::full({1}, static_cast<int64_t>(hash.get()), at::kLong);
  auto all = allgather(mine, comm_group::tp, "smp.samples");
  auto group = get_group(comm_group::tp);
  auto* hashes = all.const_data_ptr<int64_t>();
  for (size_t i = 1; i < group.size(); ++i)
    if (hashes[i] != hashes[0])
      throw error{error_code::user_code,
                  "smp.prescaled_batch = true, but ranks "
                    + std::to_string(group[0]) + " and "
                    + std::to_string(group[i])
                    + " were given different samples: give each rank the part "
                      "smp::data_rank() of smp::data_size() of the batch"};
}

} // namespace

bool compares_samples() {
  return running_call::current() != nullptr && !tracer::current()
         && (session::current().config().prescaled_batch || shares_modules());
}

void compare_samples(const packer& arguments, form_comparison& compared) {
  if (session::current().config().prescaled_batch)
    compare_numbers(arguments);
  else
    compared.run(arguments);
}

namespace {

/// The inputs of one step, whose slices are counted as long as this lives.
struct counted_inputs {
  explicit counted_inputs(const std::vector<at::Tensor>& xs) {
    for (auto& x : xs)
      if (is_counted(x)) {
        versions.emplace_back(x, x._version());
        sliced_inputs::get().begin(x);
      }
  }

  ~counted_inputs() {
    for (auto& x : versions)
      sliced_inputs::get().end(x.first);
  }

  counted_inputs(const counted_inputs&) = delete;
  counted_inputs& operator=(const counted_inputs&) = delete;

  std::vector<std::pair<at::Tensor, int64_t>> versions;
};

} // namespace

std::function<bool()> written_since(const std::vector<at::Tensor>& xs) {
  return [inputs = std::make_shared<counted_inputs>(xs)] {
    return std::ranges::any_of(inputs->versions, [](auto& x) {
      return x.first._version() != x.second
             || sliced_inputs::get().written(x.first);
    });
  };
}

void skip_step() {
  session::current().internals().skip_step();
}

namespace {

/// A rank that leaves out `optimizer.step()` would keep its part of the model
/// as it is, without a word.
/// @param first number of updates on pp_rank 0
void compare_updates(const rank_runtime& rank, uint64_t first) {
  auto mine = rank.counters().updates.load();
  if (mine != first)
    throw config_error(fmt::format(
      "rank {} called optimizer.step() {} times before step {}, rank {} {} "
      "times: every rank of a pipeline calls each step, and each update",
      rank.pipeline().front().value, first, rank.drawn_step(),
      rank.self().value, mine));
}

} // namespace

std::vector<std::shared_ptr<step_result>>
run_step(const step_call& x, const step_code& body, bool detach) {
  if (x.microbatches == 0)
    throw error{error_code::config, "a step of 0 microbatches"};
  auto& rank = session::current().internals();
  std::vector<std::vector<at::Tensor>> own(x.microbatches);
  form_comparison compared;
  auto run = [&](uint64_t index) {
    packer tensors;
    auto result = body(tensors, index, compared);
    if (tracer::current())
      return payload{};
    if (!detach)
      own[index] = materialised(tensors);
    return encode_result(*running_call::current(), tensors, result);
  };
  auto encoded = rank.run_step(x, run);
  if (encoded.size() != x.microbatches)
    throw config_error(
      "pp_rank 0 ran a step of " + std::to_string(encoded.size())
      + " microbatches, rank " + std::to_string(rank.self().value) + " of "
      + std::to_string(x.microbatches)
      + ": all ranks of a pipeline must give a step the same number "
        "(step_options::microbatches)");
  std::vector<std::shared_ptr<step_result>> result;
  for (size_t i = 0; i < encoded.size(); ++i)
    result.push_back(std::make_shared<step_result>(
      rank.weak_from_this(), encoded[i], std::move(own[i])));
  compare_updates(rank, result.front()->updates());
  return result;
}

} // namespace detail

} // namespace smp
