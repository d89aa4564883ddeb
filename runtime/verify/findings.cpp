#include "runtime/verify/findings.hpp"

#include "runtime/base/json_text.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>

namespace smp {

namespace {

using json = nlohmann::ordered_json;

/// JSON has no infinity: null stands for what is not finite.
json number(double x) {
  return std::isfinite(x) ? json(x) : json(nullptr);
}

template <class T>
json maybe(const std::optional<T>& x) {
  return x ? json(*x) : json(nullptr);
}

json object(const finding& x) {
  return {{"kind", to_string(x.kind)},
          {"step", x.step},
          {"module", x.module},
          {"tensor", x.tensor.empty() ? json(nullptr) : json(x.tensor)},
          {"microbatch", maybe(x.microbatch)},
          {"call", maybe(x.call)},
          {"rank", maybe(x.rank)},
          {"what", x.what},
          {"place", x.values.place},
          {"pipeline", x.values.pipeline},
          {"reference", x.values.reference},
          {"difference", number(x.values.difference)},
          {"bound", number(x.values.bound)},
          {"text", to_text(x)}};
}

json object(const tally& x) {
  return {{"compared", x.compared},
          {"largest_share_of_bound", number(x.share)},
          {"relative_difference", number(x.relative)},
          {"of", x.worst}};
}

std::string module_text(const std::string& x) {
  return x.empty() ? "the model's own code" : fmt::format("module '{}'", x);
}

std::string count_text(uint64_t n, const char* one, const char* many) {
  return fmt::format("{} {}", n, n == 1 ? one : many);
}

/// @returns "8 steps (5 recorded, 3 replayed)"
std::string steps_text(const verify_summary& x) {
  auto result = count_text(x.steps, "step", "steps");
  if (x.dynamic() == x.steps)
    return result;
  result += fmt::format(" ({} recorded, {} replayed", x.recorded, x.replayed);
  if (x.fell_back > 0)
    result += fmt::format(", {} diverged from the record", x.fell_back);
  return result + ')';
}

} // namespace

const char* to_string(finding_kind x) {
  switch (x) {
    case finding_kind::owner:
      return "owner";
    case finding_kind::microbatch:
      return "microbatch";
    case finding_kind::calls:
      return "calls";
    case finding_kind::argument:
      return "argument";
    case finding_kind::result:
      return "result";
    case finding_kind::loss:
      return "loss";
    case finding_kind::buffer:
      return "buffer";
    case finding_kind::seed:
      return "seed";
    case finding_kind::result_gradient:
      return "result gradient";
    case finding_kind::gradient:
      return "gradient";
    case finding_kind::norm:
      return "norm";
    case finding_kind::update:
      return "update";
  }
  return "unknown";
}

std::string to_text(const finding& x) {
  std::string where;
  auto add = [&where](const std::string& part) {
    where += (where.empty() ? "" : ", ") + part;
  };
  if (x.step > 0)
    add(fmt::format("step {}", x.step));
  if (x.microbatch)
    add(fmt::format("microbatch {}", *x.microbatch));
  add(module_text(x.module));
  if (x.call && *x.call > 0)
    add(fmt::format("call {}", *x.call + 1));
  if (x.rank)
    add(fmt::format("rank {}", *x.rank));
  auto result = fmt::format("{}: {}", where, x.what);
  if (!x.values.place.empty())
    result += fmt::format(", {}", x.values.place);
  result += fmt::format(": {} instead of {}", x.values.pipeline,
                        x.values.reference);
  if (std::isfinite(x.values.difference))
    result += fmt::format(" (off by {:.3g}, allowed {:.3g})",
                          x.values.difference, x.values.bound);
  return result;
}

void tally::add(const std::string& name, const comparison& x) {
  ++compared;
  if (worst.empty() || x.share > share) {
    share = x.share;
    relative = x.relative;
    worst = name;
  }
}

void verify_summary::add(finding x) {
  ++differences;
  if (findings.size() < max_findings)
    findings.push_back(std::move(x));
}

std::string to_json(const verify_summary& x) {
  auto list = json::array();
  for (auto& f : x.findings)
    list.push_back(object(f));
  json result = {
    {"equal", x.equal()},
    {"steps", x.steps},
    {"dynamic", x.dynamic()},
    {"recorded", x.recorded},
    {"replayed", x.replayed},
    {"fell_back", x.fell_back},
    {"ranks", x.ranks},
    {"requests", x.requests},
    {"shared", x.shared},
    {"replicas", x.replicas},
    {"microbatches", x.microbatches},
    {"modules", x.modules},
    {"calls", x.calls},
    {"owned", x.owned},
    {"arguments", x.arguments},
    {"results", x.results},
    {"result_gradients", x.result_gradients},
    {"losses", object(x.losses)},
    {"gradients", object(x.gradients)},
    {"updates", object(x.updates)},
    {"buffers", object(x.buffers)},
    {"differences", x.differences},
    {"first", x.equal() ? json(nullptr) : object(x.findings.front())},
    {"findings", std::move(list)},
  };
  return json_text(result, 2) + "\n";
}

void compare_held_out(uint64_t step, double pipeline, double reference,
                      const tolerance& allowed, verify_summary& result) {
  auto wrong = compare_numbers(pipeline, reference, allowed);
  if (!wrong)
    return;
  finding found;
  found.kind = finding_kind::loss;
  found.step = step;
  found.what = "loss of the held-out data, in evaluation mode";
  found.values = *wrong;
  result.add(std::move(found));
}

std::string to_text(const verify_summary& x, std::string_view way) {
  if (!x.equal())
    return fmt::format("different: {} in {}; the first: {}",
                       count_text(x.differences, "difference", "differences"),
                       steps_text(x), to_text(x.findings.front()));
  auto result = fmt::format(
    "equal: {}, {} of {}, {}, {}, {}, {}", steps_text(x),
    count_text(x.calls, "call", "calls"),
    count_text(x.modules, "module", "modules"),
    count_text(x.losses.compared, "loss", "losses"),
    count_text(x.gradients.compared, "gradient", "gradients"),
    count_text(x.updates.compared, "update", "updates"),
    count_text(x.buffers.compared, "buffer", "buffers"));
  auto* worst = &x.losses;
  for (auto* t : {&x.gradients, &x.updates, &x.buffers})
    if (t->share > worst->share)
      worst = t;
  if (worst->share > 0)
    result += fmt::format(
      "; largest difference {:.2g} % of what is allowed "
      "({}, relative {:.2g})",
      100 * worst->share, worst->worst, worst->relative);
  else
    result += "; bit for bit";
  if (x.ranks == 1)
    result += "; one rank: nothing was split, and nothing of it compared";
  else if (x.requests == 0 && x.shared == 0 && x.replicas > 1)
    result += fmt::format(
      "; but no module runs on another rank than its caller: of what crosses "
      "ranks only the replicas' averages were compared ({})",
      way);
  else if (x.requests == 0 && x.shared == 0)
    result += fmt::format(
      "; but no module runs on another rank than its caller: nothing that "
      "crosses ranks was compared ({})",
      way);
  return result;
}

} // namespace smp
