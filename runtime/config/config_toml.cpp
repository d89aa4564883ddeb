#include "runtime/config/config_toml.hpp"

#include "runtime/files/file_io.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace smp {

namespace {

constexpr size_t max_file_size = 1 << 20;

/// Stores a TOML value; @returns false if it has another type.
struct assigner {
  const toml::node& from;

  bool operator()(bool* to) const {
    return take<bool>(to);
  }

  bool operator()(std::string* to) const {
    return take<std::string>(to);
  }

  /// The caller checks for negative numbers.
  bool operator()(uint64_t* to) const {
    auto x = from.as_integer();
    if (x == nullptr)
      return false;
    *to = static_cast<uint64_t>(x->get());
    return true;
  }

  bool operator()(double* to) const {
    if (auto x = from.as_integer())
      *to = static_cast<double>(x->get());
    else if (auto y = from.as_floating_point())
      *to = y->get();
    else
      return false;
    return true;
  }

  bool operator()(std::array<double, 2>* to) const {
    auto list = from.as_array();
    return list != nullptr && list->size() == 2
           && assigner{*list->get(0)}(&(*to)[0])
           && assigner{*list->get(1)}(&(*to)[1]);
  }

  bool operator()(task* to) const {
    auto list = from.as_array();
    std::string what;
    if (list == nullptr || list->size() != 2
        || !assigner{*list->get(0)}(&to->microbatch.value)
        || list->get(0)->as_integer()->get() < 0
        || !assigner{*list->get(1)}(&what)
        || (what != "forward" && what != "backward"))
      return false;
    to->what = what == "forward" ? phase::forward : phase::backward;
    return true;
  }

  bool operator()(std::vector<task>* to) const {
    auto list = from.as_array();
    if (list == nullptr)
      return false;
    std::vector<task> result(list->size());
    for (size_t i = 0; i < result.size(); ++i)
      if (!assigner{*list->get(i)}(&result[i]))
        return false;
    *to = std::move(result);
    return true;
  }

  bool operator()(std::vector<uint64_t>* to) const {
    auto list = from.as_array();
    if (list == nullptr)
      return false;
    to->clear();
    for (auto& x : *list)
      // As an unsigned number, a negative one would look like a huge one.
      if (auto y = x.as_integer(); y != nullptr && y->get() >= 0)
        to->push_back(static_cast<uint64_t>(y->get()));
      else
        return false;
    return true;
  }

  bool operator()(std::vector<std::string>* to) const {
    auto list = from.as_array();
    if (list == nullptr)
      return false;
    to->assign(list->size(), {});
    for (size_t i = 0; i < to->size(); ++i)
      if (!assigner{*list->get(i)}(&(*to)[i]))
        return false;
    return true;
  }

  /// Names may be written with dots or quotes: a.b = 1, "a.b" = 1.
  bool operator()(std::map<std::string, uint64_t>* to) const {
    to->clear();
    auto table = from.as_table();
    return table != nullptr && add(*table, "", *to);
  }

  bool operator()(std::optional<bool>* to) const {
    bool x = false;
    if (std::string text; (*this)(&text) && text == "auto")
      *to = std::nullopt;
    else if ((*this)(&x))
      *to = x;
    else
      return false;
    return true;
  }

  bool operator()(std::optional<loss_scale_setting>* to) const {
    loss_scale_setting x;
    std::string text;
    x.dynamic = (*this)(&text);
    if (x.dynamic ? text != "dynamic" : !(*this)(&x.fixed))
      return false;
    *to = x;
    return true;
  }

  template <class T>
  bool operator()(std::optional<T>* to) const {
    T x{};
    if (!(*this)(&x))
      return false;
    *to = x;
    return true;
  }

private:
  static bool add(const toml::table& from, const std::string& prefix,
                  std::map<std::string, uint64_t>& to) {
    for (auto&& [key, node] : from) {
      auto name = prefix + std::string{key.str()};
      auto inner = node.as_table();
      auto x = node.as_integer();
      if (inner ? !add(*inner, name + ".", to)
                : x == nullptr || x->get() < 0
                    || !to.emplace(name, x->get()).second)
        return false;
    }
    return true;
  }

  template <class T>
  bool take(T* to) const {
    auto x = from.as<T>();
    if (x == nullptr)
      return false;
    *to = x->get();
    return true;
  }
};

} // namespace

bool assign(config_slot to, const toml::node& from) {
  return std::visit(assigner{from}, to);
}

std::optional<std::string> option_text(const toml::node& x) {
  switch (x.type()) {
    case toml::node_type::string:
      return x.ref<std::string>();
    case toml::node_type::integer:
      return fmt::format("{}", x.ref<int64_t>());
    case toml::node_type::floating_point:
      return fmt::format("{}", x.ref<double>());
    case toml::node_type::boolean:
      return x.ref<bool>() ? "true" : "false";
    default:
      return std::nullopt;
  }
}

std::string given_text(const toml::node& x) {
  switch (x.type()) {
    case toml::node_type::table:
      return "a table";
    case toml::node_type::array:
      return "a list";
    case toml::node_type::string:
      return fmt::format("the string \"{}\"", x.ref<std::string>());
    case toml::node_type::integer:
      return fmt::format("the integer {}", x.ref<int64_t>());
    case toml::node_type::floating_point:
      return fmt::format("the number {}", x.ref<double>());
    case toml::node_type::boolean:
      return x.ref<bool>() ? "true" : "false";
    default:
      return "a date or time";
  }
}

toml::table parse_setting(const std::string& text, bool raw) {
  try {
    if (auto root = toml::parse("x = " + text);
        !raw && root.size() == 1 && root.contains("x"))
      return root;
  } catch (const toml::parse_error&) {
    // nop
  }
  toml::table result;
  result.insert("x", text);
  return result;
}

std::string read_config_text(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    throw error{error_code::config, "is a directory, not a configuration"};
  auto result = try_read(path, max_file_size + 1);
  if (!result)
    throw error{error_code::config,
                fmt::format("cannot be read: {}", strerror(errno))};
  if (result->size() > max_file_size)
    throw error{error_code::config,
                "is larger than 1 MiB: not a configuration"};
  return std::move(*result);
}

} // namespace smp
