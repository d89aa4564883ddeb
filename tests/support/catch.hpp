#pragma once

// LibTorch's logging header defines a macro CHECK that aborts, and whichever of
// it and Catch2 comes last wins without a warning. Include this header first
// in every test, and never Catch2 directly.
#if __has_include(<c10/util/Logging.h>)
#  include <c10/util/Logging.h>
#  undef CHECK
#endif

#include <catch2/catch_approx.hpp>
#include <catch2/catch_message.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
