#include "runtime/config/config_schema.hpp"

#include "runtime/base/nearest_name.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

namespace smp {

namespace {

template <class... Fs>
struct overload : Fs... {
  using Fs::operator()...;
};

// Clang 14 needs it.
template <class... Fs>
overload(Fs...) -> overload<Fs...>;

// -- text of values -----------------------------------------------------------

std::string quoted_list(const std::vector<std::string_view>& xs) {
  std::string result;
  for (auto x : xs) {
    if (!result.empty())
      result += ", ";
    result += quoted(x);
  }
  return result;
}

/// Keeps the decimal point, or TOML would read the text as an integer.
std::string float_text(double x) {
  if (std::isnan(x))
    return "nan";
  if (std::isinf(x))
    return x > 0 ? "inf" : "-inf";
  auto result = fmt::format("{}", x);
  if (result.find_first_of(".e") == std::string::npos)
    result += ".0";
  return result;
}

// -- checks -------------------------------------------------------------------

bool within(const number_range& range, double x) {
  bool low = range.above_low ? x > range.low : x >= range.low;
  bool high = range.below_high ? x < range.high : x <= range.high;
  return low && high && std::isfinite(x); // NaN fails here at the latest
}

bool contains(const std::vector<std::string_view>& xs, std::string_view x) {
  return std::find(xs.begin(), xs.end(), x) != xs.end();
}

bool within(const config_key& key, const std::string& x) {
  return key.choices.empty() || contains(key.choices, x);
}

template <class T>
bool within(const config_key& key, const T& x) {
  return within(key.range, static_cast<double>(x));
}

bool within(const config_key&, bool) {
  return true;
}

bool within(const config_key&, const std::optional<bool>&) {
  return true;
}

bool within(const config_key& key, const std::vector<uint64_t>& xs) {
  return std::all_of(xs.begin(), xs.end(), [&](uint64_t x) {
    return within(key.range, static_cast<double>(x));
  });
}

bool within(const config_key& key, const std::map<std::string, uint64_t>& xs) {
  return std::all_of(xs.begin(), xs.end(), [&](auto& x) {
    return within(key.range, static_cast<double>(x.second));
  });
}

bool within(const config_key&, const std::vector<std::string>&) {
  return true;
}

bool within(const config_key& key, const std::array<double, 2>& x) {
  return within(key.range, x[0]) && within(key.range, x[1]);
}

bool within(const config_key&, const std::vector<task>&) {
  return true; // `conflicts` checks lists
}

bool within(const config_key& key, const std::optional<loss_scale_setting>& x) {
  return !x || x->dynamic || within(key.range, x->fixed);
}

template <class T>
bool within(const config_key& key, const std::optional<T>& x) {
  return !x || within(key.range, static_cast<double>(*x));
}

/// @returns the value of a string or bool key.
std::string plain_value(std::string_view name, train_config& x) {
  auto slot = find_config_key(name)->slot(x);
  if (auto flag = std::get_if<bool*>(&slot))
    return **flag ? "true" : "false";
  if (auto flag = std::get_if<std::optional<bool>*>(&slot))
    return **flag ? ***flag ? "true" : "false" : "auto";
  return *std::get<std::string*>(slot);
}

bool holds(const config_condition& condition, train_config x) {
  return contains(condition.values, plain_value(condition.key, x))
         || (!condition.or_key.empty()
             && plain_value(condition.or_key, x) == "true");
}

// -- nearest names ------------------------------------------------------------

std::string_view leaf(std::string_view name) {
  return name.substr(name.rfind('.') + 1); // npos + 1 is 0
}

std::string_view table(std::string_view name) {
  auto dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view{}
                                       : name.substr(0, dot);
}

constexpr size_t never = ~size_t{0};

/// How far the unknown name `x` is from a known name.
size_t distance_to_key(std::string_view x, std::string_view known) {
  auto leaves = typing_distance(folded_name(leaf(x)), folded_name(leaf(known)));
  auto tables = typing_distance(folded_name(table(x)),
                                folded_name(table(known)));
  if (leaves > typing_tolerance(leaf(x)))
    return never;
  // The right key in a wrong table is a typical slip, whatever the table.
  return leaves * 4 + std::min<size_t>(tables, 3);
}

const config_key* key_known_elsewhere_as(std::string_view x) {
  auto wanted = folded_name(leaf(x));
  const config_key* result = nullptr;
  for (auto& key : config_keys())
    for (auto name : key.elsewhere)
      if (folded_name(name) == wanted
          && (result == nullptr || table(key.name) == table(x)))
        result = &key;
  return result;
}

/// @returns "1 or more"
std::string text_of(const number_range& range) {
  auto low = range.above_low ? fmt::format("more than {}", range.low)
                             : fmt::format("{} or more", range.low);
  if (std::isinf(range.high))
    return low;
  if (range.below_high)
    return fmt::format("{}, less than {}", low, range.high);
  if (range.above_low)
    return fmt::format("{}, at most {}", low, range.high);
  return fmt::format("{} to {}", range.low, range.high);
}

} // namespace

std::string quoted(std::string_view x) {
  std::string result = "\"";
  for (unsigned char c : x) {
    if (c == '"' || c == '\\')
      result += {'\\', static_cast<char>(c)};
    else if (c < 0x20 || c == 0x7f)
      result += fmt::format("\\u{:04X}", static_cast<unsigned>(c));
    else
      result += static_cast<char>(c);
  }
  return result + '"';
}

bool is_integer(const config_key& key) {
  train_config x;
  auto slot = key.slot(x);
  return std::holds_alternative<uint64_t*>(slot)
         || std::holds_alternative<std::optional<uint64_t>*>(slot);
}

std::string_view type_text(const config_key& key) {
  train_config x;
  return std::visit(
    overload{
      [](bool*) { return "true or false"; },
      [](std::optional<bool>*) { return "true, false or \"auto\""; },
      [](std::vector<uint64_t>*) { return "a list of integers"; },
      [](std::vector<std::string>*) { return "a list of strings"; },
      [](uint64_t*) { return "an integer"; },
      [](std::optional<uint64_t>*) { return "an integer"; },
      [](double*) { return "a number"; },
      [](std::optional<double>*) { return "a number"; },
      [](std::optional<loss_scale_setting>*) {
        return "a number or \"dynamic\"";
      },
      [](std::string*) { return "a string"; },
      [](std::array<double, 2>*) { return "a list of two numbers"; },
      [](std::vector<task>*) {
        return "a list of [microbatch, \"forward\" or \"backward\"]";
      },
      [](std::map<std::string, uint64_t>*) { return "a table of integers"; },
    },
    key.slot(x));
}

std::string value_text(const config_key& key, const train_config& x) {
  auto copy = x; // slots give write access
  return std::visit(
    overload{
      [](bool* y) -> std::string { return *y ? "true" : "false"; },
      [&key](std::optional<bool>* y) -> std::string {
        if (*y)
          return **y ? "true" : "false";
        return key.fallback.empty() ? "\"auto\"" : "";
      },
      [](std::vector<uint64_t>* y) {
        return fmt::format("[{}]", fmt::join(*y, ", "));
      },
      [](std::vector<std::string>* y) {
        return "["
               + quoted_list(
                 std::vector<std::string_view>{y->begin(), y->end()})
               + "]";
      },
      [](uint64_t* y) { return fmt::format("{}", *y); },
      [](double* y) { return float_text(*y); },
      [](std::string* y) { return smp::quoted(std::string_view{*y}); },
      [](std::array<double, 2>* y) {
        return fmt::format("[{}, {}]", float_text((*y)[0]),
                           float_text((*y)[1]));
      },
      [](std::vector<task>* y) {
        std::string result;
        for (auto& z : *y)
          result += (result.empty() ? "" : ", ") + to_string(z);
        return "[" + result + "]";
      },
      [](std::map<std::string, uint64_t>* y) {
        std::string result;
        for (auto& [name, device] : *y)
          result += fmt::format("{}{} = {}", result.empty() ? "" : ", ",
                                smp::quoted(name), device);
        return "{" + result + "}";
      },
      [](std::optional<uint64_t>* y) {
        return *y ? fmt::format("{}", **y) : std::string{};
      },
      [](std::optional<double>* y) {
        return *y ? float_text(**y) : std::string{};
      },
      [](std::optional<loss_scale_setting>* y) {
        return !*y             ? std::string{}
               : (*y)->dynamic ? std::string{"\"dynamic\""}
                               : float_text((*y)->fixed);
      },
    },
    key.slot(copy));
}

std::string allowed_text(const config_key& key) {
  train_config x;
  auto nothing = [] { return std::string{}; };
  return std::visit(
    overload{
      [&](std::string*) { return quoted_list(key.choices); },
      [&](bool*) { return nothing(); },
      [&](std::optional<bool>*) { return nothing(); },
      [&](std::vector<std::string>*) { return nothing(); },
      [&](std::vector<task>*) { return nothing(); },
      [&](std::map<std::string, uint64_t>*) { return nothing(); },
      [&](std::optional<loss_scale_setting>*) {
        return text_of(key.range) + ", or \"dynamic\"";
      },
      [&](auto*) { return text_of(key.range); },
    },
    key.slot(x));
}

const config_condition* broken_condition(const config_key& key,
                                         const train_config& x) {
  for (auto& condition : key.only)
    if (!holds(condition, x))
      return &condition;
  return nullptr;
}

std::vector<std::string> wanted_settings(const config_condition& x) {
  train_config any;
  auto slot = find_config_key(x.key)->slot(any);
  std::vector<std::string> result;
  for (auto value : x.values) {
    auto flag = value == "true" || value == "false";
    auto written = flag ? std::string{value} : smp::quoted(value);
    result.push_back(std::holds_alternative<std::string*>(slot)
                       ? written
                       : fmt::format("{} = {}", x.key, written));
  }
  if (!x.or_key.empty())
    result.push_back(fmt::format("{} = true", x.or_key));
  return result;
}

std::string no_effect_text(const config_key& key,
                           const config_condition& broken,
                           const train_config& x, std::string_view place) {
  auto& other = *find_config_key(broken.key);
  return fmt::format("{} has no effect with {} = {}{}; it belongs to {}",
                     key.name, other.name, value_text(other, x),
                     place.empty() ? "" : fmt::format(" ({})", place),
                     fmt::join(wanted_settings(broken), ", "));
}

bool is_required(const config_key& key, const train_config& x) {
  return key.required && applies(key, x)
         && !(key.optional_if && holds(*key.optional_if, x));
}

bool may_be_folder(const config_key& key, const train_config& x) {
  return key.or_folder && (!key.folder_if || holds(*key.folder_if, x));
}

std::optional<std::string> check_value(const config_key& key,
                                       const train_config& x) {
  auto copy = x;
  auto slot = key.slot(copy);
  if (std::visit([&](auto* value) { return within(key, *value); }, slot))
    return std::nullopt;
  auto given = fmt::format("{} = {}", key.name, value_text(key, x));
  if (auto text = std::get_if<std::string*>(&slot)) {
    return fmt::format("{} is not known{}; allowed: {}", given,
                       hint_for_unknown_choice(key, **text),
                       quoted_list(key.choices));
  }
  return fmt::format("{} is out of range; allowed: {}", given,
                     allowed_text(key));
}

std::string hint_for_unknown_choice(const config_key& key,
                                    std::string_view value) {
  auto nearest = nearest_name(value, key.choices);
  return nearest.empty()
           ? std::string{}
           : fmt::format(" (did you mean {}?)", smp::quoted(nearest));
}

std::string_view key_meant_by(std::string_view name) {
  auto best = never;
  std::string_view nearest;
  auto consider = [&](std::string_view known) {
    if (auto d = distance_to_key(name, known); d < best) {
      best = d;
      nearest = known;
    }
  };
  for (auto& key : config_keys()) {
    consider(key.name);
    for (auto alias : key.aliases)
      consider(alias);
  }
  // A name that another system uses beats a name that only looks similar.
  if (best > 3)
    if (auto key = key_known_elsewhere_as(name))
      nearest = key->name;
  return nearest;
}

std::string hint_for_unknown_key(std::string_view name) {
  if (auto meant = key_meant_by(name); !meant.empty())
    return fmt::format("; did you mean {}?", meant);
  std::string known;
  for (auto& key : config_keys())
    if (table(key.name) == table(name))
      known += (known.empty() ? "" : ", ") + std::string{leaf(key.name)};
  if (!known.empty())
    return fmt::format("; keys of [{}]: {}", table(name), known);
  return hint_for_unknown_table(table(name));
}

std::string hint_for_unknown_table(std::string_view name) {
  std::vector<std::string_view> tables;
  std::string known;
  for (auto& key : config_keys()) {
    auto candidate = table(key.name);
    if (!tables.empty() && candidate == tables.back())
      continue;
    tables.push_back(candidate);
    known += fmt::format("{}[{}]", known.empty() ? "" : ", ", candidate);
  }
  auto nearest = nearest_name(name, tables);
  if (!nearest.empty())
    return fmt::format("; did you mean [{}]?", nearest);
  return fmt::format("; tables: {}", known);
}

} // namespace smp
