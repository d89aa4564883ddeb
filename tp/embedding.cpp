#include "tp/embedding.hpp"

#include "tp/cross_entropy.hpp"
#include "tp/functions.hpp"
#include "tp/refusals.hpp"
#include "tp/tensor_group.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_renorm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <optional>
#include <tuple>
#include <utility>

namespace smp::nn {

namespace {

/// With N indices and d channels on each of T peers, channels move (T - 1) / T
/// N d numbers, and rows (T - 1) N d. So rows are never better, but there may
/// be fewer channels than ranks, or a number that does not divide; and the last
/// layer of a language model may use the same table.
bool by_rows(const native_module& x, int64_t peers) {
  return x.by_words || x.parameters.at("weight").size(1) % peers != 0;
}

/// How a table is looked up, apart from which part of it a peer holds.
class lookup {
public:
  explicit lookup(const native_module& x)
    : weight_(x.parameters.at("weight")),
      padding_idx_(x.padding_idx.value_or(-1)),
      max_norm_(x.max_norm),
      norm_type_(x.norm_type),
      scales_gradients_(x.scale_grad_by_freq),
      sparse_(x.sparse) {
    // nop
  }

  const at::Tensor& weight() const noexcept {
    return weight_;
  }

  /// @param indices of rows, of which this peer holds some channels; the same
  /// on all peers
  at::Tensor channels(const at::Tensor& indices) const {
    if (max_norm_ && indices.numel() > 0)
      limit_norms(indices);
    return scaled(find(indices, padding_idx_), indices);
  }

  /// @param where [n], positions of the rows from `begin` on that this peer
  /// holds, in the indices of all peers
  at::Tensor rows(const at::Tensor& indices, const at::Tensor& where,
                  int64_t begin) const {
    auto mine = indices.flatten().index_select(0, where) - begin;
    if (max_norm_ && mine.numel() > 0) {
      at::NoGradGuard no_grad;
      auto table = weight_;
      at::embedding_renorm_(table, mine, *max_norm_, norm_type_);
    }
    auto length = weight_.size(0);
    auto padding = padding_idx_ >= begin && padding_idx_ < begin + length
                     ? padding_idx_ - begin
                     : -1;
    return scaled(find(mine, padding), indices, where);
  }

private:
  at::Tensor find(const at::Tensor& indices, int64_t padding) const {
    return at::embedding(weight_, indices, padding, false, sparse_);
  }

  /// `at::embedding_renorm_`, where no peer has a whole row.
  void limit_norms(const at::Tensor& indices) const {
    at::NoGradGuard no_grad;
    auto& group = tensor_group::current();
    auto rows = std::get<0>(at::_unique2(indices.flatten()));
    auto found = weight_.index_select(0, rows);
    auto norms = group.allgather(at::linalg_vector_norm(found, norm_type_, {1}),
                                 group.next_name());
    norms = at::linalg_vector_norm(norms, norm_type_, {0});
    auto above = norms.gt(*max_norm_).nonzero().squeeze(1);
    if (above.numel() == 0)
      return;
    // As LibTorch does, so that no rounding leaves a norm above the limit.
    auto factors = *max_norm_ / (norms.index_select(0, above) + 1e-7);
    weight_.index_copy_(0, rows.index_select(0, above),
                        found.index_select(0, above) * factors.unsqueeze(1));
  }

  /// @param found the results at `where` in `indices`; undefined: at all
  at::Tensor scaled(at::Tensor found, const at::Tensor& indices,
                    const at::Tensor& where = {}) const {
    if (!scales_gradients_ || !found.requires_grad())
      return found;
    auto factors = inverse_frequencies(indices);
    if (where.defined())
      factors = factors.flatten().index_select(0, where);
    factors = factors.unsqueeze(-1).to(found.scalar_type());
    found.register_hook(
      [factors](const at::Tensor& gradient) { return gradient * factors; });
    return found;
  }

  /// A peer counts its own samples only, as a replica that shares nothing does.
  /// @returns for each index 1 / how often the samples of its peer have it
  static at::Tensor inverse_frequencies(const at::Tensor& indices) {
    auto& group = tensor_group::current();
    auto peers = group.same_samples() ? 1 : static_cast<int64_t>(group.size());
    std::vector<at::Tensor> result;
    for (auto& x : indices.reshape({peers, -1}).unbind()) {
      auto [values, which, counts] = at::_unique2(x, true, true, true);
      result.push_back(counts.index_select(0, which).to(at::kDouble));
    }
    return at::cat(result).reciprocal().view(indices.sizes());
  }

  at::Tensor weight_;
  int64_t padding_idx_;
  std::optional<double> max_norm_;
  double norm_type_;
  bool scales_gradients_;
  bool sparse_;
};

class embedding_by_channels final : public distributed_module {
public:
  explicit embedding_by_channels(const native_module& x)
    : name_(x.name), lookup_(x) {
    // nop
  }

  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override {
    auto all = gather_batch_for_tp(only_tensor(name_, xs));
    return {merge_batch_for_tp(lookup_.channels(all), -1)};
  }

private:
  std::string name_;
  lookup lookup_;
};

class embedding_by_rows final : public distributed_module {
public:
  embedding_by_rows(const native_module& x, int64_t rows)
    : name_(x.name), lookup_(x), rows_(rows) {
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
    // Only rows held here are looked up, so that no other row has a gradient.
    auto where = all.flatten().ge(begin).logical_and(
      all.flatten().lt(begin + length));
    where = where.nonzero().squeeze(1);
    auto& weight = lookup_.weight();
    auto mine = at::zeros({all.numel(), weight.size(1)}, weight.options())
                  .index_copy(0, where, lookup_.rows(all, where, begin));
    sizes.push_back(weight.size(1));
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
  lookup lookup_;
  int64_t rows_;
};

std::string refusal_of_embedding(const native_module& x, int64_t peers) {
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
