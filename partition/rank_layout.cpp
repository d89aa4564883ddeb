#include "partition/rank_layout.hpp"

#include "transport/error.hpp"

#include <algorithm>

namespace smp {

namespace {

constexpr uint64_t rank_coordinates::*axes[] = {
  &rank_coordinates::rdp,
  &rank_coordinates::pp,
  &rank_coordinates::tp,
};

constexpr char letters[] = {'D', 'P', 'T'};

std::string permutation(const std::string& placement) {
  if (placement == "cluster")
    return "DPT";
  if (placement == "spread")
    return "TPD";
  auto sorted = placement;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != "DPT")
    throw config_error("smp.placement_strategy = \"" + placement
                       + "\" is not known; allowed: \"cluster\", \"spread\","
                         " or a permutation of \"DPT\"");
  return placement;
}

void check_degree(const char* key, uint64_t x) {
  if (x == 0)
    throw config_error(std::string{key} + " must be at least 1");
}

uint64_t reduced_data_parallel_degree(const layout_config& x) {
  check_degree("smp.pipeline_parallel_degree", x.pipeline);
  check_degree("smp.tensor_parallel_degree", x.tensor);
  if (x.tensor > 1 && !x.ddp)
    throw config_error("smp.tensor_parallel_degree = "
                       + std::to_string(x.tensor) + " needs smp.ddp = true");
  auto factors = "smp.pipeline_parallel_degree = " + std::to_string(x.pipeline)
                 + " times smp.tensor_parallel_degree = "
                 + std::to_string(x.tensor);
  // Divide first: the product of two absurd degrees may not fit.
  if (x.size == 0 || x.size % x.pipeline != 0
      || x.size / x.pipeline % x.tensor != 0)
    throw config_error(std::to_string(x.size) + " ranks are not a multiple of "
                       + factors);
  auto result = x.size / x.pipeline / x.tensor;
  if (result > 1 && !x.ddp)
    throw config_error(std::to_string(x.size) + " ranks are more than "
                       + factors + "; start "
                       + std::to_string(x.pipeline * x.tensor)
                       + ", or let the others be replicas: smp.ddp = true");
  return result;
}

} // namespace

const char* to_string(group_kind x) noexcept {
  switch (x) {
    case group_kind::world:
      return "world";
    case group_kind::pp:
      return "pp";
    case group_kind::tp:
      return "tp";
    case group_kind::rdp:
      return "rdp";
    case group_kind::dp:
      return "dp";
    case group_kind::mp:
      return "mp";
  }
  return "invalid";
}

comm_group::comm_group(const std::vector<uint64_t>& ranks) {
  for (auto x : ranks)
    ranks_.push_back(rank_id{x});
  std::sort(ranks_.begin(), ranks_.end());
  if (ranks_.empty())
    throw config_error("a group has at least one rank");
  auto twice = std::adjacent_find(ranks_.begin(), ranks_.end());
  if (twice != ranks_.end())
    throw config_error("a group has rank " + std::to_string(twice->value)
                       + " twice");
}

std::string to_string(const comm_group& x) {
  if (x.named_ranks().empty())
    return to_string(x.kind());
  std::string result;
  for (auto rank : x.named_ranks())
    result += (result.empty() ? "ranks " : ", ") + std::to_string(rank.value);
  return result;
}

rank_layout::rank_layout(const layout_config& x)
  : size_(x.size),
    degrees_{x.pipeline, x.tensor, reduced_data_parallel_degree(x)} {
  auto order = permutation(x.placement);
  uint64_t stride = 1;
  for (auto letter = order.rbegin(); letter != order.rend(); ++letter) {
    auto axis = axes[std::find(letters, letters + 3, *letter) - letters];
    strides_.*axis = stride;
    stride *= degrees_.*axis;
  }
}

// -- groups -------------------------------------------------------------------

uint64_t rank_layout::size(const comm_group& group) const {
  if (!group.named_ranks().empty())
    return group.named_ranks().size();
  switch (group.kind()) {
    case group_kind::pp:
      return degrees_.pp;
    case group_kind::tp:
      return degrees_.tp;
    case group_kind::rdp:
      return degrees_.rdp;
    case group_kind::dp:
      return degrees_.tp * degrees_.rdp;
    case group_kind::mp:
      return degrees_.pp * degrees_.tp;
    case group_kind::world:
      break;
  }
  return size_;
}

uint64_t rank_layout::rank(const comm_group& group, rank_id x) const {
  auto xs = members(group, x);
  return static_cast<uint64_t>(std::find(xs.begin(), xs.end(), x) - xs.begin());
}

