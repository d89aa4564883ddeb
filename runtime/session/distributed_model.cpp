#include "runtime/session/distributed_model.hpp"

#include "partition/print.hpp"
#include "runtime/base/fault.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/calls/backward_engine.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/intercept/sequential.hpp"
#include "runtime/intercept/trace/tracer.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/lazy/late_logits.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/placement/partition_json.hpp"
#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/state_check.hpp"
#include "runtime/sharing/sharing.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/bytes.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdio>

namespace smp {

namespace ag = torch::autograd;

namespace {

/// Writes RUN_DIR/partition.json, the same as `smp-train partition --json`.
/// @param run_dir empty: there is none
void write_partition(const model_state& x, const std::string& run_dir) {
  auto* decided = x.decision();
  if (decided == nullptr || run_dir.empty())
    return;
  try {
    write_text(
      run_dir + "/partition.json",
      plan_json(decided->model, decided->plan, decided->sharing.remarks));
  } catch (const error& e) {
    // It is for viewers, and no reason to end the run.
    print_stderr("smp: {}; viewers of the run lack its partition\n", e.what());
  }
}

} // namespace

distributed_model_base::distributed_model_base(
  std::shared_ptr<torch::nn::Module> root)
  : distributed_model_base(model_root{std::move(root), {}}) {
  // nop
}

distributed_model_base::distributed_model_base(model_root root)
  : rank_(session::current().shared_internals()),
    state_(rank_->make_model(std::move(root))) {
  if (rank_->self() != rank_id{0})
    return;
  register_post_partition_hook(
    [this] { write_partition(*state_, rank_->run_dir()); });
  auto& x = rank_->config();
  if (x.print_partition
      && x.pipeline_parallel_degree * x.tensor_parallel_degree > 1)
    register_post_partition_hook([this] {
      std::fputs((partition_text(stderr_is_terminal()) + "\n").c_str(), stderr);
    });
}

distributed_model_base::~distributed_model_base() {
  rank_->drop_model();
}

// -- training -----------------------------------------------------------------

void distributed_model_base::backward(const at::Tensor& loss,
                                      const at::Tensor& grad, bool keep_graph) {
  backward(std::vector{loss}, std::vector{grad}, keep_graph);
}

void distributed_model_base::backward(const std::vector<at::Tensor>& outputs,
                                      const std::vector<at::Tensor>& grads,
                                      bool keep_graph) {
  if (auto* trace = tracer::current())
    trace->finish();
  auto* ex = running_call::current();
  if (!ex || !ex->is_root())
    throw error{error_code::unsupported,
                "model.backward outside a step body (smp::step)"};
  if (outputs.size() != grads.size())
    throw error{error_code::unsupported,
                "model.backward: one gradient per output"};
  check_range_consumed(*ex);
  read_late_logits(outputs);
  if (SMP_FAULT("lost-backward") && ex->microbatch().value == 1)
    return;
  auto averages = rank_->config().average_grads_across_microbatches
                  && !SMP_FAULT("wrong-loss-scale");
  auto scale = state_->loss_scale().value();
  if (averages)
    scale /= static_cast<double>(rank_->counters().microbatches);
  ag::edge_list roots;
  ag::variable_list seeds;
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto& x = outputs[i];
    if (!x.defined() || !x.requires_grad())
      throw error{error_code::unsupported, "model.backward: output "
                                             + std::to_string(i)
                                             + " does not require grad"};
    if (!grads[i].defined() && x.numel() != 1)
      throw error{error_code::unsupported,
                  "model.backward: output " + std::to_string(i) + " has "
                    + std::to_string(x.numel())
                    + " elements; give a gradient or reduce it to a scalar"};
    at::NoGradGuard no_grad;
    // Scaled here and not in .grad, which may hold earlier sums (R15).
    seeds.push_back(grads[i].defined()
                      ? grads[i] * scale
                      : at::full(x.sizes(), scale, x.options()));
    roots.push_back(ag::impl::gradient_edge(x));
  }
  ++rank_->counters().backwards;
  if (ex->needs_grant())
    await_grant(*ex);
  fence(*ex); // a second backward needs the shapes, too
  ex->streams().begin_backward();
  run_engine(*ex, roots, seeds, keep_graph);
  fence(*ex);
}

void distributed_model_base::train(bool on) {
  state_->train(on);
}

// -- data parallelism ---------------------------------------------------------

