#include "runtime/checkpoint/manifest.hpp"

#include "runtime/checkpoint/checksum.hpp"
#include "runtime/files/file_io.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <set>
#include <string_view>
#include <system_error>
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

void checkpoint_manifest::add(const std::vector<saved_tensor>& added) {
  std::map<tensor_key, size_t> positions;
  for (size_t position = 0; position < tensors.size(); ++position)
    positions.emplace(
      tensor_key{tensors[position].role, tensors[position].name}, position);
  for (auto& tensor : added) {
    auto [position, fresh] = positions.emplace(
      tensor_key{tensor.role, tensor.name}, tensors.size());
    if (fresh) {
      tensors.push_back(tensor);
      continue;
    }
    auto& known = tensors[position->second];
    if (known.dtype != tensor.dtype || known.shape != tensor.shape)
      throw error{error_code::internal,
                  fmt::format("ranks have '{}' in different types or shapes",
                              tensor.name)};
    known.pieces.insert(known.pieces.end(), tensor.pieces.begin(),
                        tensor.pieces.end());
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

json content_of(const checkpoint_manifest& manifest) {
  json result{{"step", manifest.step},
              {"grid",
               {{"pipeline", manifest.pipeline},
                {"tensor", manifest.tensor},
                {"ranks", manifest.ranks}}},
              {"drawn_steps", manifest.drawn_steps},
              {"settings", manifest.settings},
              {"user_content", manifest.user_content},
              {"partition", manifest.partition},
              {"optimizers", json::array()},
              {"files", json::array()},
              {"tensors", json::array()}};
  for (auto& item : manifest.optimizers) {
    auto& saved = result["optimizers"].emplace_back(json{
      {"type", item.type}, {"groups", item.groups}, {"members", item.members}});
    if (item.loss_scale)
      saved["loss_scale"] = {{"value", item.loss_scale->value},
                             {"good_steps", item.loss_scale->good_steps}};
  }
  for (auto& item : manifest.files)
    result["files"].push_back(
      {{"name", item.name}, {"bytes", item.bytes}, {"rank", item.rank}});
  for (auto& item : manifest.tensors)
    result["tensors"].push_back(to_json_object(item));
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

/// A value in a manifest, and what an error calls it: "grid.ranks". JSON
/// libraries turn -1 and 1.5 into counts; this refuses what smp cannot have
/// written there.
class manifest_value {
public:
  manifest_value(const json& x, std::string name, const file_errors& e)
    : json_(x), name_(std::move(name)), errors_(e) {
    // nop
  }

  /// The same value under another name.
  manifest_value(const manifest_value& x, std::string name)
    : manifest_value(x.json_, std::move(name), x.errors_) {
    // nop
  }

  [[noreturn]] void fail(const std::string& wanted) const {
    errors_.fail(fmt::format("{} is {}, not {}", name_, shown(), wanted));
  }

  bool has(const char* key) const {
    return json_.is_object() && json_.contains(key);
  }

  manifest_value at(const char* key) const {
    if (!json_.is_object())
      fail("an object");
    auto name = name_.empty() ? key : fmt::format("{}.{}", name_, key);
    auto i = json_.find(key);
    if (i == json_.end())
      errors_.fail(fmt::format("it has no {}", name));
    return {*i, name, errors_};
  }

  /// The values of an array.
  std::vector<manifest_value> items() const {
    if (!json_.is_array())
      fail("a list");
    std::vector<manifest_value> result;
    for (auto& x : json_)
      result.emplace_back(x, fmt::format("{}[{}]", name_, result.size()),
                          errors_);
    return result;
  }

  /// The values of an object.
  std::map<std::string, manifest_value> members() const {
    if (!json_.is_object())
      fail("an object");
    std::map<std::string, manifest_value> result;
    for (auto& [key, x] : json_.items())
      result.emplace(
        key, manifest_value{x, fmt::format("{}[\"{}\"]", name_, key), errors_});
    return result;
  }

  std::string text() const {
    if (!json_.is_string())
      fail("a text");
    return json_.get<std::string>();
  }

  uint64_t count() const {
    if (!json_.is_number_unsigned())
      fail("a count");
    return json_.get<uint64_t>();
  }

  double number() const {
    if (!json_.is_number())
      fail("a number");
    return json_.get<double>();
  }

  uint64_t checksum() const {
    uint64_t result = 0;
    auto hex = text();
    auto end = hex.data() + hex.size();
    auto [at, why] = std::from_chars(hex.data(), end, result, 16);
    if (hex.size() != 16 || at != end || why != std::errc{})
      fail("a checksum of 16 hexadecimal digits");
    return result;
  }

  std::vector<int64_t> sizes() const {
    std::vector<int64_t> result;
    for (auto& x : items()) {
      if (x.count() > INT64_MAX)
        x.fail("a size");
      result.push_back(static_cast<int64_t>(x.count()));
    }
    return result;
  }

  template <class F>
  auto each(F f) const {
    std::map<std::string, decltype(f(*this))> result;
    for (auto& [key, x] : members())
      result.emplace(key, f(x));
    return result;
  }

private:
  std::string shown() const {
    constexpr size_t longest = 60;
    auto result = json_.dump(-1, ' ', true, json::error_handler_t::replace);
    if (result.size() > longest)
      result.replace(longest, result.size(), " ...");
    return result;
  }

  const json& json_;
  std::string name_;
  const file_errors& errors_;
};

/// Reads one manifest.
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
      return read({content, "", errors_});
    } catch (const json::exception& x) {
      errors_.fail(std::string{"it is damaged: "} + x.what());
    }
  }

private:
  static std::string text_of(const manifest_value& x) {
    return x.text();
  }

  static uint64_t count_of(const manifest_value& x) {
    return x.count();
  }

  checkpoint_manifest read(const manifest_value& content) {
    checkpoint_manifest result;
    result.step = content.at("step").count();
    auto grid = content.at("grid");
    result.pipeline = grid.at("pipeline").count();
    result.tensor = grid.at("tensor").count();
    result.ranks = grid.at("ranks").count();
    result.drawn_steps = content.at("drawn_steps").count();
    result.settings = content.at("settings").each(text_of);
    result.user_content = content.at("user_content").each(text_of);
    result.partition = content.at("partition").each(count_of);
    for (auto& item : content.at("optimizers").items())
      result.optimizers.push_back(read_optimizer(item));
    for (auto& item : content.at("files").items())
      result.files.push_back({item.at("name").text(), item.at("bytes").count(),
                              item.at("rank").count()});
    for (auto& item : result.files)
      if (item.name.find('/') != std::string::npos
          || !files_.insert(item.name).second)
        errors_.fail("file name '" + item.name + "'");
    for (auto& item : content.at("tensors").items())
      result.tensors.push_back(read_tensor(item));
    return result;
  }

  static saved_optimizer read_optimizer(const manifest_value& optimizer) {
    saved_optimizer result;
    result.type = optimizer.at("type").text();
    for (auto& group : optimizer.at("groups").items())
      result.groups.push_back(
        group.each([](auto& option) { return option.number(); }));
    result.members = optimizer.at("members").each(count_of);
    if (optimizer.has("loss_scale")) {
      auto scale = optimizer.at("loss_scale");
      result.loss_scale = {scale.at("value").number(),
                           scale.at("good_steps").count()};
    }
    return result;
  }

  saved_tensor read_tensor(const manifest_value& tensor) {
    saved_tensor result;
    auto role = tensor.at("role").text();
    auto known = std::find(role_names.begin(), role_names.end(), role);
    if (known == role_names.end())
      errors_.fail("unknown role \"" + role + "\"");
    result.role = static_cast<tensor_role>(known - role_names.begin());
    result.name = tensor.at("name").text();
    manifest_value named{tensor, "tensor \"" + result.name + '"'};
    result.dtype = named.at("dtype").text();
    result.shape = named.at("shape").sizes();
    if (!names_.emplace(result.role, result.name).second)
      errors_.fail("tensor \"" + result.name + "\" stands twice in it");
    for (auto& piece : named.at("pieces").items())
      result.pieces.push_back(read_piece(piece));
    check_pieces(result);
    return result;
  }

  static tensor_piece read_piece(const manifest_value& x) {
    return {.file = x.at("file").text(),
            .part = x.has("part") ? x.at("part").text() : std::string{},
            .replica = x.has("replica") ? x.at("replica").count() : 0,
            .begin = x.at("begin").sizes(),
            .sizes = x.at("shape").sizes(),
            .checksum = x.at("checksum").checksum()};
  }

  /// Checks that the pieces of each replica fill the tensor. They come from
  /// ranks that divide it, so they do not overlap.
  void check_pieces(const saved_tensor& tensor) const {
    auto fail = [&](const std::string& why) {
      errors_.fail("tensor \"" + tensor.name + "\": " + why);
    };
    std::map<uint64_t, uint64_t> found{{0, 0}};
    for (auto& piece : tensor.pieces) {
      if (!files_.contains(piece.file))
        fail("file '" + piece.file + "' is not listed");
      if (piece.begin.size() != tensor.shape.size()
          || piece.sizes.size() != tensor.shape.size())
        fail("a piece has another number of axes");
      for (size_t axis = 0; axis < tensor.shape.size(); ++axis)
        if (tensor.shape[axis] < piece.sizes[axis]
            || tensor.shape[axis] - piece.sizes[axis] < piece.begin[axis])
          fail("a piece leaves it");
      found[piece.replica] += elements(piece.sizes);
    }
    for (auto& [replica, count] : found)
      if (count != elements(tensor.shape))
        fail(fmt::format("its pieces have {} of {} elements", count,
                         elements(tensor.shape)));
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
