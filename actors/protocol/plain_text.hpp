#pragma once

#include <caf/fwd.hpp>

#include <string>

namespace smp {

/// An error of CAF in words: the text that it carries, or else what its code
/// means. Names of CAF's codes say nothing to people who never heard of CAF.
std::string plain_text(const caf::error& x);

} // namespace smp
