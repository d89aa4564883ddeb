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
                       + " (data parallelism is not built yet)");
  return result;
}

} // namespace

const char* to_string(comm_group x) noexcept {
  switch (x) {
    case comm_group::world:
      return "world";
    case comm_group::pp:
      return "pp";
    case comm_group::tp:
      return "tp";
    case comm_group::rdp:
      return "rdp";
    case comm_group::dp:
      return "dp";
    case comm_group::mp:
      return "mp";
  }
  return "invalid";
}

rank_layout::rank_layout(const layout_config& x)
  : size_(x.size),
    ranks_per_machine_(x.ranks_per_machine == 0 ? x.size : x.ranks_per_machine),
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

uint64_t rank_layout::size(comm_group kind) const {
  switch (kind) {
    case comm_group::pp:
      return degrees_.pp;
    case comm_group::tp:
      return degrees_.tp;
    case comm_group::rdp:
      return degrees_.rdp;
    case comm_group::dp:
      return degrees_.tp * degrees_.rdp;
    case comm_group::mp:
      return degrees_.pp * degrees_.tp;
    case comm_group::world:
      break;
  }
  return size_;
}

uint64_t rank_layout::rank(comm_group kind, rank_id x) const {
  auto xs = members(kind, x);
  return static_cast<uint64_t>(std::find(xs.begin(), xs.end(), x) - xs.begin());
}

std::vector<rank_id> rank_layout::members(comm_group kind, rank_id x) const {
  auto has = [kind](std::initializer_list<comm_group> kinds) {
    return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
  };
  // Along which axes may the coordinates of two members differ?
  using enum comm_group;
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

rank_id rank_layout::named(rank_type type, uint64_t position, rank_id x) const {
  auto xs = members(type, x);
  if (position < xs.size())
    return xs[position];
  auto name = type == rank_type::world ? std::string{"rank"}
                                       : std::string{to_string(type)} + "_rank";
  throw config_error("there is no " + name + ' ' + std::to_string(position)
                     + "; allowed: 0 to " + std::to_string(xs.size() - 1));
}

std::vector<std::vector<rank_id>> rank_layout::groups(comm_group kind) const {
  std::vector<std::vector<rank_id>> result;
  for (uint64_t i = 0; i < size_; ++i) {
    auto xs = members(kind, rank_id{i});
    if (xs.front() == rank_id{i})
      result.push_back(std::move(xs));
  }
  return result;
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

uint64_t rank_layout::local_rank(rank_id x) const {
  check(x);
  return x.value % ranks_per_machine_;
}

uint64_t rank_layout::local_size(rank_id x) const {
  auto first = x.value - local_rank(x);
  return std::min(ranks_per_machine_, size_ - first);
}

void rank_layout::check(rank_id x) const {
  if (x.value >= size_)
    throw error{error_code::internal, "rank " + std::to_string(x.value)
                                        + " of a world of "
                                        + std::to_string(size_)};
}

} // namespace smp
