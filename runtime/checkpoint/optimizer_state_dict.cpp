// The state of an optimizer as a dict (paper, section 3.2.3).

#include "partition/rank_layout.hpp"
#include "runtime/base/mistakes.hpp"
#include "runtime/checkpoint/checkpoint_parts.hpp"
#include "runtime/optimizer/optimizer_state.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "tp/distributed_module.hpp"
#include "transport/bytes.hpp"
#include "transport/exchange.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace smp {

namespace {

/// A part of a field, on its way to all ranks.
struct state_piece {
  uint32_t parameter = 0; // in the model's tensors
  std::string field;
  std::vector<int64_t> begin; // in the whole
  std::vector<int64_t> whole;
  tensor_ref content;
};

template <class Inspector>
bool inspect(Inspector& f, state_piece& x) {
  return f.object(x).fields(
    f.field("parameter", x.parameter), f.field("field", x.field),
    f.field("begin", x.begin), f.field("whole", x.whole),
    f.field("content", x.content));
}

std::string entry_name(const std::string& parameter, const std::string& field) {
  return parameter + '/' + field;
}

/// @throws error (unsupported) before the partition
const model_map& partitioned_model(const std::string& function) {
  auto& model = session::current().internals().state();
  if (!model || !model->partitioned())
    throw error{error_code::unsupported,
                "optimizer." + function
                  + " needs a model that is partitioned: after the first step, "
                    "or after model.partition()"};
  return model->map();
}

std::vector<int64_t> whole_shape(const model_map& map, uint32_t parameter) {
  auto* slice = map.slice(parameter);
  return slice ? slice->whole
               : map.model().tensors[parameter].tensor.sizes().vec();
}

void add_pieces(const model_map& map, const held_tensor& x,
                std::vector<state_piece>& out) {
  auto& [parameter, field] = x.state_of;
  if (x.slice == nullptr && x.rows == nullptr) {
    std::vector<int64_t> begin(static_cast<size_t>(x.value.dim()), 0);
    out.push_back({parameter, field, std::move(begin), x.value.sizes().vec(),
                   to_tensor_ref(x.value.detach(), true)});
    return;
  }
  auto dim = x.slice ? x.slice->dim : 0;
  int64_t at = 0;
  for (auto& box : boxes_of(x.value.sizes(), x.slice, x.rows)) {
    auto length = box.sizes.at(static_cast<size_t>(dim));
    auto part = x.value.detach().narrow(dim, at, length).contiguous();
    out.push_back({parameter, field, box.begin, whole_shape(map, parameter),
                   to_tensor_ref(part, true)});
    at += length;
  }
}

/// Checks a state before any of it is taken.
class state_dict_check {
public:
  explicit state_dict_check(const model_map& map) {
    auto& tensors = map.model().tensors;
    for (uint32_t i = 0; i < tensors.size(); ++i)
      if (!tensors[i].is_buffer && !tensors[i].is_attribute)
        for (auto& name : tensors[i].names)
          positions_.emplace(name, i);
  }

  /// Sorts by parameter and field.
  void read(const named_tensors& xs, const std::set<std::string>& fields) {
    for (auto& [name, x] : xs) {
      auto slash = name.rfind('/');
      auto found = slash == name.npos ? positions_.end()
                                      : positions_.find(name.substr(0, slash));
      if (found == positions_.end() || !fields.contains(name.substr(slash + 1)))
        unknown_.add(name);
      else
        fields_[found->second].emplace(name.substr(slash + 1), x);
    }
  }

  /// @param part null: it belongs to another rank
  void compare(const model_map& map, uint32_t parameter,
               const distributed_optimizer::known_part* part,
               const std::set<std::string>& counts,
               const std::set<std::string>& required) {
    auto i = fields_.find(parameter);
    if (i == fields_.end())
      return;
    auto& name = map.model().tensors[parameter].names.front();
    for (auto& field : required)
      if (!i->second.contains(field))
        missing_.add(entry_name(name, field));
    auto whole = whole_shape(map, parameter);
    for (auto& [field, x] : i->second) {
      auto sizes = x.defined() ? x.sizes() : at::IntArrayRef{-1};
      auto fits = counts.contains(field)
                    ? sizes.empty() && x.scalar_type() == at::kLong
                    : sizes == whole || (part && sizes == part->values.sizes());
      if (!fits)
        misshapen_.add(
          entry_name(name, field),
          ": " + shape_text(sizes) + " instead of "
            + shape_text(counts.contains(field) ? at::IntArrayRef{} : whole));
    }
  }

  /// @throws error (config)
  void finish() const {
    std::string text;
    for (auto* x : {&missing_, &unknown_, &misshapen_})
      x->describe(text);
    if (!text.empty())
      throw config_error("optimizer.load_state_dict: " + text
                         + "; nothing was loaded");
  }

