#include "runtime/train/data.hpp"

#include "runtime/nn/sizes.hpp"
#include "runtime/train/batch_numbers.hpp"

#include <ATen/ops/empty.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
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

text::text(std::vector<uint8_t> bytes, std::string name, double held_out)
  : bytes_(std::move(bytes)), name_(std::move(name)), border_(0) {
  if (bytes_.empty())
    throw error{error_code::config, fmt::format("{}: is empty", name_)};
  if (!(held_out > 0 && held_out < 1))
    throw error{error_code::config,
                fmt::format("{}: held-out share is {}, must be between 0 and 1",
                            name_, held_out)};
  border_ = static_cast<size_t>(static_cast<double>(bytes_.size())
                                * (1 - held_out));
}

text text::read(const std::string& path, double held_out) {
  auto fail = [&path](int cause) {
    throw error{error_code::config,
                fmt::format("{}: {}", path, std::strerror(cause))};
  };
  std::unique_ptr<FILE, int (*)(FILE*)> file{std::fopen(path.c_str(), "rb"),
                                             &std::fclose};
  if (file == nullptr)
    fail(errno);
  std::vector<uint8_t> bytes;
  std::array<uint8_t, 65536> buf;
  errno = 0;
  while (auto n = std::fread(buf.data(), 1, buf.size(), file.get()))
    bytes.insert(bytes.end(), buf.begin(), buf.begin() + n);
  if (std::ferror(file.get()))
    fail(errno);
  return text{std::move(bytes), path, held_out};
}

double text::unigram_entropy() const {
  std::array<uint64_t, 256> counts;
  counts.fill(1);
  for (auto x : training())
    ++counts[x];
  const auto total = static_cast<double>(training().size() + counts.size());
  double sum = 0;
  for (auto x : held_out())
    sum -= std::log(static_cast<double>(counts[x]) / total);
  return sum / static_cast<double>(held_out().size());
}

text_sequences::text_sequences(text source, options x)
  : text_(std::move(source)), options_(x) {
  require_positive("data.sequence_length", x.sequence_length);
  require_positive("data.batch_size", x.batch_size);
  auto check = [&](const char* what, std::span<const uint8_t> part) {
    if (part.size() < x.sequence_length + 1)
      throw error{error_code::config,
                  fmt::format("{}: the {} part has {} bytes, but "
                              "data.sequence_length = {} needs at least {}",
                              text_.name(), what, part.size(),
                              x.sequence_length, x.sequence_length + 1)};
  };
  check("training", text_.training());
  check("held-out", text_.held_out());
}

batch text_sequences::training_batch(uint64_t step) const {
  return cut(text_.training(),
             random_begins(options_.seed, step, options_.batch_size,
                           text_.training().size() - options_.sequence_length));
}

batch text_sequences::held_out_batch(uint64_t index, uint64_t count) const {
  return cut(text_.held_out(), even_begins(index, count, options_.batch_size,
                                           text_.held_out().size()
                                             - options_.sequence_length - 1));
}

batch text_sequences::cut(std::span<const uint8_t> from,
                          const std::vector<uint64_t>& begins) const {
  const auto length = options_.sequence_length;
  auto input = make_ints(begins.size(), length);
  auto target = make_ints(begins.size(), length);
  auto* in = input.mutable_data_ptr<int64_t>();
  auto* out = target.mutable_data_ptr<int64_t>();
  for (auto begin : begins) {
    auto sequence = from.subspan(begin, length + 1);
    in = std::copy(sequence.begin(), sequence.end() - 1, in);
    out = std::copy(sequence.begin() + 1, sequence.end(), out);
  }
  return {std::move(input), std::move(target)};
}

// -- synthetic ----------------------------------------------------------------

synthetic_tokens::synthetic_tokens(options x) : options_(x) {
  require_positive("model.vocabulary", x.vocabulary);
  require_positive("data.sequence_length", x.sequence_length);
  require_positive("data.batch_size", x.batch_size);
}

batch synthetic_tokens::training_batch(uint64_t step) const {
  return make(step);
}

batch synthetic_tokens::held_out_batch(uint64_t index, uint64_t) const {
  return make(held_out_streams + index);
}

batch synthetic_tokens::make(uint64_t stream) const {
  batch_numbers numbers{options_.seed, stream};
  auto input = make_ints(options_.batch_size, options_.sequence_length);
  auto target = make_ints(options_.batch_size, options_.sequence_length);
  auto* in = input.mutable_data_ptr<int64_t>();
  auto* out = target.mutable_data_ptr<int64_t>();
  for (uint64_t b = 0; b < options_.batch_size; ++b) {
    auto token = numbers.below(options_.vocabulary);
    const auto stride = numbers.below(options_.vocabulary);
    for (uint64_t t = 0; t < options_.sequence_length; ++t) {
      *in++ = static_cast<int64_t>(token);
      token = (token + stride) % options_.vocabulary;
      *out++ = static_cast<int64_t>(token);
    }
  }
  return {std::move(input), std::move(target)};
}

} // namespace smp
