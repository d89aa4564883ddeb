#include "runtime/sharing/sharing.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/base/nearest_name.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/deferred/deferred_script.hpp"
#include "runtime/deferred/drawn_rows.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/sharing/native_modules.hpp"
#include "runtime/sharing/sharing_request_lookup.hpp"
#include "runtime/sharing/tp_register.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "tp/refusals.hpp"
#include "transport/bytes.hpp"
#include "transport/error.hpp"
#include "transport/exchange.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace smp {

namespace {

class decider {
public:
  decider(const walked_model& model,
          const std::map<const void*, sharing_mark>& marked,
          const sharing_request& x)
    : model_(model), request_(x), wishes_(model, marked, x.patterns) {
    // nop
  }

  sharing_decision run() {
    wishes_.list().check("tensor_parallel.modules");
    check_classes();
    for (uint32_t i = 0; i < model_.modules.size(); ++i)
      // Ancestors come first in the walk.
      if (inside_.contains(i) || !wishes_.wanted(i))
        pass_over(i);
      else
        consider(i);
    if (request_.prescaled)
      result_.remarks.add("ranks that share have the same samples");
    return std::move(result_);
  }

private:
  void check_classes() const {
    for (auto& x : request_.classes) {
      if (std::ranges::find(model_.modules, x, &walked_module::type)
          != model_.modules.end())
        continue;
      std::vector<std::string_view> types;
      for (auto& m : model_.modules)
        types.emplace_back(m.type);
      auto near = nearest_name(x, types);
      throw config_error(fmt::format(
        "tensor_parallel.register: no module of the model is of class \"{}\"{}",
        x, near.empty() ? "" : fmt::format("; \"{}\"?", near)));
    }
  }

  /// Records why a module that could be shared itself is not considered.
  void pass_over(uint32_t i) {
    if (i == 0 || !request_.explains_all)
      return;
    if (auto native = native_of(model_, i); native && native->how)
      result_.remarks.add(native->type + ' ' + why_passed_over(i), name(i),
                          true);
  }

  std::string why_passed_over(uint32_t i) const {
    if (auto whole = inside_.find(i); whole != inside_.end())
      return fmt::format("not shared for itself, as it is part of {}, which is",
                         name(whole->second));
    if (auto* by = wishes_.list().left_out_by(i))
      return fmt::format(
        "not shared, as \"{}\" in tensor_parallel.modules "
        "excludes it",
        *by);
    if (wishes_.forbidden(i))
      return "not shared, as the program excludes it";
    return "not shared, as it is not named; name it in tensor_parallel.modules";
  }

  void consider(uint32_t i) {
    auto native = native_of(model_, i);
    auto* how = native ? native->how : nullptr;
    if (!how)
      return; // modules below it may be
    if (how->only_by_name && !wishes_.named(i)) {
      note(i, fmt::format("{} not shared, as little of it could be held by "
                          "others; name it by its whole path",
                          native->type));
      return;
    }
    native->saves_memory = wishes_.saves_memory(i, request_.saves_memory);
    auto why = why_not(i, *native, *how);
    if (why.empty()) {
      result_.shared.push_back({module_id{i}, native->saves_memory});
      for (auto below : model_.subtree(i))
        if (below != i)
          inside_.emplace(below, i);
      auto* manner = how->manner ? how->manner(
                       *native, static_cast<int64_t>(request_.peers))
                                 : nullptr;
      note(i, fmt::format("{} shared by {} ranks{}{}", native->type,
                          request_.peers, manner ? " " : "",
                          manner ? manner : ""));
    } else {
      note(i, fmt::format("{} not shared, as {}", native->type, why));
    }
  }

  void note(uint32_t i, const std::string& verdict) {
    result_.remarks.add(verdict, name(i));
  }

  const std::string& name(uint32_t i) const {
    return model_.modules[i].names.front();
  }

  std::string why_not(uint32_t i, const native_module& native,
                      const distribution& how) const {
    auto& m = model_.modules[i];
    if (!m.intercepted)
      return "its calls cannot be seen; declare it as smp::submodule, or put "
             "it into a Sequential";
    if (auto why = inseparable(i); !why.empty())
      return why;
    auto all = model_.subtree(i);
    for (auto below : all) {
      if (auto why = part_kept_out(below, i); !why.empty())
        return why;
      if (auto why = shared_tensor(below); !why.empty())
        return why;
      if (below != i && model_.modules[below].names.size() > 1)
        return fmt::format("'{}' has other names, too; register it once",
                           model_.modules[below].names.front());
    }
    return native.doubt.empty()
             ? how.refusal(native, static_cast<int64_t>(request_.peers))
             : native.doubt;
  }

