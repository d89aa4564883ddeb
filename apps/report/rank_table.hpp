#pragma once

// The ranks of a run as a table, and the lines above it.

#include "apps/report/run_source.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace smp::app {

/// One rank, in numbers; unknown values are empty.
struct rank_row {
  uint64_t rank = 0;
  rank_health health = rank_health::joining;
  /// "pp/tp/rdp"; empty: not known yet.
  std::string place;
  std::string state;
  std::optional<double> busy;   // share of the time since the last look
  std::optional<double> bubble; // of the last step
  std::optional<uint64_t> queue;
  std::optional<double> out; // bytes a second since the last look
  std::optional<double> in;
  std::optional<uint64_t> bytes_sent; // since the session began
  std::optional<uint64_t> bytes_received;
  std::optional<uint64_t> arena; // high water, in bytes
  std::optional<uint64_t> memory;
  std::optional<uint64_t> peak_memory;
  std::string device; // empty: the host
  std::optional<uint64_t> device_memory;
  std::optional<uint64_t> device_peak_memory;
  std::optional<uint64_t> device_total_memory;
};

/// @returns what a rank does: "FWD mb3 h.2", "WAIT h.2 <- r1", "STOPPED 3.2 s"
std::string state_of(const rank_entry& x);

/// Turns successive looks into rows: counters become rates.
class rank_rows {
public:
  using time_point = std::chrono::steady_clock::time_point;

  /// @param now when `x` was received
  std::vector<rank_row> add(const run_look& x, time_point now);

private:
  struct sample {
    double up = 0;
    double busy = 0;
    uint64_t sent = 0;
    uint64_t received = 0;
    time_point when;
  };

  std::vector<std::optional<sample>> last_;
};

struct table_line {
  enum class style : uint8_t {
    plain,
    title,
    head,
    bad,
    // Of parts:
    bar,
    forward,
    backward,
    wait,
    communication,
    optimizer,
  };

  /// A part that looks different, in characters.
  struct mark {
    size_t begin = 0;
    size_t size = 0;
    style how = style::plain;
  };

  std::string text;
  style how = style::plain;
  std::vector<mark> marks = {};
};

/// By which column rows are sorted, the most telling first.
enum class row_order : uint8_t { rank, busy, bubble, queue, memory };

constexpr row_order last_of(row_order) noexcept {
  return row_order::memory;
}

const char* to_string(row_order x) noexcept;

void sort_rows(std::vector<rank_row>& rows, row_order x);

/// @param place as the user named the run
/// @param width of the screen, in characters; lines are cut to it. Of ranks on
/// devices a narrow one shows those rather than traffic and the host's memory.
std::vector<table_line> table_of(const std::string& place, const run_look& x,
                                 const std::vector<rank_row>& rows,
                                 size_t width);

/// The last seconds of each rank, in the order of `rows`: a line of letters in
/// their colours.
std::vector<table_line> strips_of(const std::vector<flight_log>& logs,
                                  const std::vector<rank_row>& rows,
                                  size_t width);

/// @returns lines of `text`, cut to `width`
std::vector<table_line> lines_of(const std::string& text, size_t width);

} // namespace smp::app
