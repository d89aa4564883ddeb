#include "runtime/model/module_order.hpp"

#include "actors/server/microbatch_sequencer.hpp"
#include "runtime/session/engine.hpp"
#include "runtime/remote/execution.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/model/script_walk.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "runtime/remote/request_kind.hpp"

#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>

namespace smp {

namespace {

std::string last_part(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

std::string join(const std::vector<std::string>& xs) {
  std::string result;
  for (auto& x : xs)
    result += (result.empty() ? "" : ", ") + x;
  return result;
}

bool is_intercepted(const walked_module& x) {
  return x.script || !x.hooks.empty();
}

bool in_training(const walked_module& x) {
  return x.script ? is_training(*x.script) : x.object->is_training();
}

/// Over the bits of `x`, so that NaN equals itself.
/// @returns nothing for what is no plain memory
std::optional<uint64_t> hash_bits(const at::Tensor& x) {
  if (!refusal_of(x).empty())
    return std::nullopt;
  auto flat = x.detach().contiguous();
  auto* bytes = static_cast<const std::byte*>(flat.const_data_ptr());
  uint64_t result = 14695981039346656037ull;
  size_t n = flat.nbytes();
  for (size_t i = 0; i < n; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min(sizeof(word), n - i));
    result = (result ^ word) * 0x9e3779b97f4a7c15ull;
    result ^= result >> 29;
  }
  return result;
}

} // namespace

// -- which --------------------------------------------------------------------

module_order::module_order(const walked_model& model,
                           const std::map<const void*, std::string>& declared)
  : model_(&model) {
  // What a module and the modules hidden in it bring along. Shared modules
  // have several parents, so this asks downwards.
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
    result.buffers.insert(result.buffers.end(), m.reads.begin(),
                          m.reads.end());
    if (!m.stateful.empty())
      result.reasons.push_back(m.stateful);
    if (auto j = declared.find(m.identity()); j != declared.end())
      result.reasons.push_back(j->second);
    for (auto child : m.children) {
      if (is_intercepted(model.modules[child]))
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
    if (i > 0 && !is_intercepted(model.modules[i]))
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

std::vector<module_id> module_order::entered_by(const request& x) const {
  std::vector<module_id> result;
  auto add = [&](uint32_t i) {
    if (ordered(i))
      result.push_back(module_id{i});
  };
  if (entries_.empty() || x.what != phase::forward)
    return result;
  auto module = static_cast<uint32_t>(x.module.value);
  if (x.body.bytes.empty()) {
    add(module); // the step body
    return result;
  }
  try {
    byte_reader in{x.body.bytes};
    switch (static_cast<request_kind>(in.u8())) {
      case request_kind::call:
      case request_kind::method:
      case request_kind::get_attribute:
      case request_kind::set_attribute:
        add(module);
        break;
      case request_kind::range:
      case request_kind::method_range: {
        auto first = in.u32();
        auto last = in.u32();
        auto& children = model_->modules.at(module).children;
        for (auto i = first; i < last && i < children.size(); ++i)
          add(children[i]);
        break;
      }
      case request_kind::read_tensor:
      case request_kind::write_tensor:
        if (auto i = by_buffer_.find(in.u32()); i != by_buffer_.end())
          for (auto y : i->second)
            add(static_cast<uint32_t>(y.value));
        break;
      default:
        break;
    }
  } catch (const std::exception&) {
    // Whoever serves it will say what is wrong with it.
    result.clear();
  }
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
    parts.push_back((names.size() == 1 ? "buffer " : "buffers ")
                    + join(names));
  return join(parts);
}

std::string module_order::text() const {
  std::string result;
  for (auto x : modules()) {
    auto i = static_cast<uint32_t>(x.value);
    auto& name = model_->modules[i].names.front();
    result += (result.empty() ? "" : "\n")
              + std::string{"microbatches pass "}
              + (name.empty() ? "the whole model" : "'" + name + "'")
              + " in their order: " + reason(i);
  }
  return result;
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

void module_order::after_step(engine& eng) {
  auto& st = *eng.model();
  // -- what this rank saw -----------------------------------------------------
  byte_writer out;
  std::vector<uint32_t> changed, trained;
  for (auto& [t, before] : hashes_)
    if (!before || hash_bits(model_->tensors[t].tensor) != before)
      changed.push_back(t);
  for (auto& [i, x] : entries_)
    if (st.owner(module_id{i}) == eng.self()
        && eng.sequencer().calls(module_id{i}) > 0
        && in_training(model_->modules[i]))
      trained.push_back(i);
  for (auto* xs : {&changed, &trained}) {
    out.u32(static_cast<uint32_t>(xs->size()));
    for (auto x : *xs)
      out.u32(x);
  }
  payload mine;
  mine.bytes = out.take();
  // -- what all saw -----------------------------------------------------------
  std::set<uint32_t> all_changed, all_trained;
  for (auto& x : eng.exchange().all_gather(eng.pipeline(), "smp.order",
                                           std::move(mine))) {
    byte_reader in{x.bytes};
    for (auto* xs : {&all_changed, &all_trained})
      for (auto n = in.count(4, "ordered modules"); n > 0; --n)
        xs->insert(in.u32("ordered module"));
  }
  if (all_trained.empty()) // an evaluation: it tells nothing
    return;
  undecided_ = false;
  hashes_.clear();
  for (auto& [i, x] : entries_)
    x.released = x.reasons.empty() && all_trained.contains(i)
                 && std::none_of(x.buffers.begin(), x.buffers.end(),
                                 [&](auto t) {
                                   return all_changed.contains(t);
                                 });
}

// -- calls on the own rank ----------------------------------------------------

ordered_call::ordered_call(module_id x, bool ordered) : module_(x) {
  if (ordered)
    enter(x);
  if (auto* slot = call_slot::current())
    slot->enter(x);
}

void ordered_call::enter(module_id x) {
  auto* ex = execution::current();
  // What backward computes again changes no state.
  if (!ex || ex->in_backward)
    return;
  ex->stateful = true;
  if (auto open = ex->eng->sequencer().opening({x}, ex->turn))
    waiter::current().wait(open, {"the turn of microbatch "
                                    + std::to_string(ex->microbatch.value)
                                    + " in '" + ex->eng->model()->name(x)
                                    + "'",
                                  std::nullopt});
  execution_ = ex;
}

ordered_call::~ordered_call() {
  if (auto* slot = call_slot::current())
    slot->leave();
  if (execution_)
    execution_->eng->sequencer().leave({module_}, execution_->turn);
}

void set_stateful(torch::nn::Module& x, std::string why) {
  session::current().internals().stateful()[dynamic_cast<const void*>(&x)]
    = std::move(why);
}

} // namespace smp
