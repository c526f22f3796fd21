# The target syncnorm: every source below src/, public headers in include/.
set(syncnorm_folders
  comm kernels autograd nn parallel)
set(syncnorm_sources)
foreach(folder IN LISTS syncnorm_folders)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${folder}/*.cpp")
  list(APPEND syncnorm_sources ${sources})
endforeach()
list(REMOVE_DUPLICATES syncnorm_sources)
if(NOT syncnorm_sources)
  message(STATUS "syncnorm: src/ holds no source yet")
  return()
endif()

add_library(syncnorm ${syncnorm_sources})
add_library(syncnorm::syncnorm ALIAS syncnorm)
target_include_directories(syncnorm
  PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>" "$<INSTALL_INTERFACE:include>"
  PRIVATE "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(syncnorm PUBLIC syncnorm::torch MPI::MPI_C Threads::Threads)
target_compile_features(syncnorm PUBLIC cxx_std_17)
target_compile_definitions(syncnorm PUBLIC OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
set_target_properties(syncnorm PROPERTIES DEFINE_SYMBOL "")
syncnorm_target_defaults(syncnorm)
target_precompile_headers(syncnorm PRIVATE <torch/torch.h>)

# Vectorised loops: no errno and no trap keeps the compiler from turning sqrt into branches.
file(GLOB syncnorm_cpu_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/kernels/cpu/*.cpp")
set_source_files_properties(${syncnorm_cpu_sources} PROPERTIES
  COMPILE_OPTIONS "-O3;-fno-math-errno;-fno-trapping-math;-ffp-contract=fast"
  SKIP_PRECOMPILE_HEADERS ON)
