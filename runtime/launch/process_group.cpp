#include "runtime/launch/process_group.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/launch/error_exit.hpp"
#include "transport/process_state.hpp"

#include <boost/asio/post.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

namespace smp {

namespace {

/// What it means if that was no end of the run.
std::string early_text(const process_end& x) {
  return fmt::format("ended with code {} before the others", x.code);
}

} // namespace

process_group::process_group(options x) : options_(std::move(x)) {
  // Orphans of a rank must not end as zombies of a container's init.
  ::prctl(PR_GET_CHILD_SUBREAPER, &adopted_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  // Before the first child, so that no end is missed.
  signals_.add(SIGCHLD);
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2})
    if (!is_ignored(number))
      signals_.add(number);
  // Who waits for this to handle them has blocked them.
  sigset_t passed_on;
  ::sigemptyset(&passed_on);
  ::sigaddset(&passed_on, SIGUSR1);
  ::sigaddset(&passed_on, SIGUSR2);
  ::pthread_sigmask(SIG_UNBLOCK, &passed_on, nullptr);
}

process_group::~process_group() {
  for (auto& x : children_)
    if (!x.end)
      ::kill(-x.pid, SIGKILL);
  for (auto& x : children_)
    reap_group(x.pid);
  ::prctl(PR_SET_CHILD_SUBREAPER, adopted_);
}

// -- starting -----------------------------------------------------------------

void process_group::start(
  std::function<std::map<std::string, std::string>(uint64_t)> environment) {
  environment_ = std::move(environment);
  if (!options_.log_dir.empty()) {
    std::error_code problem;
    std::filesystem::create_directories(options_.log_dir, problem);
    if (problem)
      throw error{error_code::config,
                  fmt::format("{}: cannot be made: {}", options_.log_dir,
                              problem.message())};
    if (options_.first_rank == 0)
      console_ = std::make_unique<output_tee>(log_path(0),
                                              options_.appends_to_logs);
  }
  if (int ends[2]; ::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0) {
    words_out_.reset(ends[0]);
    words_in_.reset(ends[1]);
  }
  for (uint64_t i = 0; i < options_.size; ++i)
    children_.push_back(start_rank(options_.first_rank + i));
  if (console_)
    console_->close_writers();
}

process_group::child process_group::start_rank(uint64_t rank) {
  const bool has_logs = !options_.log_dir.empty();
  spawn_options x;
  x.arguments = options_.command_of ? options_.command_of(rank)
                                    : options_.command;
  x.program = options_.program.empty() ? x.arguments.at(0) : options_.program;
  x.environment = environment_(rank);
  x.kept = options_.inherited;
  x.blocked = options_.blocked_signal;
  if (words_in_) {
    x.kept.push_back(words_in_.get());
    x.environment[has_logs ? unwritten_words_variable : last_words_variable]
      = std::to_string(words_in_.get());
  }
  std::error_code missing;
  auto before = std::filesystem::file_size(log_path(rank), missing);
  file_descriptor log;
  if (console_ && rank == 0) {
    x.out = console_->out();
    x.err = console_->err();
  } else if (has_logs) {
    auto path = log_path(rank);
    const int begin = options_.appends_to_logs ? 0 : O_TRUNC;
    log.reset(::open(path.c_str(),
                     O_WRONLY | O_CREAT | begin | O_APPEND | O_CLOEXEC, 0644));
    if (!log)
      throw error{error_code::config, fmt::format("{}: cannot be written: {}",
                                                  path, std::strerror(errno))};
    x.out = x.err = log.get();
  }
  child result;
  result.pid = spawn(x);
  if (options_.appends_to_logs && !missing)
    result.log_begin = static_cast<std::streamoff>(before);
  return result;
}

void process_group::start_again_later(rank_id x,
                                      std::chrono::milliseconds wait) {
  auto& timer = again_timers_.try_emplace(x, io_).first->second;
  timer.expires_after(wait);
  timer.async_wait([this, x](boost::system::error_code problem) {
    if (problem || finished_)
      return;
    auto& process = *find(x);
    reap_group(process.pid);
    process = start_rank(x.value);
  });
}

std::string process_group::log_path(uint64_t rank) const {
  return fmt::format("{}/log-{}.txt", options_.log_dir, rank);
}

std::ifstream process_group::read_log(uint64_t rank) const {
  std::ifstream result{log_path(rank), std::ios::binary};
  if (auto* process = find(rank_id{rank}))
    result.seekg(process->log_begin);
  return result;
}

std::vector<pid_t> process_group::pids() const {
  std::vector<pid_t> result;
  for (auto& x : children_)
    result.push_back(x.pid);
  return result;
}

