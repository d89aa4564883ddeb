#pragma once

// The processes of a run as a whole: all of them live, or none.

#include "runtime/process/output_tee.hpp"
#include "runtime/process/process.hpp"
#include "transport/error.hpp"
#include "transport/files/file_descriptor.hpp"

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// Variable of a launcher that another one started by ssh, see
/// `process_group::options::ends_with_output`.
inline constexpr const char* ends_with_output_variable = "SMP_ENDS_WITH_OUTPUT";

// Exit codes of a run and of a rank.
inline constexpr int code_interrupted = 130;
inline constexpr int code_rank_failed = 3;

/// The value of a SIGINT (sigqueue) with which a launcher interrupts ranks that
/// it will start again.
inline constexpr int begins_again_value = 1;

/// Starts processes, waits for them, and ends all of them when one fails
/// or the user interrupts. No process outlives this object, or the thread
/// that called `start`.
class process_group {
public:
  struct options {
    /// argv of each process; [0] is looked up in PATH.
    std::vector<std::string> command;
    /// The same for each rank, if they differ.
    std::function<std::vector<std::string>(uint64_t)> command_of;
    /// Executable, if it is not command[0].
    std::string program;
    uint64_t size = 1;
    /// The processes are this rank and the ones after it; the other ranks of
    /// the run are on other machines.
    uint64_t first_rank = 0;
    /// Each process writes log-RANK.txt here, and rank 0 to the console too.
    /// Empty: all write to the console. Created if missing.
    std::string log_dir;
    /// The logs go on that earlier processes of the run left there.
    bool appends_to_logs = false;
    /// An exit code that, like 0, is a result and not a failure.
    int verdict = 0;
    /// Descriptors that all processes inherit under their numbers.
    std::vector<int> inherited;
    /// Time from the first failure until all are gone.
    std::chrono::milliseconds grace{2000};
    /// A process that exits because it lost another rank may be gone before
    /// that rank is: its end is reported only after this delay, or several
    /// while another is on its way out, so that others hear of the cause first.
    std::chrono::milliseconds second_hand{100};
    /// Time from the first interrupt until all are gone.
    std::chrono::milliseconds interrupt_grace{30000};
    /// Whether SIGUSR1 and SIGUSR2 go to the processes, which use them as they
    /// like. If not, one line says so.
    bool passes_signals = true;
    /// One that the processes block until they handle it; 0: none.
    int blocked_signal = 0;
    /// Interrupts the processes once the reader of stderr is gone: ssh forwards
    /// neither signals nor its own end.
    bool ends_with_output = false;
    /// Called in `run` when a process fails (not: is ended by this object).
    std::function<void(const failure&)> on_failure;
    /// Called in `run` when a process ends with a result, with what that means
    /// if it was too early: only others know, and `report` it then.
    std::function<void(const failure&)> on_result;
    /// @returns ", as ...": why a process was killed by SIGKILL, if the kernel
    /// tells; called in `run`.
    std::function<std::string()> why_killed;
    /// Called in `run` at SIGQUIT (Ctrl-\): after it, the run goes on.
    std::function<void()> on_quit = [] {};
    /// How long after its failure a process is started again in its place, if
    /// it is; called in `run`. Not set: each failure ends all.
    std::function<std::optional<std::chrono::milliseconds>(rank_id,
                                                           const process_end&)>
      again_after;
    /// Called in `run` when a signal stops or continues a process.
    std::function<void(rank_id, bool stopped)> on_stop;
  };

  struct result {
    bool interrupted = false;
    /// The first cause, if a process failed.
    failure cause;
    /// Exit code of the process that is the cause; 0 if it has none. Without a
    /// cause, `options::verdict` if a process returned it, else 0.
    int code = 0;
    /// Its last words (error_exit.hpp), or the last line of its log.
    std::string last_words;
    /// Rank 0 ended for the same reason in an orderly way (code 2 to 5), or was
    /// ended on its way out: it has printed the reason to the console.
    bool told_by_rank_0 = false;
    /// The cause ended with this result, before the others.
    std::optional<int> early;
  };

  explicit process_group(options x);
  ~process_group();
  process_group(const process_group&) = delete;
  process_group& operator=(const process_group&) = delete;

