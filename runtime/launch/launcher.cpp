#include "runtime/launch/launcher.hpp"

#include "actors/cluster/membership.hpp"
#include "actors/cluster/supervisor_link.hpp"
#include "actors/inspection/entry_file.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/error_exit.hpp"
#include "runtime/launch/launch_place.hpp"
#include "runtime/launch/process_group.hpp"
#include "runtime/launch/run_dir.hpp"
#include "runtime/launch/run_outcome.hpp"
#include "runtime/launch/secret_handover.hpp"
#include "runtime/launch/shared_segments.hpp"
#include "runtime/process/interruptible_pause.hpp"
#include "runtime/process/limits.hpp"
#include "runtime/process/shared_flights.hpp"
#include "transport/files/file_descriptor.hpp"
#include "transport/files/run_secret.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include <unistd.h>

namespace smp {

namespace {

constexpr int code_stalled = 4;

int exit_code(const process_group::result& x) {
  if (x.interrupted)
    return code_interrupted;
  if (!x.cause)
    return x.code;
  switch (x.code) {
    case 2:
    case 4:
    case 5:
    case code_interrupted:
      return x.code;
    default:
      return code_rank_failed;
  }
}

std::string cause_text(const process_group::result& x) {
  if (!x.cause)
    return {};
  return x.cause.describe() + (x.last_words.empty() ? "" : ": ") + x.last_words;
}

/// Says where a rank was that ended with a result before the others.
void place_early_end(process_group::result& x, const launch_place& place) {
  if (!x.early)
    return;
  auto was = place.progress_of(x.cause.rank.value);
  x.cause.text = was.sessions == 0
                   ? fmt::format(
                     "ended with code {} and did not join the others", *x.early)
                   : fmt::format(
                     "ended with code {} {}, before the others", *x.early,
                     was.in_step > 0 ? fmt::format("in step {}", was.steps)
                     : was.steps > 0 ? fmt::format("after step {}", was.steps)
                                     : "before its first step");
}

/// @returns the cause, and where there is more of it
std::string cause_line(const process_group::result& x,
                       const launch_place& place) {
  auto result = cause_text(x);
  auto rank = x.cause.rank;
  if (!place.log_dir().empty() && rank != no_rank)
    result += fmt::format("; its output: {}/log-{}.txt{}", place.log_dir(),
                          rank.value, place.has(rank) ? "" : " on its machine");
  return result;
}

/// Nobody can be asked, but the run is not over.
inspection_entry entry_without_port() {
  return entry_of_this_process(0, run_secret::make());
}

/// Whether rank 0 can report the stall on the console itself.
bool tells_stalls(const stall_report& x) {
  return x.ranks_know && (x.silent.empty() || x.silent.front() != rank_id{0});
}

/// Losses of ranks on other machines, except those that ended because of
/// others. They may end ranks here before the launcher there has reported why.
class distant_losses {
public:
  void note(const failure& x) {
    if (x.text == process_end{code_rank_failed, 0}.describe())
      return;
    std::lock_guard guard{mutex_};
    if (!first_)
      first_ = x;
    changed_.notify_all();
  }

