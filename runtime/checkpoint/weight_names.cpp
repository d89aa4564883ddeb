#include "runtime/checkpoint/weight_names.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace smp {

namespace {

using names = std::vector<std::string>;
using known_names = std::set<std::string>;

/// Whether Hugging Face's code makes this tensor anew, whatever a file says.
bool is_computed(const tensor_outline& x) {
  auto ends = [&x](std::string_view end) { return x.name.ends_with(end); };
  auto& shape = x.shape;
  const auto is_mask = shape.size() == 4 && shape[0] == 1 && shape[1] == 1;
  return ((ends(".attn.bias") || ends(".attention.bias")) && is_mask)
         || ((ends(".attn.masked_bias") || ends(".attention.masked_bias"))
             && shape.empty())
         || ends("embeddings.position_ids") || ends(".rotary_emb.inv_freq");
}

/// @returns what completes `name` to names of the model: "transformer."
names beginnings_for(const std::string& name, const known_names& known) {
  names result;
  for (auto& x : known)
    if (x.ends_with('.' + name))
      result.push_back(x.substr(0, x.size() - name.size()));
  return result;
}

/// Adds what the names lack.
/// @returns whether the model knows all of them now
bool complete(names& xs, const known_names& known) {
  auto is_unknown = [&](auto& x) { return !x.empty() && !known.contains(x); };
  auto first = std::ranges::find_if(xs, is_unknown);
  if (first == xs.end())
    return true;
  names fitting;
  for (auto& begin : beginnings_for(*first, known))
    if (std::ranges::all_of(xs, [&](auto& x) {
          return is_unknown(x) ? known.contains(begin + x)
                               : !x.starts_with(begin);
        }))
      fitting.push_back(begin);
  if (fitting.size() != 1)
    return false; // a model of several such parts: which one is meant?
  for (auto& x : xs)
    if (is_unknown(x))
      x.insert(0, fitting.front());
  return true;
}

/// @returns the names without `prefix`, as far as they begin with it
names without(const names& xs, std::string_view prefix) {
  auto result = xs;
  for (auto& x : result)
    if (x.starts_with(prefix))
      x.erase(0, prefix.size());
  return result;
}

/// @returns the parts with which all names begin and without which the model
/// knows them; empty if there are none
std::string superfluous_beginning(const names& xs, const known_names& known) {
  auto first = std::ranges::find_if(xs, [](auto& x) { return !x.empty(); });
  if (first == xs.end())
    return {};
  for (auto dot = first->find('.'); dot != std::string::npos;
       dot = first->find('.', dot + 1)) {
    auto prefix = first->substr(0, dot + 1);
    if (!std::ranges::all_of(
          xs, [&](auto& x) { return x.empty() || x.starts_with(prefix); }))
      return {};
    if (auto rest = without(xs, prefix); complete(rest, known))
      return prefix;
  }
  return {};
}

} // namespace

names names_in_model(const std::vector<tensor_outline>& xs,
                     const known_names& known, const std::string& prefix,
                     const std::string& path) {
  names result;
  for (auto& x : xs)
    result.push_back(x.name);
  if (!prefix.empty() && std::ranges::none_of(result, [&](auto& x) {
        return x.starts_with(prefix);
      }))
    throw config_error(
      fmt::format("cannot load {}: none of its names begins with "
                  "train.init_prefix = \"{}\"",
                  path, prefix));
  result = without(result, prefix);
  for (size_t i = 0; i < xs.size(); ++i)
    if (is_computed(xs[i]) && !known.contains(result[i]))
      result[i].clear();
  if (complete(result, known))
    return result;
  if (auto begin = superfluous_beginning(result, known); !begin.empty())
    throw config_error(
      fmt::format("cannot load {}: all its names begin with \"{}\", and those "
                  "of the model do not; write train.init_prefix = \"{}\"",
                  path, prefix + begin, prefix + begin));
  return result;
}

} // namespace smp
