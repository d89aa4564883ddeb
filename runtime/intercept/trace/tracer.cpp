#include "runtime/intercept/trace/tracer.hpp"

#include "runtime/base/out_of_memory.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/base/script_error_text.hpp"
#include "runtime/intercept/trace/retry_on_gpu.hpp"
#include "runtime/intercept/trace/state_before_trace.hpp"
#include "runtime/model/module_walk.hpp"
#include "transport/error.hpp"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <numeric>
#include <unordered_map>

namespace smp {

namespace {

/// What the body computes outside of the model is measured again while it is
/// more than this share of all; each time all runs once more, so neither often
/// nor if it takes long, in seconds.
constexpr double least_share = 0.02;
constexpr size_t body_repeats = 3;
constexpr double longest_repeated = 1;

/// Tensors whose data is on a device while this lives.
class moved_to_gpu {
public:
  explicit moved_to_gpu(at::Device x) : device_(x) {
    // nop
  }

  ~moved_to_gpu() {
    for (auto& [x, data] : tensors_)
      x.set_data(data);
  }

  moved_to_gpu(const moved_to_gpu&) = delete;
  moved_to_gpu& operator=(const moved_to_gpu&) = delete;

  void add(at::Tensor x) {
    at::NoGradGuard no_grad;
    auto there = x.to(device_);
    tensors_.emplace_back(x, x.detach());
    x.set_data(there);
  }

private:
  at::Device device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
};

/// Where modules run.
at::Device place_of(const trace_options& x) {
  return x.gpu ? x.device : at::Device{at::kCPU};
}

/// Waits until the device has done all work of this thread.
void synchronize(at::Device x) {
  c10::impl::VirtualGuardImpl device{x.type()};
  device.synchronizeStream(device.getStream(x));
}

/// What a device does once, as to get ready for products of matrices, is not
/// the time of the module that is the first to need it.
void warm_up(at::Device x) {
  auto y = at::ones({2, 2}, at::TensorOptions{x});
  at::mm(y, y);
  synchronize(x);
}

std::string first_line(std::string x) {
  constexpr size_t longest = 480;
  x.resize(std::min({x.size(), x.find('\n'), longest}));
  return x;
}

} // namespace

// -- memory -------------------------------------------------------------------

/// Tracks which tensors operators create and how long they live. (LibTorch's
/// own memory profiling complains on stderr about memory older than itself.)
struct tracer::memory_meter {
  using weak_storage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  struct block {
    weak_storage storage;
    int64_t bytes;
  };

  explicit memory_meter(const walked_model& model) {
    for (auto& x : model.tensors)
      add(x.tensor, false);
    auto callback = at::RecordFunctionCallback{
      [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
        return nullptr;
      },
      &on_end};
    callback.needsOutputs(true).scopes({at::RecordScope::FUNCTION});
    handle = at::addThreadLocalCallback(callback);
  }

  ~memory_meter() {
    at::removeCallback(handle);
  }

  static void on_end(const at::RecordFunction& f, at::ObserverContext*) {
    auto* x = current();
    // After the trace the tracer itself compares and restores state.
    if (x && x->memory_ && x->counts() && !x->stack_.empty()) {
      for (auto& output : f.outputs())
        x->memory_->add(output, true);
      x->on_memory();
    }
  }

  void add(const at::IValue& x, bool made) {
    if (x.isTensor())
      add(x.toTensor(), made);
    else if (x.isTensorList())
      for (at::Tensor y : x.toTensorList())
        add(y, made);
  }

  /// @param made by an operator of the trace; else it existed before
  void add(const at::Tensor& x, bool made) {
    if (!x.defined() || !x.has_storage())
      return;
    auto* storage = x.storage().unsafeGetStorageImpl();
    // The weak pointer keeps the address from being reused.
    auto [i, added] = known.try_emplace(storage,
                                        x.storage().getWeakStorageImpl());
    if (added && made)
      blocks.push_back({i->second, static_cast<int64_t>(x.storage().nbytes())});
  }

  /// @returns the bytes of all created tensors that are still alive.
  int64_t live() {
    int64_t result = 0;
    std::erase_if(blocks, [&](const block& x) {
      if (x.storage.expired()) {
        known.erase(x.storage._unsafe_get_target());
        return true;
      }
      result += x.bytes;
      return false;
    });
    return result;
  }

