#include "runtime/placement/module_times.hpp"

#include "partition/manual.hpp"
#include "runtime/base/json_text.hpp"
#include "runtime/files/file_io.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>

namespace smp {

using nlohmann::json;

namespace {

uint64_t own_parameters(const module_info& x) {
  uint64_t result = 0;
  for (auto& y : x.parameters)
    result += y.elements;
  return result;
}

module_times::entry read_entry(const json& x) {
  module_times::entry result;
  if (x.is_number()) {
    result.seconds = x;
    return result;
  }
  x.at("seconds").get_to(result.seconds);
  if (x.contains("type"))
    result.type = x["type"].get<std::string>();
  if (x.contains("parameters"))
    result.parameters = x["parameters"].get<uint64_t>();
  return result;
}

} // namespace

module_times read_module_times(const std::string& path) {
  auto refuse = [&path](const std::string& why) {
    throw error{error_code::config, path + ": " + why};
  };
  module_times result;
  result.file = path;
  double all = 0;
  auto check = [&](const std::string& what, double x) {
    if (!(x >= 0))
      refuse(fmt::format("{} = {} is not a time", what, x));
    all += x;
  };
  try {
    auto x = json::parse(read_text(path));
    if (!x.is_object() || !x.contains("modules") || !x["modules"].is_object())
      refuse("it has no times of modules (field \"modules\")");
    for (auto& [name, y] : x["modules"].items())
      result.modules.emplace(name, read_entry(y));
    if (x.contains("others"))
      result.others = x["others"].get<double>();
    result.backward_ratio = x.value("backward_ratio", result.backward_ratio);
    result.hop_seconds = x.value("hop_seconds", result.hop_seconds);
  } catch (const json::exception& e) {
    refuse(e.what());
  }
  for (auto& [name, y] : result.modules)
    check(fmt::format("modules[\"{}\"]", name), y.seconds);
  if (result.others)
    check("others", *result.others);
  if (all == 0)
    refuse("all times are 0");
  if (!(result.backward_ratio >= 0) || !(result.hop_seconds >= 0))
    refuse("backward_ratio and hop_seconds must not be negative");
  return result;
}

void apply_times(const module_times& x, model_info& model) {
  std::set<std::string> known;
  for (size_t i = 0; i < model.size(); ++i) {
    auto& m = model[i];
    known.insert(m.path);
    auto refuse = [&](const std::string& how) {
      throw error{error_code::config,
                  fmt::format("{} is of another model: {} {}", x.file,
                              describe_module(model, module_id{i}), how)};
    };
    auto found = x.modules.find(m.path);
    if (found == x.modules.end()) {
      if (!x.others)
        refuse(
          "has no time there (\"others\" gives one to all that have none)");
      m.compute = *x.others;
      continue;
    }
    auto& y = found->second;
    if (y.type && *y.type != m.type)
      refuse(fmt::format("is a {}, and a {} there", m.type, *y.type));
    if (y.parameters && *y.parameters != own_parameters(m))
      refuse(fmt::format("has {} parameters of its own, and {} there",
                         own_parameters(m), *y.parameters));
    m.compute = y.seconds;
  }
  for (auto& [path, y] : x.modules)
    if (!known.contains(path))
      throw error{error_code::config,
                  fmt::format("{} is of another model: this one has no module "
                              "'{}'",
                              x.file, path)};
}

json times_json(const model_info& model) {
  json result;
  if (std::any_of(model.begin(), model.end(),
                  [](auto& x) { return x.compute.value_or(0) > 0; }))
    for (auto& x : model)
      result[x.path] = {{"seconds", x.compute.value_or(0)},
                        {"type", x.type},
                        {"parameters", own_parameters(x)}};
  return result;
}

void write_module_times(const std::string& path, const model_info& model) {
  write_text(path, json_text(json{{"modules", times_json(model)}}, 1) + "\n");
}

} // namespace smp