const process_group::child* process_group::find(rank_id x) const {
  auto i = x.value - options_.first_rank; // wraps below it, and for no_rank
  return i < children_.size() ? &children_[i] : nullptr;
}

process_group::child* process_group::find(rank_id x) {
  return const_cast<child*>(std::as_const(*this).find(x));
}

// -- until all ended ----------------------------------------------------------

process_group::result process_group::run() {
  await_signal();
  if (options_.ends_with_output)
    await_output_end();
  // A child may have ended before this waited for signals.
  boost::asio::post(io_, [this] { reap_all(); });
  io_.run();
  for (auto& x : children_)
    reap_group(x.pid);
  take_words();
  console_.reset(); // takes the last output
  result_.interrupted = interrupted_;
  if (result_.cause) {
    result_.last_words = last_words();
    result_.told_by_rank_0 = told_by_rank_0();
  }
  return result_;
}

void process_group::report(failure x) {
  boost::asio::post(io_, [this, x = std::move(x)]() mutable {
    reap_all(); // its end may be known already
    report_timer_.cancel();
    auto* y = find(x.rank);
    auto early = y != nullptr && y->end && is_result(*y->end);
    if (y != nullptr && y->end && !early)
      return;
    if (early)
      x.text = early_text(*y->end);
    // A rank that is refused may be ended before it can say why.
    auto code = x.code == error_code::config ? exit_code_of(x.code) : 0;
    blame(x, evidence::indirect, code);
    if (early && result_.cause == x)
      result_.early = y->end->code;
  });
}

void process_group::end(failure x, int code) {
  boost::asio::post(io_, [this, x = std::move(x), code]() mutable {
    if (evidence_ != evidence::none || interrupted_ || all_gone())
      return;
    evidence_ = evidence::verdict;
    result_.cause = std::move(x);
    result_.code = code;
    end_all();
  });
}

void process_group::end_later(failure x, int code,
                              std::chrono::milliseconds wait) {
  boost::asio::post(io_, [this, x = std::move(x), code, wait]() mutable {
    if (all_gone())
      return;
    late_timer_.expires_after(wait);
    late_timer_.async_wait([this, x = std::move(x),
                            code](boost::system::error_code problem) mutable {
      if (!problem)
        end(std::move(x), code);
    });
  });
}

void process_group::interrupt(std::string why) {
  boost::asio::post(io_, [this, why = std::move(why)] {
    if (interrupted_ || ending_ || all_gone())
      return;
    print_stderr("smp: {}\n", why);
    interrupt_all(begins_again_value);
  });
}

void process_group::await_output_end() {
  ::signal(SIGPIPE, SIG_IGN);
  boost::system::error_code problem;
  // Only a pipe or a socket can end.
  output_.assign(::dup(STDERR_FILENO), problem);
  if (!problem)
    output_.async_wait(boost::asio::posix::stream_descriptor::wait_error,
                       [this](boost::system::error_code cancelled) {
                         if (!cancelled && !all_gone())
                           on_interrupt();
                       });
}

void process_group::await_signal() {
  signals_.async_wait([this](boost::system::error_code problem, int number) {
    if (problem)
      return;
    on_signal(number);
    if (!all_gone())
      await_signal();
  });
}

void process_group::on_signal(int number) {
  if (number == SIGCHLD)
    reap_all();
  else if (number == SIGUSR1 || number == SIGUSR2)
    pass_on(number);
  else if (number == SIGQUIT)
    options_.on_quit();
  else
    on_interrupt();
}

void process_group::pass_on(int number) {
  if (!options_.passes_signals)
    return static_cast<void>(print_stderr(
      "smp: ssh passes no SIG{} on: send it to smp-train on one of the "
      "machines\n",
      ::sigabbrev_np(number)));
  for (auto& x : children_)
    if (!x.end)
      ::kill(x.pid, number);
}

void process_group::reap_all() {
  auto place = static_cast<size_t>(
    std::count_if(children_.begin(), children_.end(),
                  [](const child& x) { return x.end.has_value(); }));
  std::vector<uint64_t> ended;
  for (uint64_t i = 0; i < children_.size(); ++i)
    if (auto& x = children_[i]; !x.end)
      if ((x.end = reap(x.pid))) {
        x.place = place;
        ended.push_back(i);
      }
  take_words();
  // Among several ends at once, a signal is the more likely cause.
  std::stable_partition(ended.begin(), ended.end(), [this](uint64_t i) {
    return children_[i].end->signal != 0;
  });
  for (auto i : ended)
    on_end(rank_id{options_.first_rank + i}, *children_[i].end);
  look_for_stops();
  if (all_gone() && !std::exchange(finished_, true))
    finish();
}

