#include "runtime/base/print_stderr.hpp"

#include <atomic>
#include <cstdio>

namespace smp {

namespace {

/// Of the console, of which a process has one.
std::atomic<bool> line_is_open = false;

/// @returns whether more text would stand behind `x`, not below it
bool leaves_line_open(std::string_view x) {
  return !x.ends_with('\n') && !x.ends_with("\x1b[K"); // which has cleared it
}

} // namespace

void note_console(std::string_view text) {
  if (!text.empty())
    line_is_open = leaves_line_open(text);
}

bool write_stderr(std::string_view text) {
  if (text.empty())
    return true;
  // A carriage return begins the same line anew.
  bool begins_line = text.front() == '\r' || text.front() == '\n';
  if (line_is_open.exchange(leaves_line_open(text)) && !begins_line)
    std::fputc('\n', stderr);
  return std::fwrite(text.data(), 1, text.size(), stderr) == text.size();
}

} // namespace smp
