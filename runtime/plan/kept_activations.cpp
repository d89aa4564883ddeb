#include "runtime/plan/kept_activations.hpp"

#include "runtime/intercept/call_scope.hpp"
#include "runtime/model/module_walk.hpp"
#include "runtime/placement/checkpointing_decision.hpp"
#include "transport/error.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>

namespace smp {

namespace {

namespace ag = torch::autograd;

using storage = const void*;

storage storage_of(const at::Tensor& x) {
  return x.storage().unsafeGetStorageImpl();
}

/// @returns the tensors that a node of the autograd graph saved
/// @throws error (unsupported) if the node does not report them
std::vector<at::Tensor> saved_by(const std::shared_ptr<ag::Node>& node) {
  namespace ca = torch::dynamo::autograd;
  ca::AutogradCompilerCall compiler{ca::SizeInput::STATIC};
  ca::NodeCall call{0, node};
  try {
    ca::CompiledNodeArgs collected{compiler, call};
    node->compiled_args(collected);
  } catch (const c10::Error&) {
    throw error{error_code::unsupported, "the autograd node " + node->name()
                                           + " does not tell what it saved"};
  }
  return std::move(compiler.tensor_args.inputs);
}

/// Where code ran.
struct place {
  uint32_t module = 0;
  /// Region of calls that are recomputed together; 0: none.
  uint32_t region = 0;
};

/// Tensors that no rank keeps because of a microbatch: parameters, buffers, and
/// its inputs on the device that has them.
class kept_elsewhere {
public:
  kept_elsewhere(const walked_model& model, const batch& inputs) {
    for (auto& x : model.tensors)
      if (x.tensor.defined() && x.tensor.has_storage())
        of_model_.insert(storage_of(x.tensor));
    for (auto& x : inputs)
      if (x.has_storage())
        inputs_.insert(storage_of(x));
  }

  /// @returns bytes of `x` on a device, of all of its storage
  uint64_t bytes(const at::Tensor& x, uint32_t device) const {
    if (of_model_.contains(storage_of(x)))
      return 0;
    if (inputs_.contains(storage_of(x))) // the others have copies
      return device == 0 ? 0 : x.nbytes();
    return x.storage().nbytes();
  }

private:
  std::set<storage> of_model_;
  std::set<storage> inputs_;
};

/// Records which call made which autograd nodes, and the arguments of calls
/// that are recomputed.
class kept_meter final : public call_interceptor {
public:
  kept_meter(const walked_model& model, const partition_decision& decision,
             const kept_elsewhere& elsewhere)
    : devices_(decision.plan.module_device),
      elsewhere_(elsewhere),
      before_(interceptor_at(static_cast<size_t>(interceptor::observe))) {
    std::vector<rank_id> owners;
    for (auto device : devices_)
      owners.push_back(rank_id{device});
    regions_ = regions_of(model, decision.checkpointing.chosen, owners);
    auto n = decision.plan.options.manual.devices;
    result_.saved.resize(model.modules.size());
    result_.arguments.resize(model.modules.size());
    result_.largest_call.resize(n);
    result_.computed_again.resize(n);
    stack_.emplace_back();
    note();
    set_interceptor(interceptor::observe, this);
  }

  ~kept_meter() override {
    set_interceptor(interceptor::observe, before_);
  }

  kept_meter(const kept_meter&) = delete;
  kept_meter& operator=(const kept_meter&) = delete;

  void enter(const intercepted_call& x) override {
    if (!x.module)
      return;
    auto& up = stack_.back();
    frame f;
    f.at.module = static_cast<uint32_t>(x.module->value);
    f.at.region = up.at.region;
    auto again = stack_.size() > 1 && up.at.module == f.at.module;
    if (again) {
      f.begins = up.begins;
    } else if (f.at.region == 0) {
      f.at.region = regions_.at(f.at.module).region;
      // Children that are recomputed together keep the first one's arguments.
      auto goes_on = up.last.region == f.at.region
                     && up.last.module != f.at.module;
      f.begins = f.at.region != 0 && !goes_on;
    }
    stack_.push_back(f);
    note();
  }

