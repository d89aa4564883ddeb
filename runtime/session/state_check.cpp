#include "runtime/session/state_check.hpp"

#include "runtime/model/model_map.hpp"
#include "transport/error.hpp"

namespace smp {

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
    unknown_.add(name);
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
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (!given_.contains(i) && !tensors[i].is_attribute)
      missing_.add(tensors[i].names.front());
  std::string text;
  for (auto* x : {&missing_, &unknown_, &misshapen_, &not_plain_})
    x->describe(text);
  if (!text.empty())
    throw error{error_code::config, who + ": " + text + "; nothing was loaded"};
}

} // namespace smp
