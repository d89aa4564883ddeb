#pragma once

#include "partition/schedule/checker.hpp"

namespace smp {

struct timeline_options {
  size_t width = 80;    // cells per row; a picture has ten pixels per cell
  size_t max_rows = 64; // devices beyond this are omitted
  bool colour = false;  // ANSI escapes
};

/// Draws a step for a terminal: devices down, time across. A cell shows what
/// took most of its time: a digit for a forward phase (the last digit of the
/// microbatch), a letter for a backward phase ("a" for 0, 10, 20, ...), a dot
/// for idle. Ends with makespan, bubble and live activations.
/// @pre the report has a timeline
std::string draw_timeline(const schedule_report& x,
                          const timeline_options& options = {});

/// @returns one line of key figures: bubble and live microbatches per rank.
/// @param name `smp.pipeline`
std::string schedule_summary(const schedule_report& x, std::string_view name,
                             uint64_t microbatches);

/// The same as a self-contained SVG picture; hovering over a work shows what it
/// is.
std::string timeline_svg(const schedule_report& x,
                         const timeline_options& options = {});

} // namespace smp
