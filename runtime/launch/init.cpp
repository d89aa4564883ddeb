#include "runtime/launch/init.hpp"

#include "runtime/launch/environment.hpp"
#include "runtime/launch/error_exit.hpp"
#include "runtime/launch/launcher.hpp"
#include "transport/error.hpp"

#include <charconv>
#include <optional>
#include <string_view>

namespace smp {

namespace {

/// @returns the value of `--ranks N` or `--ranks=N`
std::optional<std::string_view> ranks_argument(int argc, char** argv) {
  constexpr std::string_view flag = "--ranks";
  for (int i = 1; i < argc; ++i) {
    std::string_view x = argv[i];
    if (x == flag)
      return i + 1 < argc ? std::string_view{argv[i + 1]} : std::string_view{};
    if (x.starts_with(flag) && x.size() > flag.size() && x[flag.size()] == '=')
      return x.substr(flag.size() + 1);
  }
  return std::nullopt;
}

} // namespace

void init(int argc, char** argv) {
  prepare_process(argc, argv);
  end_on_uncaught_errors();
  auto text = ranks_argument(argc, argv);
  if (!text || read_rank_environment())
    return;
  launch_options x;
  auto [end, err] = std::from_chars(text->data(), text->data() + text->size(),
                                    x.ranks);
  if (err != std::errc{} || end != text->data() + text->size() || x.ranks == 0)
    throw error{error_code::config, "--ranks " + std::string{*text}
                                      + ": expected a number of ranks, 1 or "
                                        "more"};
  exit_at_once(launch(x));
}

} // namespace smp
