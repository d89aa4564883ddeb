#include "runtime/data/data_agreement.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/data/data.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

namespace {

struct told_file {
  std::string path;
  uint64_t bytes = 0;
  uint64_t sample = 0;
};

template <class Inspector>
bool inspect(Inspector& f, told_file& x) {
  return f.object(x).fields(f.field("path", x.path), f.field("bytes", x.bytes),
                            f.field("sample", x.sample));
}

} // namespace

void require_same_data(const data_source& data, const rank_context& rank) {
  std::vector<told_file> mine;
  for (auto& x : data.files())
    mine.push_back({x.path, x.bytes, x.sample});
  auto first = agree_everywhere(rank, "smp.train.data", [&] { return mine; });
  do_together(rank, "smp.train.same_data", [&] {
    if (mine.size() != first.size())
      throw config_error(
        fmt::format("data.path has {} files here, but {} on rank 0; all "
                    "machines of a run need the same data",
                    mine.size(), first.size()));
    for (size_t i = 0; i < mine.size(); ++i) {
      auto &x = mine[i], &y = first[i];
      if (x.bytes != y.bytes || x.sample != y.sample)
        throw config_error(fmt::format(
          "{} ({} bytes) holds other data than {} of rank 0 ({} bytes); all "
          "machines of a run need the same data",
          x.path, x.bytes, y.path, y.bytes));
    }
  });
}

} // namespace smp
