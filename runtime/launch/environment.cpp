#include "runtime/launch/environment.hpp"

#include "runtime/launch/secret_handover.hpp"
#include "runtime/process/limits.hpp"
#include "transport/error.hpp"
#include "transport/network/addresses.hpp"
#include "transport/ucx/signals.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <sstream>
#include <system_error>

#include <fcntl.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace smp {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(std::string text) {
  throw error{error_code::config, std::move(text)};
}

// -- variables ----------------------------------------------------------------

constexpr const char* rendezvous_variable = "SMP_RENDEZVOUS";

const char* own_variable(const char* name) {
  return std::getenv(name);
}

/// An empty variable counts as none.
std::optional<std::string> variable(const variable_source& of,
                                    const char* name) {
  auto value = of(name);
  if (value == nullptr || *value == '\0')
    return std::nullopt;
  return value;
}

std::optional<uint64_t>
number(const variable_source& of, const char* name,
       uint64_t limit = std::numeric_limits<int64_t>::max()) {
  auto text = variable(of, name);
  if (!text)
    return std::nullopt;
  uint64_t result = 0;
  auto end = text->data() + text->size();
  auto [rest, problem] = std::from_chars(text->data(), end, result);
  if (problem != std::errc{} || rest != end || result > limit)
    fail(fmt::format("environment: {}={} is not a number from 0 to {}", name,
                     *text, limit));
  return result;
}

/// The variables in which a launcher tells a process its place.
struct launcher_names {
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_size;
};

/// @returns nothing if the launcher did not start this process
std::optional<rank_environment> read_place(const variable_source& of,
                                           const launcher_names& names) {
  auto rank = number(of, names.rank);
  auto world_size = number(of, names.world_size);
  if (!rank && !world_size)
    return std::nullopt;
  if (!rank || !world_size)
    fail(
      fmt::format("environment: {} is set but {} is not; a launcher sets "
                  "both; without one, unset it",
                  rank ? names.rank : names.world_size,
                  rank ? names.world_size : names.rank));
  if (*rank >= *world_size)
    fail(fmt::format("environment: {}={} must be less than {}={}", names.rank,
                     *rank, names.world_size, *world_size));
  rank_environment result;
  result.rank = *rank;
  result.world_size = *world_size;
  result.told_by = fmt::format("{} and {}", names.rank, names.world_size);
  if (names.local_size != nullptr)
    result.local_size = number(of, names.local_size).value_or(0);
  if (result.local_size > *world_size)
    fail(fmt::format("environment: {}={} must not be more than {}={}",
                     names.local_size, result.local_size, names.world_size,
                     *world_size));
  result.local_rank = number(of, names.local_rank).value_or(*rank);
  auto local_limit = result.local_size > 0 ? result.local_size : *world_size;
  if (result.local_rank >= local_limit)
    fail(fmt::format("environment: {}={} must be less than {}",
                     names.local_rank, result.local_rank, local_limit));
  return result;
}

/// Parses "HOST:PORT".
void read_address(rank_environment& x, const std::string& text) {
  auto parts = parse_endpoint(text);
  if (!parts || parts->port == 0)
    fail(fmt::format("environment: SMP_RENDEZVOUS={} is not HOST:PORT", text));
  x.rendezvous_address = std::move(parts->host);
  x.rendezvous_port = parts->port;
}

/// Reads the address of rank 0 that the user, or torchrun, gives.
void read_master(rank_environment& x, const variable_source& of) {
  if (auto address = variable(of, "MASTER_ADDR"))
    x.rendezvous_address = *address == "localhost" ? "127.0.0.1" : *address;
  auto port = number(of, "MASTER_PORT", 65535).value_or(0);
  // With an agent store, torchrun itself listens at MASTER_PORT.
  if (variable(of, "TORCHELASTIC_USE_AGENT_STORE") != "True")
    x.rendezvous_port = static_cast<uint16_t>(port);
}

// -- launchers ----------------------------------------------------------------