  at::CallbackHandle handle = 0;
  std::unordered_map<const void*, weak_storage> known;
  std::vector<block> blocks;
};

// -- tracer -------------------------------------------------------------------

tracer::tracer(const walked_model& model, const trace_options& options,
               random_stream stream)
  : model_(model),
    options_(options),
    times_(place_of(options)),
    once_(model.modules.size(), std::numeric_limits<double>::infinity()),
    repeated_(model.modules.size()),
    saved_(std::make_unique<state_before_trace>(model, std::move(stream),
                                                options.device)) {
  result_.modules.resize(model.modules.size());
  result_.times = options.times;
  result_.memory = options.memory;
  track_results(true);
  set_interceptor(interceptor::trace, this);
  // Computation of the step outside of modules belongs to the root.
  enter(module_id{0});
}

tracer::~tracer() {
  set_interceptor(interceptor::trace, nullptr);
}

void tracer::restore() {
  saved_->restore();
}

tracer* tracer::current() noexcept {
  auto place = static_cast<size_t>(interceptor::trace);
  return static_cast<tracer*>(interceptor_at(place));
}

at::Tensor tracer::input(const at::Tensor& x) const {
  return x.to(place_of(options_), false, true);
}

bool tracer::counts() const noexcept {
  return pass_ == pass::all || pass_ == pass::count;
}

void tracer::enter(module_id x) {
  frame f;
  f.module = x;
  f.again = stack_.size() > 1 && stack_.back().module == x;
  f.live = memory_ && counts() ? memory_->live() : 0;
  auto& y = result_.modules.at(x.value);
  // The step itself is not a call.
  if (counts() && !f.again && !stack_.empty()) {
    if (y.calls++ == 0)
      y.first = order_++;
  }
  f.call = times_.begin(x);
  stack_.push_back(f);
  unwinding_ = false;
  result_.failed.reset(); // earlier failures were caught
}

void tracer::leave() {
  auto f = stack_.back();
  times_.end(f.call);
  stack_.pop_back();
  if (counts())
    result_.modules[f.module.value].activation_bytes += static_cast<uint64_t>(
      f.peak);
  if (!stack_.empty() && memory_ && counts())
    stack_.back().kept += memory_->live() - f.live;
}

std::optional<module_id> tracer::caller() const {
  auto here = stack_.back().module;
  auto found = std::find_if(stack_.rbegin(), stack_.rend(),
                            [=](auto& x) { return x.module != here; });
  return found == stack_.rend() ? std::nullopt : std::optional{found->module};
}

void tracer::add_bytes(std::span<const at::Tensor> xs) {
  if (!counts() || stack_.back().again)
    return;
  auto& y = result_.modules[stack_.back().module.value];
  for (auto& x : xs) {
    // A parameter stays where it is (R14).
    auto i = model_.find(x);
    if (x.defined() && (i < 0 || model_.tensors[i].is_buffer))
      y.transfer_bytes += x.nbytes();
  }
}

void tracer::note_arguments(std::span<const at::Tensor> xs) {
  if (!counts() || stack_.back().again)
    return;
  auto& call = result_.modules[stack_.back().module.value]
                 .arguments.emplace_back();
  for (auto& x : xs)
    if (!x.defined() || x.layout() != at::kStrided || x.is_nested())
      call.emplace_back();
    else
      call.push_back({x.sizes().vec(), static_cast<uint64_t>(x.element_size()),
                      x.dim() > 0 && x.stride(0) == 0});
}

void tracer::on_memory() {
  auto& f = stack_.back();
  f.peak = std::max(f.peak, memory_->live() - f.live - f.kept);
}

/// Tracking takes time, which must not be measured.
void tracer::track_results(bool on) {
  tracker_.reset();
  if (on)
    tracker_ = std::make_unique<result_tracker>(
      result_.modules, [this]() -> std::optional<module_id> {
        if (!counts() || stack_.empty())
          return std::nullopt;
        return stack_.back().module;
      });
}

void tracer::note_returned(const intercepted_call& x,
                           std::span<const at::Tensor> xs) {
  if (!tracker_ || !counts())
    return;
  auto& f = stack_.back();
  auto from = caller();
  if (!from)
    return;
  auto is_parameter = [this](auto& y) {
    auto i = model_.find(y);
    return i >= 0 && !model_.tensors[i].is_buffer;
  };
  // Children of a Sequential are called together (R8): for most, the argument
  // is the result of the previous child.
  auto alters = !model_.modules[from->value].sequential
                && (f.arguments.written() || f.arguments.any_in(xs)
                    || std::ranges::any_of(xs, is_parameter));
  if (alters || !x.tensors_only) // such calls always wait
    result_.modules[f.module.value].waited_for = true;
  tracker_->returned(f.module, *from, xs);
}

// -- call_interceptor ---------------------------------------------------------

void tracer::enter(const intercepted_call& x) {
  if (x.module)
    enter(*x.module);
}

void tracer::arguments(const intercepted_call& x, const void*,
                       std::span<const at::Tensor> xs) {
  if (!x.module)
    return;
  add_bytes(xs);
  note_arguments(xs);
  if (memory_)
    for (auto& y : xs)
      memory_->add(y, false); // it may be changed in place
  if (tracker_ && counts())
    stack_.back().arguments = passed_tensors{xs};
  times_.start();
}

void tracer::results(const intercepted_call& x,
                     std::span<const at::Tensor> xs) {
  if (!x.module)
    return;
  times_.stop(); // unless it was a retry
  add_bytes(xs);
  note_returned(x, xs);
}

void tracer::leave(const intercepted_call& x, bool failed) {
  if (!x.module)
    return;
  if (failed && !unwinding_)
    result_.failed = stack_.back().module;
  leave();
  unwinding_ = failed;
}

std::vector<at::Tensor> tracer::retry_on_gpu(
  torch::nn::Module& module, const std::vector<at::Tensor>& xs,
  const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>&
    f) {
  at::NoGradGuard no_grad;
  auto device = options_.device;
  moved_to_gpu moved{device};
  for (auto& x : module.parameters())
    moved.add(x);
  for (auto& x : module.buffers())
    moved.add(x);
  auto to = [](std::vector<at::Tensor> ys, at::Device where) {
    for (auto& y : ys)
      if (y.defined())
        y = y.to(where);
    return ys;
  };
  auto there = to(xs, device);
  warm_up(device);
  times_.start();
  auto result = f(there);
  synchronize(device);
  times_.stop();
  result = to(std::move(result), at::kCPU);
  result_.modules[stack_.back().module.value].on_gpu = true;
  return result;
}

bool may_retry_on_gpu() {
  auto* trace = tracer::current();
  return trace && trace->may_retry_on_gpu();
}

std::vector<at::Tensor> retry_on_gpu(
  torch::nn::Module& module, const std::vector<at::Tensor>& xs,
  const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>&
    f) {
  return tracer::current()->retry_on_gpu(module, xs, f);
}

// -- trace --------------------------------------------------------------------

namespace {

/// @returns why it failed; empty: it did not
/// @throws error (config)
std::string run_until_backward(const std::function<void()>& body) {
  try {
    body();
  } catch (const tracer::finished&) {
    // The forward phase is over.
  } catch (const error& e) {
    if (e.code() == error_code::config)
      throw;
    return first_line(e.what());
  } catch (const c10::Error& e) {
    return first_line(script_error_text(e.what_without_backtrace()));
  } catch (const std::exception& e) {
    return first_line(script_error_text(e.what()));
  } catch (...) {
    return "an exception that does not derive from std::exception";
  }
  return {};
}

} // namespace

std::vector<double> tracer::end_run() {
  stack_.resize(1);
  leave();
  restore();
  auto result = times_.seconds(once_.size(), 0);
  times_.resize(0);
  return result;
}

void tracer::take_fastest(const std::vector<double>& seconds) {
  for (size_t i = 0; i < once_.size(); ++i) {
    once_[i] = std::min(once_[i], seconds[i]);
    result_.modules[i].seconds = once_[i] + repeated_[i];
  }
}

bool tracer::wants_body_again() const {
  auto once = std::accumulate(once_.begin(), once_.end(), 0.0);
  auto all = once + result_.repeated_seconds;
  return options_.times && !is_noise(result_) && all < longest_repeated
         && once > least_share * all;
}

void tracer::time_body_again(const std::function<void()>& body) {
  memory_.reset();
  track_results(false);
  pass_ = pass::time;
  for (size_t i = 0; i < body_repeats && wants_body_again(); ++i) {
    enter(module_id{0});
    auto failed = !run_until_backward(body).empty();
    auto seconds = end_run();
    if (failed) // it did less than the first
      return;
    take_fastest(seconds);
  }
}

/// @returns with `failure` if there was no room on the GPU
trace_result trace_once(const walked_model& model, const trace_options& options,
                        random_stream stream,
                        const std::function<void()>& body) {
  tracer x{model, options, std::move(stream)};
  std::string failure;
  {
    moved_to_gpu moved{options.device};
    failure = run_until_backward([&] {
      if (options.gpu) {
        for (auto& t : model.tensors)
          moved.add(t.tensor);
        warm_up(options.device);
      }
      // To move them takes neither time nor memory of a step.
      x.times_.start();
      if (options.memory)
        x.memory_ = std::make_unique<tracer::memory_meter>(model);
      body();
    });
    if (failure.empty()) {
      x.take_fastest(x.end_run());
      x.time_body_again(body);
      x.result_.failed.reset();
    }
  }
  if (!failure.empty())
    x.take_fastest(x.end_run());
  auto result = std::move(x.result_);
  result.on_gpu = options.gpu;
  result.changed = x.saved_->changed();
  result.stateful = x.saved_->stateful();
  result.failure = failure;
  return result;
}

trace_result trace_forward(const walked_model& model,
                           const trace_options& options, random_stream stream,
                           const std::function<void()>& body) {
  auto chosen = options;
  if (chosen.device.is_cpu() && at::hasCUDA())
    chosen.device = {at::kCUDA, 0};
  if (chosen.gpu && chosen.device.is_cpu())
    throw error{error_code::config,
                "smp.trace_device = \"gpu\", but there is no GPU that this "
                "LibTorch can use; write \"cpu\" or \"none\""};
  at::NoGradGuard no_grad;
  auto result = trace_once(model, chosen, stream, body);
  if (!chosen.gpu || !is_out_of_memory(result.failure))
    return result;
  print_stderr(
    "smp: {} has no room to measure the whole model: it is measured "
    "on the CPU\n",
    chosen.device.str());
  chosen.gpu = false;
  return trace_once(model, chosen, std::move(stream), body);
}

} // namespace smp
