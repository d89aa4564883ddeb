#include "apps/smp-train/schedule.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/plan/schedule_plan.hpp"

#include <fmt/format.h>

namespace smp::app {

void draw_schedule(const schedule_command& x, const train_config& config,
                   bool terminal) {
  auto found = predict_schedule(config);
  if (!x.svg.empty())
    write_text(x.svg, timeline_svg(found.report));
  if (!x.json.empty())
    write_text(x.json, schedule_json(found, config.smp.pipeline,
                                     config.smp.microbatches));
  timeline_options drawing;
  drawing.width = 60; // 80 columns with the labels
  drawing.colour = terminal;
  print_stderr("{}{}\n", draw_timeline(found.report, drawing), found.calls);
}

} // namespace smp::app
