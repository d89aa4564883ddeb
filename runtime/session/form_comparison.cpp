#include "runtime/session/form_comparison.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/base/fnv_hash.hpp"
#include "runtime/collectives/wait_for_peers.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/values/packer.hpp"
#include "transport/error.hpp"

#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>

namespace smp {

namespace {

/// A rank's description of its arguments, of the same size on all ranks: a hash
/// of all forms, their number, and for as many as fit the type, number of axes
/// and sizes.
constexpr size_t room = 64;
constexpr size_t header = 2;

std::vector<int64_t> told_of(const packer& arguments) {
  std::vector<int64_t> result(header);
  fnv_hash hash;
  auto add = [&](int64_t x) {
    hash.add(static_cast<uint64_t>(x));
    result.push_back(x);
  };
  for (auto& t : arguments.tensors()) {
    add(static_cast<int64_t>(t.scalar_type()));
    add(t.dim());
    for (auto n : t.sizes())
      add(n);
  }
  result[0] = static_cast<int64_t>(hash.get());
  result[1] = static_cast<int64_t>(arguments.tensors().size());
  result.resize(room);
  return result;
}

/// Reads the description of a rank.
class forms {
public:
  forms(uint64_t rank, const int64_t* told) : rank_(rank), told_(told) {
    // nop
  }

  size_t count() const {
    return number(1, std::numeric_limits<int64_t>::max());
  }

  /// @returns the next form, "float32[4, 8]"; empty: it did not fit
  std::string next() {
    if (at_ + 2 > room)
      return {};
    constexpr auto types = static_cast<int64_t>(at::ScalarType::Undefined);
    auto type = static_cast<at::ScalarType>(number(at_, types - 1));
    auto axes = number(at_ + 1, std::numeric_limits<int64_t>::max());
    if (axes > room - at_ - 2)
      return {};
    at::IntArrayRef sizes{told_ + at_ + 2, axes};
    at_ += 2 + axes;
    return c10::getDtypeNames(type).first + c10::str(sizes);
  }

private:
  size_t number(size_t at, int64_t last) const {
    if (told_[at] < 0 || told_[at] > last)
      throw error{failure{
        error_code::protocol,
        rank_id{rank_},
        {},
        fmt::format("malformed forms of arguments: {} at {}", told_[at], at)}};
    return static_cast<size_t>(told_[at]);
  }

  uint64_t rank_;
  const int64_t* told_;
  size_t at_ = header;
};

/// @returns the text about the first difference
std::string difference(uint64_t first, forms a, uint64_t second, forms b) {
  if (a.count() != b.count())
    return fmt::format("has {} tensor{} on rank {} and {} on rank {}",
                       a.count(), a.count() == 1 ? "" : "s", first, b.count(),
                       second);
  for (size_t i = 0; i < a.count(); ++i) {
    auto x = a.next();
    auto y = b.next();
    if (x.empty() || y.empty())
      break;
    if (x != y)
      return fmt::format("has as tensor {} {} on rank {} and {} on rank {}", i,
                         x, first, y, second);
  }
  return fmt::format("has tensors of other sizes on rank {} than on rank {}",
                     first, second);
}

} // namespace

void compare_forms(const std::vector<uint64_t>& group, const at::Tensor& told) {
  auto of = [&](size_t i) { return told.const_data_ptr<int64_t>() + i * room; };
  for (size_t i = 1; i < group.size(); ++i)
    if (of(i)[0] != of(0)[0])
      throw error{error_code::user_code,
                  "ranks that share modules need batches of the same sizes, "
                  "but a microbatch "
                    + difference(group[0], {group[0], of(0)}, group[i],
                                 {group[i], of(i)})};
}

void form_comparison::run(const packer& arguments) {
  if (running_call::current()->microbatch().value == 0) {
    auto mine = at::zeros({static_cast<int64_t>(room)}, at::kLong);
    std::ranges::copy(told_of(arguments), mine.mutable_data_ptr<int64_t>());
    theirs_ = async::allgather(mine, comm_group::tp, "smp.forms");
  }
  // A user's schedule may begin with another microbatch.
  wait_for_peers waiting;
  if (theirs_)
    compare_forms(get_group(comm_group::tp), theirs_->get());
}

} // namespace smp
