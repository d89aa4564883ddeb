#include "runtime/config/config_file.hpp"

#include "runtime/config/config_schema.hpp"
#include "runtime/config/config_toml.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

namespace smp {

namespace fs = std::filesystem;

namespace {

constexpr size_t on_command_line = ~size_t{0};

constexpr std::string_view options_table = "model.options.";

/// Where a key was set.
struct place {
  size_t line = 0;
  /// As the user wrote it: the name or an alias.
  std::string name;
};

/// Names and values may hold any characters: none may break the line or
/// control the terminal.
std::string one_line(const std::string& text) {
  std::string result;
  for (unsigned char c : text)
    if (c < 0x20 || c == 0x7f)
      result += fmt::format("\\u{:04X}", static_cast<unsigned>(c));
    else
      result += static_cast<char>(c);
  return result;
}

// -- reading ------------------------------------------------------------------

class reader {
public:
  /// @param world see `read_config`
  reader(std::string file, std::optional<uint64_t> world,
         std::string place = "command line")
    : file_(std::move(file)), place_(std::move(place)), world_(world) {
    // nop
  }

  void read_text(const std::string& text) {
    try {
      auto root = toml::parse(text, file_);
      walk(root, "");
    } catch (const toml::parse_error& x) {
      readable_ = false;
      complain(x.source().begin.line, std::string{x.description()});
    }
  }

  void read_override(std::string_view text) {
    auto written = text;
    text.remove_prefix(std::min(text.find_first_not_of('-'), text.size()));
    auto equals = text.find('=');
    auto name = std::string{text.substr(0, equals)};
    if (equals == std::string_view::npos || name.empty()) {
      complain(
        on_command_line,
        fmt::format("{} is not a setting; write --table.key=value", written));
      return;
    }
    auto value = std::string{text.substr(equals + 1)};
    if (name == "ranks") {
      // Without replicas, each rank holds a part of the model.
      auto ddp = config_.smp.ddp;
      name = ddp ? "smp.ranks" : "smp.pipeline_parallel_degree";
      if (auto i = places_.find(name);
          i != places_.end() && i->second.line == on_command_line)
        return complain(
          on_command_line,
          fmt::format("--ranks and --{} set the same key; give one of them{}",
                      i->second.name,
                      ddp ? "" : ", or smp.ddp = true for several replicas"));
    }
    auto key = find_config_key(name);
    bool raw = key != nullptr
               && (std::holds_alternative<std::string*>(key->slot(config_))
                   || value == "auto")
               && !value.starts_with('"') && !value.starts_with('\'');
    reading_command_line_ = true;
    auto root = parse_setting(value, raw);
    visit(name, *root.get("x"), on_command_line);
    reading_command_line_ = false;
  }

  /// Checks what can only be checked once everything is read.
  /// @param whole false: of a program, which needs no key
  void check(bool whole = true) {
    if (!readable_)
      return;
    for (auto& key : config_keys())
      if (whole || places_.contains(key.name))
        check_key(key);
    check_options();
    if (config_.smp.ddp && !config_.ranks)
      config_.ranks = world_;
    for (auto& conflict : conflicts_of_good_keys(whole))
      complain_about(conflict);
  }

  /// Makes paths from the file relative to its directory and checks them.
  void resolve_paths() {
    for (auto& key : config_keys())
      if (auto at = places_.find(key.name);
          (key.is_file || key.is_folder) && at != places_.end()
          && !wrong_.contains(key.name) && applies(key, config_))
        resolve(key, at->second.line);
  }

  void complain(size_t line, std::string text) {
    errors_.emplace(line, one_line(text));
  }

  void give_up(std::string text) {
    readable_ = false;
    complain(0, std::move(text));
  }

