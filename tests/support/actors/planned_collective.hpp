#pragma once

// Collectives whose results follow from their definition alone, for tests that
// compare with what came out: small whole numbers, so that sums are the same in
// every type and order.

#include "tests/support/actors/collective_world.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace smp::test {

/// A call as all its ranks know it.
struct planned_collective {
  uint64_t id = 0;
  collective_call call;
  /// all_to_all of different sizes: rows from (first) to (second), by position
  std::vector<std::vector<uint64_t>> rows;

  uint64_t size() const {
    return call.label.group.size();
  }

  uint64_t count() const {
    return call.what.count();
  }

  uint64_t position(uint64_t rank) const {
    auto& group = call.label.group;
    auto i = std::find(group.begin(), group.end(), rank_id{rank});
    return static_cast<uint64_t>(i - group.begin());
  }

  bool has(uint64_t rank) const {
    return position(rank) < size();
  }

  /// Element `index` of what `rank` gives.
  double given(uint64_t rank, uint64_t index) const {
    auto x = static_cast<int>((id * 31 + rank * 17 + index * 7) % 13);
    auto type = call.what.type;
    if (type == element_type::boolean)
      return x % 2;
    return type == element_type::uint8 ? x : x - 6;
  }

  /// Elements that the rank at `self` gives.
  uint64_t given_count(uint64_t self) const {
    using enum collective_kind;
    switch (call.what.kind) {
      case reduce_scatter:
      case scatter:
        return size() * count();
      case all_to_all:
        return count()
               * (rows.empty()
                    ? size()
                    : std::accumulate(rows[self].begin(), rows[self].end(),
                                      uint64_t{0}));
      default:
        return count();
    }
  }
};

/// Calls `f` with each element that the rank at `self` has to end up with, in
/// their order, computed from the definition of each collective.
inline void for_each_wanted(const planned_collective& x, uint64_t self,
                            const std::function<void(double)>& f) {
  using enum collective_kind;
  auto n = x.count();
  auto& what = x.call.what;
  auto rank_at = [&](uint64_t i) { return x.call.label.group[i].value; };
  auto from = [&](uint64_t i, uint64_t begin, uint64_t count) {
    for (uint64_t j = 0; j < count; ++j)
      f(x.given(rank_at(i), begin + j));
  };
  auto reduced = [&](uint64_t begin) {
    for (uint64_t j = 0; j < n; ++j) {
      auto y = x.given(rank_at(0), begin + j);
      for (uint64_t i = 1; i < x.size(); ++i) {
        auto z = x.given(rank_at(i), begin + j);
        y = what.op == reduce_op::max ? std::max(y, z) : y + z;
      }
      f(what.op == reduce_op::mean ? y / static_cast<double>(x.size()) : y);
    }
  };
  auto is_root = self == what.root;
  switch (what.kind) {
    case allreduce:
      return reduced(0);
    case reduce:
      return is_root ? reduced(0) : void();
    case reduce_scatter:
      return reduced(self * n);
    case allgather:
    case gather:
      for (uint64_t i = 0; i < x.size(); ++i)
        if (is_root || what.kind == allgather)
          from(i, 0, n);
      return;
    case all_to_all:
      for (uint64_t i = 0; i < x.size(); ++i) {
        if (x.rows.empty()) {
          from(i, self * n, n);
          continue;
        }
        auto& given = x.rows[i];
        auto end = given.begin() + static_cast<ptrdiff_t>(self);
        auto before = std::accumulate(given.begin(), end, uint64_t{0});
        from(i, before * n, given[self] * n);
      }
      return;
    case broadcast:
      return from(what.root, 0, n);
    case scatter:
      return from(what.root, self * n, n);
    case barrier:
      return;
  }
}

// -- elements -----------------------------------------------------------------

/// The bits of `x`, rounded to the nearest number with so many bits of fraction
/// and an exponent that is stored with `bias`. Not for what is very small.
inline uint16_t sixteen_bits(double x, int fraction, int bias) {
  if (x == 0)
    return 0;
  int exponent = 0;
  std::frexp(x, &exponent);
  --exponent; // of the first bit
  // A carry goes into the exponent, as it should.
  auto bits = static_cast<int>(
                std::nearbyint(std::ldexp(std::abs(x), fraction - exponent)))
              - (1 << fraction) + ((exponent + bias) << fraction);
  return static_cast<uint16_t>(bits | (x < 0 ? 0x8000 : 0));
}

/// Writes `x` as an element of `type`.
inline void put_element(element_type type, double x, std::byte* to) {
  auto put = [to](auto y) { std::memcpy(to, &y, sizeof y); };
  switch (type) {
    case element_type::uint8:
    case element_type::boolean:
      return put(static_cast<uint8_t>(x));
    case element_type::int8:
      return put(static_cast<int8_t>(x));
    case element_type::int16:
      return put(static_cast<int16_t>(x));
    case element_type::int32:
      return put(static_cast<int32_t>(x));
    case element_type::int64:
      return put(static_cast<int64_t>(x));
    case element_type::float16:
      return put(sixteen_bits(x, 10, 15));
    case element_type::bfloat16:
      return put(sixteen_bits(x, 7, 127));
    case element_type::float32:
      return put(static_cast<float>(x));
    case element_type::float64:
      return put(x);
    case element_type::complex64: {
      const float parts[]{static_cast<float>(x), static_cast<float>(-x)};
      std::memcpy(to, parts, sizeof parts);
      return;
    }
    case element_type::complex128: {
      const double parts[]{x, -x};
      std::memcpy(to, parts, sizeof parts);
      return;
    }
  }
}

// -- running ------------------------------------------------------------------

/// A call of one rank, running.
class running_collective {
public:
  running_collective(collectives& sums, const planned_collective& x,
                     uint64_t rank, bool in_place)
    : plan_(x), self_(x.position(rank)) {
    auto type = x.call.what.type;
    auto element = size_of(type);
    auto given = x.given_count(self_);
    for_each_wanted(x, self_, [&](double) { ++taken_; });
    buffers_ = call_buffers<std::byte>::make(given * element, taken_ * element);
    for (uint64_t i = 0; i < given; ++i)
      put_element(type, x.given(rank, i), buffers_->input.data() + i * element);
    auto call = with(x.call, buffers_);
    in_place_ = in_place && given == taken_
                && x.call.what.kind == collective_kind::allreduce;
    if (in_place_)
      call.output = buffers_->input.data();
    if (!x.rows.empty()) {
      call.what.rows = x.rows[self_];
      for (auto& row : x.rows)
        call.rows_taken.push_back(row[self_]);
    }
    started_ = sums.start(std::move(call));
  }

  /// Waits for the end. @returns what came out wrong, or nothing
  std::string finish() {
    await(started_);
    auto type = plan_.call.what.type;
    auto element = size_of(type);
    auto at = (in_place_ ? buffers_->input : buffers_->output).data();
    uint64_t index = 0;
    std::string wrong;
    for_each_wanted(plan_, self_, [&](double x) {
      std::byte wanted[16];
      put_element(type, x, wanted);
      if (wrong.empty() && std::memcmp(at, wanted, element) != 0)
        wrong = plan_.call.describe() + ", " + plan_.call.what.describe()
                + ": element " + std::to_string(index) + " of "
                + std::to_string(taken_);
      at += element;
      ++index;
    });
    return wrong;
  }

private:
  const planned_collective& plan_;
  uint64_t self_;
  uint64_t taken_ = 0;
  std::shared_ptr<call_buffers<std::byte>> buffers_;
  bool in_place_ = false;
  started_collective started_;
};

} // namespace smp::test
