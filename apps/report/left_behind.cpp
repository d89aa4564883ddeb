#include "apps/report/left_behind.hpp"

#include "apps/report/text_layout.hpp"
#include "partition/short_type.hpp"

#include <fmt/format.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <vector>

namespace smp::app {

namespace {

/// A file that somebody else may have written: it is read up to `limit` bytes.
json read_json(const std::string& path, std::streamsize limit) {
  std::ifstream file{path, std::ios::binary | std::ios::ate};
  if (!file || file.tellg() > limit)
    return {};
  file.seekg(0);
  std::string text{std::istreambuf_iterator<char>{file}, {}};
  auto result = json::parse(text, nullptr, false);
  return result.is_discarded() ? json{} : result;
}

json number_of_node(const json& node, const char* key) {
  auto i = node.find(key);
  return i != node.end() && i->is_number() ? *i : json{};
}

/// @returns the strings of a list, fit for a terminal
json texts_in(const json& x, const char* key) {
  auto result = json::array();
  if (auto all = x.find(key); all != x.end() && all->is_array())
    for (auto& line : *all)
      if (line.is_string())
        result.push_back(printable(line.get<std::string>()));
  return result;
}

/// @param before nodes stand before this one, and its parent is one of them
std::optional<size_t> parent_of(const json& node, size_t before) {
  auto i = node.find("parent");
  if (i == node.end() || !i->is_number_unsigned()
      || i->get<uint64_t>() >= before)
    return std::nullopt;
  return i->get<size_t>();
}

std::string share_text(const json& x) {
  return x.is_number() ? fmt::format("{:.1f} %", 100 * x.get<double>()) : "";
}

/// @param parent null for the root
std::string line_of(const json& node, const json* parent, size_t depth) {
  auto name = node.value("name", std::string{"?"});
  if (parent)
    if (auto above = parent->value("name", std::string{}) + '.';
        name.starts_with(above))
      name = name.substr(above.size());
  auto device = node.find("device");
  return fmt::format(
    "{:<43} {:<19} {:>8}  {}\n", std::string(2 * depth, ' ') + name,
    short_type(node.value("type", std::string{})),
    share_text(node.value("cost", json{})),
    device != node.end() && device->is_number() ? device->dump() : "?");
}

} // namespace

json stored_waits(const std::string& run_dir) {
  auto x = read_json(run_dir + "/stall.json", 1 << 22);
  if (!x.is_object() || !x.contains("text") || !x["text"].is_string())
    return {};
  return {{"chain", printable(x["text"].get<std::string>())},
          {"all", texts_in(x, "waits")}};
}

json stored_partition(const std::string& run_dir) {
  constexpr size_t most_nodes = 5000;
  constexpr std::streamsize longest = 1 << 26;
  auto x = read_json(run_dir + "/partition.json", longest);
  if (!x.is_object() || !x.contains("nodes") || !x["nodes"].is_array())
    return {};
  auto& nodes = x["nodes"];
  auto kept = json::array();
  for (auto& node : nodes) {
    if (kept.size() == most_nodes)
      break;
    if (!node.is_object())
      return {};
    json y;
    for (auto* key : {"name", "type"})
      if (auto i = node.find(key); i != node.end() && i->is_string())
        y[key] = printable(i->get<std::string>());
    for (auto* key : {"memory", "compute", "cost", "device", "parent", "bytes"})
      y[key] = number_of_node(node, key);
    kept.push_back(std::move(y));
  }
  json result{{"nodes", std::move(kept)}, {"left_out", 0}};
  result["left_out"] = nodes.size() - result["nodes"].size();
  for (auto* key : {"cut_requests", "cut_bytes", "predicted", "max_cost"})
    result[key] = number_of_node(x, key);
  if (auto loads = x.find("loads"); loads != x.end() && loads->is_array())
    result["loads"] = *loads;
  if (auto costs = x.find("costs"); costs != x.end() && costs->is_string())
    result["costs"] = printable(costs->get<std::string>());
  result["notes"] = texts_in(x, "notes");
  return result;
}

std::string partition_text(const json& x) {
  std::string result;
  if (x.contains("costs"))
    result += x["costs"].get<std::string>() + '\n';
  result += fmt::format("{:<44}{:<20}{:>8}  device\n", "module", "type",
                        "cost");
  auto& nodes = x["nodes"];
  std::vector<size_t> depths;
  for (auto& node : nodes) {
    auto parent = parent_of(node, depths.size());
    depths.push_back(parent ? depths[*parent] + 1 : 0);
    result += line_of(node, parent ? &nodes[*parent] : nullptr, depths.back());
  }
  if (auto more = x.value("left_out", 0); more > 0)
    result += fmt::format("and {} more\n", more);
  auto loads = x.value("loads", json::array());
  for (size_t i = 0; i < loads.size(); ++i)
    if (loads[i].is_number())
      result += fmt::format("{}{:>3}{:>8}\n", i == 0 ? "load of " : "        ",
                            i, share_text(loads[i]));
  for (auto& note : x.value("notes", json::array()))
    result += "note: " + note.get<std::string>() + '\n';
  return result;
}

} // namespace smp::app
