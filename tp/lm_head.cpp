#include "tp/lm_head.hpp"

#include "tp/cross_entropy.hpp"
#include "tp/module_options.hpp"
#include "transport/error.hpp"

#include <string>

namespace smp::nn {

language_head::language_head(const native_module& x, int64_t vocabulary)
  : name_(x.name),
    weight_(x.parameters.at("weight")),
    bias_(x.parameters.contains("bias") ? x.parameters.at("bias")
                                        : at::Tensor{}),
    vocabulary_(vocabulary),
    options_(static_cast<const lm_head_options*>(x.options.get())->loss) {
  options_.counts_samples_once = true;
}

std::vector<at::Tensor>
language_head::forward(std::span<const at::Tensor> xs) const {
  if (xs.empty() || xs.size() > 2)
    throw error{error_code::user_code,
                "'" + name_
                  + "' expects hidden states, or these and labels, not "
                  + std::to_string(xs.size()) + " tensors"};
  return {xs.size() == 1
            ? logits_for_tp(xs[0], weight_, vocabulary_, options_, bias_)
            : cross_entropy(xs[0], xs[1], options_)};
}

at::Tensor language_head::cross_entropy(const at::Tensor& hidden,
                                        const at::Tensor& labels,
                                        cross_entropy_options x) const {
  x.counts_samples_once = options_.counts_samples_once;
  return cross_entropy_for_tp(hidden, weight_, labels, vocabulary_, x, bias_);
}

namespace {

std::string refusal_of_head(const native_module& x, int64_t peers) {
  if (auto rows = x.parameters.at("weight").size(0); rows < peers)
    return "it has " + std::to_string(rows) + " words for "
           + std::to_string(peers) + " ranks; each needs one";
  return {};
}

parameter_slices slices_of_head(const native_module& x, int64_t rank,
                                int64_t peers) {
  parameter_slices result;
  for (auto& [name, t] : x.parameters) {
    auto [begin, length] = rows_of_peer(t.size(0), rank, peers);
    result[name] = {0, begin, length, t.sizes().vec()};
  }
  return result;
}

std::unique_ptr<distributed_module> make_head(const native_module& x,
                                              const parameter_slices& slices) {
  return std::make_unique<language_head>(x, slices.at("weight").whole[0]);
}

const char* manner_of_head(const native_module&, int64_t) {
  return "by words";
}

} // namespace

const distribution lm_head_distribution{.type = "LMHead",
                                        .refusal = refusal_of_head,
                                        .slices = slices_of_head,
                                        .make = make_head,
                                        .manner = manner_of_head};

} // namespace smp::nn
