#pragma once

// How an error ends a program (docs/errors.md).

#include "transport/error.hpp"

#include <string>
#include <string_view>

namespace smp {

/// Precedes the text of an error that ended a rank.
inline constexpr std::string_view error_prefix = "error: ";

/// Variable of a rank without a log: the file descriptor of `leave_word`.
inline constexpr const char* last_words_variable = "SMP_LAST_WORDS";

/// Same for a rank with a log.
inline constexpr const char* unwritten_words_variable = "SMP_UNWRITTEN_WORDS";

/// What a rank that ends tells its launcher.
enum class last_word : char {
  heard = 'h', // it ends because another rank was lost
  told = 't',  // it has written the text, which is why, to its stderr
  why = 'w',   // the text is why, which nobody has written yet
};

/// Writes "RANK KIND TEXT" and a zero byte for the launcher of this rank.
/// @returns whether that is on its way; false without our launcher
bool leave_word(last_word kind, const char* text = "");

/// Prints why this rank ends, as `line`, and tells the launcher that it did, or
/// if stderr could not be written, as with a log on a full disk, the `text`.
void tell_why(const std::string& line, const char* text);

/// @returns the exit code of a program that ends with this kind of error
int exit_code_of(error_code x) noexcept;

/// @returns true if another process reports such errors, once for all ranks
bool told_by_others(error_code x);

/// From now on an uncaught `smp::error` ends this process in order, with one
/// line that says what happened, and with `exit_code_of`. Among several ranks
/// that our launcher started, rank 0 prints the line, or the launcher. Other
/// exceptions end the process as before, and the launcher hears what they say.
void end_on_uncaught_errors();

/// Flushes the output and ends this process, without the destructors of static
/// objects. Those of LibTorch compute for 0.2 s, on a busy machine for a
/// second, and would delay everything that waits for the end of a run.
[[noreturn]] void exit_at_once(int code);

} // namespace smp