  /// @returns the first one; empty if none was reported in time
  failure await(std::chrono::milliseconds limit) {
    std::unique_lock guard{mutex_};
    changed_.wait_for(guard, limit, [this] { return bool{first_}; });
    return first_;
  }

private:
  std::mutex mutex_;
  std::condition_variable changed_;
  failure first_;
};

/// If all that is known is that a rank here ended because of another rank:
/// finds which one that was.
void find_first_cause(process_group::result& x, const launch_place& place,
                      distant_losses& elsewhere) {
  constexpr std::chrono::seconds limit{2}; // its launcher sees it at once
  if (x.code != code_rank_failed || !place.has(x.cause.rank))
    return;
  if (auto first = elsewhere.await(limit)) {
    x.cause = std::move(first);
    x.last_words.clear();
    x.told_by_rank_0 = false;
  }
}

supervisor_host::options supervision_of(const launch_options& x,
                                        const launch_place& place,
                                        process_group& group,
                                        distant_losses& elsewhere,
                                        std::atomic<bool>& deadlock) {
  supervisor_host::options result;
  result.world_size = place.world_size;
  result.run_id = place.run_id;
  result.secret = place.secret;
  result.address = place.network.master;
  result.port = x.nodes.port;
  result.line = place.network.line;
  result.note = to_text(place.note);
  result.on_refused = [](const std::string& y) {
    print_stderr("smp: refused a connection from {}\n", y);
  };
  result.join_limit = x.join_limit;
  if (place.network.line)
    result.join_limit = patience_between_machines;
  // A rank that is alone joins nobody, and may run for ever.
  if (place.world_size == 1)
    result.join_limit = std::chrono::hours{24 * 365 * 10};
  result.on_rank_down = [&](const failure& cause) {
    if (!place.has(cause.rank))
      elsewhere.note(cause);
    group.report(cause);
  };
  result.stalls = x.stalls;
  result.on_stall = [&](const stall_report& y) {
    if (!place.log_dir().empty())
      write_stall(place.log_dir(), y);
    place.write_flights();
    deadlock = y.deadlock;
    if (y.ends)
      group.end({error_code::stalled, no_rank, {}, y.text}, code_stalled);
    else if (!tells_stalls(y))
      print_stderr("smp: {}\n", y.text);
  };
  return result;
}

supervisor_link::options link_of(const launch_options& x,
                                 const launch_place& place) {
  supervisor_link::options result;
  result.machine = place.machine;
  result.address = place.network.master;
  result.port = x.nodes.port;
  result.line = place.network.line;
  result.secret = place.secret;
  result.limit = patience_between_machines;
  return result;
}

supervisor_link::options link_of(const launch_options& x,
                                 const launch_place& place,
                                 process_group& group) {
  auto result = link_of(x, place);
  result.on_end = [&group](const failure& x) { group.end(x, code_stalled); };
  // The ranks hear of it as well, and end by themselves if they can.
  result.on_lost = [&group] {
    constexpr std::chrono::seconds wait{10};
    group.end_later({error_code::rank_down,
                     no_rank,
                     {},
                     "the launcher of the first machine is gone"},
                    code_rank_failed, wait);
  };
  return result;
}

/// What becomes of the ranks here, on its way to the SUPERVISOR.
struct rank_reports {
  /// @param x knows the way, and outlives this
  template <class T>
  void go_to(T& x) {
    down = [&x](const failure& cause) { x.report_down(cause); };
    result = [&x](const failure& early) { x.report_result(early); };
    stop = [&x](rank_id y, bool stopped) { x.report_stop(y, stopped); };
  }

  std::function<void(const failure&)> down, result;
  std::function<void(rank_id, bool)> stop;
};

/// At SIGQUIT.
void tell_flights(const launch_place& x) {
  x.write_flights();
  if (!x.log_dir().empty())
    print_stderr(
      "smp: SIGQUIT: what each rank did last is in {}; "
      "smp-inspect {} flight shows it\n",
      flight_path(x.log_dir(), rank_id{x.first_rank}), x.log_dir());
}

/// What the processes of an attempt left behind, which began then.
void clear_up(const process_group::result& x, const launch_place& place,
              const std::vector<pid_t>& pids, std::time_t begin) {
  if (x.cause || x.interrupted)
    remove_dead_segments(shared_memory_folder(), begin);
  if (x.cause)
    place.write_flights();
  if (!place.log_dir().empty())
    for (auto pid : pids)
      remove_leftovers(place.log_dir(), pid);
}

// -- attempts -----------------------------------------------------------------

/// A run, with all attempts at it. The first machine decides whether there is
/// another one; the others wait for its word, and then for its gate.
class whole_run {
public:
  explicit whole_run(const launch_options& x)
    : options_(x), policy_(x.restarts.limit) {
    note_.shares = all_shares();
    if (x.restarts.limit > 0)
      pause_.emplace();
  }

