#pragma once

// A terminal as smp-top needs it; the only place that sees ncurses.

#include "apps/report/rank_table.hpp"

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace smp::app {

class screen {
public:
  enum class key : uint8_t {
    none,
    quit,
    up,
    down,
    page_up,
    page_down,
    ranks, // ESC: back to the table
    actors,
    waits,
    flight,
    help,
    sort,
    resized,
  };

  /// Takes the terminal over.
  /// @throws error (config) if there is none that can be drawn on
  screen();

  /// Gives it back as it was.
  ~screen();

  screen(const screen&) = delete;
  screen& operator=(const screen&) = delete;

  size_t width() const;

  /// Lines that fit on the screen.
  size_t height() const;

  /// @param first the line at the top
  /// @param keys for the bottom line
  void draw(const std::vector<table_line>& lines, size_t first,
            const std::string& keys);

  /// Waits for a key for at most `limit`.
  key await_key(std::chrono::milliseconds limit);

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp::app