std::vector<rank_id> rank_layout::members(const comm_group& group,
                                          rank_id x) const {
  if (!group.named_ranks().empty())
    return checked(group, x);
  auto has = [&group](std::initializer_list<group_kind> kinds) {
    return std::find(kinds.begin(), kinds.end(), group.kind()) != kinds.end();
  };
  // Along which axes may the coordinates of two members differ?
  using enum group_kind;
  auto free_pp = has({world, pp, mp});
  auto free_tp = has({world, tp, dp, mp});
  auto free_rdp = has({world, rdp, dp});
  auto here = coordinates(x);
  std::vector<rank_id> result;
  for (uint64_t i = 0; i < (free_pp ? degrees_.pp : 1); ++i)
    for (uint64_t j = 0; j < (free_tp ? degrees_.tp : 1); ++j)
      for (uint64_t k = 0; k < (free_rdp ? degrees_.rdp : 1); ++k)
        result.push_back(at({free_pp ? i : here.pp, free_tp ? j : here.tp,
                             free_rdp ? k : here.rdp}));
  std::sort(result.begin(), result.end());
  return result;
}

rank_id rank_layout::named(const rank_type& type, uint64_t position,
                           rank_id x) const {
  auto xs = members(type, x);
  if (position < xs.size())
    return xs[position];
  auto text = "there is no "
              + (type == rank_type::world || !type.named_ranks().empty()
                   ? std::string{"rank"}
                   : to_string(type) + "_rank")
              + ' ' + std::to_string(position);
  if (!type.named_ranks().empty())
    text += " among " + to_string(type);
  throw config_error(text + "; allowed: 0 to " + std::to_string(xs.size() - 1));
}

std::vector<std::vector<rank_id>> rank_layout::groups(group_kind kind) const {
  std::vector<std::vector<rank_id>> result;
  for (uint64_t i = 0; i < size_; ++i) {
    auto xs = members(kind, rank_id{i});
    if (xs.front() == rank_id{i})
      result.push_back(std::move(xs));
  }
  return result;
}

std::vector<rank_id> rank_layout::checked(const comm_group& named,
                                          rank_id x) const {
  auto& xs = named.named_ranks();
  if (xs.back().value >= size_)
    throw config_error("a group of " + to_string(named) + " among "
                       + std::to_string(size_) + " ranks");
  if (!std::binary_search(xs.begin(), xs.end(), x))
    throw config_error("rank " + std::to_string(x.value)
                       + " is not in the group of " + to_string(named));
  return xs;
}

// -- coordinates --------------------------------------------------------------

rank_coordinates rank_layout::coordinates(rank_id x) const {
  check(x);
  rank_coordinates result;
  for (auto axis : axes)
    result.*axis = x.value / strides_.*axis % degrees_.*axis;
  return result;
}

rank_id rank_layout::at(const rank_coordinates& x) const {
  uint64_t result = 0;
  for (auto axis : axes)
    result += x.*axis * strides_.*axis;
  check(rank_id{result});
  return rank_id{result};
}

void rank_layout::place(const std::vector<std::string>& machine_of_rank) {
  if (machine_of_rank.size() != size_)
    throw error{error_code::internal, "places of other ranks"};
  std::vector<std::string> names;
  std::vector<uint64_t> result;
  for (auto& name : machine_of_rank) {
    auto i = std::find(names.begin(), names.end(), name);
    result.push_back(static_cast<uint64_t>(i - names.begin()));
    if (i == names.end())
      names.push_back(name);
  }
  machine_of_ = std::move(result);
}

uint64_t rank_layout::machines() const noexcept {
  return machine_of_.empty()
           ? 1
           : *std::max_element(machine_of_.begin(), machine_of_.end()) + 1;
}

std::vector<uint64_t> rank_layout::machine_of_ranks() const {
  return machine_of_.empty() ? std::vector<uint64_t>(size_) : machine_of_;
}

uint64_t rank_layout::local_rank(rank_id x) const {
  check(x);
  if (machine_of_.empty())
    return x.value;
  auto self = machine_of_.begin() + static_cast<std::ptrdiff_t>(x.value);
  return static_cast<uint64_t>(std::count(machine_of_.begin(), self, *self));
}

uint64_t rank_layout::local_size(rank_id x) const {
  check(x);
  if (machine_of_.empty())
    return size_;
  auto mine = machine_of_[x.value];
  return static_cast<uint64_t>(
    std::count(machine_of_.begin(), machine_of_.end(), mine));
}

void rank_layout::check(rank_id x) const {
  if (x.value >= size_)
    throw error{error_code::internal, "rank " + std::to_string(x.value)
                                        + " of a world of "
                                        + std::to_string(size_)};
}

} // namespace smp
