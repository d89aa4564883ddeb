#pragma once

#include "partition/rank_layout.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace smp {

/// How gradients travel between replicas. (The names are those of torch's
/// communication hooks.)
enum class comm_hook : uint8_t {
  allreduce,     // unchanged
  fp16_compress, // as float16: half the bytes, 11 bits, up to 65504
  bf16_compress, // as bfloat16: half the bytes, 8 bits
};

/// A way of the program's own: computes the mean over the replicas of a bucket,
/// the gradients of several parameters one after the other, by collectives over
/// `replicas`. Called by all of them for the same buckets in the same order,
/// when a step ends.
/// @param bucket [elements], a copy that it may change
/// @returns the mean, of the same size and type, the same on all replicas
using bucket_hook = std::function<at::Tensor(const at::Tensor& bucket,
                                             const comm_group& replicas)>;

/// The program's settings for the replicas of a model.
struct replication {
  comm_hook hook = comm_hook::allreduce;
  /// Instead of `hook`; empty: none.
  bucket_hook own_hook = {};
  /// Number of open `no_sync` scopes.
  uint64_t unsynced = 0;
};

} // namespace smp