void process_group::finish() {
  signals_.cancel();
  term_timer_.cancel();
  kill_timer_.cancel();
  late_timer_.cancel();
  second_hand_timer_.cancel();
  again_timers_.clear();
  if (output_.is_open())
    output_.close();
  if (!may_have_left_early())
    return;
  constexpr std::chrono::seconds limit{2}; // the witness is in this process
  report_timer_.expires_after(limit);
  report_timer_.async_wait([](boost::system::error_code) {
    // The report came, or does not come: there is nothing more to wait for.
  });
}

void process_group::look_for_stops() {
  for (uint64_t i = 0; options_.on_stop && i < children_.size(); ++i) {
    auto& x = children_[i];
    // Only 'T': a debugger ('t') may hold a process as long as it likes.
    auto now = x.end ? std::nullopt : state_of_process(x.pid);
    auto stopped = now && now->letter == 'T';
    if (std::exchange(x.stopped, stopped) != stopped)
      options_.on_stop(rank_id{options_.first_rank + i}, stopped);
  }
}

bool process_group::all_gone() const {
  return std::all_of(children_.begin(), children_.end(),
                     [](const child& x) { return x.end.has_value(); });
}

// -- what an end means --------------------------------------------------------

bool process_group::is_result(const process_end& x) const {
  return x.signal == 0 && (x.code == 0 || x.code == options_.verdict);
}

void process_group::on_end(rank_id rank, const process_end& x) {
  const bool good = is_result(x);
  bool clean = good
               || (interrupted_
                   && (x.code == code_interrupted || x.signal == SIGINT));
  if (good && x.code != 0 && !result_.cause)
    result_.code = x.code;
  if (good && !interrupted_ && !signalled_ && options_.on_result)
    options_.on_result({error_code::rank_down, rank, {}, early_text(x)});
  if (clean || signalled_)
    return;
  if (options_.again_after && !ending_ && !interrupted_)
    if (auto wait = options_.again_after(rank, x))
      return start_again_later(rank, *wait);
  auto strength = x.code != code_rank_failed ? evidence::direct
                  : find(rank)->heard        ? evidence::heard
                                             : evidence::indirect;
  auto text = x.describe();
  if (x.signal == SIGKILL && options_.why_killed)
    text += options_.why_killed();
  blame({error_code::rank_down, rank, {}, std::move(text)}, strength,
        x.signal != 0 ? 0 : x.code);
}

void process_group::blame(failure x, evidence strength, int code) {
  // The end of a process replaces what others only reported about it.
  bool same_rank = result_.cause.rank == x.rank && code != 0;
  bool consequence = evidence_ == evidence::verdict
                     || (interrupted_ && strength <= evidence::indirect);
  if (consequence) {
    end_all();
    return;
  }
  bool says_more = same_rank && evidence_ <= evidence::indirect;
  // Whatever the cause so far was, it may be a consequence of this.
  bool earlier = ended_before_cause(x.rank);
  if (strength > evidence_ || says_more || earlier) {
    evidence_ = earlier ? std::max(evidence_, strength) : strength;
    result_.cause = x;
    result_.code = code;
    result_.early.reset();
  }
  if (code == code_rank_failed)
    tell_later(std::move(x));
  else
    tell(x);
  end_all();
}

bool process_group::ended_before_cause(rank_id x) const {
  auto* mine = find(x);
  auto* other = find(result_.cause.rank);
  return mine != nullptr && other != nullptr && mine->end && other->end
         && is_result(*mine->end) && mine->place < other->place;
}

bool process_group::may_have_left_early() const {
  if (!options_.on_result || interrupted_ || evidence_ > evidence::indirect)
    return false;
  for (uint64_t i = 0; i < children_.size(); ++i)
    if (is_result(*children_[i].end)
        && (evidence_ == evidence::heard
            || ended_before_cause(rank_id{options_.first_rank + i})))
      return true;
  return false;
}

void process_group::tell(const failure& x) {
  if (options_.on_failure)
    options_.on_failure(x);
}

void process_group::tell_later(failure x) {
  told_later_.push_back(std::move(x));
  constexpr int most_delays = 20;
  if (told_later_.size() == 1)
    await_causes(most_delays);
}

void process_group::await_causes(int delays) {
  second_hand_timer_.expires_after(options_.second_hand);
  second_hand_timer_.async_wait(
    [this, delays](boost::system::error_code cancelled) {
      reap_all(); // a busy machine may have left an end and this for one moment
      auto leaves = [](const child& x) {
        auto now = x.end ? std::nullopt : state_of_process(x.pid);
        return now && (now->exiting || now->ended());
      };
      if (!cancelled && delays > 1 && std::ranges::any_of(children_, leaves))
        return await_causes(delays - 1);
      // Also if cancelled: ranks on other machines still need to know.
      for (auto& y : std::exchange(told_later_, {}))
        tell(y);
    });
}

