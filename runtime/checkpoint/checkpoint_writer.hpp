#pragma once

// How a checkpoint gets from memory to the disk. Knows no model.

#include "runtime/checkpoint/checkpoint_parts.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "transport/error.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace smp {

struct checkpoint_part;
struct checkpoint_place;
class rank_context;

/// @returns what `x` says, and of limits of the system which one
failure failure_of(const std::exception& x);

/// What one rank writes of a checkpoint.
struct checkpoint_content {
  /// What a file holds as one tensor.
  struct piece {
    saved_tensor about; // file and checksum are set when it is written
    at::Tensor value;
  };

  std::vector<piece> model;
  std::vector<piece> state; // all else
  std::vector<group_member> members;
};

/// Writes a checkpoint, on every rank of the run together, each on any one
/// thread: nobody else uses what this was given.
class checkpoint_writer {
public:
  /// @param dir of rank 0; no other rank uses it
  /// @param keep as for `remove_old_checkpoints`
  /// @param head the manifest without files and tensors; on rank 0
  /// @param mine or why it could not be had
  checkpoint_writer(const rank_context& rank, std::string dir, uint64_t keep,
                    checkpoint_manifest head,
                    std::variant<checkpoint_content, failure> mine)
    : rank_(rank),
      dir_(std::move(dir)),
      keep_(keep),
      manifest_(std::move(head)),
      mine_(std::move(mine)) {
    // nop
  }

  struct result {
    std::string folder;
    uint64_t bytes = 0; // of all ranks
  };

  /// @returns what was written, on rank 0; nothing on others, which send there
  ///          what they wrote or why they could not
  /// @throws error on rank 0, the first failure of a rank: then there is no
  ///         checkpoint; on others only if they cannot even send
  result run();

private:
  using part = checkpoint_part;
  using part_or_failure = std::variant<part, failure>;
  using pieces = std::vector<checkpoint_content::piece>;

  part_or_failure try_write(const std::string& folder);
  part write(const std::string& folder);
  void write_file(const std::string& folder, const char* kind, pieces& xs,
                  part& out) const;
  std::vector<part> collect(part_or_failure mine) const;
  void complete(const checkpoint_place& place, const std::vector<part>& parts);

  const rank_context& rank_;
  std::string dir_;
  uint64_t keep_;
  checkpoint_manifest manifest_;
  std::variant<checkpoint_content, failure> mine_;
};

} // namespace smp
