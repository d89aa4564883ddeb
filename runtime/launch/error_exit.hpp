#pragma once

// How an error ends a program (docs/errors.md).

#include "transport/error.hpp"

#include <string_view>

namespace smp {

/// Stands before the text of an error that ended a rank.
inline constexpr std::string_view error_prefix = "error: ";

/// Variable of a rank whose output is not kept: the file descriptor that takes
/// what ended it, "RANK TEXT" and a zero byte.
inline constexpr const char* last_words_variable = "SMP_LAST_WORDS";

/// The same of a rank with a log, for what its log does not take.
inline constexpr const char* unwritten_words_variable = "SMP_UNWRITTEN_WORDS";

/// Tells the launcher what ended this rank when stderr did not take it, as a
/// log on a full disk.
void leave_unwritten_words(const char* text);

/// @returns the exit code of a program that an error of this kind ends
int exit_code_of(error_code x) noexcept;

/// @returns true if another process tells it, once for all ranks
bool told_by_others(error_code x);

/// From now on an `smp::error` that nobody catches ends this process in order,
/// with one line that says what happened, and `exit_code_of`. Of several ranks
/// that our launcher started, rank 0 says it, or the launcher. Other exceptions
/// end the process as before.
void end_on_uncaught_errors();

/// Ends this process with all that it wrote, but without the destructors of
/// static objects. Those of LibTorch compute for 0.2 s: on a busy machine a
/// second, for which everybody would wait who waits for the end of a run.
[[noreturn]] void exit_at_once(int code);

} // namespace smp
