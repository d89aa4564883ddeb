#include "runtime/verify/step_comparison.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <tuple>

namespace smp {

namespace {

/// @returns how `a` differs from `b`, the reference's; nothing if it equals it.
/// A number that is not finite equals only itself
std::optional<mismatch> compare_numbers(double a, double b,
                                        const tolerance& allowed) {
  auto bound = allowed.bound(std::abs(b));
  auto close = std::isfinite(b) && std::abs(a - b) <= bound;
  if (a == b || (std::isnan(a) && std::isnan(b)) || close)
    return std::nullopt;
  return mismatch{"", number_text(a), number_text(b), std::abs(a - b), bound};
}

std::string parent_of(const std::string& path) {
  auto dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

mismatch count_mismatch(uint64_t pipeline, uint64_t reference) {
  return {"", fmt::format("{}", pipeline), fmt::format("{}", reference),
          infinity, 0};
}

class comparer {
public:
  comparer(const step_comparison_input& x, verify_summary& result)
    : in_(x), mine_(x.pipeline.log), theirs_(x.reference.log), result_(result) {
    for (auto& c : mine_.calls) {
      calls_.emplace(key_of(c), &c);
      ++counts_[{c.microbatch, c.module}];
    }
    for (auto& c : theirs_.calls) {
      if (in_.inside.contains(c.module))
        continue;
      ++expected_[{c.microbatch, c.module}];
      ordered_.push_back(&c);
    }
    std::sort(ordered_.begin(), ordered_.end(),
              [](auto* a, auto* b) { return a->ended < b->ended; });
    find_backward_order();
  }

  void run() {
    passes();
    forward();
    losses();
    buffers();
    seeds();
    backward();
    norm();
    updates();
  }

private:
  using key = std::tuple<uint64_t, std::string, uint64_t>;
  using count_key = std::pair<uint64_t, std::string>;

  static key key_of(const logged_call& c) {
    return {c.microbatch, c.module, c.number};
  }

  finding make(finding_kind kind, const std::string& module, std::string what,
               mismatch values) {
    finding result;
    result.kind = kind;
    result.step = in_.step;
    result.module = module;
    result.what = std::move(what);
    result.values = std::move(values);
    return result;
  }

  finding make(finding_kind kind, const logged_call& c, std::string what,
               mismatch values) {
    auto result = make(kind, c.module, std::move(what), std::move(values));
    result.microbatch = c.microbatch;
    result.call = c.number;
    return result;
  }

  // -- microbatches -----------------------------------------------------------

  std::vector<const logged_pass*> passes_of(uint64_t microbatch) const {
    std::vector<const logged_pass*> result;
    for (auto& p : mine_.passes)
      if (p.microbatch == microbatch)
        result.push_back(&p);
    return result;
  }

  const logged_pass* expected_pass(uint64_t microbatch) const {
    for (auto& p : theirs_.passes)
      if (p.microbatch == microbatch)
        return &p;
    return nullptr;
  }

  /// The first module that a microbatch reaches.
  std::string entrance(uint64_t microbatch) const {
    const logged_call* result = nullptr;
    for (auto* c : ordered_)
      if (c->microbatch == microbatch && (!result || c->begun < result->begun))
        result = c;
    return result ? result->module : std::string{};
  }

  /// The module that backward reaches first.
  std::string exit(uint64_t microbatch) const {
    const logged_call* result = nullptr;
    uint64_t first = 0;
    for (auto* c : ordered_)
      for (auto& g : c->gradients)
        // Of calls that return the same tensor, the innermost counts.
        if (c->microbatch == microbatch && (!result || g.order < first)) {
          result = c;
          first = g.order;
        }
    return result ? result->module : std::string{};
  }

  void passes() {
    for (uint64_t m = 0; m < in_.microbatches; ++m) {
      auto mine = passes_of(m);
      auto* expected = expected_pass(m);
      auto add = [&](std::string what, mismatch values) {
        auto f = make(finding_kind::microbatch, entrance(m), std::move(what),
                      std::move(values));
        f.microbatch = m;
        result_.add(std::move(f));
      };
      if (mine.size() != 1)
        add(mine.empty() ? "the microbatch was lost; its forward passes"
                         : "the microbatch ran again; its forward passes",
            count_mismatch(mine.size(), 1));
      else if (expected && mine[0]->inputs != expected->inputs)
        add(data_text(*mine[0], m), data_mismatch(*mine[0], *expected));
    }
    for (auto& p : mine_.passes)
      if (p.microbatch >= in_.microbatches) {
        auto f = make(finding_kind::microbatch, "",
                      "a microbatch that does not exist; its forward passes",
                      count_mismatch(1, 0));
        f.microbatch = p.microbatch;
        result_.add(std::move(f));
      }
  }

  /// @returns what went wrong with the data of a microbatch
  std::string data_text(const logged_pass& mine, uint64_t microbatch) const {
    for (auto& p : theirs_.passes)
      if (p.microbatch != microbatch && p.inputs == mine.inputs)
        return fmt::format(
          "its data was lost, that of microbatch {} came "
          "twice; the data",
          p.microbatch);
    return "the data";
  }

  static mismatch data_mismatch(const logged_pass& mine,
                                const logged_pass& theirs) {
    for (size_t i = 0; i < std::min(mine.inputs.size(), theirs.inputs.size());
         ++i)
      if (auto x = compare_digests(mine.inputs[i], theirs.inputs[i], {0, 0}))
        return *x;
    return count_mismatch(mine.inputs.size(), theirs.inputs.size());
  }

  // -- forward ----------------------------------------------------------------

  void forward() {
    std::set<count_key> told;
    std::set<std::string> modules;
    for (auto& [k, n] : expected_)
      modules.insert(k.second);
    result_.modules = std::max<uint64_t>(result_.modules, modules.size());
    std::vector<std::pair<uint64_t, const logged_call*>> events;
    for (auto* c : ordered_) {
      ++result_.calls;
      if (passes_of(c->microbatch).empty())
        continue; // lost as a whole
      events.emplace_back(c->begun, c);
      events.emplace_back(c->ended, c);
    }
    std::sort(events.begin(), events.end());
    for (auto& [at, c] : events) {
      auto i = calls_.find(key_of(*c));
      if (at == c->begun) {
        if (i != calls_.end())
          compare_arguments(*i->second, *c);
        else if (!is_inside_missing(*c))
          tell_count(*c, told);
      } else if (i != calls_.end()) {
        compare_results(*i->second, *c);
        auto k = count_key{c->microbatch, c->module};
        if (c->number + 1 == expected_[k] && counts_[k] > expected_[k])
          tell_count(*c, told);
      }
    }
    // Unless the calls of the reference cannot be observed.
    for (auto& c : mine_.calls)
      if (!expected_.empty() && !expected_.contains({c.microbatch, c.module}))
        tell_count(c, told);
  }

  /// If a module did not run, neither did what is inside it.
  bool is_inside_missing(const logged_call& c) const {
    return c.outer && !calls_.contains(key_of(theirs_.calls[*c.outer]));
  }

  void tell_count(const logged_call& c, std::set<count_key>& told) {
    auto k = count_key{c.microbatch, c.module};
    if (!told.insert(k).second)
      return;
    auto f = make(finding_kind::calls, c.module, "number of calls",
                  count_mismatch(counts_[k], expected_[k]));
    f.microbatch = c.microbatch;
    result_.add(std::move(f));
  }

  void compare_arguments(const logged_call& mine, const logged_call& theirs) {
    // Tensors that are one object in one run may be two in the other.
    if (mine.arguments.size() != theirs.arguments.size())
      return;
    auto [around, same_rank] = code_around(mine, theirs);
    auto what = same_rank
                  ? fmt::format("what it gives '{}' as argument", theirs.module)
                  : std::string{"argument"};
    result_.arguments += compare_all(finding_kind::argument, what,
                                     same_rank ? around : mine, mine.arguments,
                                     theirs.arguments);
  }

  /// @returns the call whose code made this call, and whether the same rank
  /// ran both
  std::pair<logged_call, bool> code_around(const logged_call& mine,
                                           const logged_call& theirs) const {
    if (!theirs.outer) {
      logged_call root;
      root.microbatch = mine.microbatch;
      root.rank = in_.root_rank;
      return {root, mine.rank == in_.root_rank};
    }
    auto i = calls_.find(key_of(theirs_.calls[*theirs.outer]));
    if (i == calls_.end())
      return {{}, false};
    logged_call around;
    around.module = i->second->module;
    around.microbatch = mine.microbatch;
    around.number = i->second->number;
    around.rank = i->second->rank;
    return {around, mine.rank == around.rank};
  }

  void compare_results(const logged_call& mine, const logged_call& theirs) {
    if (mine.results.size() != theirs.results.size())
      add_call(finding_kind::result, mine, "number of tensors in the result",
               count_mismatch(mine.results.size(), theirs.results.size()));
    else
      result_.results += compare_all(finding_kind::result, "result", mine,
                                     mine.results, theirs.results);
  }

  using digests = std::vector<std::optional<tensor_digest>>;

  /// @returns how many were compared
  uint64_t compare_all(finding_kind kind, const std::string& what,
                       const logged_call& call, const digests& mine,
                       const digests& theirs) {
    uint64_t result = 0;
    for (size_t i = 0; i < theirs.size(); ++i) {
      auto &a = mine[i], &b = theirs[i];
      if (!a || !b)
        continue;
      ++result;
      if (auto x = compare(*a, *b))
        add_call(kind, call, fmt::format("{} {}", what, i), *x);
    }
    return result;
  }

  void add_call(finding_kind kind, const logged_call& mine, std::string what,
                mismatch values) {
    auto f = make(kind, mine, std::move(what), std::move(values));
    f.rank = mine.rank;
    result_.add(std::move(f));
  }

  /// Compares what passes between modules.
  std::optional<mismatch> compare(tensor_digest mine,
                                  const tensor_digest& theirs) const {
    auto is_float = [](const tensor_digest& x) {
      return c10::isFloatingType(static_cast<c10::ScalarType>(x.dtype));
    };
    auto x = allowed(theirs.dtype);
    if (in_.casts_elsewhere && is_float(mine) && is_float(theirs)) {
      x = wider(x, allowed(mine.dtype));
      mine.dtype = theirs.dtype;
    }
    return compare_digests(mine, theirs, x);
  }

  tolerance allowed(uint8_t dtype) const {
    return wider(in_.allowed,
                 tolerance_for(static_cast<c10::ScalarType>(dtype)));
  }

  tolerance allowed(const at::Tensor& x) const {
    return wider(in_.allowed, tolerance_for(x.scalar_type()));
  }

  /// With 4096 rows in bfloat16, LibTorch's sum is off by 10 units in the last
  /// place in the mean of squares, a float32 sum by a fifth of one.
  tolerance allowed_sum(const at::Tensor& x) const {
    auto result = allowed(x);
    if (c10::isReducedFloatingType(x.scalar_type()))
      result.relative *= 8;
    return result;
  }

  void losses() {
    for (uint64_t m = 0; m < in_.microbatches; ++m) {
      auto mine = passes_of(m);
      auto* expected = expected_pass(m);
      if (mine.size() != 1 || !expected)
        continue;
      auto name = fmt::format("loss of microbatch {}", m);
      auto x = compare_digests(mine[0]->loss, expected->loss,
                               allowed(expected->loss.dtype));
      auto &a = mine[0]->loss.sums, &b = expected->loss.sums;
      comparison c;
      c.relative = c.share = x ? infinity : 0;
      if (a.size() == 1 && b.size() == 1 && b[0] != 0) {
        auto off = std::abs(a[0] - b[0]), size = std::abs(b[0]);
        c.relative = off / size;
        c.share = off / allowed(expected->loss.dtype).bound(size);
      }
      result_.losses.add(name, c);
      if (!x)
        continue;
      auto f = make(finding_kind::loss, "", "loss", *x);
      f.microbatch = m;
      result_.add(std::move(f));
    }
    scalar(finding_kind::loss, "mean loss of the step", in_.pipeline.loss,
           in_.reference.loss, in_.allowed);
  }

  void scalar(finding_kind kind, const char* what, double a, double b,
              const tolerance& x) {
    if (auto wrong = compare_numbers(a, b, x))
      result_.add(make(kind, "", what, *wrong));
  }

  // -- state ------------------------------------------------------------------

  /// The module that owns a tensor, the nearest to the loss if several do.
  std::string owner_of(const tensor_names& x) const {
    auto result = parent_of(x.all.front());
    for (auto& name : x.all)
      if (backward_order(parent_of(name)) < backward_order(result))
        result = parent_of(name);
    return result;
  }

  void compare(finding_kind kind, const tensor_names& x, const char* what,
               const std::map<std::string, at::Tensor>& mine,
               const std::map<std::string, at::Tensor>& theirs, tally& sum,
               std::vector<finding>& out) {
    auto& name = x.all.front();
    auto a = mine.find(name), b = theirs.find(name);
    if (a == mine.end() && b == theirs.end())
      return;
    if (in_.zeros_for_none && kind == finding_kind::gradient
        && b == theirs.end() && a->second.count_nonzero().item<int64_t>() == 0)
      return;
    auto add = [&](mismatch values) {
      auto f = make(kind, owner_of(x), fmt::format("{} '{}'", what, name),
                    std::move(values));
      f.tensor = name;
      out.push_back(std::move(f));
    };
    if (a == mine.end() || b == theirs.end()) {
      comparison none;
      none.relative = none.share = infinity;
      sum.add(name, none);
      add({"", a == mine.end() ? "none" : "a tensor",
           b == theirs.end() ? "none" : "a tensor", infinity, 0});
      return;
    }
    auto c = kind == finding_kind::update
               ? compare_update(a->second, b->second, in_.before.at(name))
               : compare_tensors(a->second, b->second,
                                 in_.summed_apart.contains(name)
                                   ? allowed_sum(b->second)
                                   : allowed(b->second));
    sum.add(fmt::format("{} '{}'", what, name), c);
    if (c.wrong)
      add(*c.wrong);
  }

  void buffers() {
    std::vector<finding> found;
    for (auto& x : in_.names)
      if (x.is_buffer)
        compare(finding_kind::buffer, x, "buffer", in_.pipeline.buffers,
                in_.reference.buffers, result_.buffers, found);
    for (auto& f : found)
      result_.add(std::move(f));
  }

  void norm() {
    // A sum of squares in another order and type.
    scalar(finding_kind::norm, "norm of the whole gradient",
           in_.pipeline.gradient_norm, in_.reference.gradient_norm,
           wider(in_.allowed, {1e-4, 1e-7}));
  }

  void updates() {
    std::vector<finding> found;
    for (auto& x : in_.names)
      if (!x.is_buffer)
        compare(finding_kind::update, x, "updated", in_.pipeline.parameters,
                in_.reference.parameters, result_.updates, found);
    for (auto& f : found)
      result_.add(std::move(f));
  }

  // -- backward ---------------------------------------------------------------

  /// Position of a module in backward: how many gradients came before the
  /// first that reached one of its calls, in its microbatch.
  void find_backward_order() {
    std::map<uint64_t, uint64_t> first;
    for (auto* c : ordered_)
      for (auto& g : c->gradients) {
        auto [i, added] = first.emplace(c->microbatch, g.order);
        i->second = std::min(i->second, g.order);
      }
    for (auto* c : ordered_)
      for (auto& g : c->gradients) {
        auto at = g.order - first[c->microbatch];
        auto [i, added] = backward_order_.emplace(c->module, at);
        i->second = std::min(i->second, at);
      }
    first_gradient_ = std::move(first);
  }

  /// For a module whose calls are not observed: that of its parent.
  uint64_t backward_order(std::string module) const {
    for (;;) {
      if (auto i = backward_order_.find(module); i != backward_order_.end())
        return i->second;
      if (module.empty())
        return std::numeric_limits<uint64_t>::max();
      module = parent_of(module);
    }
  }

  void seeds() {
    for (uint64_t m = 0; m < in_.microbatches; ++m) {
      auto mine = passes_of(m);
      auto* expected = expected_pass(m);
      if (mine.size() != 1 || !expected)
        continue;
      auto add = [&](std::string what, mismatch values) {
        auto f = make(finding_kind::seed, exit(m), std::move(what),
                      std::move(values));
        f.microbatch = m;
        result_.add(std::move(f));
      };
      auto &a = mine[0]->seeds, &b = expected->seeds;
      if (a.size() != b.size()) {
        add("backward passes of the microbatch",
            count_mismatch(a.size(), b.size()));
        continue;
      }
      for (size_t i = 0; i < b.size(); ++i)
        if (auto x = compare_digests(a[i], b[i], allowed(b[i].dtype)))
          add("the gradient that backward begins with (the loss's scale)", *x);
    }
  }

  void backward() {
    using place = std::tuple<uint64_t, int, uint64_t>;
    std::vector<std::pair<place, finding>> found;
    for (auto* c : ordered_) {
      auto i = calls_.find(key_of(*c));
      if (i == calls_.end())
        continue;
      auto& mine = *i->second;
      for (uint32_t t = 0; t < c->results.size(); ++t) {
        auto a = gradients_of(mine, t), b = gradients_of(*c, t);
        // Results that backward recomputes have none.
        if (b.empty() || a.size() != b.size() || maker_of(*b[0]) != c)
          continue;
        for (size_t k = 0; k < b.size(); ++k) {
          ++result_.result_gradients;
          auto x = compare(a[k]->value, b[k]->value);
          if (!x)
            continue;
          auto f = make(finding_kind::result_gradient, mine,
                        fmt::format("gradient of result {}{}", t, users(*c)),
                        *x);
          f.rank = mine.rank;
          auto at = b[k]->order - first_gradient_[c->microbatch];
          found.emplace_back(place{at, 0, c->microbatch}, std::move(f));
        }
      }
    }
    std::vector<finding> gradients;
    for (auto& x : in_.names)
      if (!x.is_buffer)
        compare(finding_kind::gradient, x, "gradient of",
                in_.pipeline.gradients, in_.reference.gradients,
                result_.gradients, gradients);
    for (auto& f : gradients)
      found.emplace_back(place{backward_order(f.module), 1, 0}, std::move(f));
    std::stable_sort(found.begin(), found.end(),
                     [](auto& a, auto& b) { return a.first < b.first; });
    for (auto& [at, f] : found)
      result_.add(std::move(f));
  }

  static std::vector<const logged_gradient*> gradients_of(const logged_call& c,
                                                          uint32_t tensor) {
    std::vector<const logged_gradient*> result;
    for (auto& g : c.gradients)
      if (g.tensor == tensor)
        result.push_back(&g);
    return result;
  }

  /// The innermost call in which a tensor was made: it has the gradient of all
  /// uses of the tensor, on whichever rank they run. Enclosing calls that also
  /// return the tensor may run on another rank, where they miss what the
  /// innermost call did with it.
  const logged_call* maker_of(const logged_gradient& x) const {
    auto i = std::partition_point(
      ordered_.begin(), ordered_.end(),
      [&](auto* c) { return c->end_node <= x.node; });
    i = std::find_if(i, ordered_.end(),
                     [&](auto* c) { return c->first_node <= x.node; });
    return i == ordered_.end() ? nullptr : *i;
  }

  /// The modules whose backward made the gradient of a result.
  std::string users(const logged_call& theirs) const {
    std::set<std::string> names;
    for (auto i : theirs.used_by)
      names.insert(fmt::format("'{}'", theirs_.calls[i].module));
    return names.empty()
             ? ""
             : fmt::format(" (which {} computes)", fmt::join(names, ", "));
  }

  const step_comparison_input& in_;
  const observed_step& mine_;
  const observed_step& theirs_;
  verify_summary& result_;
  std::map<key, const logged_call*> calls_; // the pipeline's
  std::map<count_key, uint64_t> counts_;    // the pipeline's
  std::map<count_key, uint64_t> expected_;
  std::vector<const logged_call*> ordered_; // the reference's, as they ended
  std::map<std::string, uint64_t> backward_order_;
  std::map<uint64_t, uint64_t> first_gradient_; // by microbatch
};

} // namespace

void compare_held_out(uint64_t step, double pipeline, double reference,
                      const tolerance& allowed, verify_summary& result) {
  auto wrong = compare_numbers(pipeline, reference, allowed);
  if (!wrong)
    return;
  finding f;
  f.kind = finding_kind::loss;
  f.step = step;
  f.what = "loss of the held-out data, in evaluation mode";
  f.values = *wrong;
  result.add(std::move(f));
}

void compare_step(const step_comparison_input& x, verify_summary& result) {
  comparer{x, result}.run();
}

} // namespace smp