  /// Why the module is shared only with one above it; empty if that is not so.
  std::string inseparable(uint32_t i) const {
    while (i != 0) {
      i = model_.modules[i].parent;
      auto above = native_of(model_, i);
      if (above && above->how && !above->how->parts_too)
        return fmt::format(
          "its calls depend on the data of each rank; share all "
          "of '{}'",
          name(i));
    }
    return {};
  }

  /// Why a part with tensors is not shared together with the whole; empty if it
  /// is.
  std::string part_kept_out(uint32_t part, uint32_t whole) const {
    if (part == whole)
      return {};
    auto why = wishes_.why_kept_out(part, whole);
    auto has_tensors = [&](uint32_t i) {
      return !model_.modules[i].tensors.empty();
    };
    return why.empty()
               || std::ranges::none_of(model_.subtree(part), has_tensors)
             ? std::string{}
             : fmt::format("'{}' in it is excluded: {}", name(part), why);
  }

  /// Why the module does not own its tensors alone; empty if it does.
  std::string shared_tensor(uint32_t module) const {
    for (auto i : model_.modules[module].tensors) {
      auto& t = model_.tensors[i];
      if (t.modules.size() > 1 && !tied_by_words(t) && !is_bias_of_head(t))
        return fmt::format(
          "'{}' belongs to other modules, too; give each "
          "its own, or name all, if they are tables and the "
          "last layer of a language model",
          t.names.front());
      if (t.read_by)
        return fmt::format(
          "the code of '{}' reads its '{}'; it has to call "
          "the module instead",
          *t.read_by, t.names.front());
    }
    return {};
  }

  /// Embedding tables and the last layer of a language model that share a
  /// weight are cut alike, if all can be shared and sharing is requested.
  bool tied_by_words(const walked_tensor& t) const {
    auto peers = static_cast<int64_t>(request_.peers);
    auto heads = 0;
    for (auto i : t.modules) {
      if (model_.modules[i].container)
        continue; // never called, as T5's table beside those of its stacks
      auto x = native_of(model_, i);
      if (!x || !wishes_.wanted(i) || !model_.modules[i].intercepted
          || !(x->type == "LMHead" || x->by_words) || !x->doubt.empty()
          || !x->how->refusal(*x, peers).empty() || !has_own_bias(*x))
        return false;
      heads += x->type == "LMHead";
    }
    return heads > 0;
  }

  bool has_own_bias(const native_module& x) const {
    auto bias = x.parameters.find("bias");
    if (bias == x.parameters.end())
      return true;
    auto& t = model_.tensors.at(static_cast<size_t>(model_.find(bias->second)));
    return t.modules.size() == 1 || is_bias_of_head(t);
  }

  /// Tells whether a tensor is the bias of a last layer for which only modules
  /// above have names of their own: "bias" for "decoder.bias", as BERT does.
  bool is_bias_of_head(const walked_tensor& t) const {
    auto head = t.modules.back(); // ancestors come first in the walk
    auto x = native_of(model_, head);
    if (!x || x->type != "LMHead" || !x->parameters.contains("bias")
        || !x->parameters.at("bias").is_same(t.tensor))
      return false;
    return std::ranges::all_of(
      t.modules, [&](auto i) { return i == head || is_above(i, head); });
  }

  bool is_above(uint32_t module, uint32_t below) const {
    while (below != 0 && below != module)
      below = model_.modules[below].parent;
    return below == module;
  }

  const walked_model& model_;
  const sharing_request& request_;
  sharing_request_lookup wishes_;
  std::map<uint32_t, uint32_t> inside_; // shared module, by its parts
  sharing_decision result_;
};

/// Stands in for a part of a module that ranks share as a whole: it has slices
/// of parameters with which only that module can compute.
class part_of_whole final : public distributed_module {
public:
  part_of_whole(std::string name, std::string whole)
    : name_(std::move(name)), whole_(std::move(whole)) {
    // nop
  }

  std::vector<at::Tensor> forward(std::span<const at::Tensor>) const override {
    throw error{error_code::unsupported,
                fmt::format("'{}' was called, but ranks share '{}' as a whole: "
                            "call that, or name the linears below it in "
                            "tensor_parallel.modules instead",
                            name_, whole_)};
  }

private:
  std::string name_;
  std::string whole_;
};

} // namespace

void register_classes(const session_config& x) {
  for (auto& entry : x.tensor_parallel_register) {
    auto [type, as] = class_and_type(entry).value(); // see `validate`
    try {
      tp_register(type, as);
    } catch (const error& e) {
      throw config_error(fmt::format("tensor_parallel.register has \"{}\": {}",
                                     entry, e.cause().text));
    }
  }
}

