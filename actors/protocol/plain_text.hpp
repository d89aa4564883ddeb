#pragma once

#include <caf/fwd.hpp>

#include <exception>
#include <string>

namespace smp {

/// An error of CAF in words: the text that it carries, or else what its code
/// means. Names of CAF's codes say nothing to people who never heard of CAF.
std::string plain_text(const caf::error& x);

/// The end of an actor by an exception, with its text: more useful to those who
/// wait for the actor than on a terminal, where CAF's own handler writes it.
caf::error error_of_exception(const std::exception_ptr& x);

} // namespace smp
