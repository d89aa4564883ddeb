#pragma once

#include <cstdint>

namespace smp {

/// How gradients travel between replicas. (The names are those of torch's
/// communication hooks.)
enum class comm_hook : uint8_t {
  allreduce,     // unchanged
  fp16_compress, // as float16: half the bytes, 11 bits, up to 65504
  bf16_compress, // as bfloat16: half the bytes, 8 bits
};

/// The program's settings for the replicas of a model.
struct replication {
  comm_hook hook = comm_hook::allreduce;
  /// Number of open `no_sync` scopes.
  uint64_t unsynced = 0;
};

} // namespace smp