  config_report take() {
    config_report result;
    result.config = std::move(config_);
    for (auto& [line, text] : errors_)
      result.errors.push_back(fmt::format("{}: {}", place_text(line), text));
    for (auto& [line, text] : warnings_)
      result.warnings.push_back(fmt::format("{}: {}", place_text(line), text));
    for (auto& [name, place] : places_)
      result.config.origins.emplace(name, place_text(place.line));
    return result;
  }

private:
  std::string place_text(size_t line) const {
    if (line == on_command_line)
      return place_;
    return line == 0 ? file_ : fmt::format("{}:{}", file_, line);
  }

  /// toml++ sorts keys by name. Visits them by line instead: of two keys that
  /// clash, the later one in the file is at fault.
  void walk(const toml::table& x, const std::string& prefix) {
    std::multimap<size_t, std::pair<std::string, const toml::node*>> by_line;
    for (auto&& [key, node] : x)
      by_line.emplace(key.source().begin.line, std::pair{key.str(), &node});
    for (auto& [line, entry] : by_line) {
      auto& [key, node] = entry;
      visit(prefix.empty() ? key : fmt::format("{}.{}", prefix, key), *node,
            reading_command_line_ ? on_command_line : line);
    }
  }

  void visit(const std::string& name, const toml::node& node, size_t line) {
    if (name.starts_with(options_table)) {
      set_option(name, node, line);
      return;
    }
    if (auto key = find_config_key(name)) {
      set(*key, name, node, line);
      return;
    }
    if (is_config_table(name)) {
      tables_.emplace(name, line);
      if (auto table = node.as_table()) {
        walk(*table, name);
        return;
      }
      broken_tables_.insert(name);
      complain(line, fmt::format("{} is a table, got {}; write [{}] and its "
                                 "keys below",
                                 name, given_text(node), name));
      return;
    }
    complain(line, fmt::format("unknown {} {}{}",
                               node.is_table() ? "table" : "key", name,
                               node.is_table() ? hint_for_unknown_table(name)
                                               : hint_for_unknown_key(name)));
  }

  void set(const config_key& key, const std::string& name,
           const toml::node& node, size_t line) {
    auto [known, added] = places_.emplace(key.name, place{line, name});
    if (!added) {
      auto& first = known->second;
      if ((first.line == on_command_line) == (line == on_command_line)) {
        complain(line,
                 fmt::format("{} sets what {} sets already ({}); keep one",
                             name, first.name, place_text(first.line)));
        return;
      }
      first = place{line, name};
    }
    auto number = node.as_integer();
    if (!assign(key.slot(config_), node)) {
      wrong_.insert(key.name);
      complain(line,
               fmt::format("{} needs {}, got {}{}", key.name, type_text(key),
                           given_text(node), allowed_hint(key)));
    } else if (number != nullptr && number->get() < 0 && is_integer(key)) {
      wrong_.insert(key.name);
      complain(line, fmt::format("{} = {} is out of range; allowed: {}",
                                 key.name, number->get(), allowed_text(key)));
    }
  }

  /// Options of a plug-in's model: only that model knows its options.
  void set_option(const std::string& name, const toml::node& node,
                  size_t line) {
    auto text = option_text(node);
    if (!text) {
      complain(line, fmt::format("{} needs a string, a number or true or "
                                 "false, got {}",
                                 name, given_text(node)));
      return;
    }
    if (first_option_ == 0)
      first_option_ = line;
    config_.model.options[name.substr(options_table.size())] = *text;
  }

  void check_options() {
    if (!config_.model.options.empty() && config_.model.type != "plugin"
        && is_good("model.type"))
      complain(first_option_,
               fmt::format("model.options has no effect with model.type = "
                           "\"{}\"; it belongs to \"plugin\"",
                           config_.model.type));
  }

  static std::string allowed_hint(const config_key& key) {
    auto allowed = allowed_text(key);
    return allowed.empty() ? allowed : "; allowed: " + allowed;
  }

  void resolve(const config_key& key, size_t line) {
    auto slot = key.slot(config_);
    if (auto* list = std::get_if<std::vector<std::string>*>(&slot)) {
      for (auto& path : **list)
        resolve(key, line, path);
      return;
    }
    auto& path = *std::get<std::string*>(slot);
    if (!path.empty() || key.required)
      resolve(key, line, path);
  }

