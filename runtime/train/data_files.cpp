// Files as data sources.

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/nn/sizes.hpp"
#include "runtime/train/batch_numbers.hpp"
#include "runtime/train/data.hpp"
#include "transport/file_descriptor.hpp"

#include <ATen/ops/empty.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fs = std::filesystem;

namespace smp {

namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw error{error_code::config, fmt::format("{}: {}", path, why)};
}

struct mapped_file {
  std::span<const uint8_t> bytes;
  std::shared_ptr<const void> owner;
};

/// @returns the bytes of `path` as a read-only mapping
mapped_file map_file(const std::string& path) {
  auto fail = [&path] { refuse(path, std::strerror(errno)); };
  file_descriptor fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (!fd)
    fail();
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0)
    fail();
  if (S_ISDIR(info.st_mode))
    refuse(path, std::strerror(EISDIR));
  if (info.st_size == 0)
    refuse(path, "is empty");
  auto size = static_cast<size_t>(info.st_size);
  auto* bytes = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (bytes == MAP_FAILED)
    fail();
  return {{static_cast<const uint8_t*>(bytes), size},
          {bytes, [size](void* x) { ::munmap(x, size); }}};
}

} // namespace

// -- text ---------------------------------------------------------------------

text text::read(const std::string& path, double held_out) {
  auto file = map_file(path);
  return text{file.bytes, std::move(file.owner), path, held_out};
}

// -- tokens -------------------------------------------------------------------

token_sequences::token_sequences(const std::string& path, options x)
  : path_(path), options_(x) {
  require_positive("data.sequence_length", x.sequence_length);
  require_positive("data.batch_size", x.batch_size);
  auto file = map_file(path);
  bytes_ = file.bytes;
  owner_ = std::move(file.owner);
  size_ = bytes_.size() / x.token_size;
  border_ = training_size(size_, x.held_out);
  if (bytes_.size() % x.token_size != 0)
    refuse(path, fmt::format("has {} bytes, no multiple of the {} of a "
                             "token; see data.dtype",
                             bytes_.size(), x.token_size));
  for (auto [what, n] :
       {std::pair{"training", border_}, std::pair{"held-out", size_ - border_}})
    if (n < x.sequence_length + 1)
      refuse(path,
             fmt::format("the {} part has {} tokens, but "
                         "data.sequence_length = {} needs at least {}",
                         what, n, x.sequence_length, x.sequence_length + 1));
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
  auto both = at::empty(
    {2, static_cast<int64_t>(begins.size()), static_cast<int64_t>(length)},
    at::kLong);
  auto* in = both.mutable_data_ptr<int64_t>();
  auto* out = in + begins.size() * length;
  for (auto begin : begins)
    for (uint64_t t = 0; t <= length; ++t) {
      const auto x = token(begin + t);
      if (x >= options_.vocabulary)
        refuse(path_, fmt::format("token {} at position {} is not below "
                                  "model.vocabulary = {}",
                                  x, begin + t, options_.vocabulary));
      if (t < length)
        *in++ = static_cast<int64_t>(x);
      if (t > 0)
        *out++ = static_cast<int64_t>(x);
    }
  return {both.select(0, 0), both.select(0, 1)};
}

uint64_t token_sequences::token(uint64_t position) const {
  const void* tokens = bytes_.data(); // aligned, as a mapping begins at a page
  return options_.token_size == 2
           ? static_cast<const uint16_t*>(tokens)[position]
           : static_cast<const uint32_t*>(tokens)[position];
}

// -- tensors by number --------------------------------------------------------

input_file::input_file(const std::string& path)
  : path_(path), file_(std::make_shared<safetensors_reader>(path)) {
  auto& tensors = file_->tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto name = fmt::format("input{}", i);
    auto position = file_->find(name);
    if (!position)
      refuse(path, fmt::format("has {} tensors, but none called {}; a batch is "
                               "input0, input1, ... in the order of the "
                               "model's arguments",
                               tensors.size(), name));
    if (tensors[*position].shape.empty())
      refuse(path, fmt::format("{} is a scalar, but each tensor is divided "
                               "along dim 0 into microbatches; repeat it for "
                               "each sample",
                               name));
    positions_.push_back(*position);
  }
  if (positions_.empty())
    refuse(path,
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
    refuse(path, trouble.message());
  if (result.empty())
    refuse(path, "is a folder without files *.safetensors");
  std::sort(result.begin(), result.end());
  return result;
}

// -- samples ------------------------------------------------------------------

namespace {

/// @returns dim 0 of all tensors
uint64_t common_rows(const input_file& x) {
  for (size_t i = 1; i < x.size(); ++i)
    if (x.rows(i) != x.rows(0))
      refuse(x.path(), fmt::format("dim 0 of input{} is {}, but that of input0 "
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
    refuse(x.path(), fmt::format("has {} tensors, but {} has {}", x.size(),
                                 first.path(), first.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    auto mine = text_of_row(x.outline(i));
    auto wanted = text_of_row(first.outline(i));
    if (mine != wanted)
      refuse(x.path(), fmt::format("a row of input{} is {}, but {} in {}", i,
                                   mine, wanted, first.path()));
  }
}

} // namespace

row_samples::row_samples(const std::string& path, options x) : options_(x) {
  require_positive("data.batch_size", x.batch_size);
  for (auto& name : files_of(path)) {
    auto& file = files_.emplace_back(name);
    check_alike(file, files_.front());
    begins_.push_back(size_);
    size_ += common_rows(file);
  }
  border_ = training_size(size_, x.held_out);
  if (border_ < x.batch_size)
    refuse(path, fmt::format("has {} rows, {} of them for training, but a step "
                             "takes {} (data.batch_size times replicas); "
                             "without data.batch_size a file is one batch, the "
                             "same in each step",
                             size_, border_, x.batch_size));
  if (border_ == size_)
    refuse(path, fmt::format("has {} rows, of which data.held_out = {} keeps "
                             "none for evaluation; write more",
                             size_, x.held_out));
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
      to += bytes_of_row;
    }
    result.push_back(std::move(all));
  }
  return result;
}

// -- a fixed batch ------------------------------------------------------------

namespace {

/// @returns `path`. @throws error (config) if that is a folder
const std::string& single_file(const std::string& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored))
    refuse(path,
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
      refuse(path, fmt::format("dim 0 of input{} is {}, which cannot be "
                               "divided into smp.microbatches = {}{}",
                               i, rows, x.microbatches, of_replicas));
  }
}

batch fixed_batch::make_training(uint64_t, batch_part part) const {
  batch result;
  for (size_t i = 0; i < file_.size(); ++i) {
    auto rows = file_.rows(i) / part.count;
    result.push_back(file_.read(i, part.index * rows, rows));
  }
  return result;
}

batch fixed_batch::make_held_out(uint64_t, uint64_t, batch_part) const {
  throw error{error_code::internal, "a fixed batch has no held-out part"};
}

} // namespace smp
