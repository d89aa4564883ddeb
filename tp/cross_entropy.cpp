#include "tp/cross_entropy.hpp"

#include "tp/functions.hpp"
#include "tp/refusals.hpp"
#include "tp/tensor_group.hpp"
#include "transport/error.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace smp {

std::pair<int64_t, int64_t> rows_of_peer(int64_t rows, int64_t rank,
                                         int64_t peers) {
  auto more = rows % peers;
  return {rank * (rows / peers) + std::min(rank, more),
          rows / peers + (rank < more ? 1 : 0)};
}

namespace nn {

namespace {

namespace ag = torch::autograd;

at::ScalarType computed_in(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// The first row of this rank.
int64_t first_row(int64_t vocabulary) {
  auto& group = tensor_group::current();
  return rows_of_peer(vocabulary, static_cast<int64_t>(group.rank()),
                      static_cast<int64_t>(group.size()))
    .first;
}

/// Some rows of the hidden states, and their logits for this rank's words.
struct chunk {
  at::Tensor hidden; // [n, C]
  at::Tensor logits; // [n, v] in the type that is computed in
  at::Tensor here;   // [n], whether the label is a word of this rank
  at::Tensor word;   // [n, 1], its row here; 0 if it is not
};

/// @param bias undefined: there is none
chunk chunk_of(const at::Tensor& hidden, const at::Tensor& weight,
               const at::Tensor& bias, const at::Tensor& labels, int64_t first,
               int64_t begin, int64_t length) {
  chunk result;
  result.hidden = hidden.narrow(0, begin, length);
  result.logits = at::linear(result.hidden, weight, bias)
                    .to(computed_in(hidden));
  auto word = labels.narrow(0, begin, length) - first;
  result.here = word.ge(0).logical_and(word.lt(weight.size(0)));
  result.word = at::where(result.here, word, 0).unsqueeze(1);
  return result;
}

/// Largest logit, sum of exponentials relative to that, and logit of the label,
/// over this rank's words: [3, n].
at::Tensor moments_of(const chunk& x) {
  if (x.logits.size(1) == 0) {
    auto none = at::zeros({x.logits.size(0)}, x.logits.options());
    return at::stack(
      {at::full_like(none, -std::numeric_limits<double>::infinity()), none,
       none});
  }
  auto largest = x.logits.amax(1);
  auto sum = (x.logits - largest.unsqueeze(1)).exp().sum(1);
  auto label = at::where(x.here, x.logits.gather(1, x.word).squeeze(1), 0);
  return at::stack({largest, sum, label.to(sum.scalar_type())});
}

/// hidden [N, C], weight [v, C], bias [v] or none, labels [N] -> losses of all
/// samples [N], the same on all peers, and so is their gradient. Losses of
/// ignored labels are 0.
struct losses_function : ag::Function<losses_function> {
  static at::Tensor forward(ag::AutogradContext* c, const at::Tensor& hidden,
                            const at::Tensor& weight,
                            const std::optional<at::Tensor>& given_bias,
                            const at::Tensor& labels, int64_t first,
                            int64_t rows, int64_t ignored,
                            const std::string& name) {
    auto bias = given_bias.value_or(at::Tensor{});
    std::vector<at::Tensor> parts;
    for (int64_t i = 0; i < hidden.size(0); i += rows)
      parts.push_back(
        moments_of(chunk_of(hidden, weight, bias, labels, first, i,
                            std::min(rows, hidden.size(0) - i))));
    auto all = tensor_group::current().allgather(at::cat(parts, 1), name);
    auto largest = all.select(1, 0).amax(0);
    auto sum = (all.select(1, 1) * (all.select(1, 0) - largest).exp()).sum(0);
    c->save_for_backward({hidden, weight, labels, largest, sum, bias});
    c->saved_data["first"] = first;
    c->saved_data["rows"] = rows;
    c->saved_data["ignored"] = ignored;
    // In this order, so that large logits cost no precision.
    return (largest - all.select(1, 2).sum(0) + sum.log())
      .masked_fill(labels.eq(ignored), 0);
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    refuse_second_derivatives("cross_entropy");
    auto saved = c->get_saved_variables();
    auto &hidden = saved[0], &weight = saved[1], &labels = saved[2],
         &bias = saved[5];
    const auto rows = c->saved_data["rows"].toInt();
    auto given = grads[0].masked_fill(
      labels.eq(c->saved_data["ignored"].toInt()), 0);
    auto of_hidden = at::empty_like(hidden);
    auto of_weight = at::zeros(weight.sizes(),
                               weight.options().dtype(computed_in(weight)));
    at::Tensor of_bias;
    if (bias.defined())
      of_bias = at::zeros(bias.sizes(),
                          bias.options().dtype(computed_in(bias)));
    for (int64_t i = 0; i < hidden.size(0); i += rows) {
      auto n = std::min(rows, hidden.size(0) - i);
      auto x = chunk_of(hidden, weight, bias, labels,
                        c->saved_data["first"].toInt(), i, n);
      auto& p = x.logits;
      p.sub_(saved[3].narrow(0, i, n).unsqueeze(1)).exp_();
      p.div_(saved[4].narrow(0, i, n).unsqueeze(1));
      if (p.size(1) > 0)
        p.scatter_add_(1, x.word, -x.here.to(p.scalar_type()).unsqueeze(1));
      p.mul_(given.narrow(0, i, n).unsqueeze(1));
      if (of_bias.defined())
        of_bias.add_(p.sum(0));
      auto of_logits = p.to(weight.scalar_type());
      of_hidden.narrow(0, i, n).copy_(of_logits.matmul(weight));
      of_weight.add_(of_logits.t().matmul(x.hidden));
    }
    if (of_bias.defined())
      of_bias = of_bias.to(bias.scalar_type());
    return {
      of_hidden, of_weight.to(weight.scalar_type()), of_bias, {}, {}, {}, {},
      {}};
  }
};

void check(const at::Tensor& hidden, const at::Tensor& weight,
           const at::Tensor& bias, const at::Tensor& labels,
           int64_t vocabulary) {
  auto& group = tensor_group::current();
  auto rows = rows_of_peer(vocabulary, static_cast<int64_t>(group.rank()),
                           static_cast<int64_t>(group.size()))
                .second;
  auto refuse = [](const std::string& why) {
    throw error{error_code::user_code, "cross_entropy_for_tp: " + why};
  };
  if (weight.dim() != 2 || weight.size(0) != rows)
    refuse("of " + std::to_string(vocabulary) + " words this rank has "
           + std::to_string(rows) + ", but the weight is "
           + c10::str(weight.sizes()));
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != rows))
    refuse("of " + std::to_string(vocabulary) + " words this rank has "
           + std::to_string(rows) + ", but the bias is "
           + c10::str(bias.sizes()));
  if (hidden.dim() < 2 || hidden.size(-1) != weight.size(1))
    refuse("hidden states " + c10::str(hidden.sizes()) + " for a weight "
           + c10::str(weight.sizes()));
  if (labels.defined()
      && labels.sizes() != hidden.sizes().slice(0, hidden.dim() - 1))
    refuse("labels " + c10::str(labels.sizes()) + " for hidden states "
           + c10::str(hidden.sizes()));
}

/// Tells whether all peers have the same samples, which are counted once.
bool one_batch(const cross_entropy_options& x) {
  return x.counts_samples_once && tensor_group::current().same_samples();
}

at::Tensor samples_of_all(const at::Tensor& x, bool one) {
  return one ? bwd_allreduce_for_tp(x) : fused_allgather_for_tp(x, 0);
}

/// The tensor that autocast would compute with: autocast does not apply in
/// backward, and leaves float64 as it is.
at::Tensor cast(const at::Tensor& x) {
  auto device = x.device().type();
  return at::autocast::is_autocast_enabled(device)
             && x.scalar_type() != at::kDouble
           ? x.to(at::autocast::get_autocast_dtype(device))
           : x;
}

} // namespace

