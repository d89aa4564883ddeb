#pragma once

// How an error ends a program (docs/errors.md).

#include "transport/error.hpp"

#include <string_view>

namespace smp {

/// Precedes the text of an error that ended a rank.
inline constexpr std::string_view error_prefix = "error: ";

/// Variable of a rank without a log: the file descriptor to which it writes why
/// it ended, as "RANK TEXT" and a zero byte.
inline constexpr const char* last_words_variable = "SMP_LAST_WORDS";

/// Same for a rank with a log, for text that the log could not take.
inline constexpr const char* unwritten_words_variable = "SMP_UNWRITTEN_WORDS";

/// Tells the launcher why this rank ended if stderr could not be written, as
/// with a log on a full disk.
void leave_unwritten_words(const char* text);

/// @returns the exit code of a program that ends with this kind of error
int exit_code_of(error_code x) noexcept;

/// @returns true if another process reports such errors, once for all ranks
bool told_by_others(error_code x);

/// From now on an uncaught `smp::error` ends this process in order, with one
/// line that says what happened, and with `exit_code_of`. Among several ranks
/// that our launcher started, rank 0 prints the line, or the launcher. Other
/// exceptions end the process as before.
void end_on_uncaught_errors();

/// Flushes the output and ends this process, without the destructors of static
/// objects. Those of LibTorch compute for 0.2 s, on a busy machine for a
/// second, and would delay everything that waits for the end of a run.
[[noreturn]] void exit_at_once(int code);

} // namespace smp
