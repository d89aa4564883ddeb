#include "apps/report/stack_report.hpp"

#include "apps/report/text_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace smp::app {

namespace {

constexpr size_t columns = 80;

/// Names whose brackets are no arguments.
constexpr std::string_view whole_names[] = {"(anonymous namespace)",
                                            "operator()",
                                            "operator<<=",
                                            "operator>>=",
                                            "operator<=>",
                                            "operator<<",
                                            "operator>>",
                                            "operator->*",
                                            "operator->",
                                            "operator<=",
                                            "operator>=",
                                            "operator<",
                                            "operator>"};

std::string_view whole_name_at(std::string_view x) {
  for (auto name : whole_names)
    if (x.starts_with(name))
      return name;
  return {};
}

/// @returns the place behind the bracket that closes the one at `x[0]`
size_t end_of_brackets(std::string_view x) {
  size_t depth = 0;
  for (size_t i = 0; i < x.size();) {
    if (auto name = whole_name_at(x.substr(i)); !name.empty()) {
      i += name.size();
      continue;
    }
    if (x[i] == '<' || x[i] == '(' || x[i] == '[' || x[i] == '{')
      ++depth;
    else if (x[i] == '>' || x[i] == ')' || x[i] == ']' || x[i] == '}')
      --depth;
    ++i;
    if (depth == 0)
      return i;
  }
  return x.size();
}

std::string without_arguments(std::string_view x) {
  std::string result;
  for (size_t i = 0; i < x.size();) {
    if (auto name = whole_name_at(x.substr(i)); !name.empty()) {
      result += name;
      i += name.size();
    } else if (x[i] == '<' || x[i] == '(') {
      auto size = end_of_brackets(x.substr(i));
      // Empty ones stay.
      result += size == 2 ? x.substr(i, 2) : x[i] == '<' ? "<..>" : "(..)";
      i += size;
    } else {
      result += x[i++];
    }
  }
  return result;
}

std::string_view file_of(std::string_view path) {
  return path.substr(path.rfind('/') + 1);
}

std::string frame_text(const stack_frame& x) {
  if (x.library.empty())
    return fmt::format("    {:#x}, in no file\n", x.offset);
  auto file = file_of(x.library);
  if (x.function.empty())
    return fmt::format("    {}+{:#x}\n", file, x.offset);
  constexpr size_t rest = 4 + 4; // before, and " in "
  auto room = columns - std::min(rest + file.size(), columns / 2);
  return fmt::format("    {} in {}\n", short_function(x.function, room), file);
}

std::string thread_text(const thread_stack& x, bool is_main) {
  std::string head;
  if (x.ids.size() == 1)
    head = fmt::format("thread {}", x.ids.front());
  else
    head = fmt::format("{} threads", x.ids.size());
  auto result = fmt::format("  {}{} \"{}\", {}, {} of CPU time{}{}\n",
                            is_main ? "main " : "", head, x.name, x.state,
                            duration_text(x.cpu_seconds),
                            x.problem.empty() ? "" : ": ", x.problem);
  for (auto& line : x.script)
    result += fmt::format("    {}\n", line);
  for (auto& y : x.frames)
    result += frame_text(y);
  if (x.cut)
    result += "    ...\n";
  return result;
}

json frame_json(const stack_frame& x) {
  json result{{"offset", x.offset}};
  result["function"] = x.function.empty() ? json{}
                                          : json(printable(x.function));
  result["library"] = x.library.empty() ? json{} : json(printable(x.library));
  return result;
}

json thread_json(const thread_stack& x) {
  json result{{"ids", x.ids},
              {"name", printable(x.name)},
              {"state", x.state},
              {"cpu_seconds", x.cpu_seconds},
              {"problem", printable(x.problem)},
              {"cut", x.cut}};
  auto& frames = result["frames"] = json::array();
  for (auto& y : x.frames)
    frames.push_back(frame_json(y));
  auto& script = result["python"] = json::array();
  for (auto& y : x.script)
    script.push_back(printable(y));
  return result;
}

} // namespace

std::string short_function(const std::string& x, size_t width) {
  auto result = without_arguments(x);
  if (result.size() <= width)
    return result;
  auto begin = (width - 2) / 3;
  return result.substr(0, begin) + ".."
         + result.substr(result.size() - (width - 2 - begin));
}

std::string stack_text(std::span<const process_stacks> ranks) {
  std::string result;
  for (auto& x : ranks) {
    result += fmt::format(
      "\nrank {}, process {} on {}; innermost frames "
      "first\n",
      x.rank.value, x.pid, x.host);
    if (!x.problem.empty())
      result += fmt::format("! {}\n", x.problem);
    for (auto& y : x.threads)
      result += thread_text(y, y.ids.front() == x.pid);
  }
  return printable(result);
}

json stack_json(std::span<const process_stacks> ranks) {
  auto result = json::array();
  for (auto& x : ranks) {
    json y{{"rank", x.rank.value},
           {"pid", x.pid},
           {"host", printable(x.host)},
           {"problem", printable(x.problem)}};
    auto& threads = y["threads"] = json::array();
    for (auto& z : x.threads)
      threads.push_back(thread_json(z));
    result.push_back(std::move(y));
  }
  return result;
}

} // namespace smp::app