  /// Starts all processes. `environment` gives the variables of a rank.
  /// @throws error (config) if the command or the logs do not work
  void start(
    std::function<std::map<std::string, std::string>(uint64_t)> environment);

  /// @returns when all processes are gone.
  result run();

  /// Reports that another witness saw the loss of `x.rank`. Any thread. The
  /// exit status of the process itself, if it comes, is better evidence.
  void report(failure x);

  /// Ends all processes for a cause outside of them, with `code` as the
  /// result. Any thread.
  void end(failure x, int code);

  /// Same after `wait`, unless all are gone by then. Any thread.
  void end_later(failure x, int code, std::chrono::milliseconds wait);

  /// Interrupts all processes, as the user would. Any thread.
  /// @param why is printed
  void interrupt(std::string why);

  /// Process numbers by rank, as of `start`.
  std::vector<pid_t> pids() const;

private:
  struct child {
    pid_t pid = 0;
    std::streamoff log_begin = 0; // where its log was before it
    std::optional<process_end> end;
    /// How many ended before it.
    size_t place = 0;
    bool stopped = false;
    // Its last words.
    bool heard = false; // of the loss of another
    bool told = false;
    std::string said; // first line of what it told
    std::string why;
  };

  /// How good a cause is: a process that exits with code 3, or that others
  /// report as lost, may only have noticed the loss of another rank, all the
  /// more if it says so (`heard`). A finding about the run as a whole counts
  /// most.
  enum class evidence { none, heard, indirect, direct, verdict };

  /// @returns the process of that rank; null if it is not here
  child* find(rank_id x);
  const child* find(rank_id x) const;
  child start_rank(uint64_t rank);
  void start_again_later(rank_id x, std::chrono::milliseconds wait);
  void await_signal();
  void await_output_end();
  void on_signal(int number);
  void on_interrupt();
  void interrupt_all(int value = 0);
  void pass_on(int number);
  void reap_all();
  void look_for_stops();
  bool is_result(const process_end& x) const;
  void on_end(rank_id rank, const process_end& x);
  void blame(failure x, evidence strength, int code);
  /// @returns whether `x` ended with a result and the cause ended later
  bool ended_before_cause(rank_id x) const;
  /// Whether a process that ended well may be the cause, as only others know.
  bool may_have_left_early() const;
  void finish();
  void tell(const failure& x);
  void tell_later(failure x);
  /// Lets the causes of what is told later come first. @param delays at most
  void await_causes(int delays);
  void end_all();
  void send_to_all(int number);
  void after(boost::asio::steady_timer& timer, std::chrono::milliseconds delay,
             int number);
  bool all_gone() const;
  std::string log_path(uint64_t rank) const;
  /// Opens what a rank of this group has written there.
  std::ifstream read_log(uint64_t rank) const;
  std::string last_words() const;
  /// Takes the last words that came from the pipe.
  void take_words();
  bool told_by_rank_0() const;
  /// Tells whether rank 0 wrote `x` to the console, however it ended.
  bool has_printed(const std::string& x) const;

  options options_;
  boost::asio::io_context io_;
  boost::asio::signal_set signals_{io_};
  boost::asio::steady_timer term_timer_{io_};
  boost::asio::steady_timer kill_timer_{io_};
  boost::asio::steady_timer late_timer_{io_};
  boost::asio::steady_timer second_hand_timer_{io_};
  boost::asio::steady_timer report_timer_{io_};
  boost::asio::posix::stream_descriptor output_{io_};
  /// Of processes that are started again.
  std::map<rank_id, boost::asio::steady_timer> again_timers_;
  /// Whether this process was a subreaper of orphans before.
  int adopted_ = 0;
  std::unique_ptr<output_tee> console_;
  /// The pipe for the last words of ranks: without logs, and when a log
  /// cannot be written.
  file_descriptor words_out_;
  file_descriptor words_in_;
  std::function<std::map<std::string, std::string>(uint64_t)> environment_;
  std::vector<child> children_;
  bool interrupted_ = false;
  /// The first failure came, or an interrupt took too long.
  bool ending_ = false;
  bool finished_ = false;
  /// Signals were sent: a process that dies now is not a cause.
  bool signalled_ = false;
  evidence evidence_ = evidence::none;
  std::vector<failure> told_later_;
  result result_;
};

} // namespace smp
