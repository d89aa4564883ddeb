#include "apps/smp-top/screen.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <clocale>
#include <cstdio>

#define NCURSES_NOMACROS // they hide names such as erase
#include <ncurses.h>
#include <unistd.h>

namespace smp::app {

struct screen::impl {
  SCREEN* terminal = nullptr;
};

screen::screen() : impl_(std::make_unique<impl>()) {
  std::setlocale(LC_ALL, "");
  if (::isatty(STDOUT_FILENO) == 1 && ::isatty(STDIN_FILENO) == 1)
    impl_->terminal = ::newterm(nullptr, stdout, stdin);
  if (impl_->terminal == nullptr)
    throw config_error("no terminal to draw on; --once prints the table");
  ::cbreak();
  ::noecho();
  ::keypad(stdscr, TRUE);
  ::curs_set(0);
  // Some keys send ESC first: wait only briefly for their other bytes.
  ::set_escdelay(25);
}

screen::~screen() {
  ::endwin();
  ::delscreen(impl_->terminal);
}

size_t screen::width() const {
  return static_cast<size_t>(std::max(getmaxx(stdscr), 1));
}

size_t screen::height() const {
  return static_cast<size_t>(std::max(getmaxy(stdscr) - 1, 1));
}

void screen::draw(const std::vector<table_line>& lines, size_t first) {
  using style = table_line::style;
  ::erase();
  auto rows = std::min(lines.size() - std::min(first, lines.size()), height());
  for (size_t i = 0; i < rows; ++i) {
    auto& x = lines[first + i];
    auto look = x.how == style::title  ? A_BOLD
                : x.how == style::head ? A_UNDERLINE
                : x.how == style::bad  ? A_REVERSE
                                       : A_NORMAL;
    ::attrset(static_cast<int>(look));
    ::mvaddnstr(static_cast<int>(i), 0, x.text.c_str(), -1);
  }
  ::attrset(A_DIM);
  ::mvaddnstr(getmaxy(stdscr) - 1, 0, "q quit, arrows scroll",
              getmaxx(stdscr) - 1);
  ::attrset(A_NORMAL);
  ::refresh();
}

screen::key screen::await_key(std::chrono::milliseconds limit) {
  ::timeout(static_cast<int>(limit.count()));
  switch (::getch()) {
    case 'q':
    case 'Q':
      return key::quit;
    case KEY_UP:
    case 'k':
      return key::up;
    case KEY_DOWN:
    case 'j':
      return key::down;
    case KEY_RESIZE:
      return key::resized;
    default:
      return key::none;
  }
}

} // namespace smp::app