  const std::map<std::string, at::Tensor>* of(uint32_t parameter) const {
    auto i = fields_.find(parameter);
    return i == fields_.end() ? nullptr : &i->second;
  }

private:
  std::map<std::string, uint32_t> positions_;
  std::map<uint32_t, std::map<std::string, at::Tensor>> fields_;
  mistakes missing_{"missing"};
  mistakes unknown_{"of no parameter or field of this optimizer"};
  mistakes misshapen_{"of another shape"};
};

/// @returns the part of `x` that this rank holds, in memory of its own
at::Tensor own_part(const at::Tensor& x, const tensor_slice* slice,
                    const distributed_optimizer::known_part& part) {
  auto result = x;
  if (x.dim() > 0 && x.sizes() != part.values.sizes()) {
    if (slice)
      result = slice->of(result);
    if (part.where)
      result = result.narrow(0, part.where->begin, part.where->length);
  }
  return result.detach().clone();
}

/// Calls `f(position, parameter, part)` for each parameter that an optimizer
/// updates on this rank.
template <class F>
void each_part(const model_map& map, const distributed_optimizer& optimizer,
               F f) {
  std::set<const void*> updated;
  for (auto& group : optimizer.inner().param_groups())
    for (auto& p : group.params())
      updated.insert(optimizer.parameter_of(p).unsafeGetTensorImpl());
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (updated.contains(tensors[i].tensor.unsafeGetTensorImpl()))
      if (auto part = optimizer.part_of(tensors[i].tensor, map.slice(i)))
        f(i, tensors[i], *part);
}

/// Fields that LibTorch's optimizers have only with some options.
constexpr std::array optional_fields{"momentum_buffer", "max_exp_avg_sq",
                                     "grad_avg"};

} // namespace

named_tensors distributed_optimizer::state_dict() const {
  auto& map = partitioned_model("state_dict()");
  auto& rank = session::current().internals();
  at::NoGradGuard no_grad;
  std::vector<state_piece> mine;
  for (auto& x : held_states(map, *this))
    add_pieces(map, x, mine);
  std::map<std::pair<uint32_t, std::string>, at::Tensor> found;
  for (auto& other : rank.exchange().all_gather(
         rank.layout().members(comm_group::world, rank.self()),
         "smp.optimizer.state_dict", to_payload(mine)))
    for (auto& x :
         from_payload<std::vector<state_piece>>(other, "optimizer's state")) {
      auto part = to_tensor(x.content);
      auto& whole = found[{x.parameter, x.field}];
      if (!whole.defined())
        whole = at::empty(x.whole, part.options());
      auto place = whole;
      for (int64_t d = 0; d < part.dim(); ++d)
        place = place.narrow(d, x.begin.at(static_cast<size_t>(d)),
                             part.size(d));
      place.copy_(part);
    }
  named_tensors result;
  for (auto& [key, x] : found)
    result.emplace_back(entry_name(map.tensor_name(key.first), key.second), x);
  return result;
}

named_tensors distributed_optimizer::local_state_dict() const {
  auto& map = partitioned_model("local_state_dict()");
  at::NoGradGuard no_grad;
  named_tensors result;
  each_part(map, *this, [&](uint32_t, auto& parameter, auto& part) {
    for (auto& [field, x] : fields_of(*this, part))
      result.emplace_back(entry_name(parameter.names.front(), field),
                          x.detach().clone());
  });
  return result;
}

void distributed_optimizer::load_state_dict(const named_tensors& xs) {
  auto& map = partitioned_model("load_state_dict()");
  at::NoGradGuard no_grad;
  std::set<std::string> fields{master_field, average_field};
  std::set<std::string> counts;
  std::set<std::string> required;
  for (auto& x : state_fields(inner())) {
    fields.insert(x.name);
    if (x.is_count)
      counts.insert(x.name);
    if (std::ranges::find(optional_fields, x.name) == optional_fields.end())
      required.insert(x.name);
  }
  state_dict_check given{map};
  given.read(xs, fields);
  std::map<uint32_t, known_part> parts;
  each_part(map, *this,
            [&](uint32_t i, auto&, auto& part) { parts.emplace(i, part); });
  for (uint32_t i = 0; i < map.model().tensors.size(); ++i) {
    auto part = parts.find(i);
    given.compare(map, i, part == parts.end() ? nullptr : &part->second, counts,
                  required);
  }
  given.finish();
  for (auto& entry : parts)
    set_fields(*this, entry.second, [&](const std::string& field) {
      auto* known = given.of(entry.first);
      auto x = known ? known->find(field) : decltype(known->end()){};
      return known && x != known->end()
               ? own_part(x->second, map.slice(entry.first), entry.second)
               : at::Tensor{};
    });
}

} // namespace smp
