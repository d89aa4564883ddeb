#include "runtime/model/model_map.hpp"

#include <utility>

namespace smp {

model_map::model_map(rank_id self, size_t ranks, walked_model model)
  : self_(self),
    ranks_(ranks),
    model_(std::move(model)),
    owners_(model_.modules.size(), self) {
  // nop
}

bool model_map::keeps_order(module_id x) const {
  // On one rank a microbatch does not stop within its forward phase.
  return ranks_ > 1 && order_.ordered(static_cast<uint32_t>(x.value));
}

bool model_map::shares_state(const at::Tensor& x) const {
  return x.has_storage()
         && storages_.contains(x.storage().unsafeGetStorageImpl());
}

void model_map::replace(walked_model x,
                        const std::map<const void*, std::string>& declared) {
  model_ = std::move(x);
  owners_.assign(model_.modules.size(), self_);
  order_ = module_order{model_, declared};
}

void model_map::finish_partition() {
  partitioned_ = true;
  for (uint32_t i = 0; i < model_.tensors.size(); ++i)
    if (auto& t = model_.tensors[i].tensor; owned(i) && t.has_storage())
      storages_.insert(t.storage().unsafeGetStorageImpl());
}

void model_map::rebind(const at::Tensor& from, const at::Tensor& to) {
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

} // namespace smp
