# The target syncnorm: every source below src/, public headers in include/.

function(syncnorm_sources out)
  set(sources)
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE found CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${folder}/*.cpp")
    list(APPEND sources ${found})
  endforeach()
  set(${out} "${sources}" PARENT_SCOPE)
endfunction()

syncnorm_sources(syncnorm_core_sources comm kernels)
syncnorm_sources(syncnorm_sources autograd nn parallel)

# Merely having <torch/torch.h> precompiled costs a source 12 s more than having <ATen/ATen.h>; the lower layers, which
# need only the latter, are a target of their own for that.
add_library(syncnorm_core OBJECT ${syncnorm_core_sources})
target_precompile_headers(syncnorm_core PRIVATE <ATen/ATen.h>)
add_library(syncnorm ${syncnorm_sources} $<TARGET_OBJECTS:syncnorm_core>)
target_precompile_headers(syncnorm PRIVATE <torch/torch.h>)
add_library(syncnorm::syncnorm ALIAS syncnorm)

foreach(target IN ITEMS syncnorm_core syncnorm)
  target_include_directories(${target}
    PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>" "$<INSTALL_INTERFACE:include>"
    PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_link_libraries(${target} PUBLIC syncnorm::torch MPI::MPI_C Threads::Threads)
  target_compile_features(${target} PUBLIC cxx_std_17)
  target_compile_definitions(${target} PUBLIC OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
  syncnorm_target_defaults(${target})
endforeach()
# Headers alone, of the sources alone: nothing that a consumer would have to find.
target_link_libraries(syncnorm PRIVATE $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
# Programs reuse the precompiled header, so it must not depend on a macro that only the library has.
set_target_properties(syncnorm PROPERTIES DEFINE_SYMBOL "")

# Vectorised loops: no errno and no trap keeps the compiler from turning sqrt into branches.
file(GLOB syncnorm_cpu_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/kernels/cpu/*.cpp")
set_source_files_properties(${syncnorm_cpu_sources} PROPERTIES
  COMPILE_OPTIONS "-O3;-fno-math-errno;-fno-trapping-math;-ffp-contract=fast"
  SKIP_PRECOMPILE_HEADERS ON)
