#include "runtime/session/state_check.hpp"

#include "runtime/base/nearest_name.hpp"
#include "runtime/model/model_map.hpp"
#include "transport/error.hpp"

#include <string_view>

namespace smp {

namespace {

/// Suggests model names for `name`, which the model lacks: often another
/// program saved a part of the model, or nested it in something.
/// @param missing names of the model that were not given
std::string hint_for(std::string_view name,
                     const std::vector<std::string_view>& missing) {
  auto ends_as = [](std::string_view x, std::string_view end) {
    return x.size() > end.size() && x.ends_with(end)
           && x[x.size() - end.size() - 1] == '.';
  };
  std::string_view meant;
  for (auto x : missing)
    if (meant.empty() && (ends_as(x, name) || ends_as(name, x)))
      meant = x;
  if (meant.empty())
    meant = nearest_name(name, missing);
  return meant.empty() ? "" : ": did you mean '" + std::string{meant} + "'?";
}

} // namespace

state_check::state_check(const model_map& map) : map_(map) {
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    for (auto& name : tensors[i].names)
      positions_.emplace(name, i);
}

void state_check::add(const std::string& name, c10::IntArrayRef sizes,
                      bool plain) {
  auto i = positions_.find(name);
  if (i == positions_.end()) {
    unknown_.push_back(name);
    return;
  }
  given_.insert(i->second);
  auto* slice = map_.slice(i->second);
  auto mine = slice ? c10::IntArrayRef{slice->whole}
                    : map_.model().tensors[i->second].tensor.sizes();
  if (!plain)
    not_plain_.add(name);
  else if (sizes != mine)
    misshapen_.add(name, ": " + shape_text(sizes) + " instead of "
                           + shape_text(mine));
}

void state_check::finish(const std::string& who) {
  auto& tensors = map_.model().tensors;
  std::vector<std::string_view> absent;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (!given_.contains(i) && !tensors[i].is_attribute) {
      missing_.add(tensors[i].names.front());
      absent.emplace_back(tensors[i].names.front());
    }
  mistakes unknown{"not in the model"};
  for (size_t i = 0; i < unknown_.size(); ++i)
    unknown.add(unknown_[i],
                i < mistakes::max_named ? hint_for(unknown_[i], absent) : "");
  std::string text;
  for (auto* x : {&missing_, &unknown, &misshapen_, &not_plain_})
    x->describe(text);
  if (!text.empty())
    throw error{error_code::config, who + ": " + text + "; nothing was loaded"};
}

} // namespace smp
