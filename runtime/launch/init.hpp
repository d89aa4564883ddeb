#pragma once

namespace smp {

/// First thing in main of a program of your own: prepares the process (see
/// `prepare_process`), and with `--ranks N` on the command line starts the
/// program N times on this machine, as ranks of one run, and ends with their
/// exit code (see `launch`). The run has a directory for its logs (see
/// `session::run_dir`): `--run-dir DIR`, or a new one, runs/TIME-PROGRAM; a
/// single rank has one only if it is named. What failed in DIR before its first
/// step was over is overwritten; a new directory goes if no rank began a
/// session, as when the program shows its own help. Under mpirun, srun and the
/// like, and without `--ranks`, it returns and the program goes on. An
/// `smp::error` that leaves main is then one line on stderr and an exit code
/// (docs/errors.md).
/// @throws error (config) if N is no number of ranks, or if DIR holds a run
/// already or cannot be made
void init(int argc, char** argv);

} // namespace smp
