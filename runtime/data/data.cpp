#include "runtime/data/data.hpp"

#include "runtime/data/batch_numbers.hpp"
#include "runtime/nn/sizes.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace smp {

batch part_of(const batch& x, batch_part part) {
  batch result;
  for (auto& t : x) {
    auto length = t.size(0) / static_cast<int64_t>(part.count);
    result.push_back(
      t.narrow(0, static_cast<int64_t>(part.index) * length, length));
  }
  return result;
}

data_source::~data_source() = default;

// -- tokens -------------------------------------------------------------------

namespace {

/// @returns token `i` of an array of tokens
uint64_t token_at(const std::vector<uint8_t>& bytes, uint64_t i,
                  uint64_t token_size) {
  uint32_t result = 0; // both little endian
  std::memcpy(&result, bytes.data() + i * token_size, token_size);
  return result;
}

using byte_counts = std::array<uint64_t, 256>;

byte_counts count_bytes(const data_file& file, uint64_t begin, uint64_t end) {
  constexpr uint64_t at_once = 1 << 20;
  byte_counts result = {};
  for (; begin < end; begin += std::min(at_once, end - begin))
    for (auto x : file.read(begin, std::min(at_once, end - begin)))
      ++result[x];
  file.require_unchanged();
  return result;
}

} // namespace

token_sequences::token_sequences(const std::string& path, options x)
  : file_(path), options_(x) {
  require_positive("data.sequence_length", x.sequence_length);
  require_positive("data.batch_size", x.batch_size);
  size_ = file_.size() / x.token_size;
  border_ = training_size(size_, x.held_out);
  if (file_.size() % x.token_size != 0)
    refuse_data(path, fmt::format("has {} bytes, no multiple of the {} of a "
                                  "token; see data.dtype",
                                  file_.size(), x.token_size));
  for (auto [what, n] :
       {std::pair{"training", border_}, std::pair{"held-out", size_ - border_}})
    if (n < x.sequence_length + 1)
      refuse_data(path,
                  fmt::format("the {} part has {} {}, but "
                              "data.sequence_length = {} needs at least {}",
                              what, n, is_text() ? "bytes" : "tokens",
                              x.sequence_length, x.sequence_length + 1));
}

std::string token_sequences::prompt(uint64_t most) const {
  auto bytes = file_.read(border_, std::min(most, size_ - border_));
  return {bytes.begin(), bytes.end()};
}

double token_sequences::unigram_entropy() const {
  auto trained = count_bytes(file_, 0, border_);
  auto held_out = count_bytes(file_, border_, size_);
  const auto total = static_cast<double>(border_ + trained.size());
  double sum = 0;
  for (size_t i = 0; i < trained.size(); ++i)
    sum -= static_cast<double>(held_out[i])
           * std::log(static_cast<double>(trained[i] + 1) / total);
  return sum / static_cast<double>(size_ - border_);
}

batch token_sequences::make_training(uint64_t step, batch_part part) const {
  auto begins = random_begins(options_.seed, step, options_.batch_size,
                              border_ - options_.sequence_length);
  return cut(part_of(begins, part.index, part.count));
}

batch token_sequences::make_held_out(uint64_t index, uint64_t count,
                                     batch_part part) const {
  auto begins = even_begins(index, count, options_.batch_size,
                            size_ - border_ - options_.sequence_length - 1);
  for (auto& x : begins)
    x += border_;
  return cut(part_of(begins, part.index, part.count));
}

batch token_sequences::cut(const std::vector<uint64_t>& begins) const {
  const auto length = options_.sequence_length;
  const auto size = options_.token_size;
  auto input = at::empty(
    {static_cast<int64_t>(begins.size()), static_cast<int64_t>(length)},
    at::kLong);
  auto target = at::empty_like(input);
  auto* in = input.mutable_data_ptr<int64_t>();
  auto* out = target.mutable_data_ptr<int64_t>();
  for (auto begin : begins) {
    auto bytes = file_.read(begin * size, (length + 1) * size);
    for (uint64_t t = 0; t <= length; ++t) {
      const auto x = token_at(bytes, t, size);
      if (x >= options_.vocabulary) {
        file_.require_unchanged();
        refuse_data(file_.path(),
                    fmt::format("token {} at position {} is not below "
                                "model.vocabulary = {}",
                                x, begin + t, options_.vocabulary));
      }
      if (t < length)
        *in++ = static_cast<int64_t>(x);
      if (t > 0)
        *out++ = static_cast<int64_t>(x);
    }
  }
  file_.require_unchanged();
  return {std::move(input), std::move(target)};
}

} // namespace smp