std::optional<rank_environment> read_ours(const variable_source& of) {
  auto result = read_place(
    of, {"SMP_RANK", "SMP_WORLD_SIZE", "SMP_LOCAL_RANK", "SMP_LOCAL_SIZE"});
  if (!result)
    return result;
  auto run_id = variable(of, "SMP_RUN_ID");
  if (!run_id)
    fail("environment: SMP_RANK is set but SMP_RUN_ID is not");
  result->run_id = *run_id;
  // An address means that our launcher is already listening there.
  if (auto address = variable(of, rendezvous_variable)) {
    read_address(*result, *address);
    result->supervised = true;
    result->no_shared_memory = variable(of, no_shared_memory_variable)
                                 .value_or("");
    result->run_dir = variable(of, run_dir_variable).value_or("");
  }
  return result;
}

std::optional<rank_environment> read_torchrun(const variable_source& of) {
  auto result = read_place(
    of, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"});
  if (!result)
    return result;
  auto address = variable(of, "MASTER_ADDR").value_or("127.0.0.1");
  auto port = number(of, "MASTER_PORT", 65535).value_or(0);
  read_master(*result, of);
  auto id = variable(of, "TORCHELASTIC_RUN_ID").value_or("none");
  result->run_id = fmt::format("{}-{}-{}", id, address, port);
  if (id == "none" && port == 0)
    fail(
      "environment: RANK is set but neither MASTER_PORT nor "
      "TORCHELASTIC_RUN_ID is; runs could not be told apart: set MASTER_PORT "
      "or, without a launcher, unset RANK and WORLD_SIZE");
  return result;
}

std::optional<rank_environment> read_open_mpi(const variable_source& of) {
  auto result = read_place(of, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                "OMPI_COMM_WORLD_LOCAL_RANK",
                                "OMPI_COMM_WORLD_LOCAL_SIZE"});
  if (!result)
    return result;
  auto job = variable(of, "PMIX_NAMESPACE");
  if (!job)
    job = variable(of, "OMPI_MCA_ess_base_jobid");
  if (!job)
    fail(
      "environment: OMPI_COMM_WORLD_RANK is set but neither PMIX_NAMESPACE "
      "nor OMPI_MCA_ess_base_jobid is");
  result->run_id = "mpi-" + *job;
  read_master(*result, of);
  return result;
}

/// Slurm gives the number of tasks of each node, "2(x3),1" for 2, 2, 2, 1, and
/// the index of this node.
/// @returns the number of tasks here; 0 if Slurm does not give it
uint64_t tasks_of_node(const variable_source& of) {
  auto text = variable(of, "SLURM_STEP_TASKS_PER_NODE");
  auto node = number(of, "SLURM_NODEID");
  if (!text || !node)
    return 0;
  uint64_t nodes = 0; // so far
  std::istringstream groups{*text};
  for (std::string group; std::getline(groups, group, ',');) {
    unsigned long long tasks = 0;
    unsigned long long times = 1;
    if (std::sscanf(group.c_str(), "%llu(x%llu)", &tasks, &times) < 1)
      return 0;
    nodes += times;
    if (*node < nodes)
      return tasks;
  }
  return 0;
}

std::optional<rank_environment> read_slurm(const variable_source& of) {
  // The batch script of a job has most of these variables too, but only srun
  // starts one process per rank.
  auto step = number(of, "SLURM_STEP_ID");
  constexpr uint64_t first_special_step = 0xfffffff0; // batch, extern, ...
  if (!step || *step >= first_special_step)
    return std::nullopt;
  auto size = variable(of, "SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS"
                                                   : "SLURM_NTASKS";
  auto result = read_place(of,
                           {"SLURM_PROCID", size, "SLURM_LOCALID", nullptr});
  if (!result)
    return result;
  auto job = variable(of, "SLURM_JOB_ID");
  if (!job)
    fail("environment: SLURM_PROCID is set but SLURM_JOB_ID is not");
  result->run_id = fmt::format("slurm-{}.{}", *job, *step);
  result->told_by = "SLURM_STEP_ID";
  if (auto here = tasks_of_node(of);
      here > result->local_rank && here <= result->world_size)
    result->local_size = here;
  read_master(*result, of);
  return result;
}

/// MPICH and what descends from it (Intel MPI). Slurm sets these variables too.
std::optional<rank_environment> read_mpich(const variable_source& of) {
  auto result = read_place(
    of, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});
  if (!result)
    return result;
  read_master(*result, of);
  if (result->rendezvous_port != 0)
    result->run_id = fmt::format("mpich-{}-{}", result->rendezvous_address,
                                 result->rendezvous_port);
  else if (result->local_size == result->world_size)
    result->run_id = fmt::format("mpich-{}", ::getppid()); // its proxy
  else
    fail(
      "environment: PMI_RANK is set, but MPI_LOCALNRANKS does not say that "
      "all ranks are on this machine; runs could not be told apart: set "
      "MASTER_ADDR and MASTER_PORT or, without a launcher, unset PMI_RANK "
      "and PMI_SIZE");
  return result;
}

