# What goes into the wheel of the Python package (pyproject.toml): beside its
# modules the extension, libsmp with CAF, and the programs. LibTorch and UCX are
# those of their own wheels, in the folders beside ours.

if(NOT TARGET smp_core)
  message(FATAL_ERROR "a wheel needs CPython 3.10 or later with its headers: SMP_PYTHON=${SMP_PYTHON}")
endif()

set(beside "$ORIGIN/../../torch/lib" "$ORIGIN/../../libucx/lib")
set_target_properties(smp_core PROPERTIES INSTALL_RPATH "$ORIGIN/lib")
set_target_properties(smp smp_cuda PROPERTIES INSTALL_RPATH "$ORIGIN;${beside}")
install(TARGETS smp_core LIBRARY DESTINATION smp COMPONENT python)
install(TARGETS smp smp_cuda LIBRARY DESTINATION smp/lib COMPONENT python NAMELINK_SKIP)
foreach(library CAF::core CAF::io CAF::openssl)
  if(TARGET ${library})
    install(FILES $<TARGET_FILE:${library}> DESTINATION smp/lib COMPONENT python)
  endif()
endforeach()
foreach(program smp-train smp-top smp-inspect)
  set_target_properties(${program} PROPERTIES
    INSTALL_RPATH "$ORIGIN/../lib;${beside}")
  install(TARGETS ${program} RUNTIME DESTINATION smp/bin COMPONENT python)
endforeach()
