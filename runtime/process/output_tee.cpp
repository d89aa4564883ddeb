#include "runtime/process/output_tee.hpp"

#include "runtime/base/print_stderr.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace smp {

namespace {

/// Timeout for the console to take the last output.
constexpr int last_words_ms = 1000;

/// The most that any user may have, by default. A launcher that is stopped
/// (Ctrl-Z) reads nothing, and a rank that blocks on its pipe hears of no loss.
constexpr int pipe_bytes = 1 << 20;

bool write_all(int fd, std::string_view x) {
  while (!x.empty()) {
    auto n = ::write(fd, x.data(), x.size());
    if (n < 0 && errno != EINTR)
      return false;
    if (n > 0)
      x.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

/// Keeps the last text of each line.
class line_log {
public:
  explicit line_log(int fd) : fd_(fd) {
    // nop
  }

  ~line_log() {
    if (!line_.empty())
      flush();
  }

  void add(std::string_view x) {
    for (char c : x) {
      // A carriage return counts only if something other than the end of
      // the line follows it.
      if (std::exchange(returned_, false) && c != '\n')
        line_.clear();
      if (c == '\r')
        returned_ = true;
      else
        line_ += c;
      if (c == '\n' || line_.size() > max_line)
        flush();
    }
  }

private:
  static constexpr size_t max_line = 65536;

  void flush() {
    write_all(fd_, line_);
    line_.clear();
  }

  int fd_;
  std::string line_;
  bool returned_ = false;
};

/// The loop of the thread.
class pump {
public:
  pump(int log, int stop, const file_descriptor (&readers)[2])
    : stop_(stop),
      streams_{{{readers[0].get(), 1, line_log{log}},
                {readers[1].get(), 2, line_log{log}}}} {
    // nop
  }

  void run() {
    while (streams_[0].from >= 0 || streams_[1].from >= 0) {
      pollfd fds[] = {{streams_[0].from, POLLIN, 0},
                      {streams_[1].from, POLLIN, 0},
                      {stopping_ ? -1 : stop_, POLLIN, 0}};
      auto ready = ::poll(fds, 3, stopping_ ? 0 : -1);
      if (ready == 0 || (ready < 0 && errno != EINTR))
        return;
      if (ready < 0)
        continue;
      stopping_ |= (fds[2].revents & POLLIN) != 0;
      for (int i = 0; i < 2; ++i)
        if (fds[i].revents != 0)
          copy(streams_[i]);
    }
  }

private:
  struct stream {
    int from; // -1: ended
    int to;   // -1: no longer writable
    line_log log;
  };

  void copy(stream& x) {
    char buffer[65536];
    auto n = ::read(x.from, buffer, sizeof(buffer));
    if (n <= 0) {
      if (n == 0 || errno != EINTR)
        x.from = -1;
      return;
    }
    std::string_view text{buffer, static_cast<size_t>(n)};
    x.log.add(text);
    note_console(text);
    while (!text.empty() && x.to >= 0) {
      auto part = text.substr(0, 4096); // a pipe that is ready takes it whole
      text.remove_prefix(part.size());
      if (!wait_until_writable(x.to) || !write_all(x.to, part))
        x.to = -1;
    }
  }

  bool wait_until_writable(int fd) {
    for (;;) {
      pollfd fds[] = {{fd, POLLOUT, 0}, {stopping_ ? -1 : stop_, POLLIN, 0}};
      auto ready = ::poll(fds, 2, stopping_ ? last_words_ms : -1);
      if (ready < 0 && errno != EINTR)
        return false;
      if (ready == 0)
        return false;
      if (ready > 0 && fds[0].revents != 0)
        return true;
      if (ready > 0)
        stopping_ = true;
    }
  }

  int stop_;
  bool stopping_ = false;
  std::array<stream, 2> streams_;
};

} // namespace

output_tee::output_tee(const std::string& log_path, bool appends) {
  const int begin = appends ? 0 : O_TRUNC;
  log_.reset(::open(log_path.c_str(),
                    O_WRONLY | O_CREAT | begin | O_APPEND | O_CLOEXEC, 0644));
  bool ready = static_cast<bool>(log_);
  if (ready) {
    stop_.reset(::eventfd(0, EFD_CLOEXEC));
    ready = static_cast<bool>(stop_);
  }
  for (int i = 0; i < 2 && ready; ++i) {
    int ends[2];
    ready = ::pipe2(ends, O_CLOEXEC) == 0;
    if (ready) {
      readers_[i].reset(ends[0]);
      writers_[i].reset(ends[1]);
      // If that is refused, the pipe keeps the default size.
      ::fcntl(ends[1], F_SETPIPE_SZ, pipe_bytes);
    }
  }
  if (!ready)
    throw error{
      error_code::config,
      fmt::format("{}: cannot be written: {}", log_path, std::strerror(errno))};
  thread_ = std::thread{[this] {
    // A closed console must be an error code here, not the end of us.
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
    pump{log_.get(), stop_.get(), readers_}.run();
  }};
}

output_tee::~output_tee() {
  close_writers();
  uint64_t one = 1;
  auto ignored = ::write(stop_.get(), &one, sizeof(one));
  static_cast<void>(ignored);
  thread_.join();
}

void output_tee::close_writers() {
  for (auto& fd : writers_)
    fd.reset();
}

} // namespace smp