distributed_model_base::no_sync_scope::no_sync_scope(
  std::shared_ptr<model_state> x)
  : state_(std::move(x)) {
  ++state_->replication().unsynced;
}

distributed_model_base::no_sync_scope::~no_sync_scope() {
  --state_->replication().unsynced;
}

void distributed_model_base::register_comm_hook(comm_hook x) {
  state_->replication().hook = x;
  state_->replication().own_hook = {};
}

void distributed_model_base::register_comm_hook(bucket_hook x) {
  if (rank_->config().shard_gradients)
    throw error{error_code::unsupported,
                "register_comm_hook with a function of your own, but "
                "smp.shard_gradients = true sends gradients to the replica "
                "that updates their rows: leave one of them out"};
  state_->replication().own_hook = std::move(x);
}

// -- partition ----------------------------------------------------------------

void distributed_model_base::partition() {
  state_->partition();
}

bool distributed_model_base::partitioned() const {
  return state_->partitioned();
}

std::string distributed_model_base::partition_text(bool colour,
                                                   bool all) const {
  auto text = all ? state_->full_text() : state_->text();
  return colour ? text : without_colours(text);
}

std::string distributed_model_base::order_text() const {
  return state_->map().order().text();
}

void distributed_model_base::register_post_partition_hook(
  std::function<void()> f) {
  state_->on_partition(std::move(f));
}

// -- what this rank owns ------------------------------------------------------

std::vector<std::string> distributed_model_base::local_module_names() const {
  std::vector<std::string> result;
  auto& modules = state_->model().modules;
  for (size_t i = 0; i < modules.size(); ++i)
    if (state_->map().owner(module_id{i}) == rank_->self())
      result.push_back(modules[i].names.front());
  return result;
}

std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>
distributed_model_base::local_named_modules() const {
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>
    result;
  auto& modules = state_->model().modules;
  for (size_t i = 0; i < modules.size(); ++i)
    if (modules[i].object && state_->map().owner(module_id{i}) == rank_->self())
      result.emplace_back(modules[i].names.front(),
                          modules[i].object->shared_from_this());
  return result;
}

std::vector<std::shared_ptr<torch::nn::Module>>
distributed_model_base::local_modules() const {
  std::vector<std::shared_ptr<torch::nn::Module>> result;
  for (auto& [name, x] : local_named_modules())
    result.push_back(std::move(x));
  return result;
}

named_tensors distributed_model_base::local_named_parameters() const {
  named_tensors result;
  auto& tensors = state_->model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (state_->map().owned(i) && !tensors[i].is_buffer)
      result.emplace_back(tensors[i].names.front(), tensors[i].tensor);
  return result;
}

std::vector<at::Tensor> distributed_model_base::local_parameters() const {
  std::vector<at::Tensor> result;
  for (auto& [name, x] : local_named_parameters())
    result.push_back(std::move(x));
  return result;
}

std::vector<at::Tensor> distributed_model_base::local_buffers() const {
  std::vector<at::Tensor> result;
  auto& tensors = state_->model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (state_->map().owned(i) && tensors[i].is_buffer
        && !tensors[i].is_attribute)
      result.push_back(tensors[i].tensor);
  return result;
}

named_tensors distributed_model_base::local_state_dict() const {
  named_tensors result;
  auto& tensors = state_->model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (state_->map().owned(i) && !tensors[i].is_attribute)
      result.emplace_back(tensors[i].names.front(),
                          tensors[i].tensor.detach().clone());
  return result;
}

// -- the whole model ----------------------------------------------------------

named_tensors distributed_model_base::gather(const char* what,
                                             bool gradients) const {
  auto& tensors = state_->model().tensors;
  using entry = std::pair<uint32_t, tensor_ref>; // with its position
  std::vector<entry> mine;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    if (!state_->map().owned(i)
        || (state_->partitioned() ? false : rank_->pp_rank() != 0))
      continue;
    if (tensors[i].is_attribute)
      continue;
    auto x = gradients ? state_->gradient(i) : tensors[i].tensor;
    if (auto* slice = state_->map().slice(i))
      x = whole_of(*rank_, x, *slice);
    if (!x.defined())
      continue;
    if (gradients)
      x = x.to_dense();
    mine.emplace_back(i, to_tensor_ref(x.detach(), true));
  }
  auto all = rank_->exchange().all_gather(rank_->pipeline(), what,
                                          to_payload(mine));
  std::vector<at::Tensor> found(tensors.size());
  for (auto& x : all)
    for (auto& [i, t] : from_payload<std::vector<entry>>(x, "state"))
      found.at(i) = to_tensor(t);
  named_tensors result;
  for (size_t i = 0; i < found.size(); ++i)
    if (found[i].defined())
      result.emplace_back(tensors[i].names.front(), found[i]);
  return result;
}