  /// @returns the exit code
  int operator()() {
    do {
      if (!enter())
        break;
      try {
        attempt();
      } catch (const error& e) {
        no_attempt(e);
      }
    } while (next_.again);
    return code_;
  }

private:
  /// Finds the place of this launcher in the next attempt.
  /// @returns false if there is none: the run has ended
  bool enter();

  void attempt();

  /// The ranks of an attempt could not be started.
  /// @throws error `e` if it was the first attempt: nothing is left of the run
  void no_attempt(const error& e) {
    if (note_.restarts == 0) {
      entry_.reset();
      std::error_code ignored; // an empty directory is nothing, too
      if (!options_.log_dir.empty())
        std::filesystem::remove(options_.log_dir, ignored);
      throw e;
    }
    next_ = {};
    cannot_go_on(e);
  }

  void cannot_go_on(const error& e) {
    code_ = exit_code_of(e.code());
    end({}, fmt::format("not started again: {}", e.what()));
  }

  /// Waits for an attempt in which this machine has a place.
  void stand_by();

  /// Number of ranks of each machine, if all are there.
  std::vector<uint64_t> all_shares() const {
    auto& result = options_.nodes.ranks_of;
    return result.empty() ? std::vector{options_.ranks} : result;
  }

  /// @param here machines whose launchers are there, beside this one
  std::vector<uint64_t> shares_among(std::vector<uint64_t> here) const {
    here.push_back(place_.machine);
    return smp::shares_among(all_shares(), here, options_.restarts.fit);
  }

  /// From now on tools can inspect the run, see docs/inspect.md. Called before
  /// there are logs, so that their readers can know that the run is not over. A
  /// lone rank joins nobody: its session publishes where to ask.
  void let_look(supervisor_host& supervisor) {
    auto& dir = options_.log_dir;
    if (dir.empty())
      return;
    auto where = place_.world_size > 1 ? supervisor.open_inspection()
                                       : entry_without_port();
    if (entry_)
      return entry_->replace(where);
    make_run_dir(dir, {});
    for (auto& left : {end_path(dir), stall_path(dir)})
      std::remove(left.c_str()); // of an earlier run
    for (uint64_t i = 0; i < options_.ranks; ++i)
      std::remove(flight_path(dir, rank_id{i}).c_str());
    entry_ = std::make_unique<published_entry>(dir, where);
    server_ = run_server::start(dir, options_.served);
  }

  /// What follows, while tools can still ask the SUPERVISOR.
  /// @param returned a machine for which the ranks were interrupted
  void conclude(const process_group::result& x, bool deadlock,
                std::optional<uint64_t> returned, supervisor_host& supervisor) {
    reached_ = std::max(reached_, place_.progress_of(0).stage());
    code_ = exit_code(x);
    cause_ = cause_text(x);
    next_ = decide(x, deadlock, returned);
    if (next_.again) {
      if (entry_)
        entry_->replace(entry_without_port());
      auto when = returned ? std::string{"starts again"}
                           : fmt::format("restart {} of {} in {} s",
                                         policy_.restarts(), policy_.limit(),
                                         next_.wait / std::chrono::seconds{1});
      print_stderr("smp: {}; {} step{} done; {}, from {}\n",
                   returned ? cause_ : cause_line(x, place_), position_.steps,
                   position_.steps == 1 ? " is" : "s are", when,
                   position_.checkpoint.empty() ? "the beginning"
                                                : position_.checkpoint);
      next_.again = begins_again();
    } else {
      auto told = x.cause && !x.told_by_rank_0 ? cause_line(x, place_) : "";
      end(std::move(told), next_.why_not);
    }
    if (pause_ && options_.nodes.ranks_of.size() > 1) {
      auto heard = supervisor.tell_course(next_.again);
      if (next_.again)
        choose_shares(std::move(heard));
    }
  }

