# Run at every build by build_id.cmake: writes OUTPUT if the string changed.

cmake_minimum_required(VERSION 3.25)

execute_process(
  COMMAND git -C ${SOURCE_DIR} describe --always --dirty --abbrev=12 --exclude *
  OUTPUT_VARIABLE revision OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_QUIET RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  set(revision "no revision")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT
[[#include "transport/build_id.hpp"

namespace smp {

const char* build_id() noexcept {
  return "@PREFIX@ (@revision@, @SUFFIX@)";
}

} // namespace smp
]])
