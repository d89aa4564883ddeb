#include "partition/print.hpp"

#include "partition/short_type.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

namespace smp {

namespace {

constexpr size_t max_depth = 12;
constexpr size_t max_reasons = 8;
constexpr size_t max_bars = 4;
constexpr size_t screen_width = 80;
constexpr size_t bar_width = 20;
constexpr size_t min_bar_width = 8;

// -- text ---------------------------------------------------------------------

std::string left(std::string x, size_t width) {
  x.resize(std::max(x.size(), width), ' ');
  return x;
}

std::string trimmed(std::string x) {
  x.resize(x.find_last_not_of(' ') + 1);
  return x;
}

std::string right(const std::string& x, size_t width) {
  return std::string(width - std::min(width, x.size()), ' ') + x;
}

std::string format(const char* pattern, double x) {
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), pattern, x);
  return buffer;
}

std::string percent(double x) {
  return format("%.1f %%", 100 * x);
}

/// "65,536", "3.15 M", "11.3 B", or "-" for none.
std::string count(uint64_t x) {
  if (x == 0)
    return "-";
  auto value = static_cast<double>(x);
  // With three digits, a value that rounds up to 1000 gets the next unit.
  if (value >= 999.5e9)
    return format("%.3g T", value / 1e12);
  if (value >= 999.5e6)
    return format("%.3g B", value / 1e9);
  if (value >= 1e6)
    return format("%.3g M", value / 1e6);
  auto result = std::to_string(x);
  if (result.size() > 3)
    result.insert(result.size() - 3, ",");
  return result;
}

std::string bytes(uint64_t x) {
  auto value = static_cast<double>(x);
  if (value >= 999.5e6)
    return format("%.3g GB", value / 1e9);
  if (value >= 999.5e3)
    return format("%.3g MB", value / 1e6);
  return value >= 1e3 ? format("%.3g KB", value / 1e3)
                      : std::to_string(x) + " bytes";
}

std::string calls(uint64_t x) {
  return std::to_string(x) + (x == 1 ? " call" : " calls");
}

/// Cuts out the middle of a text that is too long.
std::string shortened(std::string x, size_t width) {
  if (x.size() <= width)
    return x;
  auto tail = (width - 2) / 2;
  return x.substr(0, width - 2 - tail) + ".." + x.substr(x.size() - tail);
}

/// Breaks a paragraph into lines that fit, the later ones indented.
std::string wrapped(const std::string& x, size_t indent) {
  std::string result;
  size_t begin = 0;
  for (auto width = screen_width; x.size() - begin > width;
       width = screen_width - indent) {
    auto space = x.rfind(' ', begin + width);
    if (space == std::string::npos || space <= begin)
      space = x.find(' ', begin + width);
    if (space == std::string::npos)
      break;
    result += x.substr(begin, space - begin) + '\n' + std::string(indent, ' ');
    begin = space + 1;
  }
  return result + x.substr(begin) + '\n';
}

/// A bar of whole and eighth blocks.
std::string bar(double share, size_t width = bar_width) {
  static constexpr const char* parts[] = {"",  "▏", "▎", "▍",
                                          "▌", "▋", "▊", "▉"};
  auto eighths = std::lround(share * static_cast<double>(width) * 8);
  std::string result;
  for (; eighths >= 8; eighths -= 8)
    result += "█";
  return result + parts[eighths];
}

// -- tree ---------------------------------------------------------------------

struct line {
  std::string name;
  std::string type;
  uint64_t parameters = 0;
  double share = 0;
  uint32_t device = 0;
  std::string devices;
};

