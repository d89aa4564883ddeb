#include "runtime/session/model_state.hpp"

#include "actors/replay/record_book.hpp"
#include "partition/partitioner.hpp"
#include "partition/print.hpp"
#include "runtime/lazy/deferred_init.hpp"
#include "runtime/session/engine.hpp"
#include "runtime/remote/execution.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/remote/promised_call.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/intercept/script/script_calls.hpp"
#include "runtime/model/script_walk.hpp"
#include "runtime/intercept/sequential.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "runtime/intercept/trace_recorder.hpp"
#include "runtime/remote/request_kind.hpp"

#include <ATen/ops/equal.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <limits>

namespace smp {

namespace {

namespace ag = torch::autograd;

/// Why the calls of a module cannot be intercepted, with the cure (R20).
std::string not_interceptable(const walked_module& x) {
  if (x.script || !x.hooks.empty() || x.container || x.names.front().empty())
    return {};
  auto type = x.type;
  if (type.ends_with("Impl"))
    type.resize(type.size() - 4);
  return "its calls cannot be seen; declare it as smp::submodule<" + type
         + "> or put it into a Sequential";
}

void write(byte_writer& out, const pipeline_program& x) {
  out.u32(x.devices);
  out.u32(x.chunks);
  out.f64(x.hop_seconds);
  out.u64(x.chain.size());
  for (auto& y : x.chain) {
    out.u32(y.device);
    out.f64(y.forward);
    out.f64(y.backward);
    out.f64(y.activations);
    out.boolean(y.ordered);
    out.u32(y.chunk);
  }
}

pipeline_program read_program(byte_reader& in) {
  pipeline_program result;
  result.devices = in.u32("devices");
  result.chunks = in.u32("chunks");
  result.hop_seconds = in.f64("hop");
  auto n = in.u64("works");
  for (uint64_t i = 0; i < n; ++i) {
    work x;
    x.device = in.u32("device");
    x.forward = in.f64("forward");
    x.backward = in.f64("backward");
    x.activations = in.f64("activations");
    x.ordered = in.boolean("ordered");
    x.chunk = in.u32("chunk");
    result.chain.push_back(x);
  }
  return result;
}

/// Mean size of an element of the model's parameters, in bytes.
double element_bytes(const walked_model& model) {
  double bytes = 0;
  double elements = 0;
  for (auto& x : model.tensors)
    if (!x.is_buffer && x.tensor.defined()) {
      bytes += static_cast<double>(x.tensor.nbytes());
      elements += static_cast<double>(x.tensor.numel());
    }
  return elements > 0 ? bytes / elements : sizeof(float);
}

model_info describe(const walked_model& model,
                    const std::map<const void*, uint32_t>& pins,
                    const module_order& order) {
  model_info result;
  for (auto& m : model.modules) {
    module_info x;
    x.path = m.names.front();
    x.type = m.type;
    for (auto child : m.children)
      x.children.push_back(module_id{child});
    for (auto i : m.tensors) {
      auto& t = model.tensors[i];
      auto info = tensor_info{i, t.names.front(),
                              static_cast<uint64_t>(t.tensor.numel())};
      (t.is_buffer ? x.buffers : x.parameters).push_back(info);
    }
    x.not_interceptable = not_interceptable(m);
    x.ordered = order.reason(static_cast<uint32_t>(result.size()));
    x.container = m.container;
    x.sequential = m.sequential;
    for (auto* hook : m.hooks)
      if (hook->pinned)
        x.pinned_device = hook->pinned;
    if (auto i = pins.find(m.identity()); i != pins.end())
      x.pinned_device = i->second;
    result.push_back(std::move(x));
  }
  return result;
}

walked_model walk(const model_root& x) {
  return x.script ? smp::walk(x.script) : smp::walk(*x.module);
}

/// Takes the gradient of a parameter of another rank to its owner (R14):
/// whatever consumes the parameter, or a copy, sends its gradient here.
class remote_parameter_gradient : public ag::Node {
public:
  remote_parameter_gradient(rank_id owner, module_id module, uint32_t tensor,
                   std::string name, at::Tensor parameter)
    // As soon as it is ready, like what adds to the gradient of a leaf: a number
    // of this thread would order it among those of others by chance.
    : Node(std::numeric_limits<uint64_t>::max()),
      owner_(owner),
      module_(module),
      tensor_(tensor),
      name_(std::move(name)),
      parameter_(std::move(parameter)) {
    // nop
  }

