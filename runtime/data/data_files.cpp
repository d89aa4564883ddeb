// Files as data sources.

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/data/batch_numbers.hpp"
#include "runtime/data/data.hpp"
#include "runtime/nn/sizes.hpp"

#include <ATen/ops/empty.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

namespace fs = std::filesystem;

namespace smp {

// -- tokens -------------------------------------------------------------------

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
      refuse_data(
        path, fmt::format("the {} part has {} tokens, but "
                          "data.sequence_length = {} needs at least {}",
                          what, n, x.sequence_length, x.sequence_length + 1));
}

std::vector<file_content> token_sequences::files() const {
  return {file_.content()};
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

namespace {

/// @returns token `i` of an array of tokens
uint64_t token_at(const std::vector<uint8_t>& bytes, uint64_t i,
                  uint64_t token_size) {
  uint32_t result = 0; // both little endian
  std::memcpy(&result, bytes.data() + i * token_size, token_size);
  return result;
}

} // namespace

batch token_sequences::cut(const std::vector<uint64_t>& begins) const {
  const auto length = options_.sequence_length;
  const auto size = options_.token_size;
  auto both = at::empty(
    {2, static_cast<int64_t>(begins.size()), static_cast<int64_t>(length)},
    at::kLong);
  auto* in = both.mutable_data_ptr<int64_t>();
  auto* out = in + begins.size() * length;
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
  return {both.select(0, 0), both.select(0, 1)};
}

// -- tensors by number --------------------------------------------------------

input_file::input_file(const std::string& path, size_t among)
  : file_(std::make_shared<safetensors_reader>(path)),
    watch_(std::make_shared<file_watch>(file_->descriptor(), path, among)) {
  auto& tensors = file_->tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto name = fmt::format("input{}", i);
    auto position = file_->find(name);
    if (!position)
      refuse_data(path,
                  fmt::format("has {} tensors, but none called {}; a batch is "
                              "input0, input1, ... in the order of the "
                              "model's arguments",
                              tensors.size(), name));
    if (tensors[*position].shape.empty())
      refuse_data(path,
                  fmt::format("{} is a scalar, but each tensor is divided "
                              "along dim 0 into microbatches; repeat it for "
                              "each sample",
                              name));
    positions_.push_back(*position);
  }
  if (positions_.empty())
    refuse_data(path,
                "has no tensor; a batch is input0, input1, ... in the order "
                "of the model's arguments");
}

const tensor_outline& input_file::outline(size_t input) const {
  return file_->tensors()[positions_[input]];
}

uint64_t input_file::rows(size_t input) const {
  return static_cast<uint64_t>(outline(input).shape.front());
}

at::Tensor input_file::read(size_t input, uint64_t begin, uint64_t rows) const {
  return file_->read_rows(positions_[input], static_cast<int64_t>(begin),
                          static_cast<int64_t>(rows));
}

void input_file::read_row(size_t input, uint64_t row, void* to) const {
  file_->read_rows(positions_[input], static_cast<int64_t>(row), 1, to);
}

std::vector<std::string> files_of(const std::string& path) {
  std::error_code trouble;
  if (!fs::is_directory(path, trouble))
    return {path};
  std::vector<std::string> result;
  for (auto& entry : fs::directory_iterator{path, trouble})
    if (entry.path().extension() == ".safetensors")
      result.push_back(entry.path().string());
  if (trouble)
    refuse_data(path, trouble.message());
  if (result.empty())
    refuse_data(path, "is a folder without files *.safetensors");
  std::sort(result.begin(), result.end());
  return result;
}

// -- samples ------------------------------------------------------------------