/// How wide the columns of some lines are, so that a line fits the screen.
struct columns {
  columns(const line& head, const std::vector<line>& lines)
    : names(head.name.size()),
      types(head.type.size()),
      devices(head.devices.size()) {
    for (auto& x : lines) {
      names = std::max(names, x.name.size());
      types = std::max(types, x.type.size());
      devices = std::max(devices, x.devices.size());
      with_types |= !x.type.empty();
      with_parameters |= x.parameters > 0;
    }
    // Bars take the remaining width, of which names leave some.
    auto shrink = [this](size_t& x, size_t least) {
      auto most = screen_width - min_bar_width;
      if (used() > most)
        x = std::max(std::min(x, least), x - std::min(x, used() - most));
    };
    shrink(types, 10);
    shrink(names, 24);
  }

  /// @returns the columns before the cost
  std::string start(const line& x, const std::string& parameters) const {
    auto result = "  " + left(shortened(x.name, names), names);
    if (with_types)
      result += "  " + left(shortened(x.type, types), types);
    if (with_parameters)
      result += "  " + right(parameters, 7);
    return result + "  ";
  }

  size_t bars() const {
    return std::min(bar_width, screen_width - std::min(used(), screen_width));
  }

  /// All columns but the bars.
  size_t used() const {
    return 2 + names + (with_types ? 2 + types : 0)
           + (with_parameters ? 2 + 7 : 0) + 2 + 7 + 2 + devices + 2;
  }

  size_t names;
  size_t types;
  size_t devices;
  // Trees given as data have neither types nor parameters.
  bool with_types = false;
  bool with_parameters = false;
};

class printer {
public:
  printer(const model_info& model, const partition_plan& plan,
          const print_options& options)
    : model_(model),
      plan_(plan),
      options_(options),
      uniform_(plan.tree.size(), true),
      parameters_(plan.tree.size()) {
    auto& tree = plan.tree;
    for (size_t i = tree.size(); i-- > 0;) {
      parameters_[i] += tree[i].parameters;
      if (i == 0)
        break;
      auto up = tree[i].parent;
      parameters_[up] += parameters_[i];
      uniform_[up] = uniform_[up] && uniform_[i]
                     && plan.node_device[i] == plan.node_device[up];
    }
  }

  std::string run() {
    print_head();
    print_tree();
    print_loads();
    for (auto& x : plan_.warnings)
      out_ += wrapped("warning: " + x, 9);
    print_reasons();
    return std::move(out_);
  }

private:
  // -- lines of the tree ------------------------------------------------------

  void print_head() {
    auto& x = plan_.options;
    auto devices = x.manual.devices;
    out_ += "partition: " + std::to_string(model_.size()) + " modules over "
            + std::to_string(devices) + (devices == 1 ? " device" : " devices");
    if (!x.manual.automatic)
      out_ += ", placed by hand";
    else
      out_ += std::string{x.strategy == partition_strategy::paper
                            ? ", strategy paper"
                            : ", strategy balanced"}
              + format(", memory weight %g", x.memory_weight);
    out_ += '\n';
    if (!x.basis.empty())
      out_ += wrapped("costs: " + x.basis, 7);
  }

  void print_tree() {
    auto depth = max_depth;
    auto lines = collect(depth, false);
    if (lines.size() > options_.max_lines)
      lines = collect(depth, true);
    while (lines.size() > options_.max_lines && depth > 1)
      lines = collect(--depth, true);
    size_t hidden = 0;
    if (lines.size() > options_.max_lines) {
      hidden = lines.size() - options_.max_lines;
      lines.resize(options_.max_lines);
    }
    line head{"module", "type", 0, 0, 0, "device"};
    columns widths{head, lines};
    out_ += widths.start(head, "params") + "   cost  device\n";
    for (auto& x : lines)
      out_ += widths.start(x, count(x.parameters)) + right(percent(x.share), 7)
              + "  "
              + paint(x.device, trimmed(left(x.devices, widths.devices) + "  "
                                        + bar(x.share, widths.bars())))
              + '\n';
    if (hidden > 0)
      out_ += "  and " + std::to_string(hidden) + " more\n";
    if (small_ > 0)
      out_ += "  and " + std::to_string(small_)
              + (small_ == 1 ? " small one with its parent\n"
                             : " small ones with their parents\n");
  }

