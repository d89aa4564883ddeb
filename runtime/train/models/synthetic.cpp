#include "runtime/train/models/synthetic.hpp"

#include "runtime/data/batch_numbers.hpp"
#include "runtime/nn/sizes.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include <fmt/format.h>

#include <algorithm>
#include <functional>

namespace smp {

namespace {

/// Batches from a function, the same one for held-out data.
class synthetic_batches final : public data_source {
public:
  using maker = std::function<batch(batch_numbers&)>;

  synthetic_batches(uint64_t seed, uint64_t batch_size, maker f)
    : seed_(seed), batch_size_(batch_size), make_(std::move(f)) {
    require_positive("data.batch_size", batch_size);
  }

  uint64_t batch_size() const noexcept override {
    return batch_size_;
  }

private:
  batch make_training(uint64_t step, batch_part part) const override {
    return make(step, part);
  }

  batch make_held_out(uint64_t index, uint64_t,
                      batch_part part) const override {
    return make(held_out_streams + index, part);
  }

  /// Numbers come in sequence: those of other replicas are drawn, too.
  batch make(uint64_t stream, batch_part part) const {
    batch_numbers numbers{seed_, stream};
    return part_of(make_(numbers), part);
  }

  uint64_t seed_;
  uint64_t batch_size_;
  maker make_;
};

struct token_sizes {
  int64_t batch = 0;
  int64_t length = 0;
  uint64_t vocabulary = 0;
};

token_sizes token_sizes_of(const train_config& x) {
  token_sizes result{static_cast<int64_t>(x.data.batch_size.value_or(0)),
                     static_cast<int64_t>(x.data.sequence_length),
                     x.model.vocabulary.value_or(256)};
  require_positive("data.sequence_length", result.length);
  return result;
}

/// Token t + 1 is token t plus a stride drawn for the sequence, modulo the
/// vocabulary.
batch next_tokens(batch_numbers& numbers, const token_sizes& x) {
  auto input = at::empty({x.batch, x.length}, at::kLong);
  auto target = at::empty_like(input);
  auto* in = input.mutable_data_ptr<int64_t>();
  auto* out = target.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < x.batch; ++b) {
    auto token = numbers.below(x.vocabulary);
    const auto stride = numbers.below(x.vocabulary);
    for (int64_t t = 0; t < x.length; ++t) {
      *in++ = static_cast<int64_t>(token);
      token = (token + stride) % x.vocabulary;
      *out++ = static_cast<int64_t>(token);
    }
  }
  return {input, target};
}

/// Low tokens are more frequent, which is the first thing to learn.
uint64_t some_token(batch_numbers& numbers, uint64_t n) {
  return 2 + numbers.below(1 + numbers.below(n));
}

/// @returns [B, T] int64, each row counting up from some token on
at::Tensor counting_rows(batch_numbers& numbers, const token_sizes& x) {
  auto result = at::empty({x.batch, x.length}, at::kLong);
  auto* out = result.mutable_data_ptr<int64_t>();
  const auto n = x.vocabulary - 3;
  for (int64_t b = 0; b < x.batch; ++b) {
    auto token = some_token(numbers, n);
    for (int64_t t = 0; t < x.length; ++t) {
      *out++ = static_cast<int64_t>(token);
      token = 2 + (token - 1) % n;
    }
  }
  return result;
}

batch masked_tokens(batch_numbers& numbers, const token_sizes& x) {
  // The same number in each sequence, so that microbatches weigh the same.
  const auto masked = std::max<int64_t>(x.length * 15 / 100, 1);
  auto tokens = counting_rows(numbers, x);
  auto labels = at::full({x.batch, x.length}, -100, at::kLong);
  auto* in = tokens.mutable_data_ptr<int64_t>();
  auto* out = labels.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < x.batch; ++b, in += x.length, out += x.length)
    for (int64_t i = 0; i < masked;) {
      auto t = numbers.below(static_cast<uint64_t>(x.length));
      if (out[t] >= 0)
        continue;
      out[t] = in[t];
      in[t] = static_cast<int64_t>(x.vocabulary) - 1;
      ++i;
    }
  return {tokens, labels};
}

batch copied_tokens(batch_numbers& numbers, const token_sizes& x) {
  auto tokens = counting_rows(numbers, x);
  return {tokens, tokens.clone()};
}

batch likes(batch_numbers& numbers, int64_t n, uint64_t users, uint64_t items) {
  auto who = at::empty({n}, at::kLong);
  auto what = at::empty({n}, at::kLong);
  auto label = at::empty({n}, at::kFloat);
  for (int64_t i = 0; i < n; ++i) {
    const auto user = numbers.below(users);
    const auto item = numbers.below(items);
    who.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(user);
    what.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(item);
    label.mutable_data_ptr<float>()[i] = user % 2 == item % 2 ? 1.0f : 0.0f;
  }
  return {who, what, label};
}

batch vectors(batch_numbers& numbers, int64_t n, int64_t inputs,
              int64_t outputs) {
  auto x = at::empty({n, inputs}, at::kFloat);
  auto y = at::empty({n}, at::kLong);
  auto* row = x.mutable_data_ptr<float>();
  for (int64_t i = 0; i < n; ++i, row += inputs) {
    std::generate_n(row, inputs,
                    [&] { return static_cast<float>(numbers.between_ones()); });
    y.mutable_data_ptr<int64_t>()[i] = std::max_element(row, row + outputs)
                                       - row;
  }
  return {x, y};
}

synthetic_batches::maker maker_of(const train_config& x) {
  const auto& type = x.model.type;
  const auto n = static_cast<int64_t>(x.data.batch_size.value_or(0));
  if (type == "ncf")
    return [n, users = x.model.users, items = x.model.items](auto& numbers) {
      return likes(numbers, n, users, items);
    };
  if (type == "mlp") {
    if (x.model.inputs < x.model.outputs)
      throw error{error_code::config,
                  fmt::format("model.inputs ({}) must not be less than "
                              "model.outputs ({}) for synthetic data",
                              x.model.inputs, x.model.outputs)};
    return [n, inputs = static_cast<int64_t>(x.model.inputs),
            outputs = static_cast<int64_t>(x.model.outputs)](auto& numbers) {
      return vectors(numbers, n, inputs, outputs);
    };
  }
  auto sizes = token_sizes_of(x);
  if (type == "gpt" || type == "moe")
    return [sizes](auto& numbers) { return next_tokens(numbers, sizes); };
  // 0 and 1 are padding of one model or another, the last is a mask.
  if (sizes.vocabulary < 4)
    throw error{error_code::config,
                fmt::format("model.vocabulary is {}, must be at least 4 for "
                            "synthetic data",
                            sizes.vocabulary)};
  if (type == "t5")
    return [sizes](auto& numbers) { return copied_tokens(numbers, sizes); };
  return [sizes](auto& numbers) { return masked_tokens(numbers, sizes); };
}

} // namespace

std::unique_ptr<data_source> make_synthetic(const train_config& x) {
  return std::make_unique<synthetic_batches>(
    x.data.shuffle_seed, x.data.batch_size.value_or(0), maker_of(x));
}

} // namespace smp