sharing_request sharing_wanted(const session_config& x) {
  sharing_request result{x.tensor_parallel_modules, x.tensor_parallel_degree,
                         x.optimize == "memory", x.prescaled_batch, false};
  for (auto& entry : x.tensor_parallel_register)
    result.classes.push_back(class_and_type(entry).value().first);
  return result;
}

sharing_decision
decide_sharing(const walked_model& model,
               const std::map<const void*, sharing_mark>& marked,
               const sharing_request& x) {
  if (x.peers == 1)
    return {};
  return decider{model, marked, x}.run();
}

void decide_cuts(const walked_model& model, const std::vector<cut_mark>& marks,
                 uint64_t peers, sharing_decision& result) {
  for (auto& mark : marks) {
    auto parameter = mark.parameter.lock();
    auto found = model.tensor_index.find(parameter.get());
    if (!parameter || found == model.tensor_index.end())
      continue; // of another model
    auto& t = model.tensors[found->second];
    auto& m = model.modules[t.modules.front()];
    auto refuse = [&](const std::string& why) {
      throw config_error(
        fmt::format("'{}' cannot be cut along axis {} by {} "
                    "tensor-parallel ranks: {}",
                    t.names.front(), mark.dim, peers, why));
    };
    if (mark.dim < 0 || mark.dim >= t.tensor.dim())
      refuse(
        fmt::format("it has {} axes; parameter_creation_scope counts "
                    "them from 0",
                    t.tensor.dim()));
    if (auto n = t.tensor.size(mark.dim), of = static_cast<int64_t>(peers);
        !nn::can_divide(n, of))
      refuse(nn::refusal_to_divide(n, "numbers there", of));
    if (t.modules.size() > 1)
      refuse("it belongs to several modules; give each its own");
    if (!m.intercepted)
      refuse(
        fmt::format("the calls of '{}' cannot be seen; declare it as "
                    "smp::submodule, or put it into a Sequential",
                    m.names.front()));
    result.cut.push_back({found->second, mark.dim, mark.scaled_batch});
    result.remarks.add(
      fmt::format("cut along axis {} by {} ranks", mark.dim, peers),
      t.names.front());
  }
}

namespace {

/// Copies to `to`, a slice of rows, those of `rows` that belong to it.
void take_rows(const at::Tensor& to, const tensor_slice& slice, int64_t first,
               const at::Tensor& rows) {
  int64_t before = 0;
  for (auto& x : slice.ranges()) {
    auto begin = std::max(first, x.begin);
    auto end = std::min(first + rows.size(0), x.begin + x.length);
    if (begin < end)
      to.narrow(0, before + begin - x.begin, end - begin)
        .copy_(rows.narrow(0, begin - first, end - begin));
    before += x.length;
  }
}

/// @returns the slice of a deferred tensor that never exists as a whole,
/// since its numbers are drawn or read piecewise; undefined if that is
/// impossible
at::Tensor slice_in_pieces(const at::Tensor& x, const tensor_slice& slice) {
  if (!is_deferred(x))
    return {};
  auto sizes = x.sizes().vec();
  sizes.at(static_cast<size_t>(slice.dim)) = slice.blocks * slice.length;
  auto result = at::empty(sizes, x.options());
  auto take = [&](int64_t first, const at::Tensor& rows) {
    if (slice.dim == 0)
      take_rows(result, slice, first, rows);
    else
      result.narrow(0, first, rows.size(0)).copy_(slice.of(rows));
  };
  return draw_rows(x, take) || read_rows(x, take) ? result : at::Tensor{};
}

/// Reduces `x` to its slice, with the same numbers as in one process.
void cut_tensor(at::Tensor x, const tensor_slice& slice) {
  auto mine = slice_in_pieces(x, slice);
  if (!mine.defined()) {
    initialise_deferred({x});
    mine = slice.of(x).clone();
  }
  x.set_data(mine);
}

} // namespace

void cut_parameter_of(model_map& map, const cut_parameter& x, int64_t rank,
                      int64_t peers) {
  at::NoGradGuard no_grad;
  if (!map.owned(x.tensor))
    return;
  auto t = map.model().tensors[x.tensor].tensor;
  auto length = t.size(x.dim) / peers;
  tensor_slice slice{x.dim, rank * length, length, t.sizes().vec()};
  cut_tensor(t, slice);
  map.cut(x.tensor, slice);
  if (!x.scaled_batch)
    map.count_once(x.tensor);
}