  void choose_shares(std::vector<uint64_t> here) {
    note_.shares = shares_among(std::move(here));
    auto ranks = ranks_in(note_.shares);
    if (ranks < options_.ranks)
      print_stderr(
        "smp: goes on with {} of {} ranks until the others are "
        "back\n",
        ranks, options_.ranks);
  }

  /// What follows on a machine that does not decide.
  void follow(const process_group::result& x, const supervisor_link& link) {
    code_ = exit_code(x);
    cause_ = cause_text(x);
    auto told = x.cause && !x.told_by_rank_0 ? cause_line(x, place_) : "";
    next_ = {};
    if (!pause_ || x.interrupted)
      return end(std::move(told), {});
    auto course = await_course(link, patience_between_machines);
    if (pause_->interrupted())
      code_ = code_interrupted;
    // A first machine that went well and is gone has nothing to begin again.
    next_.again = course == run_course::again
                  || (course == run_course::lost && x.cause);
    if (next_.again)
      print_stderr("smp: {}{}waits for the first machine to begin again\n",
                   told, told.empty() ? "" : "; ");
    else if (course == run_course::unknown)
      end(std::move(told), pause_->interrupted()
                             ? "interrupted"
                             : "the first machine did not say whether the run "
                               "begins again");
    else
      end(std::move(told), {});
  }

  /// @returns unknown if the user interrupts, or the wait takes too long
  /// @param limit not set: as long as the first machine is there
  run_course
  await_course(const supervisor_link& link,
               std::optional<std::chrono::minutes> limit = std::nullopt) {
    constexpr std::chrono::milliseconds between{50};
    auto begin = std::chrono::steady_clock::now();
    auto course = link.course();
    while (course == run_course::unknown
           && !(limit && std::chrono::steady_clock::now() - begin >= *limit)
           && pause_->wait(between))
      course = link.course();
    return course;
  }

  restart_decision decide(const process_group::result& x, bool deadlock,
                          std::optional<uint64_t> returned) {
    if (!pause_ || (!returned && (!x.cause || x.interrupted)))
      return {};
    try {
      position_ = options_.restarts.look();
    } catch (const error& e) {
      return {.why_not = fmt::format("not started again: {}", e.what())};
    }
    if (returned) {
      cause_ = fmt::format("machine {} is back", *returned);
      return {.again = true};
    }
    return policy_.decide({.cause = x.cause,
                           .code = x.code,
                           .early = x.early.has_value(),
                           .interrupted = x.interrupted,
                           .deadlock = deadlock,
                           .steps = position_.steps,
                           .made_steps = position_.made_steps});
  }

  /// Waits before another attempt, and puts it on record.
  /// @returns false if there is none: the run has ended
  bool begins_again() {
    if (!pause_->wait(next_.wait)) {
      code_ = code_interrupted;
      end("interrupted", {});
      return false;
    }
    try {
      options_.restarts.record({.number = ++note_.restarts,
                                .at_step = position_.steps + 1,
                                .from_step = position_.next_from,
                                .cause = cause_});
      note_.newest = position_.newest;
    } catch (const error& e) {
      cannot_go_on(e);
      return false;
    }
    return true;
  }

  /// The run is over. @param why_not joins the cause in the run's outcome
  void end(std::string told, const std::string& why_not) {
    for (auto* text : {&told, &cause_})
      if (!why_not.empty())
        *text += (text->empty() ? "" : "; ") + why_not;
    if (!place_.log_dir().empty() && place_.first())
      write_run_outcome(place_.log_dir(),
                        {code_, cause_, reached_, note_.restarts});
    if (!told.empty())
      print_stderr("smp: {}\n", told);
    entry_.reset();
  }

