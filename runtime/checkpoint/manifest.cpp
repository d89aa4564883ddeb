#include "runtime/checkpoint/manifest.hpp"

#include "runtime/base/file_io.hpp"
#include "runtime/checkpoint/checksum.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <utility>

namespace smp {

namespace {

using json = nlohmann::json;

constexpr std::array<std::string_view, 4> role_names{"parameter", "buffer",
                                                     "optimizer", "random"};

std::string_view name_of(tensor_role x) {
  return role_names.at(static_cast<size_t>(x));
}

using tensor_key = std::pair<tensor_role, std::string>;

} // namespace

void checkpoint_manifest::add(const std::vector<saved_tensor>& xs) {
  std::map<tensor_key, size_t> positions;
  for (size_t i = 0; i < tensors.size(); ++i)
    positions.emplace(tensor_key{tensors[i].role, tensors[i].name}, i);
  for (auto& x : xs) {
    auto [i, fresh] = positions.emplace(tensor_key{x.role, x.name},
                                        tensors.size());
    if (fresh) {
      tensors.push_back(x);
      continue;
    }
    auto& y = tensors[i->second];
    if (y.dtype != x.dtype || y.shape != x.shape)
      throw error{
        error_code::internal,
        fmt::format("ranks have '{}' in different types or shapes", x.name)};
    y.pieces.insert(y.pieces.end(), x.pieces.begin(), x.pieces.end());
  }
}

uint64_t checkpoint_manifest::bytes() const {
  uint64_t result = 0;
  for (auto& x : files)
    result += x.bytes;
  return result;
}

// -- writing ------------------------------------------------------------------

namespace {

json to_json_object(const tensor_piece& x) {
  json result{{"file", x.file},
              {"begin", x.begin},
              {"shape", x.sizes},
              {"checksum", to_hex(x.checksum)}};
  if (x.replica > 0)
    result["replica"] = x.replica;
  if (!x.part.empty())
    result["part"] = x.part;
  return result;
}

json to_json_object(const saved_tensor& x) {
  auto pieces = json::array();
  for (auto& y : x.pieces)
    pieces.push_back(to_json_object(y));
  return {{"role", name_of(x.role)},
          {"name", x.name},
          {"dtype", x.dtype},
          {"shape", x.shape},
          {"pieces", std::move(pieces)}};
}

json content_of(const checkpoint_manifest& x) {
  json result{
    {"step", x.step},
    {"grid",
     {{"pipeline", x.pipeline}, {"tensor", x.tensor}, {"ranks", x.ranks}}},
    {"drawn_steps", x.drawn_steps},
    {"settings", x.settings},
    {"user_content", x.user_content},
    {"partition", x.partition},
    {"optimizers", json::array()},
    {"files", json::array()},
    {"tensors", json::array()}};
  for (auto& y : x.optimizers) {
    auto& saved = result["optimizers"].emplace_back(
      json{{"type", y.type}, {"groups", y.groups}, {"members", y.members}});
    if (y.loss_scale)
      saved["loss_scale"] = {{"value", y.loss_scale->value},
                             {"good_steps", y.loss_scale->good_steps}};
  }
  for (auto& y : x.files)
    result["files"].push_back(
      {{"name", y.name}, {"bytes", y.bytes}, {"rank", y.rank}});
  for (auto& y : x.tensors)
    result["tensors"].push_back(to_json_object(y));
  return result;
}

std::string checksum_of(const json& content) {
  auto text = content.dump();
  return to_hex(checksum(text.data(), text.size()));
}

} // namespace

std::string to_json(const checkpoint_manifest& x) {
  try {
    auto content = content_of(x);
    return json{{"smp_checkpoint", checkpoint_manifest::version},
                {"checksum", checksum_of(content)},
                {"content", content}}
             .dump(1)
           + "\n";
  } catch (const json::exception&) {
    throw config_error("a name or a text of the checkpoint is not valid UTF-8");
  }
}

// -- reading ------------------------------------------------------------------

namespace {

/// Reads one manifest. A JSON exception means damage: content with the right
/// checksum has the right types, unless it was forged.
class manifest_reader {
public:
  explicit manifest_reader(const std::string& path) : errors_("read", path) {
    // nop
  }