/// A directory that only this user can write to: whoever controls it decides
/// where the ranks connect.
std::string private_directory() {
  std::error_code why;
  auto above = fs::temp_directory_path(why);
  if (why)
    fail(
      fmt::format("TMPDIR: no directory for temporary files ({}); set "
                  "SMP_RENDEZVOUS_DIR to a directory that all ranks can "
                  "write to",
                  why.message()));
  auto path = above / fmt::format("smp-{}", ::geteuid());
  auto made = ::mkdir(path.c_str(), 0700);
  struct stat info {};
  if ((made != 0 && errno != EEXIST) || ::lstat(path.c_str(), &info) != 0)
    fail(
      fmt::format("{}: cannot be made; set SMP_RENDEZVOUS_DIR to a "
                  "directory that all ranks can write to",
                  path.string()));
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid()
      || (info.st_mode & 0077) != 0)
    fail(
      fmt::format("{}: must be a directory of this user that no one else "
                  "can enter (mode 0700); set SMP_RENDEZVOUS_DIR to "
                  "another one",
                  path.string()));
  return path.string();
}

} // namespace

bool started_by_our_launcher() {
  return variable(own_variable, rendezvous_variable).has_value();
}

std::optional<rank_environment> read_place_in_run(const variable_source& of) {
  for (auto read :
       {read_ours, read_torchrun, read_open_mpi, read_slurm, read_mpich})
    if (auto result = read(of))
      return result;
  return std::nullopt;
}

std::optional<rank_environment> read_rank_environment() {
  auto result = read_place_in_run(own_variable);
  if (!result)
    return result;
  if (auto dir = variable(own_variable, "SMP_RENDEZVOUS_DIR"))
    result->rendezvous_dir = *dir;
  else if (!result->supervised
           && (result->rendezvous_port == 0
               || !variable(own_variable, secret_file_variable)))
    result->rendezvous_dir = private_directory();
  return result;
}

uint64_t restart_number() {
  return number(own_variable, restart_variable).value_or(0);
}

bool stderr_is_terminal() {
  if (auto told = variable(own_variable, "SMP_TERMINAL"))
    return *told == "1";
  return ::isatty(STDERR_FILENO) == 1;
}

// -- before everything else ---------------------------------------------------

namespace {

/// A program without them (`>&- 2>&-`, cron) would give their numbers to its
/// files, and what it prints would go there.
void open_standard_descriptors() {
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF)
      ::open("/dev/null", O_RDWR); // takes the least that is free
}

} // namespace

void settle_process() {
  open_standard_descriptors();
  use_limits();
  // Executor threads allocate in arenas that glibc would trim after each step.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
  // Nothing returns to the system, so memory that one thread frees must serve
  // the others: with an arena each, several held memory for gradients.
  ::mallopt(M_ARENA_MAX, 1);
}

void prepare_process(int, char** argv) {
  // The exec below keeps what is ignored, but no handler.
  restore_hangup();
  // After the exec below, top and pkill would know it as "exe".
  ::prctl(PR_SET_NAME, program_invocation_short_name);
  // The guard is removed as soon as it is read: programs that this one starts
  // decide for themselves.
  constexpr auto guard = "SMP_PREPARED";
  bool again = std::getenv(guard) != nullptr;
  ::unsetenv(guard);
  bool missing = false;
  for (auto& x : variables_before_exec) {
    missing |= std::getenv(x.name) == nullptr;
    ::setenv(x.name, x.value, 0);
  }
  settle_process();
  if (!missing || again)
    return;
  ::setenv(guard, "1", 1);
  ::execv("/proc/self/exe", argv);
  // exec failed: only speed is lost.
  ::unsetenv(guard);
}

} // namespace smp