named_tensors distributed_model_base::state_dict() const {
  return gather("smp.state_dict", false);
}

named_tensors distributed_model_base::gradients() const {
  return gather("smp.gradients", true);
}

namespace {

/// Tells whether a parameter can take its values from `x`.
bool has_plain_values(const at::Tensor& x) {
  return x.defined() && !x.is_nested() && !x.is_quantized() && !x.is_meta()
         && x.layout() == c10::kStrided;
}

} // namespace

void distributed_model_base::load_state_dict(const named_tensors& xs) {
  state_check check{state_->map()};
  for (auto& [name, x] : xs) {
    auto plain = has_plain_values(x);
    check.add(name, plain ? x.sizes() : at::IntArrayRef{}, plain);
  }
  check.finish("load_state_dict");
  at::NoGradGuard no_grad;
  for (auto& [name, x] : xs)
    if (auto i = check.position(name); state_->map().owned(i)) {
      auto* slice = state_->map().slice(i);
      state_->model().tensors[i].tensor.copy_(slice ? slice->of(x) : x);
    }
}

void set_partition(torch::nn::Module& x, uint32_t pp_rank) {
  auto* module = dynamic_cast<const void*>(&x);
  session::current()
    .internals()
    .marks_for(module, "smp::set_partition")
    .pins[module]
    = pp_rank;
}

void set_tensor_parallelism(torch::nn::Module& x, bool enabled,
                            const tensor_parallel_config& how) {
  auto* module = dynamic_cast<const void*>(&x);
  session::current()
    .internals()
    .marks_for(module, "smp::set_tensor_parallelism")
    .sharing[module]
    = make_sharing_mark(enabled, how);
}

namespace {

/// Applies the options to a parameter in place: its module has other handles to
/// it.
void make_anew(const at::Tensor& x, const nn::parameter_creation_options& how) {
  if (!x.is_floating_point() || !(how.dtype || how.use_normal))
    return;
  at::NoGradGuard no_grad;
  delay_param_initialization later{is_deferred(x)};
  auto y = how.dtype ? x.to(*how.dtype) : x;
  if (how.use_normal)
    y.normal_(0, how.initializer_range);
  if (!y.is_same(x))
    x.set_data(y);
}

} // namespace

nn::parameter_creation_scope::parameter_creation_scope(
  torch::nn::Module& x, int64_t dim, const parameter_creation_options& how)
  : parameter_creation_scope(x, dim, 0, how) {
  // nop
}

nn::parameter_creation_scope::parameter_creation_scope(
  torch::nn::Module& x, int64_t dim, int64_t axes,
  const parameter_creation_options& how)
  : module_(x),
    dim_(dim),
    axes_(axes),
    how_(how),
    before_(x.parameters(false).size()) {
  session::current(); // throws if there is none
  if (how.dtype && !c10::isFloatingType(*how.dtype))
    throw config_error(
      "parameter_creation_scope: dtype is not a floating-point "
      "type, so nothing could be trained");
  if (!(how.initializer_range >= 0))
    throw config_error(
      "parameter_creation_scope: initializer_range is a "
      "standard deviation; allowed: 0 or more");
}

nn::parameter_creation_scope::~parameter_creation_scope() {
  auto all = module_.parameters(false);
  auto& cuts = session::current().internals().marks().cuts;
  for (auto i = before_; i < all.size(); ++i) {
    make_anew(all[i], how_);
    if (all[i].dim() >= axes_)
      cuts.push_back(
        {c10::weak_intrusive_ptr<c10::TensorImpl>{all[i].getIntrusivePtr()},
         dim_, how_.scaled_batch});
  }
}

void set_stateful(torch::nn::Module& x, std::string why) {
  auto* module = dynamic_cast<const void*>(&x);
  session::current()
    .internals()
    .marks_for(module, "smp::set_stateful")
    .stateful[module]
    = std::move(why);
}

} // namespace smp