  launch_options options_;
  restart_policy policy_;
  std::optional<interruptible_pause> pause_;
  std::unique_ptr<published_entry> entry_;
  std::unique_ptr<run_server> server_;
  launch_place place_; // of the last attempt
  attempt_note note_;
  run_position position_;
  restart_decision next_;
  run_stage reached_ = run_stage::start;
  int code_ = 0;
  std::string cause_;
};

bool whole_run::enter() {
  const bool is_first_attempt = place_.run_id.empty();
  std::optional<repeated_question> question;
  if (pause_) {
    question.emplace();
    question->pause = [this](auto x) { return pause_->wait(x); };
    if (!is_first_attempt)
      question->before = place_.secret;
  }
  note_.log_dir = options_.log_dir;
  std::optional<launch_place> next;
  try {
    next = find_place(options_, note_, question);
  } catch (const error& e) {
    if (is_first_attempt)
      throw;
    end({}, fmt::format("not started again: {}", e.what()));
    return false;
  }
  if (!next) {
    code_ = code_interrupted;
    end("interrupted", {});
    return false;
  }
  place_ = std::move(*next);
  note_ = place_.note;
  if (pause_)
    options_.command = options_.restarts.command(note_.newest,
                                                 place_.world_size);
  return true;
}

void whole_run::stand_by() {
  print_stderr(
    "smp: the run goes on with {} ranks on other machines, until "
    "it starts again with this one\n",
    place_.world_size);
  actor_host actors;
  supervisor_link link{actors, link_of(options_, place_)};
  auto course = await_course(link);
  next_ = {.again = !pause_->interrupted() && course != run_course::over};
  code_ = pause_->interrupted() ? code_interrupted : 0;
  if (!next_.again)
    end(pause_->interrupted() ? "interrupted" : "the run is over", {});
}

void whole_run::attempt() {
  auto& x = options_;
  auto& place = place_;
  if (place.ranks == 0)
    return stand_by();
  check_limits(place.ranks);
  if (place.world_size > 1 && !place.network.line)
    check_loopback();
  auto begin = std::time(nullptr);
  auto handed_over = secret_descriptor(place.secret);
  auto options = place.group_options(x, handed_over.get());
  options.appends_to_logs = place.note.restarts > 0;
  rank_reports reports;
  options.on_quit = [&] { tell_flights(place); };
  options.on_failure = [&](const failure& cause) { reports.down(cause); };
  options.on_result = [&](const failure& early) { reports.result(early); };
  options.on_stop = [&](rank_id y, bool stopped) { reports.stop(y, stopped); };
  process_group group{std::move(options)};
  distant_losses elsewhere;
  std::atomic<bool> deadlock = false;
  late_machines late{all_shares(), place.note.shares, x.restarts.fit};
  actor_host actors;
  std::unique_ptr<supervisor_host> supervisor;
  std::unique_ptr<supervisor_link> link;
  if (place.first()) {
    auto boss = supervision_of(x, place, group, elsewhere, deadlock);
    boss.on_launcher = [&](uint64_t machine) {
      if (late.note(machine))
        group.interrupt(fmt::format(
          "machine {} is back: saving, to start again with it", machine));
    };
    supervisor = std::make_unique<supervisor_host>(actors, std::move(boss));
  } else
    link = std::make_unique<supervisor_link>(actors, link_of(x, place, group));
  if (supervisor)
    reports.go_to(*supervisor);
  else
    reports.go_to(*link);
  auto port = supervisor ? supervisor->port() : x.nodes.port;
  if (supervisor)
    let_look(*supervisor);
  group.start([&](uint64_t rank) {
    return place.variables_of(rank, x, handed_over.get(), port);
  });
  auto result = group.run();
  if (place.first() && place.ranks < place.world_size)
    find_first_cause(result, place, elsewhere);
  place_early_end(result, place);
  clear_up(result, place, group.pids(), begin);
  if (supervisor)
    conclude(result, deadlock, result.interrupted ? late.get() : std::nullopt,
             *supervisor);
  else
    follow(result, *link);
}

} // namespace

int launch(const launch_options& x) {
  if (x.ranks == 0)
    throw error{error_code::config, "the number of ranks must be at least 1"};
  return whole_run{x}();
}

} // namespace smp
