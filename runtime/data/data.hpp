#pragma once

// Sources of batches. A batch is a function of (seed, step) alone: every rank
// of a pipeline can make it, a run that resumes at step N sees the batches that
// it would have seen, and dropout is unaffected, as nothing here draws from
// LibTorch's generators (R23).

#include "runtime/data/data_file.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace smp {

class safetensors_reader;
struct tensor_outline;

/// Arguments of one training step, in the order in which the model takes them.
/// A step divides each along its dim 0 into microbatches.
using batch = std::vector<at::Tensor>;

/// @returns part `index` of `count` equal ones of each tensor, along dim 0.
batch part_of(const batch& x, uint64_t index, uint64_t count);

/// Part `index` of `count` equal ones of a batch.
struct batch_part {
  uint64_t index = 0;
  uint64_t count = 1;
};

/// The data of a training run. Replicas of the model divide each batch among
/// them, so that the order of samples does not depend on the number of
/// replicas. It is known before reading which samples a replica gets: each
/// reads only its own.
class data_source {
public:
  virtual ~data_source();

  /// Samples per batch, of all replicas.
  virtual uint64_t batch_size() const noexcept = 0;

  /// The files that it reads, as they were when it was made.
  virtual std::vector<file_content> files() const {
    return {};
  }

  /// @returns the batch of training step `step`.
  /// @throws error (config) naming a file that changed since this was made
  batch training_batch(uint64_t step, batch_part part = {}) const {
    return make_training(step, part);
  }

  /// Tells whether there is held-out data, which training never sees.
  virtual bool has_held_out() const noexcept = 0;

  /// The held-out data in `count` batches, of which this is number `index`;
  /// training never sees it.
  batch held_out_batch(uint64_t index, uint64_t count,
                       batch_part part = {}) const {
    return make_held_out(index, count, part);
  }

private:
  virtual batch make_training(uint64_t step, batch_part part) const = 0;
  virtual batch make_held_out(uint64_t index, uint64_t count,
                              batch_part part) const = 0;
};

// -- text ---------------------------------------------------------------------

/// The bytes of a file, its tail held out.
class text {
public:
  /// Share of the bytes that training never sees.
  static constexpr double default_held_out = 0.1;

  /// @throws error (config) naming `path`: as `data_file`, or there are no
  ///         bytes to hold out or to train on
  explicit text(const std::string& path, double held_out = default_held_out);

  const data_file& file() const noexcept {
    return *file_;
  }

  /// Where the held-out part begins: how many bytes are trained on.
  uint64_t border() const noexcept {
    return border_;
  }

  uint64_t held_out_size() const noexcept {
    return file_->size() - border_;
  }

  /// The loss of a model that knows only how often each byte occurs: the cross
  /// entropy, in nat per byte, of the held-out bytes under the byte frequencies
  /// of the training part (each of the 256 counts plus one, so that an unseen
  /// byte has a high but finite cost).
  /// @throws error (config) if the file changed
  double unigram_entropy() const;

private:
  std::shared_ptr<const data_file> file_;
  uint64_t border_ = 0;
};

/// Sequences of a text for a language model: a batch is {input, target}, both
/// int64 [batch_size, sequence_length], and target[b, t] = input[b, t + 1] in
/// the text.
class text_sequences final : public data_source {
public:
  struct options {
    uint64_t sequence_length = 128;
    uint64_t batch_size = 32;
    uint64_t seed = 1;
  };

  /// @throws error (config) naming the text if its training or its held-out
  ///         part is shorter than sequence_length + 1
  text_sequences(text source, options x);

  uint64_t batch_size() const noexcept override {
    return options_.batch_size;
  }

  std::vector<file_content> files() const override;

  bool has_held_out() const noexcept override {
    return true;
  }

  const text& source() const noexcept {
    return text_;
  }

private:
  /// Sequences begin at uniformly drawn positions.
  batch make_training(uint64_t step, batch_part part) const override;

  /// Sequences evenly spaced over the held-out part, the same in every run.
  batch make_held_out(uint64_t index, uint64_t count,
                      batch_part part) const override;

  batch cut(const std::vector<uint64_t>& begins) const;

  text text_;
  options options_;
};

// -- tokens -------------------------------------------------------------------

/// Sequences of a token file for a language model: an array of uint16 or uint32
/// in little endian, its tail held out. Batches as in `text_sequences`.
class token_sequences final : public data_source {
public:
  struct options {
    /// Bytes per token: 2 or 4.
    uint64_t token_size = 2;
    /// Size of the model's vocabulary: tokens are below it.
    uint64_t vocabulary = 256;
    double held_out = text::default_held_out;
    uint64_t sequence_length = 128;
    uint64_t batch_size = 32;
    uint64_t seed = 1;
  };

  /// @throws error (config) naming `path`: as `data_file`, is not an array of
  ///         tokens, or one of its parts is shorter than sequence_length + 1
  token_sequences(const std::string& path, options x);

  uint64_t batch_size() const noexcept override {
    return options_.batch_size;
  }

  std::vector<file_content> files() const override;

  bool has_held_out() const noexcept override {
    return true;
  }

private:
  /// Sequences begin at uniformly drawn positions.
  /// @throws error (config) naming file and place of a token that is not in
  ///         the vocabulary
  batch make_training(uint64_t step, batch_part part) const override;

