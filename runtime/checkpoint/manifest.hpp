#pragma once

// The contents of a checkpoint, as its manifest.json lists them: the tensors,
// and which piece of each is in which file. Knows no session.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// A part of a tensor, as one rank held and wrote it. Its name in the file is
/// the name of the tensor followed by `part`.
struct tensor_piece {
  std::string file; // in the folder of the checkpoint
  /// "#1" if the slice has several blocks, each a piece of its own; else empty.
  std::string part = {};
  /// For buffers, which replicas do not share: the dp_rank of the owner.
  uint64_t replica = 0;
  /// By axis: where it begins in the whole, and its length.
  std::vector<int64_t> begin;
  std::vector<int64_t> sizes;
  uint64_t checksum = 0; // of its bytes

  bool operator==(const tensor_piece&) const = default;
};

enum class tensor_role : uint8_t {
  parameter,
  buffer,
  optimizer, // "optimizer0/exp_avg/NAME"
  random,    // "random/RANK": state of a rank's default generator
};

constexpr tensor_role last_of(tensor_role) noexcept {
  return tensor_role::random;
}

struct saved_tensor {
  tensor_role role = tensor_role::parameter;
  std::string name;
  std::string dtype; // as safetensors calls it: "F32"
  std::vector<int64_t> shape;
  std::vector<tensor_piece> pieces;

  bool operator==(const saved_tensor&) const = default;
};

struct saved_file {
  std::string name;
  uint64_t bytes = 0;
  uint64_t rank = 0; // that wrote it

  bool operator==(const saved_file&) const = default;
};

/// A dynamic loss scale.
struct saved_loss_scale {
  double value = 1;
  /// Good steps since it last changed.
  uint64_t good_steps = 0;

  bool operator==(const saved_loss_scale&) const = default;
};

/// An optimizer without its tensors.
struct saved_optimizer {
  std::string type; // "AdamW"
  /// Options of each group, by name.
  std::vector<std::map<std::string, double>> groups;
  /// The group of each parameter.
  std::map<std::string, uint64_t> members;
  std::optional<saved_loss_scale> loss_scale = {};

  bool operator==(const saved_optimizer&) const = default;
};

struct checkpoint_manifest {
  /// Version of the format; any other is refused.
  static constexpr uint64_t version = 1;

  uint64_t step = 0;
  /// Ranks that wrote it: for people, and to tell whether a rank resumes with
  /// its own state.
  uint64_t pipeline = 1, tensor = 1, ranks = 1;
  /// User steps for which random numbers were drawn (R23).
  uint64_t drawn_steps = 0;
  /// Settings whose changes are refused or reported: KEY to value.
  std::map<std::string, std::string> settings;
  std::map<std::string, std::string> user_content;
  /// The pp_rank of each module; empty if there was one rank.
  std::map<std::string, uint64_t> partition;
  std::vector<saved_optimizer> optimizers;
  std::vector<saved_file> files;
  std::vector<saved_tensor> tensors;

  bool operator==(const checkpoint_manifest&) const = default;

  /// Adds the tensors that one rank wrote.
  /// @throws error (internal) if ranks describe a tensor differently
  void add(const std::vector<saved_tensor>& xs);

  uint64_t bytes() const;
};

std::string to_json(const checkpoint_manifest& x);

/// @param path names the file in errors
/// @throws error (config) naming `path`: no manifest, of another version,
///         damaged, or one whose pieces do not make up their tensors
checkpoint_manifest parse_manifest(const std::string& text,
                                   const std::string& path);

template <class Inspector>
bool inspect(Inspector& f, tensor_piece& x) {
  return f.object(x).fields(
    f.field("file", x.file), f.field("replica", x.replica),
    f.field("part", x.part), f.field("begin", x.begin),
    f.field("sizes", x.sizes), f.field("checksum", x.checksum));
}

template <class Inspector>
bool inspect(Inspector& f, saved_tensor& x) {
  return f.object(x).fields(
    f.field("role", x.role), f.field("name", x.name), f.field("dtype", x.dtype),
    f.field("shape", x.shape), f.field("pieces", x.pieces));
}

template <class Inspector>
bool inspect(Inspector& f, saved_file& x) {
  return f.object(x).fields(f.field("name", x.name), f.field("bytes", x.bytes),
                            f.field("rank", x.rank));
}

} // namespace smp