namespace {

/// @returns dim 0 of all tensors
uint64_t common_rows(const input_file& x) {
  for (size_t i = 1; i < x.size(); ++i)
    if (x.rows(i) != x.rows(0))
      refuse_data(x.path(),
                  fmt::format("dim 0 of input{} is {}, but that of input0 "
                              "is {}; with data.batch_size row k of each "
                              "belongs to sample k",
                              i, x.rows(i), x.rows(0)));
  return x.rows(0);
}

/// @returns what a row is: "I64 [128]"
std::string text_of_row(const tensor_outline& x) {
  return fmt::format("{} [{}]", dtype_in_file(x.dtype),
                     fmt::join(x.shape.begin() + 1, x.shape.end(), ", "));
}

/// Files can follow each other only if their rows are alike.
void check_alike(const input_file& x, const input_file& first) {
  if (x.size() != first.size())
    refuse_data(x.path(), fmt::format("has {} tensors, but {} has {}", x.size(),
                                      first.path(), first.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    auto mine = text_of_row(x.outline(i));
    auto wanted = text_of_row(first.outline(i));
    if (mine != wanted)
      refuse_data(x.path(), fmt::format("a row of input{} is {}, but {} in {}",
                                        i, mine, wanted, first.path()));
  }
}

} // namespace

row_samples::row_samples(const std::string& path, options x) : options_(x) {
  require_positive("data.batch_size", x.batch_size);
  auto names = files_of(path);
  for (auto& name : names) {
    auto& file = files_.emplace_back(name, names.size());
    check_alike(file, files_.front());
    begins_.push_back(size_);
    size_ += common_rows(file);
  }
  border_ = training_size(size_, x.held_out);
  if (border_ < x.batch_size)
    refuse_data(path,
                fmt::format("has {} rows, {} of them for training, but a step "
                            "takes {} (data.batch_size times replicas); "
                            "without data.batch_size a file is one batch, the "
                            "same in each step",
                            size_, border_, x.batch_size));
  if (border_ == size_)
    refuse_data(path,
                fmt::format("has {} rows, of which data.held_out = {} keeps "
                            "none for evaluation; write more",
                            size_, x.held_out));
}

std::vector<file_content> row_samples::files() const {
  std::vector<file_content> result;
  for (auto& x : files_)
    result.push_back(x.watch().content());
  return result;
}

batch row_samples::make_training(uint64_t step, batch_part part) const {
  const auto n = options_.batch_size;
  auto rows = shuffled_rows(options_.seed, step * n, n, border_);
  return read(part_of(rows, part.index, part.count));
}

batch row_samples::make_held_out(uint64_t index, uint64_t count,
                                 batch_part part) const {
  auto rows = even_rows(index, count, options_.batch_size, size_ - border_);
  for (auto& x : rows)
    x += border_;
  return read(part_of(rows, part.index, part.count));
}

batch row_samples::read(const std::vector<uint64_t>& rows) const {
  batch result;
  std::set<size_t> used;
  for (size_t i = 0; i < files_.front().size(); ++i) {
    auto& x = files_.front().outline(i);
    auto shape = x.shape;
    shape.front() = static_cast<int64_t>(rows.size());
    auto all = at::empty(shape, x.dtype);
    auto* to = static_cast<uint8_t*>(all.mutable_data_ptr());
    const auto bytes_of_row = all.nbytes() / rows.size();
    for (auto row : rows) {
      auto next = std::upper_bound(begins_.begin(), begins_.end(), row);
      auto k = static_cast<size_t>(next - begins_.begin()) - 1;
      files_[k].read_row(i, row - begins_[k], to);
      used.insert(k);
      to += bytes_of_row;
    }
    result.push_back(std::move(all));
  }
  for (auto k : used)
    files_[k].watch().require_unchanged();
  return result;
}

// -- a fixed batch ------------------------------------------------------------

namespace {

/// @returns `path`. @throws error (config) if that is a folder
const std::string& single_file(const std::string& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored))
    refuse_data(path,
                "is a folder; data.batch_size has to say how many of its "
                "samples a step takes");
  return path;
}

} // namespace

fixed_batch::fixed_batch(const std::string& path, options x)
  : file_(single_file(path)) {
  auto of_replicas = x.replicas > 1
                       ? fmt::format(" for each of {} replicas", x.replicas)
                       : std::string{};
  for (size_t i = 0; i < file_.size(); ++i) {
    auto rows = file_.rows(i);
    if (rows == 0 || rows % (x.microbatches * x.replicas) != 0)
      refuse_data(path, fmt::format("dim 0 of input{} is {}, which cannot be "
                                    "divided into smp.microbatches = {}{}",
                                    i, rows, x.microbatches, of_replicas));
  }
}

std::vector<file_content> fixed_batch::files() const {
  return {file_.watch().content()};
}

batch fixed_batch::make_training(uint64_t, batch_part part) const {
  batch result;
  for (size_t i = 0; i < file_.size(); ++i) {
    auto rows = file_.rows(i) / part.count;
    result.push_back(file_.read(i, part.index * rows, rows));
  }
  file_.watch().require_unchanged();
  return result;
}

batch fixed_batch::make_held_out(uint64_t, uint64_t, batch_part) const {
  throw error{error_code::internal, "a fixed batch has no held-out part"};
}

} // namespace smp
