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
  comparer(const step_comparison_input& input, verify_summary& result)
    : in_(input),
      mine_(input.pipeline.log),
      theirs_(input.reference.log),
      result_(result) {
    for (auto& call : mine_.calls) {
      if (call.repeated || in_.inside.contains(call.module))
        continue;
      calls_.emplace(key_of(call), &call);
      ++counts_[{call.microbatch, call.module}];
    }
    for (auto& call : theirs_.calls) {
      if (in_.inside.contains(call.module))
        continue;
      if (call.repeated) {
        ++repeated_[{call.microbatch, call.module}];
        continue;
      }
      ++expected_[{call.microbatch, call.module}];
      ordered_.push_back(&call);
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

  static key key_of(const logged_call& call) {
    return {call.microbatch, call.module, call.number};
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

  finding make(finding_kind kind, const logged_call& call, std::string what,
               mismatch values) {
    auto result = make(kind, call.module, std::move(what), std::move(values));
    result.microbatch = call.microbatch;
    result.call = call.number;
    return result;
  }

  void add(finding_kind kind, uint64_t microbatch, const std::string& module,
           std::string what, mismatch values) {
    auto found = make(kind, module, std::move(what), std::move(values));
    found.microbatch = microbatch;
    result_.add(std::move(found));
  }

  void add(std::vector<finding>&& found) {
    for (auto& x : found)
      result_.add(std::move(x));
  }

  // -- microbatches -----------------------------------------------------------

  std::vector<const logged_pass*> passes_of(uint64_t microbatch) const {
    std::vector<const logged_pass*> result;
    for (auto& pass : mine_.passes)
      if (pass.microbatch == microbatch)
        result.push_back(&pass);
    return result;
  }

  const logged_pass* expected_pass(uint64_t microbatch) const {
    for (auto& pass : theirs_.passes)
      if (pass.microbatch == microbatch)
        return &pass;
    return nullptr;
  }

  /// Calls `f` for each microbatch that went forward once in both runs.
  template <class F>
  void each_pass(F f) {
    for (uint64_t microbatch = 0; microbatch < in_.microbatches; ++microbatch) {
      auto mine = passes_of(microbatch);
      auto* expected = expected_pass(microbatch);
      if (mine.size() == 1 && expected)
        f(microbatch, *mine[0], *expected);
    }
  }

  /// The first module that a microbatch reaches.
  std::string entrance(uint64_t microbatch) const {
    const logged_call* first = nullptr;
    for (auto* call : ordered_)
      if (call->microbatch == microbatch
          && (!first || call->begun < first->begun))
        first = call;
    return first ? first->module : std::string{};
  }

  /// The module that backward reaches first.
  std::string exit(uint64_t microbatch) const {
    std::string result;
    std::optional<uint64_t> first;
    for (auto* call : ordered_)
      for (auto& gradient : call->gradients)
        // Of calls that return the same tensor, the innermost counts.
        if (call->microbatch == microbatch
            && (!first || gradient.order < *first)) {
          result = call->module;
          first = gradient.order;
        }
    return result;
  }

  void passes() {
    for (uint64_t microbatch = 0; microbatch < in_.microbatches; ++microbatch) {
      auto mine = passes_of(microbatch);
      auto* expected = expected_pass(microbatch);
      if (mine.size() != 1)
        add(finding_kind::microbatch, microbatch, entrance(microbatch),
            mine.empty() ? "the microbatch was lost; its forward passes"
                         : "the microbatch ran again; its forward passes",
            count_mismatch(mine.size(), 1));
      else if (expected && mine[0]->inputs != expected->inputs)
        add(finding_kind::microbatch, microbatch, entrance(microbatch),
            data_text(*mine[0], microbatch),
            data_mismatch(*mine[0], *expected));
    }
    for (auto& pass : mine_.passes)
      if (pass.microbatch >= in_.microbatches)
        add(finding_kind::microbatch, pass.microbatch, "",
            "a microbatch that does not exist; its forward passes",
            count_mismatch(1, 0));
  }

  /// @returns what went wrong with the data of a microbatch
  std::string data_text(const logged_pass& mine, uint64_t microbatch) const {
    for (auto& pass : theirs_.passes)
      if (pass.microbatch != microbatch && pass.inputs == mine.inputs)
        return "its data was lost, that of microbatch "
               + std::to_string(pass.microbatch) + " came twice; the data";
    return "the data";
  }

  static mismatch data_mismatch(const logged_pass& mine,
                                const logged_pass& theirs) {
    auto both = std::min(mine.inputs.size(), theirs.inputs.size());
    for (size_t i = 0; i < both; ++i)
      if (auto x = compare_digests(mine.inputs[i], theirs.inputs[i], {0, 0}))
        return *x;
    return count_mismatch(mine.inputs.size(), theirs.inputs.size());
  }

  // -- forward ----------------------------------------------------------------

  void forward() {
    std::set<count_key> told;
    std::set<std::string> modules;
    for (auto& [key, count] : expected_)
      modules.insert(key.second);
    result_.modules = std::max<uint64_t>(result_.modules, modules.size());
    std::vector<std::pair<uint64_t, const logged_call*>> events;
    for (auto* call : ordered_) {
      ++result_.calls;
      if (passes_of(call->microbatch).empty())
        continue; // lost as a whole
      events.emplace_back(call->begun, call);
      events.emplace_back(call->ended, call);
    }
    std::sort(events.begin(), events.end());
    for (auto& [at, call] : events) {
      auto mine = calls_.find(key_of(*call));
      if (at == call->begun) {
        if (mine != calls_.end())
          compare_arguments(*mine->second, *call);
        else if (!is_inside_missing(*call))
          tell_count(*call, told);
      } else if (mine != calls_.end()) {
        compare_results(*mine->second, *call);
        auto key = count_key{call->microbatch, call->module};
        if (call->number + 1 == expected_[key]
            && counts_[key] > expected_[key] + repeated_[key])
          tell_count(*call, told);
      }
    }
    // Unless the calls of the reference cannot be observed.
    for (auto& call : mine_.calls)
      if (!expected_.empty() && !in_.inside.contains(call.module)
          && !expected_.contains({call.microbatch, call.module}))
        tell_count(call, told);
  }

  /// If a module did not run, neither did what is inside it.
  bool is_inside_missing(const logged_call& call) const {
    return call.outer && !calls_.contains(key_of(theirs_.calls[*call.outer]));
  }

  void tell_count(const logged_call& call, std::set<count_key>& told) {
    auto module = count_key{call.microbatch, call.module};
    if (!told.insert(module).second)
      return;
    add(finding_kind::calls, call.microbatch, call.module, "number of calls",
        count_mismatch(counts_[module], expected_[module]));
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
    auto outer = calls_.find(key_of(theirs_.calls[*theirs.outer]));
    if (outer == calls_.end())
      return {{}, false};
    logged_call around;
    around.module = outer->second->module;
    around.microbatch = mine.microbatch;
    around.number = outer->second->number;
    around.rank = outer->second->rank;
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
      if (auto wrong = compare(*a, *b))
        add_call(kind, call, fmt::format("{} {}", what, i), *wrong);
    }
    return result;
  }

  void add_call(finding_kind kind, const logged_call& mine, std::string what,
                mismatch values) {
    auto found = make(kind, mine, std::move(what), std::move(values));
    found.rank = mine.rank;
    result_.add(std::move(found));
  }

  /// Compares what passes between modules.
  std::optional<mismatch> compare(tensor_digest mine,
                                  const tensor_digest& theirs) const {
    auto is_float = [](const tensor_digest& x) {
      return c10::isFloatingType(static_cast<c10::ScalarType>(x.dtype));
    };
    auto bound = allowed(theirs.dtype);
    if (in_.casts_elsewhere && is_float(mine) && is_float(theirs)) {
      bound = wider(bound, allowed(mine.dtype));
      mine.dtype = theirs.dtype;
    }
    return compare_digests(mine, theirs, bound);
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
    each_pass([this](auto microbatch, auto& mine, auto& theirs) {
      auto n = theirs.results.size();
      if (mine.results.size() != n)
        return add(finding_kind::loss, microbatch, "", "number of results",
                   count_mismatch(mine.results.size(), n));
      for (size_t i = 0; i < n; ++i)
        loss(microbatch,
             i == 0 ? "loss" : fmt::format("result {} of the step", i),
             mine.results[i], theirs.results[i]);
    });
    scalar(finding_kind::loss, "mean loss of the step", in_.pipeline.loss,
           in_.reference.loss, in_.allowed);
  }

  void loss(uint64_t microbatch, const std::string& name,
            const tensor_digest& mine, const tensor_digest& theirs) {
    auto score = score_of(mine, theirs, allowed(theirs.dtype));
    result_.losses.add(fmt::format("{} of microbatch {}", name, microbatch),
                       score);
    if (score.wrong)
      add(finding_kind::loss, microbatch, "", name, *score.wrong);
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

  void compare(finding_kind kind, const tensor_names& names, const char* what,
               const std::map<std::string, at::Tensor>& mine,
               const std::map<std::string, at::Tensor>& theirs, tally& sum,
               std::vector<finding>& out) {
    auto& name = names.all.front();
    auto own = mine.find(name), other = theirs.find(name);
    if (own == mine.end() && other == theirs.end())
      return;
    if (in_.zeros_for_none && kind == finding_kind::gradient
        && other == theirs.end()
        && own->second.count_nonzero().item<int64_t>() == 0)
      return;
    auto tell = [&](mismatch values) {
      auto found = make(kind, owner_of(names),
                        fmt::format("{} '{}'", what, name), std::move(values));
      found.tensor = name;
      out.push_back(std::move(found));
    };
    if (own == mine.end() || other == theirs.end()) {
      sum.add(name, {.relative = infinity, .share = infinity, .wrong = {}});
      tell({"", own == mine.end() ? "none" : "a tensor",
            other == theirs.end() ? "none" : "a tensor", infinity, 0});
      return;
    }
    auto compared = kind == finding_kind::update
                      ? compare_update(own->second, other->second,
                                       in_.before.at(name))
                      : compare_tensors(own->second, other->second,
                                        in_.summed_apart.contains(name)
                                          ? allowed_sum(other->second)
                                          : allowed(other->second));
    sum.add(fmt::format("{} '{}'", what, name), compared);
    if (compared.wrong)
      tell(*compared.wrong);
  }

  void buffers() {
    std::vector<finding> found;
    for (auto& names : in_.names)
      if (names.is_buffer)
        compare(finding_kind::buffer, names, "buffer", in_.pipeline.buffers,
                in_.reference.buffers, result_.buffers, found);
    add(std::move(found));
  }

  void norm() {
    // A sum of squares in another order.
    scalar(finding_kind::norm, "norm of the whole gradient",
           in_.pipeline.gradient_norm, in_.reference.gradient_norm,
           wider(in_.allowed, {1e-4, 1e-7}));
  }

  void updates() {
    std::vector<finding> found;
    for (auto& names : in_.names)
      if (!names.is_buffer)
        compare(finding_kind::update, names, "updated", in_.pipeline.parameters,
                in_.reference.parameters, result_.updates, found);
    add(std::move(found));
  }

  // -- backward ---------------------------------------------------------------

  /// Position of a module in backward: how many gradients came before the
  /// first that reached one of its calls, in its microbatch.
  void find_backward_order() {
    std::map<uint64_t, uint64_t> first;
    for (auto* call : ordered_)
      for (auto& gradient : call->gradients) {
        auto [i, added] = first.emplace(call->microbatch, gradient.order);
        i->second = std::min(i->second, gradient.order);
      }
    for (auto* call : ordered_)
      for (auto& gradient : call->gradients) {
        auto at = gradient.order - first[call->microbatch];
        auto [i, added] = backward_order_.emplace(call->module, at);
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
    each_pass([this](auto microbatch, auto& mine, auto& theirs) {
      auto add_seed = [&](std::string what, mismatch values) {
        add(finding_kind::seed, microbatch, exit(microbatch), std::move(what),
            std::move(values));
      };
      auto &own = mine.seeds, &other = theirs.seeds;
      if (own.size() != other.size())
        return add_seed("backward passes of the microbatch",
                        count_mismatch(own.size(), other.size()));
      for (size_t i = 0; i < other.size(); ++i)
        if (auto wrong = compare_digests(own[i], other[i],
                                         allowed(other[i].dtype)))
          add_seed("the gradient that backward begins with (the loss's scale)",
                   *wrong);
    });
  }

  void backward() {
    using place = std::tuple<uint64_t, int, uint64_t>;
    std::vector<std::pair<place, finding>> found;
    for (auto* call : ordered_) {
      auto own = calls_.find(key_of(*call));
      if (own == calls_.end())
        continue;
      auto& mine = *own->second;
      for (uint32_t tensor = 0; tensor < call->results.size(); ++tensor) {
        auto gradients = gradients_of(mine, tensor),
             expected = gradients_of(*call, tensor);
        // Results that backward recomputes have none.
        if (expected.empty() || gradients.size() != expected.size()
            || maker_of(*expected[0]) != call)
          continue;
        for (size_t use = 0; use < expected.size(); ++use) {
          ++result_.result_gradients;
          auto wrong = compare(gradients[use]->value, expected[use]->value);
          if (!wrong)
            continue;
          auto found_here = make(
            finding_kind::result_gradient, mine,
            fmt::format("gradient of result {}{}", tensor, users(*call)),
            *wrong);
          found_here.rank = mine.rank;
          auto at = expected[use]->order - first_gradient_[call->microbatch];
          found.emplace_back(place{at, 0, call->microbatch},
                             std::move(found_here));
        }
      }
    }
    std::vector<finding> gradients;
    for (auto& names : in_.names)
      if (!names.is_buffer)
        compare(finding_kind::gradient, names, "gradient of",
                in_.pipeline.gradients, in_.reference.gradients,
                result_.gradients, gradients);
    for (auto& x : gradients)
      found.emplace_back(place{backward_order(x.module), 1, 0}, std::move(x));
    std::stable_sort(found.begin(), found.end(),
                     [](auto& a, auto& b) { return a.first < b.first; });
    for (auto& [at, x] : found)
      result_.add(std::move(x));
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
  const logged_call* maker_of(const logged_gradient& gradient) const {
    auto call = std::partition_point(
      ordered_.begin(), ordered_.end(),
      [&](auto* made) { return made->end_node <= gradient.node; });
    call = std::find_if(call, ordered_.end(), [&](auto* made) {
      return made->first_node <= gradient.node;
    });
    return call == ordered_.end() ? nullptr : *call;
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
  /// The reference's, and those that its backward repeated.
  std::map<count_key, uint64_t> expected_, repeated_;
  std::vector<const logged_call*> ordered_; // the reference's, as they ended
  std::map<std::string, uint64_t> backward_order_;
  std::map<uint64_t, uint64_t> first_gradient_; // by microbatch
};

} // namespace

void compare_step(const step_comparison_input& x, verify_summary& result) {
  comparer{x, result}.run();
}

} // namespace smp
