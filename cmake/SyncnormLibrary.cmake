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

# The folder of a backend, or the file in it that stands for a missing one.
function(syncnorm_choose_backend sources folder built)
  if(${built})
    list(FILTER ${sources} EXCLUDE REGEX "/${folder}/absent\\.cpp$")
  else()
    list(FILTER ${sources} EXCLUDE REGEX "/${folder}/[^/]*\\.cpp$")
    list(APPEND ${sources} "${PROJECT_SOURCE_DIR}/src/${folder}/absent.cpp")
  endif()
  set(${sources} "${${sources}}" PARENT_SCOPE)
endfunction()
syncnorm_choose_backend(syncnorm_core_sources comm/nccl ${SYNCNORM_NCCL_BUILT})
syncnorm_choose_backend(syncnorm_core_sources kernels/cuda ${SYNCNORM_CUDA_BUILT})

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
if(SYNCNORM_CUDA_BUILT)
  file(GLOB syncnorm_cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/kernels/cuda/*.cu")
  add_library(syncnorm_cuda OBJECT ${syncnorm_cuda_sources})
  target_include_directories(syncnorm_cuda PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_compile_features(syncnorm_cuda PRIVATE cuda_std_17)
  target_compile_options(syncnorm_cuda PRIVATE --expt-relaxed-constexpr)
  set_target_properties(syncnorm_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_RUNTIME_LIBRARY Shared)
  target_sources(syncnorm PRIVATE $<TARGET_OBJECTS:syncnorm_cuda>)
  set_target_properties(syncnorm PROPERTIES CUDA_RUNTIME_LIBRARY Shared LINKER_LANGUAGE CXX)
  target_include_directories(syncnorm_core SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  # The runtime that libtorch_cpu has loaded already.
  target_link_libraries(syncnorm PRIVATE CUDA::cudart)
endif()
if(SYNCNORM_NCCL_BUILT)
  target_include_directories(syncnorm_core SYSTEM PRIVATE ${SYNCNORM_NCCL_INCLUDE_DIRS})
endif()
# Headers alone, of the sources alone: nothing that a consumer would have to find.
target_link_libraries(syncnorm PRIVATE $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
# Programs reuse the precompiled header, so it must not depend on a macro that only the library has.
set_target_properties(syncnorm PROPERTIES DEFINE_SYMBOL "")

# The loops are one source, compiled for each instruction set that may be there at run time.
# No errno and no trap keeps the compiler from turning sqrt into branches.
# GCC would pack the two sums of a run or block into a vector by way of memory: two stores that a wider
# load has to wait for, at every run.
set(syncnorm_unpacked_sums -fno-tree-slp-vectorize)
set(syncnorm_loop_options -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast
  ${syncnorm_unpacked_sums})
set(syncnorm_loop_options_baseline)
set(syncnorm_loop_options_avx2 -mavx2 -mfma -mf16c)
# GCC 12 takes the undefined upper half in its own AVX-512 intrinsics for a mistake of ours.
set(syncnorm_loop_options_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c
  -mprefer-vector-width=512 -Wno-uninitialized -Wno-maybe-uninitialized)
set(syncnorm_loops "${PROJECT_SOURCE_DIR}/src/kernels/cpu/loops")
foreach(capability IN ITEMS baseline avx2 avx512)
  if(capability STREQUAL "baseline" OR CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set_source_files_properties("${syncnorm_loops}_${capability}.cpp" PROPERTIES
      COMPILE_OPTIONS "${syncnorm_loop_options};${syncnorm_loop_options_${capability}}"
      SKIP_PRECOMPILE_HEADERS ON)
  else()
    set_source_files_properties("${syncnorm_loops}_${capability}.cpp" PROPERTIES HEADER_FILE_ONLY ON)
  endif()
endforeach()
set_source_files_properties("${PROJECT_SOURCE_DIR}/src/kernels/cpu/cpu.cpp" PROPERTIES
  COMPILE_OPTIONS ${syncnorm_unpacked_sums})
