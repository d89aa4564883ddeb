#include "apps/smp-top/screen.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <clocale>
#include <cstdio>
#include <cstdlib>

#define NCURSES_NOMACROS // they hide names such as erase
#include <ncurses.h>
#include <unistd.h>

namespace smp::app {

namespace {

using style = table_line::style;

/// Without colours, letters say the same.
attr_t attributes_of(style x) {
  switch (x) {
    case style::title:
      return A_BOLD;
    case style::head:
      return A_UNDERLINE;
    case style::bad:
      return A_REVERSE;
    case style::wait:
      return A_DIM;
    default:
      return A_NORMAL;
  }
}

/// @returns 0: none
short colour_of(style x) {
  switch (x) {
    case style::bar:
      return COLOR_CYAN;
    case style::forward:
      return COLOR_BLUE;
    case style::backward:
      return COLOR_GREEN;
    case style::communication:
      return COLOR_YELLOW;
    case style::optimizer:
      return COLOR_MAGENTA;
    case style::bad:
      return COLOR_RED;
    default:
      return 0;
  }
}

/// Letters of activities are blocks of their colour.
bool is_block(style x) {
  return x == style::forward || x == style::backward
         || x == style::communication || x == style::optimizer;
}

void start_colours() {
  // https://no-color.org
  auto* refused = std::getenv("NO_COLOR");
  if ((refused != nullptr && *refused != 0) || !::has_colors())
    return;
  ::start_color();
  ::use_default_colors();
  for (short x = COLOR_RED; x <= COLOR_WHITE; ++x) {
    ::init_pair(x, x, -1);
    ::init_pair(static_cast<short>(x + COLOR_WHITE), COLOR_WHITE, x);
  }
}

void draw_mark(int row, const table_line::mark& x) {
  auto pair = ::has_colors() ? colour_of(x.how) : short{0};
  if (pair != 0 && is_block(x.how))
    pair = static_cast<short>(pair + COLOR_WHITE);
  ::mvchgat(row, static_cast<int>(x.begin), static_cast<int>(x.size),
            attributes_of(x.how), pair, nullptr);
}

} // namespace

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
  start_colours();
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

void screen::draw(const std::vector<table_line>& lines, size_t first,
                  const std::string& keys) {
  ::erase();
  auto rows = std::min(lines.size() - std::min(first, lines.size()), height());
  for (size_t i = 0; i < rows; ++i) {
    auto& x = lines[first + i];
    ::attrset(static_cast<int>(attributes_of(x.how)));
    ::mvaddnstr(static_cast<int>(i), 0, x.text.c_str(), -1);
    ::attrset(A_NORMAL);
    for (auto& mark : x.marks)
      if (mark.begin < width())
        draw_mark(static_cast<int>(i), mark);
  }
  ::attrset(A_DIM);
  ::mvaddnstr(getmaxy(stdscr) - 1, 0, keys.c_str(), getmaxx(stdscr) - 1);
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
    case KEY_PPAGE:
      return key::page_up;
    case KEY_NPAGE:
    case ' ':
      return key::page_down;
    case 27: // ESC
    case 'r':
      return key::ranks;
    case 'a':
      return key::actors;
    case 'w':
      return key::waits;
    case 'f':
      return key::flight;
    case 'h':
    case '?':
      return key::help;
    case 's':
      return key::sort;
    case KEY_RESIZE:
      return key::resized;
    default:
      return key::none;
  }
}

} // namespace smp::app
