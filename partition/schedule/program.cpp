#include "partition/schedule/program.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace smp {

namespace {

class program_builder {
public:
  program_builder(const model_info& model, const partition_plan& plan,
                  const program_times& times)
    : model_(model),
      plan_(plan),
      compute_(own_compute(model)),
      visited_(model.size()) {
    auto sum = std::accumulate(compute_.begin(), compute_.end(), 0.0);
    auto forward = times.step_seconds / (1 + times.backward_ratio);
    unit_ = sum > 0 ? forward / sum : 0;
    ratio_ = times.backward_ratio;
    result_.devices = plan.options.manual.devices;
    result_.chunks = plan.options.chunks;
    result_.hop_seconds = times.hop_seconds;
  }

  /// Walks without recursion: a model may be as deep as its number of modules.
  pipeline_program run() {
    enter(0, 0);
    while (!stack_.empty()) {
      auto here = stack_.back();
      auto& children = model_[here.module].children;
      if (here.next_child == children.size()) {
        leave();
        continue;
      }
      ++stack_.back().next_child;
      auto child = children[here.next_child].value;
      if (visited_[child])
        continue;
      if (!continues_run(here, child))
        back_to(stack_.back());
      enter(child, here.device);
    }
    return std::move(result_);
  }

private:
  struct frame {
    size_t module;
    size_t next_child;
    uint32_t device; // where the code runs that calls the children
    /// Its code waits for the result of the last child.
    bool waits = false;
    /// It called a module that keeps state, so its caller waits.
    bool keeps_state = false;
  };

  bool is_list(size_t i) const {
    return i > 0 && model_[i].container && !model_[i].sequential;
  }

  /// Whether the call of `child` is part of the request of the child before it.
  bool continues_run(const frame& x, size_t child) const {
    return model_[x.module].sequential
           && plan_.module_device[child] == result_.chain.back().device;
  }

  void enter(size_t i, uint32_t caller) {
    visited_[i] = true;
    if (is_list(i)) {
      stack_.push_back({i, 0, caller});
      return;
    }
    auto device = plan_.module_device[i];
    auto& here = at(device);
    auto seconds = compute_[i] * unit_;
    here.forward += seconds;
    here.backward += seconds * ratio_;
    here.activations += model_[i].activations;
    here.ordered |= !model_[i].ordered.empty();
    here.chunk = std::max(here.chunk, plan_.module_chunk[i]);
    stack_.push_back({i, 0, device, false, model_[i].keeps_state});
  }

  /// A module ends on its own device; only then does its caller continue.
  void leave() {
    auto here = stack_.back();
    stack_.pop_back();
    if (is_list(here.module)) {
      stack_.back().waits |= here.waits;
      stack_.back().keeps_state |= here.keeps_state;
      return;
    }
    back_to(here);
    if (stack_.empty())
      return;
    auto& caller = stack_.back();
    caller.keeps_state |= here.keeps_state;
    if (caller.device != here.device)
      caller.waits |= here.keeps_state || is_waited_for(here);
  }

  /// The code of `x` continues.
  void back_to(frame& x) {
    at(x.device).waits |= std::exchange(x.waits, false);
  }

  bool is_waited_for(const frame& x) const {
    auto& m = model_[x.module];
    auto elsewhere = [&](module_id y) {
      return plan_.module_device[y.value] != x.device;
    };
    return m.waited_for
           || std::any_of(m.added_to.begin(), m.added_to.end(), elsewhere)
           || (m.passed_on && caller_is_called());
  }

  /// Whether another device waits for the result of the code that continues.
  bool caller_is_called() const {
    auto is_call = [this](const frame& x) { return !is_list(x.module); };
    auto caller = std::find_if(stack_.rbegin(), stack_.rend(), is_call);
    if (caller == stack_.rend())
      return false;
    auto above = std::find_if(caller + 1, stack_.rend(), is_call);
    return above != stack_.rend() && above->device != caller->device;
  }

  /// @returns the last work, which is on `device`.
  work& at(uint32_t device) {
    auto& chain = result_.chain;
    if (chain.empty() || chain.back().device != device) {
      auto chunk = chain.empty() ? 0 : chain.back().chunk;
      chain.emplace_back().device = device;
      chain.back().chunk = chunk;
    }
    return chain.back();
  }

  const model_info& model_;
  const partition_plan& plan_;
  std::vector<double> compute_;
  std::vector<bool> visited_;
  double unit_ = 0; // seconds of forward per compute cost
  double ratio_ = 0;
  std::vector<frame> stack_;
  pipeline_program result_;
};

} // namespace

pipeline_program make_program(const model_info& model,
                              const partition_plan& plan,
                              const program_times& times) {
  return program_builder{model, plan, times}.run();
}

service_place place_of(const pipeline_program& x, uint32_t device,
                       uint64_t microbatches) {
  service_place result{device, x.devices, microbatches, x.chunks, {}};
  for (auto& y : x.chain)
    if (y.device == device)
      result.chunk_of.push_back(y.chunk);
  return result;
}

} // namespace smp
