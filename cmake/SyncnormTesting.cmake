# Registers tests that run on several MPI ranks.

set(SYNCNORM_TEST_MPI_FLAGS "--oversubscribe;--bind-to;none;--mca;mpi_yield_when_idle;1"
  CACHE STRING "Flags for mpirun in tests (these are Open MPI's)")
mark_as_advanced(SYNCNORM_TEST_MPI_FLAGS)

# Single-copy through process_vm_readv is forbidden in many containers; root is usual there, and Open MPI asks twice.
set(SYNCNORM_TEST_ENVIRONMENT
  OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  OMPI_MCA_btl_vader_single_copy_mechanism=none)

# syncnorm_add_test(NAME SOURCES file... [RANKS n...] [LIBRARIES target...] [LABELS label...] [TIMEOUT seconds]
#                   [PREFIX text])
#
# Builds the GoogleTest program NAME with the MPI main of tests/support and registers each test suite in it at each
# rank count (default 1 2 3 4) as "<prefix><suite>/ranks=<n>". Suites of one fixture (TEST_P instances, typed
# tests) form one entry. They are read from the program after each link, so a new suite needs no line in CMake.
function(syncnorm_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;PREFIX" "SOURCES;RANKS;LIBRARIES;LABELS")
  if(NOT arg_RANKS)
    set(arg_RANKS 1 2 3 4)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE syncnorm_test_support ${arg_LIBRARIES})
  syncnorm_target_defaults(${name} PRECOMPILED)
  # Tests spend their time in the library; -O1 compiles them sooner.
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)

  set(list "${CMAKE_CURRENT_BINARY_DIR}/${name}_tests.cmake")
  add_custom_command(TARGET ${name} POST_BUILD
    COMMAND "${CMAKE_COMMAND}"
      "-DPROGRAM=$<TARGET_FILE:${name}>" "-DLIST=${list}" "-DRANKS=${arg_RANKS}" "-DLABELS=${arg_LABELS}" "-DPREFIX=${arg_PREFIX}"
      "-DTIMEOUT=${arg_TIMEOUT}" "-DMPIEXEC=${MPIEXEC_EXECUTABLE}" "-DFLAGS=${SYNCNORM_TEST_MPI_FLAGS}"
      "-DENVIRONMENT=${SYNCNORM_TEST_ENVIRONMENT}"
      -P "${PROJECT_SOURCE_DIR}/cmake/SyncnormListTests.cmake"
    BYPRODUCTS "${list}"
    VERBATIM)
  set(include "${CMAKE_CURRENT_BINARY_DIR}/${name}_include.cmake")
  file(WRITE "${include}"
    "if(EXISTS \"${list}\")\n  include(\"${list}\")\nelse()\n  add_test(${name}_NOT_BUILT ${name}_NOT_BUILT)\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${include}")
endfunction()

# syncnorm_add_fault_test(NAME PROGRAM target-or-path [ARGS arg...] RANKS n EXPECT_MESSAGE regex [WITHIN seconds]
#                         [ENVIRONMENT name=value...])
#
# Runs PROGRAM on n ranks and expects the job to end by itself, within the time, with a non-zero status and a line that
# matches the extended regular expression.
function(syncnorm_add_fault_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PROGRAM;RANKS;EXPECT_MESSAGE;WITHIN" "ARGS;ENVIRONMENT")
  foreach(required IN ITEMS PROGRAM RANKS EXPECT_MESSAGE)
    if(NOT DEFINED arg_${required})
      message(FATAL_ERROR "syncnorm_add_fault_test(${name}): ${required} is missing")
    endif()
  endforeach()
  if(NOT arg_WITHIN)
    set(arg_WITHIN 60)
  endif()
  if(TARGET ${arg_PROGRAM})
    set(arg_PROGRAM "$<TARGET_FILE:${arg_PROGRAM}>")
  endif()
  add_test(NAME ${name}
    COMMAND "${PROJECT_SOURCE_DIR}/tests/support/expect_failure" "${arg_WITHIN}" "${arg_EXPECT_MESSAGE}"
      "${MPIEXEC_EXECUTABLE}" ${SYNCNORM_TEST_MPI_FLAGS} -n ${arg_RANKS} "${arg_PROGRAM}" ${arg_ARGS})
  math(EXPR limit "${arg_WITHIN} + 30")
  set_tests_properties(${name} PROPERTIES
    PROCESSORS ${arg_RANKS} TIMEOUT ${limit} LABELS fault
    ENVIRONMENT "${SYNCNORM_TEST_ENVIRONMENT};${arg_ENVIRONMENT}")
endfunction()
