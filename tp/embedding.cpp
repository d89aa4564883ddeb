#include "tp/embedding.hpp"

#include "tp/cross_entropy.hpp"
#include "tp/functions.hpp"
#include "tp/refusals.hpp"
#include "tp/tensor_group.hpp"

#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

namespace smp::nn {

namespace {

/// With N indices and d channels on each of T peers, channels move (T - 1) / T
/// N d numbers, and rows (T - 1) N d. So rows are never better, but there may
/// be fewer channels than ranks, or a number that does not divide; and the last
/// layer of a language model may use the same table.
bool by_rows(const native_module& x, int64_t peers) {
  return x.by_words || x.parameters.at("weight").size(1) % peers != 0;
}

class embedding_by_channels final : public distributed_module {
public:
  explicit embedding_by_channels(const native_module& x)
    : name_(x.name),
      weight_(x.parameters.at("weight")),
      padding_idx_(x.padding_idx.value_or(-1)),
      sparse_(x.sparse) {
    // nop
  }

  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override {
    auto all = gather_batch_for_tp(only_tensor(name_, xs));
    auto mine = at::embedding(weight_, all, padding_idx_, false, sparse_);
    return {merge_batch_for_tp(mine, -1)};
  }

private:
  std::string name_;
  at::Tensor weight_;
  int64_t padding_idx_;
  bool sparse_;
};

class embedding_by_rows final : public distributed_module {
public:
  embedding_by_rows(const native_module& x, int64_t rows)
    : name_(x.name),
      weight_(x.parameters.at("weight")),
      rows_(rows),
      padding_idx_(x.padding_idx.value_or(-1)),
      sparse_(x.sparse) {
    // nop
  }

  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override {
    auto& x = only_tensor(name_, xs);
    auto& group = tensor_group::current();
    auto [begin, length] = rows_of_peer(rows_,
                                        static_cast<int64_t>(group.rank()),
                                        static_cast<int64_t>(group.size()));
    auto all = gather_batch_for_tp(x);
    check_range(all);
    auto sizes = all.sizes().vec();
    all = all.flatten();
    // Only rows held here are looked up, so that no other row has a gradient.
    auto where = all.ge(begin).logical_and(all.lt(begin + length)).nonzero();
    where = where.squeeze(1);
    auto padding = padding_idx_ >= begin && padding_idx_ < begin + length
                     ? padding_idx_ - begin
                     : -1;
    auto found = at::embedding(weight_, all.index_select(0, where) - begin,
                               padding, false, sparse_);
    auto mine = at::zeros({all.numel(), weight_.size(1)}, weight_.options())
                  .index_copy(0, where, found);
    sizes.push_back(weight_.size(1));
    return {scatter_batch_for_tp(mine.view(sizes))};
  }

private:
  /// An index that no rank holds would otherwise go unnoticed.
  void check_range(const at::Tensor& indices) const {
    if (indices.numel() > 0
        && (indices.min().item<int64_t>() < 0
            || indices.max().item<int64_t>() >= rows_))
      TORCH_CHECK_INDEX(false, "index out of range: the table has ", rows_,
                        " rows");
  }

  std::string name_;
  at::Tensor weight_;
  int64_t rows_;
  int64_t padding_idx_;
  bool sparse_;
};

std::string refusal_of_embedding(const native_module& x, int64_t peers) {
  if (x.max_norm)
    return "max_norm changes whole rows, of which no rank has one; leave "
           "max_norm out";
  if (x.scale_grad_by_freq)
    return "scale_grad_by_freq would count the samples of other ranks; leave "
           "scale_grad_by_freq out";
  auto& weight = x.parameters.at("weight");
  if (weight.size(1) > 0 && (!by_rows(x, peers) || weight.size(0) >= peers))
    return {};
  return refusal_to_divide(weight.size(1), "channels", peers)
         + ", and so could " + std::to_string(peers) + " rows or more";
}

parameter_slices slices_of_embedding(const native_module& x, int64_t rank,
                                     int64_t peers) {
  auto& weight = x.parameters.at("weight");
  if (by_rows(x, peers)) {
    auto [begin, length] = rows_of_peer(weight.size(0), rank, peers);
    return {{"weight", {0, begin, length, weight.sizes().vec()}}};
  }
  auto channels = weight.size(1) / peers;
  return {{"weight", {1, rank * channels, channels, weight.sizes().vec()}}};
}

std::unique_ptr<distributed_module>
make_embedding(const native_module& x, const parameter_slices& slices) {
  if (auto& slice = slices.at("weight"); slice.dim == 0)
    return std::make_unique<embedding_by_rows>(x, slice.whole[0]);
  return std::make_unique<embedding_by_channels>(x);
}

const char* manner_of_embedding(const native_module& x, int64_t peers) {
  return by_rows(x, peers) ? "by rows" : nullptr;
}

} // namespace

const distribution embedding_distribution{.type = "Embedding",
                                          .refusal = refusal_of_embedding,
                                          .slices = slices_of_embedding,
                                          .make = make_embedding,
                                          .manner = manner_of_embedding};

} // namespace smp::nn