  /// Sequences evenly spaced over the held-out part, the same in every run.
  batch make_held_out(uint64_t index, uint64_t count,
                      batch_part part) const override;

  batch cut(const std::vector<uint64_t>& begins) const;

  data_file file_;
  options options_;
  uint64_t size_ = 0;   // tokens
  uint64_t border_ = 0; // first held-out token
};

// -- tensors by number --------------------------------------------------------

/// The tensors input0, input1, ... of a safetensors file: arguments of a model.
class input_file {
public:
  /// @param among see `file_watch`
  /// @throws error (config) naming file and tensor: missing, of another name,
  ///         without dim 0
  explicit input_file(const std::string& path, size_t among = 1);

  const std::string& path() const noexcept {
    return watch_->content().path;
  }

  /// See `file_watch`.
  const file_watch& watch() const noexcept {
    return *watch_;
  }

  /// Number of tensors, at least one.
  size_t size() const noexcept {
    return positions_.size();
  }

  const tensor_outline& outline(size_t input) const;

  /// Dim 0.
  uint64_t rows(size_t input) const;

  /// @throws error (config) naming the file if it cannot be read any more
  at::Tensor read(size_t input, uint64_t begin, uint64_t rows) const;

  /// Reads one row into memory that has room for it.
  void read_row(size_t input, uint64_t row, void* to) const;

private:
  std::shared_ptr<const safetensors_reader> file_;
  std::shared_ptr<const file_watch> watch_; // of `file_`
  std::vector<size_t> positions_; // of input0, input1, ... in the file
};

/// @returns `path`, or, if it is a folder, its files *.safetensors in the order
/// of their names
/// @throws error (config) naming the folder if it has none
std::vector<std::string> files_of(const std::string& path);

// -- samples ------------------------------------------------------------------

/// The user's samples: row k of the tensors of a file is sample k, and the
/// files of a folder follow each other. The tail is held out. A caller that
/// asks for a part of a batch reads only the rows of that part, so that files
/// may be larger than memory.
class row_samples final : public data_source {
public:
  struct options {
    double held_out = text::default_held_out;
    uint64_t batch_size = 32;
    uint64_t seed = 1;
  };

  /// @throws error (config) naming file and tensor: as in `input_file`; row
  ///         counts that differ within a file; rows unlike those of the first
  ///         file; fewer rows than a batch and the held-out part need
  row_samples(const std::string& path, options x);

  uint64_t batch_size() const noexcept override {
    return options_.batch_size;
  }

  std::vector<file_content> files() const override;

  bool has_held_out() const noexcept override {
    return true;
  }

private:
  /// The next samples in a shuffled order; each occurs once before any repeats.
  /// A batch may hold the last samples of one pass and the first of the next.
  batch make_training(uint64_t step, batch_part part) const override;

  /// Samples evenly spaced over the held-out part, the same in every run.
  batch make_held_out(uint64_t index, uint64_t count,
                      batch_part part) const override;

  /// @throws error (config) naming the file if it cannot be read any more
  batch read(const std::vector<uint64_t>& rows) const;

  options options_;
  std::vector<input_file> files_;
  std::vector<uint64_t> begins_; // the first row of each file among all
  uint64_t size_ = 0;            // rows
  uint64_t border_ = 0;          // first held-out row
};

// -- a fixed batch ------------------------------------------------------------

/// The tensors of a file as the batch of every step, which shows whether a
/// model computes the right numbers. Each step reads the requested part from
/// the file.
class fixed_batch final : public data_source {
public:
  struct options {
    /// Each tensor's dim 0 must be divisible by the product of these.
    uint64_t microbatches = 1;
    uint64_t replicas = 1;
  };

  /// @throws error (config) naming file and tensor: as `input_file` does, or
  ///         not divisible
  fixed_batch(const std::string& path, options x);

  /// Dim 0 of input0.
  uint64_t batch_size() const noexcept override {
    return file_.rows(0);
  }

  std::vector<file_content> files() const override;

  bool has_held_out() const noexcept override {
    return false;
  }

private:
  /// @throws error (config) naming the file if it cannot be read any more
  batch make_training(uint64_t step, batch_part part) const override;

  /// @throws error (internal)
  batch make_held_out(uint64_t index, uint64_t count,
                      batch_part part) const override;

  input_file file_;
};

// -- synthetic ----------------------------------------------------------------

/// Tokens without a file: in each sequence, token t + 1 is token t plus a
/// stride drawn for the sequence, modulo the vocabulary. A model can learn it.
class synthetic_tokens final : public data_source {
public:
  struct options {
    uint64_t vocabulary = 256;
    uint64_t sequence_length = 128;
    uint64_t batch_size = 32;
    uint64_t seed = 1;
  };

  /// @throws error (config) if a size is 0
  explicit synthetic_tokens(options x);

  uint64_t batch_size() const noexcept override {
    return options_.batch_size;
  }

  bool has_held_out() const noexcept override {
    return true;
  }

private:
  /// {input, target}, both int64 [batch_size, sequence_length].
  batch make_training(uint64_t step, batch_part part) const override;
  batch make_held_out(uint64_t index, uint64_t count,
                      batch_part part) const override;

  batch make(uint64_t stream, batch_part part) const;

  options options_;
};

} // namespace smp
