# Settings of this build tree that no consumer inherits.

set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")

# ccache keys a precompiled header by its contents only when told that this is safe.
find_program(CCACHE_PROGRAM ccache)
mark_as_advanced(CCACHE_PROGRAM)
if(CCACHE_PROGRAM AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND}" -E env
      "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
      "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${CCACHE_PROGRAM}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
endif()

# Compile options of every target of this project. PRECOMPILED reuses the library's precompiled torch headers.
function(syncnorm_target_defaults target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "PRECOMPILED" "" "")
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  # One precompiled header serves the library and all programs, so both are compiled alike: position independent, and
  # with OpenMP, without which at::parallel_for silently runs on one thread.
  # OpenMP comes as a flag: its library by path would be a second libgomp beside the one in LibTorch's folder.
  target_compile_options(${target} PRIVATE -fPIC ${OpenMP_CXX_FLAGS})
  target_link_options(${target} PRIVATE ${OpenMP_CXX_FLAGS})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ccache needs the preprocessed text to name the precompiled header it came from.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
  if(arg_PRECOMPILED)
    target_precompile_headers(${target} REUSE_FROM syncnorm)
  endif()
endfunction()