  bool looks() const noexcept override {
    return true;
  }

  void arguments(const intercepted_call& x, const void*,
                 std::span<const at::Tensor> xs) override {
    if (!x.module || !stack_.back().begins)
      return;
    std::set<storage> counted;
    uint64_t bytes = 0;
    auto& at = stack_.back().at;
    for (auto& y : xs) {
      if (!y.defined() || !y.has_storage())
        continue;
      arguments_.emplace_back(at.module, y);
      if (counted.insert(storage_of(y)).second)
        bytes += elsewhere_.bytes(y, devices_[at.module]);
    }
    auto& most = result_.largest_call[devices_[at.module]];
    most = std::max(most, bytes);
  }

  void leave(const intercepted_call& x, bool) override {
    if (!x.module)
      return;
    auto at = stack_.back().at;
    stack_.pop_back();
    stack_.back().last = at;
    note();
  }

  /// @returns all that is kept for the backward phase from `loss`
  kept_activations count(const at::Tensor& loss) {
    if (auto root = loss.grad_fn())
      visit(root);
    // What is kept in any case does not count once more as an argument.
    for (auto& [module, x] : arguments_)
      if (is_first(kept_[devices_[module]], x))
        result_.arguments[module] += elsewhere_.bytes(x, devices_[module]);
    for (auto& [where, bytes] : region_bytes_) {
      auto& most = result_.computed_again[where.first];
      most = std::max(most, bytes);
    }
    return std::move(result_);
  }

private:
  struct frame {
    place at;
    place last; // the previous call made from here
    bool begins = false;
  };

  void note() {
    spans_[at::sequence_number::peek()] = stack_.back().at;
  }

  place place_of(const ag::Node& x) const {
    auto i = spans_.upper_bound(x.sequence_nr());
    return i == spans_.begin() ? place{} : std::prev(i)->second;
  }

  static bool is_first(std::set<storage>& known, const at::Tensor& x) {
    return known.insert(storage_of(x)).second;
  }

  void visit(const std::shared_ptr<ag::Node>& root) {
    std::vector<std::shared_ptr<ag::Node>> next{root};
    std::set<const ag::Node*> seen{root.get()};
    while (!next.empty()) {
      auto node = std::move(next.back());
      next.pop_back();
      if (dynamic_cast<const ag::AccumulateGrad*>(node.get()) == nullptr)
        add(node);
      for (auto& edge : node->next_edges())
        if (edge.function && seen.insert(edge.function.get()).second)
          next.push_back(edge.function);
    }
  }

  void add(const std::shared_ptr<ag::Node>& node) {
    auto at = place_of(*node);
    auto device = devices_.at(at.module);
    for (auto& x : saved_by(node)) {
      if (!x.defined() || !x.has_storage())
        continue;
      std::pair where{device, at.region};
      if (at.region != 0 && is_first(in_regions_[where], x))
        region_bytes_[where] += elsewhere_.bytes(x, device);
      if (at.region == 0 && is_first(kept_[device], x))
        result_.saved[at.module] += elsewhere_.bytes(x, device);
    }
  }

  const std::vector<uint32_t>& devices_; // by module
  const kept_elsewhere& elsewhere_;
  call_interceptor* before_;           // the previous observer, restored later
  std::vector<recomputation> regions_; // by module
  std::vector<frame> stack_;
  /// By the number of the first node that was made there.
  std::map<uint64_t, place> spans_;
  std::vector<std::pair<uint32_t, at::Tensor>> arguments_; // with the module
  std::map<uint32_t, std::set<storage>> kept_;             // by device
  /// By device and region.
  std::map<std::pair<uint32_t, uint32_t>, std::set<storage>> in_regions_;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> region_bytes_;
  kept_activations result_;
};

} // namespace

kept_activations measure_kept(const walked_model& model,
                              const partition_decision& decision,
                              const batch& inputs,
                              const std::function<at::Tensor()>& loss) {
  at::AutoGradMode with_gradients{true};
  kept_elsewhere elsewhere{model, inputs};
  kept_meter meter{model, decision, elsewhere};
  return meter.count(loss());
}

} // namespace smp
