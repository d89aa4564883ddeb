#pragma once

// Sources of batches. A batch is a function of (seed, step) alone: every rank
// of a pipeline can make it, a run that resumes at step N sees the batches that
// it would have seen, and dropout is unaffected, as nothing here draws from
// LibTorch's generators (R23).

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
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

  /// @returns the batch of training step `step`.
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

/// A text as bytes, its tail held out.
class text {
public:
  /// Share of the bytes that training never sees.
  static constexpr double default_held_out = 0.1;

  /// Takes `bytes`; error messages call them `name`.
  /// @throws error (config) if there are no bytes to hold out or to train on
  explicit text(std::vector<uint8_t> bytes, std::string name = "text",
                double held_out = default_held_out);

  /// Maps a file, so that ranks of one machine share its bytes.
  /// @throws error (config) naming `path`: cannot be read, empty
  static text read(const std::string& path, double held_out = default_held_out);

  std::span<const uint8_t> training() const noexcept {
    return bytes_.first(border_);
  }

  std::span<const uint8_t> held_out() const noexcept {
    return bytes_.subspan(border_);
  }

  const std::string& name() const noexcept {
    return name_;
  }

  /// The loss of a model that knows only how often each byte occurs: the cross
  /// entropy, in nat per byte, of the held-out bytes under the byte frequencies
  /// of the training part (each of the 256 counts plus one, so that an unseen
  /// byte has a high but finite cost).
  double unigram_entropy() const;

private:
  text(std::span<const uint8_t> bytes, std::shared_ptr<const void> owner,
       std::string name, double held_out);

  std::span<const uint8_t> bytes_;
  std::shared_ptr<const void> owner_;
  std::string name_;
  size_t border_ = 0;
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

  batch cut(std::span<const uint8_t> from,
            const std::vector<uint64_t>& begins) const;

  text text_;
  options options_;
};

// -- tokens -------------------------------------------------------------------

/// Sequences of a token file for a language model: a mapped array of uint16 or
/// uint32 in little endian, its tail held out. Batches as in `text_sequences`.
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

  /// @throws error (config) naming `path`: cannot be mapped, is no array of
  ///         tokens, or one of its parts is shorter than sequence_length + 1
  token_sequences(const std::string& path, options x);

  uint64_t batch_size() const noexcept override {
    return options_.batch_size;
  }

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
  uint64_t token(uint64_t position) const;

  std::string path_;
  options options_;
  std::span<const uint8_t> bytes_; // mapped
  std::shared_ptr<const void> owner_;
  uint64_t size_ = 0;   // tokens
  uint64_t border_ = 0; // first held-out token
};

// -- tensors by number --------------------------------------------------------

/// The tensors input0, input1, ... of a safetensors file: arguments of a model.
class input_file {
public:
  /// @throws error (config) naming file and tensor: missing, of another name,
  ///         without dim 0
  explicit input_file(const std::string& path);

  const std::string& path() const noexcept {
    return path_;
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
  std::string path_;
  std::shared_ptr<const safetensors_reader> file_;
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
