#pragma once

#include <cstdint>

namespace smp {

/// How gradients travel between replicas. (The names are those of torch's
/// communication hooks.)
enum class comm_hook : uint8_t {
  allreduce,     // as they are
  fp16_compress, // as float16: half the bytes, 11 digits, up to 65504
  bf16_compress, // as bfloat16: half the bytes, 8 digits
};

/// What a program says about the replicas of a model.
struct replication {
  comm_hook hook = comm_hook::allreduce;
  /// Scopes of `no_sync` that the program is in.
  uint64_t unsynced = 0;
};

} // namespace smp
