#include "runtime/model/model_map.hpp"

#include "runtime/base/random_stream.hpp"
#include "runtime/model/module_facts.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace smp {

namespace {

/// LibTorch modules whose code draws no random numbers, so that a stream of
/// theirs could not be observed: their calls need not pay for one.
constexpr std::array<std::string_view, 33> drawing_nothing{
  "BatchNorm1d",
  "BatchNorm2d",
  "BatchNorm3d",
  "Bilinear",
  "Conv1d",
  "Conv2d",
  "Conv3d",
  "ConvTranspose1d",
  "ConvTranspose2d",
  "ConvTranspose3d",
  "CrossEntropyLoss",
  "ELU",
  "Embedding",
  "EmbeddingBag",
  "Flatten",
  "GELU",
  "GLU",
  "GroupNorm",
  "Identity",
  "InstanceNorm1d",
  "InstanceNorm2d",
  "LayerNorm",
  "LeakyReLU",
  "Linear",
  "LogSoftmax",
  "MSELoss",
  "MaxPool2d",
  "Mish",
  "ReLU",
  "SiLU",
  "Sigmoid",
  "Softmax",
  "Tanh",
};

bool draws_nothing(const walked_module& x) {
  constexpr std::string_view prefix = "torch::nn::";
  constexpr std::string_view in_python = "torch.nn.modules.";
  constexpr std::string_view suffix = "Impl";
  std::string_view type = x.type;
  if (type.starts_with(in_python)) {
    type.remove_prefix(type.rfind('.') + 1);
  } else if (type.starts_with(prefix) && type.ends_with(suffix)) {
    type.remove_prefix(prefix.size());
    type.remove_suffix(suffix.size());
  } else {
    return false;
  }
  // A file's class of that name may do more.
  return x.object && x.children.empty()
         && std::ranges::binary_search(drawing_nothing, type)
         && x.facts->differs_from_class().empty();
}

std::vector<uint64_t> streams_of(const walked_model& model) {
  std::vector<uint64_t> result;
  for (auto& m : model.modules)
    result.push_back(draws_nothing(m) ? 0 : path_of_module(m.names.front()));
  return result;
}

} // namespace

model_map::model_map(rank_id self, size_t ranks, walked_model model)
  : self_(self),
    ranks_(ranks),
    model_(std::move(model)),
    owners_(model_.modules.size(), self),
    streams_(streams_of(model_)),
    recomputed_(model_.modules.size()) {
  // nop
}

bool model_map::recomputes() const noexcept {
  return std::ranges::any_of(recomputed_,
                             [](auto& x) { return x.region != 0; });
}

bool model_map::keeps_order(module_id x) const {
  return overlaps() && order_.ordered(static_cast<uint32_t>(x.value));
}

bool model_map::shares_state(const at::Tensor& x) const {
  return x.has_storage()
         && storages_.contains(x.storage().unsafeGetStorageImpl());
}

void model_map::replace(walked_model x,
                        const std::map<const void*, std::string>& declared) {
  model_ = std::move(x);
  owners_.assign(model_.modules.size(), self_);
  streams_ = streams_of(model_);
  recomputed_.assign(model_.modules.size(), {});
  order_ = module_order{model_, declared};
}

void model_map::recompute(std::vector<recomputation> xs) {
  recomputed_ = std::move(xs);
  number_state();
}

void model_map::order_again(const std::set<uint32_t>& tensors) {
  order_.order_again(tensors);
  number_state();
}

void model_map::number_state() {
  if (recomputes())
    for (auto& [i, entry] : order_.entries())
      streams_.at(i) = path_of_module(model_.modules[i].names.front());
}

void model_map::share(const std::vector<module_id>& modules) {
  for (auto x : modules) {
    shared_[x] = nullptr;
    streams_.at(x.value) = path_of_module(name(x));
  }
}

bool model_map::is_of_shared(uint32_t tensor) const {
  return std::ranges::any_of(shared_, [&](auto& x) {
    auto& own = model_.modules[x.first.value].tensors;
    return std::ranges::find(own, tensor) != own.end();
  });
}

void model_map::compute_together(const std::vector<uint32_t>& tensors) {
  for (auto i : tensors)
    streams_.at(home(i).value) = path_of_module(name(home(i)));
}

void model_map::share(module_id module, std::unique_ptr<distributed_module> x,
                      const std::map<uint32_t, tensor_slice>& slices) {
  shared_[module] = std::move(x);
  slices_.insert(slices.begin(), slices.end());
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
