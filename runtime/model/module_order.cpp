#include "runtime/model/module_order.hpp"

#include "runtime/base/copied_on_write.hpp"
#include "runtime/lazy/late_value.hpp"
#include "runtime/model/module_facts.hpp"
#include "runtime/values/tensor_bridge.hpp"

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>

namespace smp {

namespace {

std::string last_part(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

bool in_training(const walked_module& x) {
  return x.facts->is_training();
}

/// Constants up to this size, in bytes, are copied: state that begins to change
/// late is small (a count, an average); masks are not.
constexpr size_t kept_constant_limit = 1 << 20;

} // namespace

// -- which --------------------------------------------------------------------

module_order::module_order(const walked_model& model,
                           const std::map<const void*, std::string>& declared)
  : model_(&model) {
  // The state of a module and of the modules hidden in it. Shared modules have
  // several parents, so this recurses downwards.
  struct found : entry {
    std::vector<uint32_t> parameters;
  };
  std::map<uint32_t, found> known;
  auto append = [](auto& xs, const auto& ys) {
    xs.insert(xs.end(), ys.begin(), ys.end());
  };
  auto state_of = [&](auto&& self, uint32_t i) -> const found& {
    auto [pos, added] = known.emplace(i, found{});
    auto& result = pos->second;
    if (!added)
      return result;
    auto& m = model.modules[i];
    for (auto t : m.tensors)
      (model.tensors[t].is_buffer ? result.state : result.parameters)
        .push_back(t);
    append(result.state, m.reads);
    if (!m.stateful.empty())
      result.reasons.push_back(m.stateful);
    if (auto j = declared.find(m.identity()); j != declared.end()) {
      result.reasons.push_back(j->second);
      result.hidden = true;
    }
    for (auto child : m.children) {
      if (model.modules[child].intercepted)
        continue;
      auto& x = self(self, child);
      append(result.state, x.state);
      append(result.reasons, x.reasons);
      append(result.parameters, x.parameters);
      result.hidden = result.hidden || x.hidden;
    }
    return result;
  };
  for (uint32_t i = 0; i < model.modules.size(); ++i) {
    if (i > 0 && !model.modules[i].intercepted)
      continue;
    auto& x = state_of(state_of, i);
    if (!x.state.empty() || !x.reasons.empty())
      entries_.emplace(i, x);
    for (auto t : x.parameters)
      holders_[t].push_back(i);
  }
  for (auto& [i, x] : entries_) {
    undecided_ = undecided_ || x.reasons.empty();
    for (auto t : x.state)
      by_tensor_[t].push_back(module_id{i});
  }
}

bool module_order::ordered(uint32_t module) const {
  auto i = entries_.find(module);
  return i != entries_.end() && !i->second.released;
}

std::vector<module_id> module_order::modules() const {
  std::vector<module_id> result;
  for (auto& [i, x] : entries_)
    if (!x.released)
      result.push_back(module_id{i});
  return result;
}

std::set<module_id> module_order::unseen() const {
  std::set<module_id> result;
  for (auto& [i, x] : entries_)
    if (!x.reasons.empty())
      result.insert(module_id{i});
  return result;
}

void module_order::declare(uint32_t module, const std::string& reason) {
  auto& x = entries_[module];
  x.released = false;
  if (std::ranges::find(x.reasons, reason) == x.reasons.end())
    x.reasons.push_back(reason);
}

bool module_order::any_hidden() const {
  return std::ranges::any_of(entries_, [](auto& x) { return x.second.hidden; });
}

// -- words --------------------------------------------------------------------

std::string module_order::reason(uint32_t module) const {
  auto i = entries_.find(module);
  if (i == entries_.end())
    return {};
  auto parts = i->second.reasons;
  std::vector<std::string> buffers;
  std::vector<std::string> parameters;
  for (auto t : i->second.state) {
    auto name = last_part(model_->tensors[t].names.front());
    auto& names = model_->tensors[t].is_buffer ? buffers : parameters;
    if (std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(name);
  }
  auto add = [&parts](const auto& names, const char* what) {
    if (!names.empty())
      parts.push_back(fmt::format("{}{} {}", what, names.size() == 1 ? "" : "s",
                                  fmt::join(names, ", ")));
  };
  add(buffers, "buffer");
  add(parameters, "changing parameter");
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string module_order::text() const {
  std::string result;
  for (auto x : modules()) {
    auto i = static_cast<uint32_t>(x.value);
    auto& name = model_->modules[i].names.front();
    result += (result.empty() ? "" : "\n") + std::string{"microbatches pass "}
              + (name.empty() ? "the whole model" : "'" + name + "'")
              + " in their order: " + reason(i);
  }
  if (!changing_parameters_.empty())
    result += "\nmicrobatches run one after the other, as calls change "
              "parameter '"
              + model_->tensors[*changing_parameters_.begin()].names.front()
              + "'";
  else if (serial_)
    result += "\nmicrobatches run one after the other";
  return result;
}

// -- what is computed again ---------------------------------------------------

bool module_order::may_change(uint32_t tensor, step_id s) {
  auto& x = changes_.try_emplace(tensor, state_change{s}).first->second;
  return x.changed || x.since == s;
}

void module_order::note_change(uint32_t tensor, bool changed) {
  auto& x = changes_.at(tensor);
  x.changed = x.changed || changed;
}

// -- steps that fail ----------------------------------------------------------

void module_order::keep(const std::function<bool(uint32_t tensor)>& owned) {
  at::NoGradGuard no_grad;
  kept_.clear();
  put_back_late_.clear();
  versions_.clear();
  for (auto& [t, guards] : by_tensor_) {
    auto& tensor = model_->tensors[t].tensor;
    if (!owned(t) || !refusal_of(tensor).empty())
      continue;
    if (!tensor.is_inference())
      versions_.emplace_back(t, tensor._version());
    if (std::ranges::any_of(guards, [&](auto x) {
          return ordered(static_cast<uint32_t>(x.value));
        }))
      kept_.emplace(t, tensor.detach().clone());
    else if (!tensor.is_inference()) // those have no version
      keep_constant(t);
  }
  keep_parameters(owned);
}

void module_order::keep_constant(uint32_t t) {
  auto& tensor = model_->tensors[t].tensor;
  auto [i, added] = constants_.try_emplace(t);
  auto& x = i->second;
  if (!added && x.version == tensor._version())
    return;
  x.version = tensor._version();
  x.hash = hash_bits(tensor);
  x.kept = tensor.nbytes() <= kept_constant_limit ? tensor.detach().clone()
                                                  : at::Tensor{};
}

void module_order::keep_parameters(
  const std::function<bool(uint32_t tensor)>& owned) {
  parameters_.clear();
  for (uint32_t t = 0; t < model_->tensors.size(); ++t) {
    auto& x = model_->tensors[t].tensor;
    if (model_->tensors[t].is_buffer || changing_parameters_.contains(t)
        || !x.defined() || x.is_inference() || !owned(t))
      continue;
    // Copying a late one would wait for it.
    auto keeps = !is_late(x) && !not_kept_.contains(t);
    auto kept = keeps ? copied_on_write(x) : at::Tensor{};
    if (keeps && !kept.defined() && !trained_
        && x.nbytes() <= kept_constant_limit)
      kept = x.detach().clone();
    parameters_.push_back(
      {t, x, static_cast<uint32_t>(x._version()), std::move(kept)});
  }
}

void module_order::forget_kept() {
  trained_ = trained_ || std::ranges::any_of(model_->modules, in_training);
  kept_.clear();
  parameters_.clear();
}

void module_order::put_back() {
  at::NoGradGuard no_grad;
  auto restore = [this](uint32_t t, const at::Tensor& x) {
    auto tensor = model_->tensors[t].tensor;
    c10::InferenceMode mode{tensor.is_inference()};
    if (tensor.sizes() == x.sizes() && tensor.dtype() == x.dtype())
      tensor.detach().copy_(x);
  };
  auto late = changed_late();
  for (auto& [t, x] : constants_)
    if (late.contains(t)) {
      put_back_late_[t] = x.kept.defined();
      if (!x.kept.defined())
        continue;
      restore(t, x.kept);
      x.version = model_->tensors[t].tensor._version();
    }
  for (auto& x : parameters_)
    if (changed(x)) {
      put_back_late_[x.tensor] = x.kept.defined();
      if (x.kept.defined())
        restore(x.tensor, x.kept);
    }
  parameters_.clear();
  for (auto& [t, x] : kept_)
    restore(t, x);
  kept_.clear();
}

// -- changes that come late ---------------------------------------------------

std::vector<std::string> module_order::changed_in_place() const {
  std::vector<std::string> result;
  auto add = [&](uint32_t t, uint32_t version) {
    auto& x = model_->tensors[t];
    if (x.tensor._version() != version)
      result.push_back(fmt::format(
        "{} '{}'", x.is_buffer ? "buffer" : "parameter", x.names.front()));
  };
  for (auto& [t, version] : versions_)
    add(t, version);
  for (auto& x : parameters_)
    add(x.tensor, x.version);
  return result;
}

std::set<uint32_t> module_order::changed_late() const {
  std::set<uint32_t> result;
  for (auto& [t, restored] : put_back_late_)
    result.insert(t);
  for (auto& [t, x] : constants_)
    if (changed(t, x))
      result.insert(t);
  for (auto& x : parameters_)
    if (changed(x))
      result.insert(x.tensor);
  return result;
}

bool module_order::changed(uint32_t t, const constant& x) const {
  auto& tensor = model_->tensors[t].tensor;
  if (tensor._version() == x.version)
    return false;
  if (hash_bits(tensor) != x.hash)
    return true;
  x.version = tensor._version();
  return false;
}

/// Code may write past the version counter, as `tensor.data()` does.
bool module_order::changed(const parameter& x) const {
  if (x.version != x.content._version())
    return true;
  // Bytes that are still shared were not written.
  if (!x.kept.defined() || is_late(x.content)
      || x.kept.const_data_ptr() == x.content.const_data_ptr())
    return false;
  if (x.kept.sizes() != x.content.sizes()
      || x.kept.scalar_type() != x.content.scalar_type()
      || hash_bits(x.kept) != hash_bits(x.content))
    return true;
  not_kept_.insert(x.tensor);
  x.kept.reset();
  return false;
}

bool module_order::keeps_late_changes() const {
  return std::ranges::all_of(put_back_late_,
                             &std::pair<const uint32_t, bool>::second)
         && std::ranges::all_of(constants_,
                                [this](auto& x) {
                                  return x.second.kept.defined()
                                         || !changed(x.first, x.second);
                                })
         && std::ranges::all_of(parameters_, [this](auto& x) {
              return x.kept.defined() || !changed(x);
            });
}

void module_order::order_again(const std::set<uint32_t>& tensors) {
  for (auto t : tensors) {
    if (auto i = holders_.find(t); i != holders_.end())
      for (auto module : i->second) {
        auto& x = entries_[module];
        if (std::ranges::find(x.state, t) == x.state.end()) {
          x.state.push_back(t);
          by_tensor_[t].push_back(module_id{module});
        }
        x.changes_parameters = true;
      }
    if (!model_->tensors[t].is_buffer)
      changing_parameters_.insert(t);
  }
  for (auto& [i, x] : entries_)
    if (std::ranges::any_of(x.state,
                            [&](auto t) { return tensors.contains(t); }))
      x.released = false;
  for (auto& [t, guards] : by_tensor_)
    if (std::ranges::any_of(guards, [&](auto x) {
          return ordered(static_cast<uint32_t>(x.value));
        }))
      constants_.erase(t);
  std::erase_if(put_back_late_,
                [&](auto& x) { return tensors.contains(x.first); });
  std::erase_if(parameters_,
                [&](auto& x) { return tensors.contains(x.tensor); });
}

// -- the first steps ----------------------------------------------------------

void module_order::before_step(
  const std::function<bool(uint32_t tensor)>& owned) {
  hashes_.clear();
  for (auto& [i, x] : entries_)
    for (auto t : x.state)
      if (owned(t) && !hashes_.contains(t))
        hashes_.emplace(t, hash_bits(model_->tensors[t].tensor));
}

module_order::observation
module_order::observe(const std::function<bool(uint32_t module)>& ran) const {
  observation result;
  for (auto& [t, before] : hashes_)
    if (!before || hash_bits(model_->tensors[t].tensor) != before)
      result.changed.insert(t);
  for (auto& [i, x] : entries_)
    if (ran(i) && in_training(model_->modules[i]))
      result.trained.insert(i);
  return result;
}

bool module_order::learn(const observation& all) {
  if (all.trained.empty()) // an evaluation shows nothing
    return false;
  undecided_ = false;
  hashes_.clear();
  auto result = false;
  for (auto& [i, x] : entries_) {
    x.released = x.reasons.empty() && !x.changes_parameters
                 && all.trained.contains(i)
                 && std::none_of(x.state.begin(), x.state.end(), [&](auto t) {
                      return all.changed.contains(t);
                    });
    result = result || x.released;
  }
  return result;
}

} // namespace smp
