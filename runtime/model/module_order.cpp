#include "runtime/model/module_order.hpp"

#include "runtime/base/fnv_hash.hpp"
#include "runtime/model/script_walk.hpp"
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
  return x.script ? is_training(*x.script) : x.object->is_training();
}

/// Constants up to this size, in bytes, are copied: state that begins to change
/// late is small (a count, an average); masks are not.
constexpr size_t kept_constant_limit = 1 << 20;

/// Over the bits of `x`, so that NaN equals itself.
/// @returns nothing for a tensor that is not plain memory
std::optional<uint64_t> hash_bits(const at::Tensor& x) {
  if (!refusal_of(x).empty())
    return std::nullopt;
  auto flat = x.detach().contiguous();
  auto* bytes = static_cast<const std::byte*>(flat.const_data_ptr());
  return hash_of_memory({bytes, flat.nbytes()});
}

} // namespace

// -- which --------------------------------------------------------------------

module_order::module_order(const walked_model& model,
                           const std::map<const void*, std::string>& declared)
  : model_(&model) {
  // The state of a module and of the modules hidden in it. Shared modules have
  // several parents, so this recurses downwards.
  std::map<uint32_t, entry> known;
  auto state_of = [&](auto&& self, uint32_t i) -> const entry& {
    auto [pos, added] = known.emplace(i, entry{});
    auto& result = pos->second;
    if (!added)
      return result;
    auto& m = model.modules[i];
    for (auto t : m.tensors)
      if (model.tensors[t].is_buffer)
        result.buffers.push_back(t);
    result.buffers.insert(result.buffers.end(), m.reads.begin(), m.reads.end());
    if (!m.stateful.empty())
      result.reasons.push_back(m.stateful);
    if (auto j = declared.find(m.identity()); j != declared.end())
      result.reasons.push_back(j->second);
    for (auto child : m.children) {
      if (model.modules[child].intercepted)
        continue;
      auto& x = self(self, child);
      result.buffers.insert(result.buffers.end(), x.buffers.begin(),
                            x.buffers.end());
      result.reasons.insert(result.reasons.end(), x.reasons.begin(),
                            x.reasons.end());
    }
    return result;
  };
  for (uint32_t i = 0; i < model.modules.size(); ++i) {
    if (i > 0 && !model.modules[i].intercepted)
      continue;
    auto& x = state_of(state_of, i);
    if (!x.buffers.empty() || !x.reasons.empty())
      entries_.emplace(i, x);
  }
  for (auto& [i, x] : entries_) {
    undecided_ = undecided_ || x.reasons.empty();
    for (auto t : x.buffers)
      by_buffer_[t].push_back(module_id{i});
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

// -- words --------------------------------------------------------------------

std::string module_order::reason(uint32_t module) const {
  auto i = entries_.find(module);
  if (i == entries_.end())
    return {};
  auto parts = i->second.reasons;
  std::vector<std::string> names;
  for (auto t : i->second.buffers) {
    auto name = last_part(model_->tensors[t].names.front());
    if (std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(name);
  }
  if (!names.empty())
    parts.push_back(fmt::format("{} {}",
                                names.size() == 1 ? "buffer" : "buffers",
                                fmt::join(names, ", ")));
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
  return result;
}

// -- what is computed again ---------------------------------------------------

bool module_order::may_change(uint32_t tensor, step_id s) {
  auto& x = changes_.try_emplace(tensor, buffer_change{s}).first->second;
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
  for (auto& [t, guards] : by_buffer_) {
    auto& tensor = model_->tensors[t].tensor;
    if (!owned(t) || !refusal_of(tensor).empty())
      continue;
    if (std::ranges::any_of(guards, [&](auto x) {
          return ordered(static_cast<uint32_t>(x.value));
        }))
      kept_.emplace(t, tensor.detach().clone());
    else if (!tensor.is_inference()) // those have no version
      keep_constant(t);
  }
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

void module_order::put_back() {
  auto restore = [this](uint32_t t, const at::Tensor& x) {
    auto tensor = model_->tensors[t].tensor;
    at::NoGradGuard no_grad;
    c10::InferenceMode mode{tensor.is_inference()};
    if (tensor.sizes() == x.sizes() && tensor.dtype() == x.dtype())
      tensor.detach().copy_(x);
  };
  put_back_late_ = changed_late();
  for (auto t : put_back_late_)
    if (auto& x = constants_.at(t); x.kept.defined()) {
      restore(t, x.kept);
      x.version = model_->tensors[t].tensor._version();
    }
  for (auto& [t, x] : kept_)
    restore(t, x);
  kept_.clear();
}

// -- changes that come late ---------------------------------------------------

std::set<uint32_t> module_order::changed_late() const {
  auto result = put_back_late_;
  for (auto& [t, x] : constants_)
    if (changed(t, x))
      result.insert(t);
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

bool module_order::keeps_late_changes() const {
  auto late = changed_late();
  return std::ranges::all_of(
    late, [this](auto t) { return constants_.at(t).kept.defined(); });
}

void module_order::order_again(const std::set<uint32_t>& buffers) {
  for (auto& [i, x] : entries_)
    if (std::ranges::any_of(x.buffers,
                            [&](auto t) { return buffers.contains(t); }))
      x.released = false;
  for (auto& [t, guards] : by_buffer_)
    if (std::ranges::any_of(guards, [&](auto x) {
          return ordered(static_cast<uint32_t>(x.value));
        }))
      constants_.erase(t);
  std::erase_if(put_back_late_, [&](auto t) { return buffers.contains(t); });
}

// -- the first steps ----------------------------------------------------------

void module_order::before_step(
  const std::function<bool(uint32_t tensor)>& owned) {
  hashes_.clear();
  for (auto& [i, x] : entries_)
    for (auto t : x.buffers)
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
    x.released = x.reasons.empty() && all.trained.contains(i)
                 && std::none_of(
                   x.buffers.begin(), x.buffers.end(),
                   [&](auto t) { return all.changed.contains(t); });
    result = result || x.released;
  }
  return result;
}

} // namespace smp