  void resolve(const config_key& key, size_t line, std::string& path) {
    auto given = path;
    if (key.is_folder
        && (given.empty()
            || std::ranges::find(key.no_paths, given) != key.no_paths.end()))
      return;
    auto base = line == on_command_line ? fs::path{}
                                        : fs::path{file_}.parent_path();
    path = fs::absolute(base / given).lexically_normal().string();
    std::error_code ignored;
    const bool or_folder = may_be_folder(key, config_) && !given.empty();
    auto* wrong = or_folder ? "neither a file nor a folder" : "not a file";
    if (key.is_file && !fs::is_regular_file(path, ignored)
        && !(or_folder && fs::is_directory(path, ignored)))
      complain(line, fmt::format("{} = \"{}\" is {}; looked for {}", key.name,
                                 given, wrong, path));
  }

  // -- checks of the whole ----------------------------------------------------

  void check_key(const config_key& key) {
    auto at = places_.find(key.name);
    bool given = at != places_.end();
    if (wrong_.contains(key.name))
      return;
    bool known_whether = std::all_of(
      key.only.begin(), key.only.end(),
      [this](const config_condition& x) { return is_good(x.key); });
    auto* broken = broken_condition(key, config_);
    if (known_whether && given && broken != nullptr) {
      complain(at->second.line, has_no_effect(key, *broken));
      return;
    }
    if (known_whether && !given && is_required(key, config_)) {
      wrong_.insert(key.name);
      if (broken_tables_.contains(table_of(key.name)))
        return;
      complain(line_of_table(key.name),
               fmt::format("{} is missing{}", key.name, allowed_hint(key)));
      return;
    }
    if (!given)
      return;
    if (auto wrong = check_value(key, config_)) {
      wrong_.insert(key.name);
      complain(at->second.line, *wrong);
    }
  }

  std::string has_no_effect(const config_key& key,
                            const config_condition& broken) const {
    auto at = places_.find(broken.key);
    return no_effect_text(key, broken, config_,
                          at == places_.end() ? "the default"
                                              : place_text(at->second.line));
  }

  /// Whether its value, set or by default, is legal.
  bool is_good(std::string_view name) const {
    auto& key = *find_config_key(name);
    return !wrong_.contains(name) && !check_value(key, config_)
           && (places_.contains(name) || !key.required);
  }

  static std::string_view table_of(std::string_view name) {
    return name.substr(0, name.rfind('.'));
  }

  size_t line_of_table(std::string_view name) const {
    auto at = tables_.find(table_of(name));
    return at == tables_.end() ? 0 : at->second;
  }

  std::vector<config_conflict> conflicts_of_good_keys(bool whole) const {
    // Wrong values would only cause more errors, or a division by zero.
    train_config defaults;
    auto x = config_;
    if (!whole) // the code of a program may name modules
      x.model.type = "plugin";
    for (auto name : wrong_) {
      auto& key = *find_config_key(name);
      std::visit(
        [&](auto* to) { *to = *std::get<decltype(to)>(key.slot(defaults)); },
        key.slot(x));
    }
    auto found = conflicts(x);
    std::erase_if(found, [&](const config_conflict& y) {
      return std::any_of(y.keys.begin(), y.keys.end(),
                         [&](auto& name) { return wrong_.contains(name); });
    });
    return found;
  }

  void complain_about(const config_conflict& x) {
    std::optional<size_t> first;
    std::string others;
    for (auto& key : x.keys) {
      auto at = places_.find(key);
      if (at == places_.end())
        continue;
      if (!first)
        first = at->second.line;
      else
        others += fmt::format("{}{}: {}", others.empty() ? " (" : ", ", key,
                              place_text(at->second.line));
    }
    auto& to = x.can_be_meant ? warnings_ : errors_;
    to.emplace(first.value_or(0),
               one_line(x.text + (others.empty() ? others : others + ")")));
  }