  std::string name() const override {
    return "smp::remote_parameter_gradient(" + name_ + ")";
  }

  void release_variables() override {
    // nop
  }

  /// The user's hooks on the parameter.
  std::vector<std::unique_ptr<ag::FunctionPreHook>>&
  tensor_pre_hooks() noexcept override {
    return ag::impl::hooks(parameter_);
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    if (!grads[0].defined())
      return {};
    auto* ex = execution::current();
    if (!ex || !ex->in_backward)
      throw error{error_code::unsupported,
                  "gradient of '" + name_ + "', which rank "
                    + std::to_string(owner_.value)
                    + " owns: call model.backward(loss) inside the step"};
    call c;
    c.owner = owner_;
    c.module = module_;
    c.what = phase::backward;
    c.why = {"gradient of '" + name_ + "'", owner_};
    byte_writer out;
    out.u8(static_cast<uint8_t>(request_kind::add_gradient));
    out.u32(tensor_);
    write(out, wire_table{put_data(c.body, materialise(grads[0]), false)});
    c.body.bytes = out.take();
    ex->park(std::move(c));
    return {};
  }

private:
  rank_id owner_;
  module_id module_;
  uint32_t tensor_;
  std::string name_;
  at::Tensor parameter_;
};

} // namespace

std::string partition_decision::text() const {
  return print_partition(model, plan, {.colour = true});
}

model_state::model_state(engine& eng, model_root root)
  : engine_(eng),
    self_(eng.self()),
    root_(std::move(root)),
    model_(walk(root_)),
    owners_(model_.modules.size(), self_) {
  // nop
}

model_state::~model_state() {
  for (auto& m : model_.modules)
    for (auto* hook : m.hooks) {
      hook->local = true;
      hook->ordered = false;
    }
}

// -- partition ----------------------------------------------------------------

void model_state::partition() {
  if (partitioned_)
    return;
  rewalk();
  check_same_everywhere();
  place();
  rewrite_script();
  release();
  partitioned_ = true;
  // Nobody may ask for a module before its owner is ready.
  engine_.exchange().barrier(engine_.pipeline(), "smp.partitioned");
  engine_.promises().set_waiting(*this, engine_.config().no_promises);
  engine_.check_schedule(engine_.config().microbatches);
  text_ += engine_.schedule_text();
  for (auto& f : std::exchange(hooks_, {}))
    f();
}

void model_state::rewalk() {
  // Again: the user may have added modules since.
  model_ = walk(root_);
  owners_.assign(model_.modules.size(), self_);
  order_ = module_order{model_, engine_.stateful()};
}

void model_state::rewrite_script() {
  if (root_.script && !script_)
    script_ = std::make_unique<script_program>(model_,
                                               engine_.pipeline().size());
}

bool model_state::any_deferred() const {
  return std::any_of(model_.tensors.begin(), model_.tensors.end(),
                     [](auto& x) { return is_deferred(x.tensor); });
}

bool model_state::wants_trace(uint64_t devices) const {
  auto& cfg = engine_.config();
  // One rank alone may not hold what is created with delay.
  return cfg.trace_device != "none" && cfg.auto_partition
         && (cfg.trace_execution_times || cfg.trace_memory_usage)
         && devices > 1 && !any_deferred();
}

void model_state::trace(random_stream stream,
                        const std::function<void()>& body) {
  auto& cfg = engine_.config();
  rewalk();
  for (size_t i = 0; i < model_.modules.size(); ++i)
    for (auto* hook : model_.modules[i].hooks)
      hook->id = module_id{i};
  traced_hash_ = model_.hash();
  try {
    rewrite_script(); // or its calls would not be seen
    trace_ = trace_forward(model_,
                           {.gpu = cfg.trace_device == "gpu",
                            .times = cfg.trace_execution_times,
                            .memory = cfg.trace_memory_usage},
                           std::move(stream), body);
  } catch (const error& err) {
    // All ranks are to hear of it: they wait for the decision.
    trace_failure_ = err.cause();
  }
}

void model_state::on_partition(std::function<void()> f) {
  if (partitioned_)
    f();
  else
    hooks_.push_back(std::move(f));
}

void model_state::check_same_everywhere() {
  byte_writer out;
  out.u64(model_.hash());
  out.u64(model_.modules.size());
  out.u64(model_.tensors.size());
  auto all = engine_.exchange().all_gather(engine_.pipeline(), "smp.model",
                                           {out.take(), {}});
  for (size_t i = 0; i < all.size(); ++i) {
    byte_reader in{all[i].bytes};
    auto hash = in.u64("model hash");
    auto modules = in.u64("modules");
    auto tensors = in.u64("tensors");
    if (hash != model_.hash())
      throw error{error_code::config,
                  "rank " + std::to_string(engine_.pipeline()[i].value)
                    + " has another model than rank "
                    + std::to_string(self_.value) + ": "
                    + std::to_string(modules) + " modules and "
                    + std::to_string(tensors) + " tensors against "
                    + std::to_string(model_.modules.size()) + " and "
                    + std::to_string(model_.tensors.size())
                    + ", or other names, types or shapes; all ranks must "
                      "build the same model"};
  }
}

partition_decision model_state::decide(uint32_t devices) const {
  if (trace_failure_)
    throw error{trace_failure_};
  auto& cfg = engine_.config();
  partition_options options;
  options.manual.devices = devices;
  options.manual.automatic = cfg.auto_partition;
  options.manual.default_device
    = static_cast<uint32_t>(cfg.default_partition);
  options.memory_weight = effective_memory_weight(cfg);
  options.strategy = parse_partition_strategy(cfg.strategy);
  options.chunks = static_cast<uint32_t>(cfg.chunks);
  auto info = describe(model_, engine_.pins(), order_);
  std::vector<std::string> remarks;
  if (trace_ && traced_hash_ == model_.hash()) {
    apply_trace(info, *trace_, element_bytes(model_));
    options.step_seconds = step_seconds(info, *trace_);
    options.basis = describe_trace(*trace_, options.step_seconds,
                                   cfg.trace_device);
    remarks = explain_trace(info, *trace_);
  } else if (cfg.auto_partition && devices > 1) {
    options.basis = std::string{"guessed from sizes: "}
                    + (trace_                        ? "modules were added"
                       : cfg.trace_device == "none" ? "smp.trace_device is none"
                       : any_deferred() ? "parameters have no values yet"
                                       : "partitioned before the first step");
  }
  if (options.step_seconds > 0) {
    options.crossing = communication::from_times(options.step_seconds);
    // Measured times have errors, and a detour costs a microbatch turns in the
    // queues of both ranks besides: no module is sent elsewhere for less than
    // a tenth of what the last device gains.
    auto n = static_cast<double>(devices);
    if (devices > 1)
      options.crossing.request
        = std::max(options.crossing.request, 0.1 / (n * (n - 1)));
  }
  auto plan = make_partition(info, options);
  plan.reasons.insert(plan.reasons.begin(), remarks.begin(), remarks.end());
  return {std::move(info), std::move(plan)};
}

void model_state::place() {
  // Measured times differ from rank to rank, so only one of them decides.
  byte_writer out;
  auto& pipeline = engine_.pipeline();
  if (engine_.pp_rank() == 0) {
    failure wrong;
    try {
      decision_ = decide(static_cast<uint32_t>(pipeline.size()));
      out.boolean(true);
      out.string(decision_->text());
      for (auto device : decision_->plan.module_device)
        out.u32(device);
      write(out, make_program(decision_->model, decision_->plan, {}));
    } catch (const error& err) {
      wrong = err.cause();
    }
    if (wrong) {
      out = {};
      out.boolean(false);
      out.u8(static_cast<uint8_t>(wrong.code));
      out.string(wrong.text);
    }
  }
  auto found = engine_.exchange().broadcast(pipeline, "smp.partition",
                                            pipeline.front(), {out.take(), {}});
  byte_reader in{found.bytes};
  if (!in.boolean("decision")) {
    auto code = static_cast<error_code>(in.u8("error code"));
    throw error{code, in.string("error")};
  }
  text_ = in.string("partition");
  for (auto& owner : owners_)
    owner = pipeline.at(in.u32("device"));
  program_ = read_program(in);
  in.expect_end();
  for (size_t i = 0; i < owners_.size(); ++i) {
    auto& m = model_.modules[i];
    for (auto* hook : m.hooks) {
      hook->id = module_id{i};
      hook->owner = owners_[i];
      hook->local = owners_[i] == self_;
    }
    if (auto* seq = dynamic_cast<torch::nn::SequentialImpl*>(m.object))
      name_sequential(*seq, module_id{i});
  }
  set_order();
}

bool model_state::keeps_order(module_id x) const {
  // On one rank a microbatch does not stop within its forward phase.
  return engine_.pipeline().size() > 1
         && order_.ordered(static_cast<uint32_t>(x.value));
}

void model_state::set_order() {
  for (uint32_t i = 0; i < model_.modules.size(); ++i)
    for (auto* hook : model_.modules[i].hooks)
      hook->ordered = keeps_order(module_id{i});
  if (engine_.pipeline().size() == 1)
    return;
  engine_.sequencer().set_modules(order_.modules());
}

void model_state::release() {
  std::vector<at::Tensor> mine;
  for (uint32_t i = 0; i < model_.tensors.size(); ++i) {
    auto& t = model_.tensors[i].tensor;
    if (owned(i)) {
      mine.push_back(t);
      continue;
    }
    std::shared_ptr<ag::Node> gradient;
    // What is frozen now may require grad later.
    if (ag::isDifferentiableType(t.scalar_type())) {
      gradient = {new remote_parameter_gradient(tensor_owner(i), home(i), i,
                                       tensor_name(i), t),
                  ag::deleteNode};
      gradients_.push_back(gradient);
    }
    make_placeholder(t, gradient);
  }
  // Now that there is room.
  initialise_deferred(mine);
  for (auto& t : mine)
    if (t.has_storage())
      storages_.insert(t.storage().unsafeGetStorageImpl());
}

module_id model_state::home(uint32_t tensor) const {
  return module_id{model_.tensors.at(tensor).modules.front()};
}

// -- properties ---------------------------------------------------------------

rank_id model_state::tensor_owner(uint32_t x) const {
  // Modules that share a tensor are one node, so any of them tells (R18).
  return owner(home(x));
}

void model_state::train(bool on) {
  if (root_.script)
    set_training(*root_.script, on);
  else
    root_.module->train(on);
}

bool model_state::shares_state(const at::Tensor& x) const {
  return x.has_storage()
         && storages_.contains(x.storage().unsafeGetStorageImpl());
}

// -- remote parameters -------------------------------------------------------

execution& model_state::executing(uint32_t tensor) const {
  if (auto* ex = execution::current())
    return *ex;
  throw error{error_code::unsupported,
              "'" + tensor_name(tensor)
                + "' is used outside a step, but rank "
                + std::to_string(tensor_owner(tensor).value)
                + " owns it; use model.state_dict()"};
}

/// A request about one tensor, for its owner.
call model_state::ask(request_kind op, uint32_t tensor, const char* what) const {
  call result;
  result.owner = tensor_owner(tensor);
  result.module = home(tensor);
  result.why = {std::string{what} + " of '" + tensor_name(tensor) + "'",
                result.owner};
  byte_writer out;
  out.u8(static_cast<uint8_t>(op));
  out.u32(tensor);
  result.body.bytes = out.take();
  return result;
}

at::Tensor model_state::fetch(uint32_t tensor) {
  auto& t = model_.tensors.at(tensor);
  auto& ex = executing(tensor);
  flush();
  ex.stateful = ex.stateful || t.is_buffer;
  auto alone = engine_.promises().on() && engine_.records().active();
  std::pair key{tensor, alone ? ex.id : request_id{}};
  auto c = ask(request_kind::read_tensor, tensor, "value");
  // A copy made for one microbatch serves others, which may need its graph.
  std::optional<c10::InferenceMode> off;
  if (c10::InferenceMode::is_enabled())
    off.emplace(false);
  std::shared_ptr<awaited<at::Tensor>> mine;
  if (!t.is_buffer) {
    // One fetch per step, however many microbatches want it.
    std::unique_lock guard{copies_mutex_};
    auto& known = copies_[key];
    if (known.value) {
      auto other = known.value;
      guard.unlock();
      return awaited<at::Tensor>::peek(other, c.why);
    }
    known.value = mine = std::make_shared<awaited<at::Tensor>>();
  }
  try {
    auto answer = ex.park(std::move(c));
    auto result = take_data(answer.body, wire_tensor{});
    // Released tensors have a node of their own, which knows the owner.
    if (t.tensor.requires_grad())
      ag::impl::set_gradient_edge(result, ag::impl::gradient_edge(t.tensor));
    if (mine) {
      std::unique_lock guard{copies_mutex_};
      auto& known = copies_[key];
      known.known = result;
      known.version = result._version();
      guard.unlock();
      mine->set_value(result);
    }
    return result;
  } catch (const error& err) {
    if (mine)
      mine->fail(err.cause());
    throw;
  }
}

void model_state::store(uint32_t tensor, const at::Tensor& x) {
  auto& ex = executing(tensor);
  ex.stateful = true;
  auto c = ask(request_kind::write_tensor, tensor, "new value");
  c.body.tensors.push_back(to_tensor_ref(x.detach(), true));
  ex.park(std::move(c));
}

void model_state::lend(uint32_t tensor, const at::Tensor& copy) {
  executing(tensor).lent.push_back({tensor, copy, copy.detach().clone()});
}

void model_state::flush() {
  auto* ex = execution::current();
  if (!ex)
    return;
  for (auto& x : std::exchange(ex->lent, {})) {
    // The version tells nothing: batch norm changes statistics without it.
    if (!at::equal(x.copy.detach(), x.content)) {
      x.content = x.copy.detach().clone();
      store(x.tensor, x.content);
    }
    if (x.copy.storage().use_count() > 1)
      ex->lent.push_back(std::move(x));
  }
  std::unique_lock guard{copies_mutex_};
  for (auto& [key, x] : copies_)
    if (x.known.defined() && x.known._version() != x.version)
      throw error{failure{error_code::unsupported, self_, ex->module_path,
                          "changes a view of '" + tensor_name(key.first)
                            + "', which rank "
                            + std::to_string(tensor_owner(key.first).value)
                            + " owns; change it inside the module that owns "
                              "it"}};
}

void model_state::rebind(const at::Tensor& from, const at::Tensor& to) {
  auto i = model_.tensor_index.find(from.unsafeGetTensorImpl());
  if (i == model_.tensor_index.end() || from.is_same(to) || !to.defined())
    return;
  auto index = i->second;
  model_.tensor_index.erase(i);
  model_.tensor_index.emplace(to.unsafeGetTensorImpl(), index);
  model_.tensors[index].tensor = to;
  if (to.has_storage())
    storages_.insert(to.storage().unsafeGetStorageImpl());
}

// -- steps --------------------------------------------------------------------

void model_state::begin_step() {
  if (order_.undecided() && engine_.pipeline().size() > 1)
    order_.before_step([this](uint32_t tensor) { return owned(tensor); });
}

void model_state::end_step(bool complete) {
  {
    std::unique_lock guard{copies_mutex_};
    copies_.clear();
  }
  for (auto x : engine_.sequencer().take_overtaken())
    TORCH_WARN("smp: a microbatch called '", name(x),
               "' more often than any before it, after a younger microbatch "
               "had been there: in this step its state saw them in another "
               "order than in one process; from now on each microbatch waits "
               "there for the forward phase of the one before it");
  if (!complete || !order_.undecided() || engine_.pipeline().size() == 1)
    return;
  order_.after_step(engine_);
  set_order();
  engine_.promises().reconsider();
}

} // namespace smp
