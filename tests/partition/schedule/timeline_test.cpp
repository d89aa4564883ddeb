#include "tests/support/catch.hpp"

#include "partition/schedule/timeline.hpp"

#include <algorithm>

using namespace smp;

namespace {

schedule_report played(uint32_t stages, uint64_t microbatches) {
  pipeline_program program;
  program.devices = stages;
  for (uint32_t i = 0; i < stages; ++i)
    program.chain.push_back({i, 1, 2, 1, false});
  auto policy = make_schedule("simple", microbatches, microbatches);
  check_options options;
  options.microbatches = microbatches;
  options.timeline = true;
  return check_schedule(program, *policy, options);
}

auto occurrences(const std::string& text, const std::string& part) {
  size_t result = 0;
  for (auto i = text.find(part); i != std::string::npos;
       i = text.find(part, i + 1))
    ++result;
  return result;
}

} // namespace

TEST_CASE("a GPipe step of two stages is drawn as in the textbook",
          "[partition][timeline]") {
  timeline_options options;
  options.width = 12;
  CHECK(draw_timeline(played(2, 3), options)
        == "   0  012...aabbcc  keeps 3\n"
           "   1  .012aabbcc..  keeps 3\n"
           "      digits: forward, letters: backward (a is 0), dots: idle\n"
           "makespan 12 s, bubble 25.0 %, at most 3 microbatches live (rank "
           "0)\n");
}

TEST_CASE("cells that are finer or coarser than works show the same step",
          "[partition][timeline]") {
  timeline_options options;
  options.width = 24;
  auto text = draw_timeline(played(2, 3), options);
  CHECK(text.find("   0  001122......aaaabbbbcccc") == 0);
  options.width = 6;
  text = draw_timeline(played(2, 3), options);
  CHECK(text.find("   1  01abc.") != std::string::npos);
}

TEST_CASE("colours change nothing but colours", "[partition][timeline]") {
  auto report = played(3, 4);
  timeline_options options;
  options.colour = true;
  auto text = draw_timeline(report, options);
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\x1b')
      i = text.find('m', i);
    else
      plain += text[i];
  CHECK(text != plain);
  CHECK(plain == draw_timeline(report));
}

TEST_CASE("many devices are drawn in part, and said so",
          "[partition][timeline]") {
  timeline_options options;
  options.max_rows = 4;
  auto text = draw_timeline(played(10, 2), options);
  CHECK(text.find("  and 6 more devices\n") != std::string::npos);
  CHECK(std::count(text.begin(), text.end(), '\n') == 7);
}

TEST_CASE("the picture has one box for each work", "[partition][timeline]") {
  auto svg = timeline_svg(played(2, 3));
  CHECK(svg.starts_with("<svg "));
  CHECK(svg.ends_with("</svg>\n"));
  CHECK(occurrences(svg, "<title>") == 12);
  CHECK(occurrences(svg, "<rect") == occurrences(svg, "#eeeeee") + 12);
  CHECK(svg.find("<title>microbatch 2, backward, 8 s to 10 s</title>")
        != std::string::npos);
}

TEST_CASE("a drawing of 60 cells fits a terminal", "[partition][timeline]") {
  timeline_options options;
  options.width = 60;
  for (uint32_t stages : {1, 2, 70})
    for (uint64_t microbatches : {1, 8, 300}) {
      auto text = draw_timeline(played(stages, microbatches), options);
      for (size_t i = 0; i < text.size();) {
        auto end = text.find('\n', i);
        CHECK(end - i <= 80);
        i = end + 1;
      }
    }
}
