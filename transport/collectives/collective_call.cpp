#include "transport/collectives/collective_call.hpp"

#include "transport/error.hpp"

#include <algorithm>

namespace smp {

namespace {

bool has_root(collective_kind x) {
  using enum collective_kind;
  return x == reduce || x == broadcast || x == scatter || x == gather;
}

bool is_sum(collective_kind x) {
  using enum collective_kind;
  return x == allreduce || x == reduce || x == reduce_scatter;
}

std::string numbers(const std::vector<uint64_t>& xs) {
  std::string result;
  for (auto x : xs)
    result += (result.empty() ? "" : ", ") + std::to_string(x);
  return result;
}

std::string rank_text(rank_id x) {
  return "rank " + std::to_string(x.value);
}

} // namespace

const char* to_string(collective_kind x) noexcept {
  constexpr const char* names[] = {"allreduce", "reduce",     "reduce_scatter",
                                   "allgather", "all_to_all", "broadcast",
                                   "scatter",   "gather",     "barrier"};
  return names[static_cast<size_t>(x)];
}

std::string collective_signature::describe() const {
  std::string result;
  if (is_sum(kind))
    result = std::string{to_string(op)} + ' ';
  result += to_string(kind);
  if (kind == collective_kind::barrier)
    return result;
  result += std::string{" of "} + to_string(type) + '[';
  for (size_t i = 0; i < shape.size(); ++i)
    result += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  result += ']';
  if (!rows.empty())
    result += " times " + numbers(rows);
  if (every_root)
    result += " of every root";
  if (on_device)
    result += " on devices";
  return result;
}

uint64_t collective_signature::count() const noexcept {
  uint64_t result = 1;
  for (auto x : shape)
    result *= static_cast<uint64_t>(x);
  return result;
}

std::string collective_call::describe() const {
  std::string result = to_string(what.kind);
  result += " \"" + label.name + "\" of ranks ";
  for (size_t i = 0; i < label.group.size(); ++i)
    result += (i == 0 ? "" : ", ") + std::to_string(label.group[i].value);
  return result;
}

void collective_call::check(rank_id self) const {
  auto& group = label.group;
  auto ascends = [](rank_id a, rank_id b) { return a >= b; };
  if (std::adjacent_find(group.begin(), group.end(), ascends) != group.end())
    throw error{error_code::internal,
                describe() + ": the group is not in ascending order"};
  if (!std::binary_search(group.begin(), group.end(), self))
    throw error{error_code::internal,
                describe() + ": " + rank_text(self) + " is not in the group"};
  if (what.root >= group.size())
    throw config_error(describe() + ": there is no root "
                       + std::to_string(what.root));
  if (is_sum(what.kind) && !can_reduce(what.type, what.op))
    throw error{error_code::unsupported, describe() + ": no "
                                           + to_string(what.op) + " of "
                                           + to_string(what.type)};
  auto sizes = {what.rows.size(), rows_taken.size()};
  auto none = std::max(sizes) == 0;
  if (!none
      && (what.kind != collective_kind::all_to_all
          || std::min(sizes) != group.size()
          || std::max(sizes) != group.size()))
    throw config_error(describe() + ": " + std::to_string(group.size())
                       + " numbers of rows each way are expected");
}

std::string difference(const collective_label& label,
                       const collective_signature& theirs, uint64_t from,
                       const collective_call& mine, uint64_t to) {
  auto& ours = mine.what;
  auto other = rank_text(label.group[from]);
  auto self = rank_text(label.group[to]);
  auto rooted = has_root(ours.kind) || has_root(theirs.kind);
  auto same_op = !is_sum(ours.kind) || theirs.op == ours.op;
  if (theirs.kind != ours.kind || !same_op || theirs.type != ours.type
      || theirs.shape != ours.shape || theirs.root != ours.root
      || theirs.rows.size() != ours.rows.size()
      || theirs.every_root != ours.every_root
      || theirs.on_device != ours.on_device) {
    auto text = [&](const collective_signature& x) {
      auto result = x.describe();
      if (rooted && has_root(x.kind) && x.root < label.group.size())
        result += " with root " + rank_text(label.group[x.root]);
      return result;
    };
    auto advice = theirs.kind == ours.kind && theirs.shape != ours.shape
                      && !mine.advice.empty()
                    ? "; " + mine.advice
                    : std::string{};
    auto place = mine.place.empty() ? std::string{} : " in " + mine.place;
    return other + " calls " + text(theirs) + " where " + self + " calls "
           + text(ours) + place + advice;
  }
  if (!ours.rows.empty() && theirs.rows[to] != mine.rows_taken[from])
    return other + " gives " + std::to_string(theirs.rows[to]) + " rows where "
           + self + " takes " + std::to_string(mine.rows_taken[from]);
  return {};
}

} // namespace smp