  std::vector<line> collect(size_t depth, bool without_small) {
    std::vector<line> result;
    without_small_ = without_small;
    small_ = 0;
    add(result, std::vector<size_t>{0}, 0, depth);
    return result;
  }

  /// Adds the line of equal siblings, and lines for the nodes below if these
  /// are on several devices.
  void add(std::vector<line>& lines, const std::vector<size_t>& nodes,
           size_t level, size_t depth) {
    auto& tree = plan_.tree;
    line x;
    auto first = nodes.front();
    x.name = std::string(2 * level, ' ') + label(nodes);
    x.type = short_type(type_of(first));
    if (nodes.size() > 1 && !x.type.empty())
      x.type = std::to_string(nodes.size()) + " x " + x.type;
    x.device = plan_.node_device[first];
    auto open = !uniform_[first] && level < depth;
    std::set<uint32_t> devices{x.device};
    exact_cost cost = 0;
    for (auto i : nodes) {
      x.parameters += parameters_[i];
      cost += plan_.costs.subtree(i);
      if (!open)
        devices.insert(plan_.node_device.begin() + i,
                       plan_.node_device.begin() + tree[i].subtree_end);
    }
    x.share = plan_.costs.share(cost);
    x.devices = list(devices);
    lines.push_back(x);
    if (!open)
      return;
    auto& children = tree[first].children;
    for (size_t i = 0; i < children.size();) {
      std::vector<size_t> alike{children[i++]};
      while (i < children.size() && continues(alike, children[i]))
        alike.push_back(children[i++]);
      if (without_small_ && is_small(alike, x.device))
        small_ += alike.size();
      else
        add(lines, alike, level + 1, depth);
    }
  }

  /// Whether nodes are with their parent and too small for a line.
  bool is_small(const std::vector<size_t>& nodes, uint32_t device) const {
    constexpr double small = 0.005;
    exact_cost cost = 0;
    for (auto i : nodes)
      cost += plan_.costs.subtree(i);
    return uniform_[nodes.front()] && plan_.node_device[nodes.front()] == device
           && plan_.costs.share(cost) < small;
  }

  /// Whether `next` is of the same kind and on the same device as `nodes`.
  bool continues(const std::vector<size_t>& nodes, size_t next) const {
    auto last = nodes.back();
    return uniform_[last] && uniform_[next]
           && plan_.node_device[last] == plan_.node_device[next]
           && type_of(last) == type_of(next) && number_of(last) >= 0
           && number_of(next) == number_of(last) + 1;
  }

  std::string type_of(size_t node) const {
    return model_[plan_.tree[node].modules[0].value].type;
  }

  /// @returns the number at the end of the name, or -1.
  int64_t number_of(size_t node) const {
    auto& path = model_[plan_.tree[node].modules[0].value].path;
    auto digits = path.substr(path.find_last_not_of("0123456789") + 1);
    return digits.empty() || digits.size() > 9 ? -1 : std::stoll(digits);
  }

  /// The name as seen from the parent, "wte = lm_head" for modules that share
  /// parameters, "h.0-3" for a run of siblings.
  std::string label(const std::vector<size_t>& nodes) const {
    auto first = nodes.front();
    if (first == 0)
      return "model";
    auto result = relative(first, plan_.tree[first].modules[0]);
    if (nodes.size() > 1)
      return result + "-" + std::to_string(number_of(nodes.back()));
    auto names = partners_of(first);
    if (names.size() > 2)
      return result + " and " + std::to_string(names.size())
             + " that share with it";
    for (auto x : names)
      result += " = " + relative(first, x);
    return result;
  }

  std::string relative(size_t node, module_id x) const {
    auto up = plan_.tree[node].parent;
    auto prefix = model_[plan_.tree[up].modules[0].value].path + ".";
    auto& path = model_[x.value].path;
    return prefix.size() > 1 && path.starts_with(prefix)
             ? path.substr(prefix.size())
             : path;
  }