  checkpoint_manifest run(const std::string& text) {
    try {
      auto whole = json::parse(text);
      auto version = whole.is_object() ? whole.find("smp_checkpoint")
                                       : whole.end();
      if (version == whole.end())
        errors_.fail("it is not the manifest of an smp checkpoint");
      if (*version != checkpoint_manifest::version)
        errors_.fail(
          fmt::format("it has version {} of the format, this "
                      "program reads version {}; use the program "
                      "that wrote it",
                      version->dump(), checkpoint_manifest::version));
      auto& content = whole.at("content");
      if (whole.at("checksum") != checksum_of(content))
        errors_.fail("its checksum is wrong: it is damaged");
      return read(content);
    } catch (const json::exception& x) {
      errors_.fail(std::string{"it is damaged: "} + x.what());
    }
  }

private:
  checkpoint_manifest read(const json& x) {
    checkpoint_manifest result;
    x.at("step").get_to(result.step);
    auto& grid = x.at("grid");
    grid.at("pipeline").get_to(result.pipeline);
    grid.at("tensor").get_to(result.tensor);
    grid.at("ranks").get_to(result.ranks);
    x.at("drawn_steps").get_to(result.drawn_steps);
    x.at("settings").get_to(result.settings);
    x.at("user_content").get_to(result.user_content);
    x.at("partition").get_to(result.partition);
    for (auto& y : x.at("optimizers")) {
      auto& saved = result.optimizers.emplace_back();
      y.at("type").get_to(saved.type);
      y.at("groups").get_to(saved.groups);
      y.at("members").get_to(saved.members);
      if (auto scale = y.find("loss_scale"); scale != y.end())
        saved.loss_scale = {scale->at("value").get<double>(),
                            scale->at("good_steps").get<uint64_t>()};
    }
    for (auto& y : x.at("files"))
      result.files.push_back({y.at("name").get<std::string>(),
                              y.at("bytes").get<uint64_t>(),
                              y.at("rank").get<uint64_t>()});
    for (auto& y : result.files)
      if (y.name.find('/') != std::string::npos
          || !files_.insert(y.name).second)
        errors_.fail("file name '" + y.name + "'");
    for (auto& y : x.at("tensors"))
      result.tensors.push_back(read_tensor(y));
    return result;
  }

  saved_tensor read_tensor(const json& x) {
    saved_tensor result;
    auto& role = x.at("role").get_ref<const std::string&>();
    auto i = std::find(role_names.begin(), role_names.end(), role);
    if (i == role_names.end())
      errors_.fail("unknown role \"" + role + "\"");
    result.role = static_cast<tensor_role>(i - role_names.begin());
    x.at("name").get_to(result.name);
    x.at("dtype").get_to(result.dtype);
    x.at("shape").get_to(result.shape);
    if (!names_.emplace(result.role, result.name).second)
      errors_.fail("tensor \"" + result.name + "\" stands twice in it");
    for (auto& y : x.at("pieces"))
      result.pieces.push_back(
        {y.at("file").get<std::string>(), y.value("part", std::string{}),
         y.value("replica", uint64_t{0}),
         y.at("begin").get<std::vector<int64_t>>(),
         y.at("shape").get<std::vector<int64_t>>(),
         std::stoull(y.at("checksum").get<std::string>(), nullptr, 16)});
    check_pieces(result);
    return result;
  }

  /// Checks that the pieces of each replica fill the tensor. They come from
  /// ranks that divide it, so they do not overlap.
  void check_pieces(const saved_tensor& x) const {
    auto fail = [&](const std::string& why) {
      errors_.fail("tensor \"" + x.name + "\": " + why);
    };
    std::map<uint64_t, uint64_t> found{{0, 0}};
    for (auto& y : x.pieces) {
      if (!files_.contains(y.file))
        fail("file '" + y.file + "' is not listed");
      if (y.begin.size() != x.shape.size() || y.sizes.size() != x.shape.size())
        fail("a piece has another number of axes");
      for (size_t i = 0; i < x.shape.size(); ++i)
        if (y.begin[i] < 0 || y.sizes[i] < 0 || x.shape[i] < y.sizes[i]
            || x.shape[i] - y.sizes[i] < y.begin[i])
          fail("a piece leaves it");
      found[y.replica] += elements(y.sizes);
    }
    for (auto& [replica, count] : found)
      if (count != elements(x.shape))
        fail(fmt::format("its pieces have {} of {} elements", count,
                         elements(x.shape)));
  }

  static uint64_t elements(const std::vector<int64_t>& shape) {
    uint64_t result = 1;
    for (auto size : shape)
      result *= static_cast<uint64_t>(size);
    return result;
  }

  file_errors errors_;
  std::set<std::string> files_;
  std::set<tensor_key> names_;
};

} // namespace

checkpoint_manifest parse_manifest(const std::string& text,
                                   const std::string& path) {
  return manifest_reader{path}.run(text);
}

} // namespace smp
