#pragma once

namespace smp {

/// First call in main of a user's program: prepares the process (see
/// `prepare_process`), and with `--ranks N` on the command line starts the
/// program N times on this machine, as the ranks of one run, and exits with
/// their exit code (see `launch`). The run has a directory for its logs (see
/// `session::run_dir`): `--run-dir DIR`, or a new one, runs/TIME-PROGRAM; a
/// single rank has one only with `--run-dir`. Output in DIR of a run that
/// failed before the end of its first step is overwritten; a new directory is
/// removed if no rank began a session, as when the program prints its own help.
/// Under mpirun, srun and the like, and without `--ranks`, it returns and the
/// program goes on. An `smp::error` that leaves main is then one line on stderr
/// and an exit code (docs/errors.md).
/// @throws error (config) if N is not a number of ranks, or if DIR already
/// holds a run or cannot be created
void init(int argc, char** argv);

} // namespace smp
