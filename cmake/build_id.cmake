# smp::build_id(): the one string that two ranks compare to know that they run
# the same program. It lives in a generated file that changes only when the
# string does, so an unchanged tree builds nothing.

set(SMP_BUILD_ID_SOURCE ${CMAKE_BINARY_DIR}/generated/build_id.cpp)

string(TOLOWER "${CMAKE_BUILD_TYPE} ${SMP_SANITIZE}" flavour)
string(STRIP "${flavour}" flavour)

set(torch_version "")
set(version_header ${SMP_TORCH_DIR}/include/torch/headeronly/version.h)
foreach(part MAJOR MINOR PATCH)
  file(STRINGS ${version_header} line REGEX "define TORCH_VERSION_${part} ")
  string(REGEX MATCH "[0-9]+" number "${line}")
  list(APPEND torch_version ${number})
endforeach()
list(JOIN torch_version "." torch_version)

add_custom_target(smp_build_id
  COMMAND ${CMAKE_COMMAND}
    -D "SOURCE_DIR=${PROJECT_SOURCE_DIR}"
    -D "OUTPUT=${SMP_BUILD_ID_SOURCE}"
    -D "PREFIX=smp ${PROJECT_VERSION}"
    -D "SUFFIX=${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} ${flavour}, torch ${torch_version}, ucx ${ucx_VERSION}, caf ${CAF_VERSION}"
    -P ${PROJECT_SOURCE_DIR}/cmake/write_build_id.cmake
  BYPRODUCTS ${SMP_BUILD_ID_SOURCE}
  COMMENT "Checking the revision")
