#include "runtime/data/data.hpp"

#include "runtime/data/batch_numbers.hpp"
#include "runtime/nn/sizes.hpp"

#include <ATen/ops/empty.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

namespace smp {

namespace {

at::Tensor make_ints(uint64_t rows, uint64_t columns) {
  return at::empty({static_cast<int64_t>(rows), static_cast<int64_t>(columns)},
                   at::kLong);
}

} // namespace

batch part_of(const batch& x, uint64_t index, uint64_t count) {
  batch result;
  for (auto& t : x) {
    auto length = t.size(0) / static_cast<int64_t>(count);
    result.push_back(t.narrow(0, static_cast<int64_t>(index) * length, length));
  }
  return result;
}

data_source::~data_source() = default;

// -- text ---------------------------------------------------------------------

text::text(const std::string& path, double held_out)
  : file_(std::make_shared<const data_file>(path)) {
  if (!(held_out > 0 && held_out < 1))
    throw error{error_code::config,
                fmt::format("{}: held-out share is {}, must be between 0 and 1",
                            path, held_out)};
  border_ = training_size(file_->size(), held_out);
}

namespace {

std::array<uint64_t, 256> count_bytes(const data_file& file, uint64_t begin,
                                      uint64_t end) {
  constexpr uint64_t at_once = 1 << 20;
  std::array<uint64_t, 256> result = {};
  for (; begin < end; begin += std::min(at_once, end - begin))
    for (auto x : file.read(begin, std::min(at_once, end - begin)))
      ++result[x];
  file.require_unchanged();
  return result;
}

} // namespace

double text::unigram_entropy() const {
  auto trained = count_bytes(*file_, 0, border_);
  auto held_out = count_bytes(*file_, border_, file_->size());
  const auto total = static_cast<double>(border_ + trained.size());
  double sum = 0;
  for (size_t i = 0; i < trained.size(); ++i)
    sum -= static_cast<double>(held_out[i])
           * std::log(static_cast<double>(trained[i] + 1) / total);
  return sum / static_cast<double>(held_out_size());
}

text_sequences::text_sequences(text source, options x)
  : text_(std::move(source)), options_(x) {
  require_positive("data.sequence_length", x.sequence_length);
  require_positive("data.batch_size", x.batch_size);
  auto check = [&](const char* what, uint64_t bytes) {
    if (bytes < x.sequence_length + 1)
      throw error{error_code::config,
                  fmt::format("{}: the {} part has {} bytes, but "
                              "data.sequence_length = {} needs at least {}",
                              text_.file().path(), what, bytes,
                              x.sequence_length, x.sequence_length + 1)};
  };
  check("training", text_.border());
  check("held-out", text_.held_out_size());
}

std::vector<file_content> text_sequences::files() const {
  return {text_.file().content()};
}

batch text_sequences::make_training(uint64_t step, batch_part part) const {
  auto begins = random_begins(options_.seed, step, options_.batch_size,
                              text_.border() - options_.sequence_length);
  return cut(part_of(begins, part.index, part.count));
}

batch text_sequences::make_held_out(uint64_t index, uint64_t count,
                                    batch_part part) const {
  auto begins = even_begins(index, count, options_.batch_size,
                            text_.held_out_size() - options_.sequence_length
                              - 1);
  for (auto& x : begins)
    x += text_.border();
  return cut(part_of(begins, part.index, part.count));
}

batch text_sequences::cut(const std::vector<uint64_t>& begins) const {
  const auto length = options_.sequence_length;
  auto input = make_ints(begins.size(), length);
  auto target = make_ints(begins.size(), length);
  auto* in = input.mutable_data_ptr<int64_t>();
  auto* out = target.mutable_data_ptr<int64_t>();
  for (auto begin : begins) {
    auto sequence = text_.file().read(begin, length + 1);
    in = std::copy(sequence.begin(), sequence.end() - 1, in);
    out = std::copy(sequence.begin() + 1, sequence.end(), out);
  }
  text_.file().require_unchanged();
  return {std::move(input), std::move(target)};
}

// -- synthetic ----------------------------------------------------------------

synthetic_tokens::synthetic_tokens(options x) : options_(x) {
  require_positive("model.vocabulary", x.vocabulary);
  require_positive("data.sequence_length", x.sequence_length);
  require_positive("data.batch_size", x.batch_size);
}

batch synthetic_tokens::make_training(uint64_t step, batch_part part) const {
  return make(step, part);
}

batch synthetic_tokens::make_held_out(uint64_t index, uint64_t,
                                      batch_part part) const {
  return make(held_out_streams + index, part);
}

batch synthetic_tokens::make(uint64_t stream, batch_part part) const {
  batch_numbers numbers{options_.seed, stream};
  const auto sequences = options_.batch_size / part.count;
  const auto first = part.index * sequences;
  auto input = make_ints(sequences, options_.sequence_length);
  auto target = make_ints(sequences, options_.sequence_length);
  auto* in = input.mutable_data_ptr<int64_t>();
  auto* out = target.mutable_data_ptr<int64_t>();
  for (uint64_t b = 0; b < first + sequences; ++b) {
    auto token = numbers.below(options_.vocabulary);
    const auto stride = numbers.below(options_.vocabulary);
    if (b < first)
      continue; // another replica's
    for (uint64_t t = 0; t < options_.sequence_length; ++t) {
      *in++ = static_cast<int64_t>(token);
      token = (token + stride) % options_.vocabulary;
      *out++ = static_cast<int64_t>(token);
    }
  }
  return {std::move(input), std::move(target)};
}

} // namespace smp