void process_group::end_all() {
  again_timers_.clear();
  if (std::exchange(ending_, true) || all_gone())
    return;
  // First, the ranks get time to end by themselves and say why.
  after(term_timer_, options_.grace / 4, SIGTERM);
  after(kill_timer_, options_.grace * 3 / 4, SIGKILL);
}

void process_group::on_interrupt() {
  if (interrupted_ || ending_) {
    send_to_all(SIGKILL);
    interrupted_ = true;
    return;
  }
  // A terminal has just shown "^C".
  print_stderr("{}smp: interrupted; ending cleanly (again: at once)\n",
               ::isatty(STDERR_FILENO) == 1 ? "\n" : "");
  interrupt_all();
}

void process_group::interrupt_all(int value) {
  interrupted_ = true;
  again_timers_.clear();
  for (auto& x : children_)
    if (!x.end)
      ::sigqueue(x.pid, SIGINT, {.sival_int = value});
  after(term_timer_, options_.interrupt_grace, SIGTERM);
  after(kill_timer_, options_.interrupt_grace + options_.grace, SIGKILL);
}

void process_group::after(boost::asio::steady_timer& timer,
                          std::chrono::milliseconds delay, int number) {
  timer.expires_after(delay);
  timer.async_wait([this, number](boost::system::error_code problem) {
    if (!problem)
      send_to_all(number);
  });
}

void process_group::send_to_all(int number) {
  signalled_ = true;
  for (auto& x : children_)
    if (!x.end)
      ::kill(-x.pid, number);
}

// -- what the console shows already -------------------------------------------

bool process_group::told_by_rank_0() const {
  auto* rank_0 = find(rank_id{0});
  bool orderly = result_.code >= 2 && result_.code <= 5 && rank_0 != nullptr
                 && rank_0->end
                 && rank_0->end->code == result_.code
                 // Anybody may exit with 3, for any reason.
                 && (result_.code != code_rank_failed || rank_0->told);
  return orderly
         || (evidence_ == evidence::verdict && has_printed(result_.cause.text));
}

bool process_group::has_printed(const std::string& x) const {
  if (options_.log_dir.empty() || options_.first_rank > 0)
    return false;
  auto file = read_log(0);
  for (std::string line; std::getline(file, line);)
    if (line.find(x) != std::string::npos)
      return true;
  return false;
}

std::string process_group::last_words() const {
  auto rank = result_.cause.rank.value;
  auto* mine = find(result_.cause.rank);
  if (mine == nullptr)
    return {};
  if (auto* rank_0 = find(rank_id{0}); rank_0 != nullptr && told_by_rank_0())
    return rank_0->said; // perhaps of another rank
  if (rank == 0)
    return {};
  // The log of a process that a signal killed may end with anything.
  if (options_.log_dir.empty() || !mine->why.empty() || result_.code == 0)
    return mine->why;
  auto file = read_log(rank);
  auto begin = static_cast<std::streamoff>(file.tellg());
  file.seekg(0, std::ios::end);
  auto size = static_cast<std::streamoff>(file.tellg());
  file.seekg(std::max(begin, size - 4096));
  std::string line;
  std::string result;
  while (std::getline(file, line)) {
    line.resize(line.find_last_not_of(" \t\r") + 1); // 0 where there is none
    if (!line.empty())
      result = line.substr(line.find_last_of('\r') + 1);
  }
  if (result.starts_with(error_prefix))
    result.erase(0, error_prefix.size());
  return result;
}

void process_group::take_words() {
  std::string all;
  char buffer[4096];
  // Does not block, so other holders of the write end do not matter.
  for (ssize_t n; (n = ::read(words_out_.get(), buffer, sizeof(buffer))) > 0;)
    all.append(buffer, static_cast<size_t>(n));
  std::istringstream of_all_ranks{all};
  for (std::string words; std::getline(of_all_ranks, words, '\0');) {
    std::istringstream in{words};
    uint64_t rank = 0;
    char kind = 0;
    auto* from = in >> rank >> kind ? find(rank_id{rank}) : nullptr;
    if (from == nullptr)
      continue;
    from->heard |= kind == static_cast<char>(last_word::heard);
    from->told |= kind == static_cast<char>(last_word::told);
    auto text = in.get() == ' ' ? words.substr(static_cast<size_t>(in.tellg()))
                                : std::string{};
    if (kind == static_cast<char>(last_word::why))
      from->why = std::move(text);
    else if (kind == static_cast<char>(last_word::told))
      from->said = text.substr(0, text.find('\n'));
  }
}

} // namespace smp
