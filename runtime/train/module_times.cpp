#include "runtime/train/module_times.hpp"

#include "runtime/base/file_io.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace smp {

using nlohmann::json;

module_times read_module_times(const std::string& path) {
  auto refuse = [&path](const std::string& why) {
    throw error{error_code::config, path + ": " + why};
  };
  module_times result;
  try {
    auto x = json::parse(read_text(path));
    result.modules = x.at("modules").get<std::map<std::string, double>>();
    result.backward_ratio = x.value("backward_ratio", result.backward_ratio);
    result.hop_seconds = x.value("hop_seconds", result.hop_seconds);
  } catch (const json::exception& e) {
    refuse(e.what());
  }
  for (auto& [name, seconds] : result.modules)
    if (!(seconds >= 0))
      refuse(fmt::format("modules[\"{}\"] = {} is no time", name, seconds));
  if (!(result.backward_ratio >= 0) || !(result.hop_seconds >= 0))
    refuse("backward_ratio and hop_seconds must not be negative");
  return result;
}

void write_module_times(const std::string& path, const model_info& model) {
  json modules = json::object();
  for (auto& x : model)
    if (x.compute && *x.compute > 0)
      modules[x.path] = *x.compute;
  write_text(path, json{{"modules", modules}}.dump(1) + "\n");
}

} // namespace smp
