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

/// Arguments of one training step, in the order in which the model takes them.
/// A step divides each along its dim 0 into microbatches.
using batch = std::vector<at::Tensor>;

/// Part `index` of `count` equal ones of a batch.
struct batch_part {
  uint64_t index = 0;
  uint64_t count = 1;
};

/// @returns this part of each tensor, along dim 0.
batch part_of(const batch& x, batch_part part);

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
  virtual bool has_held_out() const noexcept {
    return true;
  }

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

// -- tokens -------------------------------------------------------------------

/// Share of the data, at its end, that training never sees.
constexpr double default_held_out = 0.1;

/// Sequences of a file for a language model: of the bytes of a text, or of an
/// array of uint16 or uint32 in little endian, its tail held out. A batch is
/// {input, target}, both int64 [batch_size, sequence_length], and
/// target[b, t] = input[b, t + 1] in the file.
class token_sequences final : public data_source {
public:
  struct options {
    /// Bytes per token: 1 (a text), 2 or 4.
    uint64_t token_size = 1;
    /// Size of the model's vocabulary: tokens are below it.
    uint64_t vocabulary = 256;
    double held_out = default_held_out;
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

  std::vector<file_content> files() const override {
    return {file_.content()};
  }

  bool is_text() const noexcept {
    return options_.token_size == 1;
  }

  /// @returns the first bytes of a text's held-out part, `most` or all
  std::string prompt(uint64_t most) const;

  /// The loss of a model that knows only how often each byte of a text occurs:
  /// the cross entropy, in nat per byte, of the held-out bytes under the byte
  /// frequencies of the training part (each of the 256 counts plus one, so that
  /// an unseen byte has a high but finite cost).
  /// @throws error (config) if the file changed
  double unigram_entropy() const;

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

struct row_options {
  double held_out = default_held_out;
  uint64_t batch_size = 32;
  uint64_t seed = 1;
};

/// The user's samples: row k of the tensors input0, input1, ... (arguments of
/// the model) of a safetensors file is sample k, and the files of a folder
/// follow each other by name. The tail is held out. Only the rows of the part
/// of a batch that is asked for are read, so that files may be larger than
/// memory. Training takes samples in a shuffled order; each occurs once before
/// any repeats, and a batch may hold the last samples of one pass and the first
/// of the next.
/// @throws error (config) naming file and tensor: missing, of another name,
///         without dim 0; row counts that differ within a file; rows unlike
///         those of the first file; fewer rows than a batch and the held-out
///         part need; and a folder without such files
std::unique_ptr<data_source> make_row_samples(const std::string& path,
                                              row_options x);

/// The tensors of such a file as the batch of every step, which shows whether a
/// model computes the right numbers. Each step reads the requested part from
/// the file. Nothing is held out.
/// @throws error (config) naming file and tensor: missing, of another name,
///         without dim 0, or dim 0 not divisible by microbatches * replicas
std::unique_ptr<data_source> make_fixed_batch(const std::string& path,
                                              uint64_t microbatches = 1,
                                              uint64_t replicas = 1);

} // namespace smp