namespace {

native_module native_to_share(const walked_model& model,
                              const shared_module& x) {
  auto result = native_of(model, static_cast<uint32_t>(x.id.value)).value();
  result.saves_memory = x.saves_memory;
  return result;
}

std::map<uint32_t, tensor_slice> by_position(const walked_model& model,
                                             uint32_t module,
                                             const native_module& native,
                                             const parameter_slices& xs) {
  std::map<uint32_t, tensor_slice> result;
  for (auto& [name, slice] : xs) {
    auto own = native.own_names.find(name);
    result.emplace(
      own_tensor(model, module,
                 own == native.own_names.end() ? name : own->second)
        .value(),
      slice);
  }
  return result;
}

} // namespace

std::map<uint32_t, tensor_slice> slices_of(const walked_model& model,
                                           const shared_module& x, int64_t rank,
                                           int64_t peers) {
  auto native = native_to_share(model, x);
  return by_position(model, static_cast<uint32_t>(x.id.value), native,
                     native.how->slices(native, rank, peers));
}

namespace {

/// Restores the sizes that parameters had before another module that also has
/// them cut them.
native_module as_a_whole(const model_map& map, native_module x) {
  for (auto& [name, t] : x.parameters)
    if (auto i = map.model().find(t); i >= 0)
      if (auto* slice = map.slice(static_cast<uint32_t>(i)))
        t = at::empty(slice->whole, t.options().device(at::kMeta));
  return x;
}

} // namespace

void share_module(model_map& map, const shared_module& shared, int64_t rank,
                  const sharing_request& request) {
  at::NoGradGuard no_grad;
  const auto id = shared.id;
  if (map.owner(id) != map.self())
    return;
  auto& model = map.model();
  auto i = static_cast<uint32_t>(id.value);
  auto native = native_to_share(model, shared);
  auto parts = native.how->slices(as_a_whole(map, native), rank,
                                  static_cast<int64_t>(request.peers));
  auto slices = by_position(model, i, native, parts);
  for (auto& [position, slice] : slices) {
    if (map.slice(position) == nullptr)
      cut_tensor(model.tensors[position].tensor, slice);
    if (request.prescaled && native.how->counts_samples_once)
      map.count_once(position);
  }
  auto how = native.how->make(native, parts);
  if (auto calls = script_translation_of(model.modules[i]))
    how = std::make_unique<translated_module>(std::move(how), std::move(calls));
  map.share(id, std::move(how), slices);
  auto all = model.subtree(i);
  for (auto below : all) {
    auto part = module_id{below};
    if (below != i)
      map.share(part,
                std::make_unique<part_of_whole>(map.name(part), map.name(id)),
                {});
    for (auto* hook : model.modules[below].hooks) {
      hook->distributed = map.shared(part);
      hook->translation = below == i ? translation_of(model.modules[i])
                                     : nullptr;
      hook->result = below == i ? result_of(model.modules[i]) : nullptr;
    }
  }
}

sharing_rehearsal::sharing_rehearsal(model_map& map, const sharing_decision& x,
                                     const sharing_request& wanted)
  : map_(map) {
  const auto peers = static_cast<int64_t>(wanted.peers);
  auto keep = [&](uint32_t i) {
    wholes_.emplace(i, map.model().tensors[i].tensor.detach());
  };
  for (auto& shared : x.shared)
    for (auto& [position, slice] : slices_of(map.model(), shared, 0, peers))
      keep(position);
  for (auto& cut : x.cut)
    keep(cut.tensor);
  try {
    for (auto& shared : x.shared)
      share_module(map, shared, 0, wanted);
    for (auto& cut : x.cut)
      cut_parameter_of(map, cut, 0, peers);
  } catch (...) {
    end();
    throw;
  }
}

sharing_rehearsal::~sharing_rehearsal() {
  end();
}

void sharing_rehearsal::end() {
  for (auto& m : map_.model().modules)
    for (auto* hook : m.hooks) {
      hook->distributed = nullptr;
      hook->translation = nullptr;
      hook->result = nullptr;
    }
  map_.unshare();
  for (auto& [position, whole] : wholes_)
    map_.model().tensors[position].tensor.set_data(whole);
}

at::Tensor whole_of(const rank_context& rank, const at::Tensor& mine,
                    const tensor_slice& slice) {
  using part = std::vector<tensor_ref>; // one, or none
  part sent;
  if (mine.defined() && slice.length > 0)
    sent.push_back(to_tensor_ref(mine.detach().to_dense(), true));
  std::vector<at::Tensor> parts;
  for (auto& x : rank.exchange().all_gather(
         rank.layout().members(comm_group::tp, rank.self()), "smp.slices",
         to_payload(sent)))
    for (auto& y : from_payload<part>(x, "slice of a tensor"))
      parts.push_back(to_tensor(y));
  return parts.empty() ? at::Tensor{} : slice.merged(parts);
}

} // namespace smp
