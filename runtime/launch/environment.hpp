#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace smp {

/// A process's place in its run, as its launcher's environment says.
struct rank_environment {
  uint64_t rank = 0;
  uint64_t world_size = 1;
  uint64_t local_rank = 0;
  /// Ranks on this machine; 0: the launcher does not say. (Once all have
  /// joined, `rank_layout` derives this and `local_rank` from their reports.)
  uint64_t local_size = 0;
  /// Identifies the run; not a secret.
  std::string run_id;
  /// Address of the SUPERVISOR; port 0: rank 0 of this run hosts it and
  /// publishes the port in a file named after `run_id` in `rendezvous_dir`,
  /// together with the secret, unless the user gave one.
  std::string rendezvous_address = "127.0.0.1";
  uint16_t rendezvous_port = 0;
  std::string rendezvous_dir;
  /// Why the ranks of this machine must not share memory through files, as our
  /// own launcher decided for all of them; empty: they may.
  std::string no_shared_memory;
  /// True if our own launcher started this rank and waits for its process.
  bool supervised = false;
  /// The variables that show that a launcher started this process:
  /// "RANK and WORLD_SIZE".
  std::string told_by;
  /// The directory of the run, as our own launcher says; empty: it has none.
  std::string run_dir;
};

/// Reads the variables of our launcher (SMP_RANK ...), of torchrun-like
/// launchers (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), of
/// Open MPI and of Slurm (for both, MASTER_ADDR and MASTER_PORT of the user),
/// in this order.
/// @returns nothing if no launcher started this process
/// @throws error (config) naming the variables if they contradict each other
/// or if no directory for the rendezvous can be used
std::optional<rank_environment> read_rank_environment();

/// @returns whether this process is a rank that our launcher started
bool started_by_our_launcher();

/// @returns a variable of some environment; null if it is not set
using variable_source = std::function<const char*(const char*)>;

/// Same for any process, without the rendezvous directory.
std::optional<rank_environment> read_place_in_run(const variable_source& of);

/// Passes `no_shared_memory` from our launcher to its ranks.
inline constexpr const char* no_shared_memory_variable = "SMP_NO_SHARED_MEMORY";

/// Passes `run_dir` from our launcher to its ranks.
inline constexpr const char* run_dir_variable = "SMP_RUN_DIR";

/// Passes `restart_number` from our launcher to its ranks.
inline constexpr const char* restart_variable = "SMP_RESTART";

/// @returns how often our launcher has started the run of this rank again; 0:
/// this is its first start
uint64_t restart_number();

/// A variable of the environment and its value.
struct environment_variable {
  const char* name;
  const char* value;
};

/// What must be set before exec (R27): large pages for malloc, because tensors
/// in small pages cross between processes at half the rate; OpenMP threads that
/// sleep while they wait, because spinning ones slow down those that work; no
/// memory hooks of UCX, because they cost 0.4 s, and none on memory of GPUs,
/// which it never gets. (python/smp/__init__.py has those of the libraries once
/// more: there they come before this code is loaded.)
inline constexpr environment_variable variables_before_exec[] = {
  {"GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"},
  {"OMP_WAIT_POLICY", "passive"},
  {"UCX_MEM_MMAP_HOOK_MODE", "none"},
  {"UCX_MEMTYPE_CACHE", "n"},
  {"UCX_DEBUG_SIGNO", "0"},
};

/// Under our launcher the stderr of rank 0 is a pipe to the console.
/// @returns true if a terminal shows what this process writes to stderr
bool stderr_is_terminal();

/// Settings of a process that is running, before it uses LibTorch: files,
/// limits, malloc's thresholds.
void settle_process();

/// First call in main (R27): settles the process, and re-executes the program
/// once if variables that must precede exec are missing. Variables that
/// are already set to other values stay as they are.
void prepare_process(int argc, char** argv);

} // namespace smp