  std::string file_;
  std::string place_; // of what is set on top of it
  std::optional<uint64_t> world_;
  train_config config_;
  bool reading_command_line_ = false;
  /// False if the file could not be parsed at all.
  bool readable_ = true;
  std::map<std::string, place, std::less<>> places_;
  std::map<std::string, size_t, std::less<>> tables_;
  /// Names of tables whose value in the file is not a table.
  std::set<std::string, std::less<>> broken_tables_;
  /// Keys that are missing, or whose value is wrong by itself.
  std::set<std::string_view> wrong_;
  std::multimap<size_t, std::string> errors_;
  std::multimap<size_t, std::string> warnings_;
  size_t first_option_ = 0; // its line
};

} // namespace

config_report parse_config(const std::string& text, const std::string& name,
                           const std::vector<std::string>& overrides,
                           std::optional<uint64_t> world) {
  reader x{name, world};
  x.read_text(text);
  for (auto& setting : overrides)
    x.read_override(setting);
  x.check();
  return x.take();
}

config_report read_config(const std::string& path,
                          const std::vector<std::string>& overrides,
                          std::optional<uint64_t> world) {
  reader x{path, world};
  try {
    x.read_text(read_config_text(path));
    for (auto& setting : overrides)
      x.read_override(setting);
    x.check();
    x.resolve_paths();
  } catch (const error& e) {
    x.give_up(e.what());
  }
  return x.take();
}

namespace {

train_config config_of(config_report report) {
  if (report.errors.empty())
    return std::move(report.config);
  std::string text;
  for (auto& line : report.errors)
    text += (text.empty() ? "" : "\n") + line;
  throw error{error_code::config, text};
}

} // namespace

train_config load_config(const std::string& path,
                         const std::vector<std::string>& overrides) {
  return config_of(read_config(path, overrides));
}

train_config program_config(const std::string& text, const std::string& name,
                            const std::vector<std::string>& settings,
                            const std::string& place, uint64_t world) {
  reader x{name, world, place};
  x.read_text(text);
  for (auto& setting : settings)
    x.read_override(setting);
  x.check(false);
  auto result = config_of(x.take());
  if (result.tensorboard)
    throw config_error(
      fmt::format("{}: monitor.tensorboard = true has no effect here: only "
                  "smp-train knows what is to be written; a program writes its "
                  "own events, such as with torch.utils.tensorboard",
                  place));
  if (auto& x = result.monitor; !x.web.empty() || !x.prometheus.empty())
    throw config_error(
      fmt::format("{}: monitor.web and monitor.prometheus have no effect here: "
                  "a program is running by now; beside it, run `smp-inspect "
                  "RUN_DIR serve`",
                  place));
  return result;
}

train_config effective(train_config x) {
  x.smp.active_microbatches = effective_active_microbatches(x.smp,
                                                            x.smp.microbatches);
  x.smp.memory_weight = effective_memory_weight(x.smp);
  auto fill = [](auto& field, auto value) {
    if (!field)
      field = value;
  };
  fill(x.model.sequence_length, x.data.sequence_length);
  fill(x.model.vocabulary, 256);
  fill(x.model.decoder_layers, x.model.layers);
  fill(x.model.head_size, x.model.width / std::max<uint64_t>(x.model.heads, 1));
  fill(x.model.feed_forward, 4 * x.model.width);
  const auto& type = x.model.type;
  const bool gpt = type == "gpt" || type == "moe";
  fill(x.model.segments, type == "bert" ? 2 : 1);
  fill(x.model.norm_eps, gpt ? 1e-5 : type == "t5" ? 1e-6 : 1e-12);
  fill(x.model.tied, !gpt);
  fill(x.optimizer.loss_scale,
       loss_scale_setting{.dynamic = x.smp.fp16_params
                                     || x.train.dtype == "float16"});
  fill(x.optimizer.eps, x.optimizer.type == "adagrad" ? 1e-10 : 1e-8);
  fill(x.optimizer.weight_decay, x.optimizer.type == "adamw" ? 0.01 : 0.0);
  return x;
}

} // namespace smp