  /// Modules that are in the node because they share a tensor.
  std::vector<module_id> partners_of(size_t node) const {
    std::vector<module_id> result;
    auto& xs = plan_.tree[node].modules;
    if (xs.size() == 1)
      return result;
    for (auto& merge : plan_.tree.merges())
      if (merge.is_shared() && plan_.tree.node_of(merge.module) == node
          && std::find(result.begin(), result.end(), merge.module)
               == result.end())
        result.push_back(merge.module);
    return result;
  }

  // -- loads and reasons ------------------------------------------------------

  void print_loads() {
    auto& xs = plan_.loads;
    auto many = xs.size() > max_bars;
    for (size_t i = 0; i < xs.size(); ++i) {
      auto device = static_cast<uint32_t>(i);
      auto text = right(std::to_string(i), 3) + right(percent(xs[i]), 8);
      if (!many)
        text = trimmed(text + "  " + bar(xs[i]));
      if (!many || i % 5 == 0)
        out_ += i == 0 ? "load of" : "       ";
      out_ += paint(device, text)
              + (!many || i % 5 == 4 || i + 1 == xs.size() ? "\n" : "  ");
    }
    auto& x = plan_.score;
    auto text = "largest load " + percent(x.max_load) + " (even: "
                + percent(1 / static_cast<double>(xs.size())) + "), "
                + calls(x.requests) + (x.requests == 1 ? " crosses" : " cross");
    if (x.bytes > 0)
      text += " with " + bytes(x.bytes);
    out_ += wrapped(text + " per microbatch and phase", 2);
    auto& y = plan_.paper;
    if (plan_.options.strategy == partition_strategy::balanced
        && plan_.options.manual.automatic
        && (x.max_load != y.max_load || x.requests != y.requests))
      out_ += "strategy paper: largest load " + percent(y.max_load) + ", "
              + calls(y.requests) + "\n";
  }

  void print_reasons() {
    auto& xs = plan_.reasons;
    auto shown = xs.size() > max_reasons ? max_reasons - 1 : xs.size();
    for (size_t i = 0; i < shown; ++i)
      out_ += wrapped("note: " + xs[i], 6);
    if (shown < xs.size())
      out_ += "note: and " + std::to_string(xs.size() - shown)
              + " more of this kind\n";
  }

  /// "0", "0-3", "0,2,5"
  static std::string list(const std::set<uint32_t>& xs) {
    auto span = *xs.rbegin() - *xs.begin() + 1;
    if (span == xs.size() && span > 2)
      return std::to_string(*xs.begin()) + "-" + std::to_string(*xs.rbegin());
    std::string result;
    for (auto x : xs)
      result += (result.empty() ? "" : ",") + std::to_string(x);
    return result;
  }

  std::string paint(uint32_t device, const std::string& x) const {
    static constexpr int colours[] = {36, 33, 35, 32, 34, 31};
    if (!options_.colour)
      return x;
    return "\x1b[" + std::to_string(colours[device % std::size(colours)]) + "m"
           + x + "\x1b[0m";
  }

  const model_info& model_;
  const partition_plan& plan_;
  const print_options& options_;
  std::vector<bool> uniform_;        // is the subtree on one device?
  std::vector<uint64_t> parameters_; // of subtrees
  bool without_small_ = false;
  size_t small_ = 0; // modules that were left out
  std::string out_;
};

} // namespace

std::string print_partition(const model_info& model, const partition_plan& plan,
                            const print_options& options) {
  return printer{model, plan, options}.run();
}

std::string without_colours(std::string x) {
  for (size_t begin; (begin = x.find("\x1b[")) != std::string::npos;)
    x.erase(begin, x.find('m', begin) - begin + 1);
  return x;
}

} // namespace smp