at::Tensor cross_entropy_for_tp(const at::Tensor& hidden,
                                const at::Tensor& weight,
                                const at::Tensor& labels, int64_t vocabulary,
                                const cross_entropy_options& x,
                                const at::Tensor& bias) {
  check(hidden, weight, bias, labels, vocabulary);
  auto mine = labels.flatten();
  auto counts = mine.ne(x.ignore_index);
  if (mine.lt(0)
        .logical_or(mine.ge(vocabulary))
        .logical_and(counts)
        .any()
        .item<bool>())
    TORCH_CHECK_INDEX(false, "a label is out of range: there are ", vocabulary,
                      " words");
  auto rows = mine.size(0);
  const auto one = one_batch(x);
  auto all = samples_of_all(cast(hidden).flatten(0, -2), one);
  auto losses = losses_function::apply(
    all, cast(weight),
    bias.defined() ? std::optional{cast(bias)} : std::nullopt,
    samples_of_all(mine, one), first_row(vocabulary),
    std::max<int64_t>(rows, 1), x.ignore_index,
    tensor_group::current().next_name());
  if (!one)
    losses = narrow_for_tp(losses, 0);
  auto sum = losses.sum();
  return x.mean ? sum / counts.sum() : sum;
}

at::Tensor logits_for_tp(const at::Tensor& hidden, const at::Tensor& weight,
                         int64_t vocabulary, const cross_entropy_options& x,
                         const at::Tensor& bias) {
  check(hidden, weight, bias, {}, vocabulary);
  const auto one = one_batch(x);
  auto peers = static_cast<int64_t>(tensor_group::current().size());
  auto most = rows_of_peer(vocabulary, 0, peers).second;
  auto mine = at::linear(samples_of_all(hidden, one), weight, bias);
  // A peer that has one row less pads one, which is left out below.
  mine = at::constant_pad_nd(mine, {0, most - mine.size(-1)});
  auto all = one ? merge_for_tp(mine, -1)
                 : scatter_and_merge_for_tp(mine, 0, -1);
  std::vector<at::Tensor> words;
  for (int64_t i = 0; i < peers; ++i)
    words.push_back(
      all.narrow(-1, i * most, rows_of_peer(vocabulary, i, peers).second));
  return at::cat(words, -1);
}

} // namespace nn

} // namespace smp
