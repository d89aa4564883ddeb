#pragma once

#include "transport/inspect.hpp"

#include <cstdint>
#include <string>

namespace smp {

/// Precedes the user's bytes in a message of kind `exchange`.
struct exchange_label {
  uint64_t sequence = 0;
  std::string tag;
};

template <class Inspector>
bool inspect(Inspector& f, exchange_label& x) {
  return f.object(x).fields(f.field("sequence", x.sequence),
                            f.field("tag", x.tag));
}

} // namespace smp
