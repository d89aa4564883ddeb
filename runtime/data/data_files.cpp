// Samples in safetensors files.

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/data/batch_numbers.hpp"
#include "runtime/data/data.hpp"
#include "runtime/nn/sizes.hpp"

#include <ATen/ops/empty.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>

namespace fs = std::filesystem;

namespace smp {

// -- tensors by number --------------------------------------------------------

namespace {

/// The tensors input0, input1, ... of a safetensors file: arguments of a model.
class input_file {
public:
  /// @param among see `file_watch`
  explicit input_file(const std::string& path, size_t among = 1)
    : file_(std::make_shared<safetensors_reader>(path)),
      watch_(std::make_shared<file_watch>(file_->descriptor(), path, among)) {
    auto& tensors = file_->tensors();
    for (size_t i = 0; i < tensors.size(); ++i) {
      auto name = fmt::format("input{}", i);
      auto position = file_->find(name);
      if (!position)
        refuse_data(path,
                    fmt::format("has {} tensors, but none called {}; a batch "
                                "is input0, input1, ... in the order of the "
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

  const std::string& path() const noexcept {
    return watch_->content().path;
  }

  const file_watch& watch() const noexcept {
    return *watch_;
  }

  /// Number of tensors, at least one.
  size_t size() const noexcept {
    return positions_.size();
  }

  const tensor_outline& outline(size_t input) const {
    return file_->tensors()[positions_[input]];
  }

  /// Dim 0.
  uint64_t rows(size_t input) const {
    return static_cast<uint64_t>(outline(input).shape.front());
  }

  /// @throws error (config) naming the file if it cannot be read any more
  at::Tensor read(size_t input, uint64_t begin, uint64_t rows) const {
    return file_->read_rows(positions_[input], static_cast<int64_t>(begin),
                            static_cast<int64_t>(rows));
  }

  /// Reads one row into memory that has room for it.
  void read_row(size_t input, uint64_t row, void* to) const {
    file_->read_rows(positions_[input], static_cast<int64_t>(row), 1, to);
  }

private:
  std::shared_ptr<const safetensors_reader> file_;
  std::shared_ptr<const file_watch> watch_; // of `file_`
  std::vector<size_t> positions_; // of input0, input1, ... in the file
};

/// @returns `path`, or, if it is a folder, its files *.safetensors in the order
/// of their names
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

class row_samples final : public data_source {
public:
  row_samples(const std::string& path, row_options x) : options_(x) {
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
      refuse_data(
        path, fmt::format("has {} rows, {} of them for training, but a step "
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

  uint64_t batch_size() const noexcept override {
    return options_.batch_size;
  }

  std::vector<file_content> files() const override {
    std::vector<file_content> result;
    for (auto& x : files_)
      result.push_back(x.watch().content());
    return result;
  }

private:
  batch make_training(uint64_t step, batch_part part) const override {
    const auto n = options_.batch_size;
    auto rows = shuffled_rows(options_.seed, step * n, n, border_);
    return read(part_of(rows, part.index, part.count));
  }

  /// Samples evenly spaced over the held-out part, the same in every run.
  batch make_held_out(uint64_t index, uint64_t count,
                      batch_part part) const override {
    auto rows = even_rows(index, count, options_.batch_size, size_ - border_);
    for (auto& x : rows)
      x += border_;
    return read(part_of(rows, part.index, part.count));
  }

  /// @throws error (config) naming the file if it cannot be read any more
  batch read(const std::vector<uint64_t>& rows) const {
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

  row_options options_;
  std::vector<input_file> files_;
  std::vector<uint64_t> begins_; // the first row of each file among all
  uint64_t size_ = 0;            // rows
  uint64_t border_ = 0;          // first held-out row
};

/// @returns `path`. @throws error (config) if that is a folder
const std::string& single_file(const std::string& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored))
    refuse_data(path,
                "is a folder; data.batch_size has to say how many of its "
                "samples a step takes");
  return path;
}

class fixed_batch final : public data_source {
public:
  fixed_batch(const std::string& path, uint64_t microbatches, uint64_t replicas)
    : file_(single_file(path)) {
    auto of_replicas = replicas > 1
                         ? fmt::format(" for each of {} replicas", replicas)
                         : std::string{};
    for (size_t i = 0; i < file_.size(); ++i) {
      auto rows = file_.rows(i);
      if (rows == 0 || rows % (microbatches * replicas) != 0)
        refuse_data(path, fmt::format("dim 0 of input{} is {}, which cannot be "
                                      "divided into smp.microbatches = {}{}",
                                      i, rows, microbatches, of_replicas));
    }
  }

  /// Dim 0 of input0.
  uint64_t batch_size() const noexcept override {
    return file_.rows(0);
  }

  std::vector<file_content> files() const override {
    return {file_.watch().content()};
  }

  bool has_held_out() const noexcept override {
    return false;
  }

private:
  batch make_training(uint64_t, batch_part part) const override {
    batch result;
    for (size_t i = 0; i < file_.size(); ++i) {
      auto rows = file_.rows(i) / part.count;
      result.push_back(file_.read(i, part.index * rows, rows));
    }
    file_.watch().require_unchanged();
    return result;
  }

  batch make_held_out(uint64_t, uint64_t, batch_part) const override {
    throw error{error_code::internal, "a fixed batch has no held-out part"};
  }

  input_file file_;
};

} // namespace

std::unique_ptr<data_source> make_row_samples(const std::string& path,
                                              row_options x) {
  return std::make_unique<row_samples>(path, x);
}

std::unique_ptr<data_source> make_fixed_batch(const std::string& path,
                                              uint64_t microbatches,
                                              uint64_t replicas) {
  return std::make_unique<fixed_batch>(path, microbatches, replicas);
}

} // namespace smp
