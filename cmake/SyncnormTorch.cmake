# Finds LibTorch and defines the imported target syncnorm::torch (libtorch_cpu and libc10, headers as SYSTEM).
#
# LibTorch is searched in Torch_DIR, Torch_ROOT and CMAKE_PREFIX_PATH (variables, then environment; a folder, a Python
# environment or what torch.utils.cmake_prefix_path prints), then in SYNCNORM_TORCH_HINTS. Any distribution will do: the PyPI wheel (CUDA or not), the zip of pytorch.org, an own build.
#
# find_package(Torch) is not used: for a CUDA build of LibTorch it demands a CUDA toolkit even where nobody compiles
# CUDA code, and it links libtorch_cuda, which adds 0.3 s and 11 libraries to the start of every process. A
# program that wants CUDA tensors links the `torch` target of find_package(Torch) besides this one.
#
# Used by syncnorm's own build and, installed beside its package configuration, by its consumers.
include_guard(GLOBAL)

set(SYNCNORM_TORCH_TESTED_VERSION 2.11)

# Sets <out> to the LibTorch root (the folder that holds share/cmake/Torch), or to NOTFOUND.
function(_syncnorm_find_torch_root out)
  string(REPLACE ":" ";" environment_prefixes "$ENV{CMAKE_PREFIX_PATH}")
  set(prefixes ${Torch_DIR} $ENV{Torch_DIR} ${Torch_ROOT} $ENV{Torch_ROOT}
    ${CMAKE_PREFIX_PATH} ${environment_prefixes} ${SYNCNORM_TORCH_HINTS})
  set(folders)
  foreach(prefix IN LISTS prefixes)
    file(GLOB site_packages "${prefix}/lib/python3*/site-packages")
    list(APPEND folders "${prefix}" ${site_packages})
  endforeach()
  find_file(SYNCNORM_TORCH_CONFIG TorchConfig.cmake
    PATHS ${folders}
    PATH_SUFFIXES share/cmake/Torch torch/share/cmake/Torch libtorch/share/cmake/Torch Torch
    DOC "TorchConfig.cmake of the LibTorch to build with"
    NO_DEFAULT_PATH)
  mark_as_advanced(SYNCNORM_TORCH_CONFIG)
  set(root NOTFOUND)
  if(SYNCNORM_TORCH_CONFIG)
    cmake_path(SET root NORMALIZE "${SYNCNORM_TORCH_CONFIG}/../../../..")
    string(REGEX REPLACE "/$" "" root "${root}")
  endif()
  set(${out} "${root}" PARENT_SCOPE)
endfunction()

function(_syncnorm_torch_version root out)
  set(version unknown)
  set(file "${root}/share/cmake/Torch/TorchConfigVersion.cmake")
  if(EXISTS "${file}")
    file(STRINGS "${file}" line REGEX "PACKAGE_VERSION \"" LIMIT_COUNT 1)
    string(REGEX REPLACE ".*\"([^\"]*)\".*" "\\1" version "${line}")
  endif()
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

# Folders that hold the CUDA runtime libraries which libtorch_cpu of a CUDA build needs (libcudart, libcupti). Those
# of a wheel or a zip are found by libtorch_cpu itself; only a toolkit elsewhere has to be named.
function(_syncnorm_cuda_runtime_folders root out)
  set(folders)
  execute_process(COMMAND "${CMAKE_READELF}" -d "${root}/lib/libtorch_cpu.so"
    OUTPUT_VARIABLE dynamic ERROR_QUIET)
  string(REGEX MATCHALL "lib(cudart|cupti)[^]]*" needed "${dynamic}")
  foreach(library IN LISTS needed)
    file(GLOB bundled "${root}/lib/${library}" "${root}/../nvidia/*/lib/${library}")
    if(bundled)
      continue()
    endif()
    find_package(CUDAToolkit QUIET)
    find_file(found "${library}" NO_CACHE
      HINTS "${CUDAToolkit_LIBRARY_DIR}" "${CUDAToolkit_LIBRARY_ROOT}/extras/CUPTI/lib64"
            "${CUDAToolkit_TARGET_DIR}/extras/CUPTI/lib64"
      PATHS /usr/local/cuda/lib64 /usr/local/cuda/extras/CUPTI/lib64)
    if(NOT found)
      message(FATAL_ERROR
        "syncnorm: ${root}/lib/libtorch_cpu.so needs ${library}, which is neither beside it nor in a CUDA toolkit. "
        "Install it into the same Python environment (pip install nvidia-cuda-runtime nvidia-cuda-cupti, of that "
        "major version), install a CUDA toolkit, or use a LibTorch without CUDA.")
    endif()
    cmake_path(GET found PARENT_PATH folder)
    list(APPEND folders "${folder}")
    unset(found)
  endforeach()
  list(REMOVE_DUPLICATES folders)
  set(${out} "${folders}" PARENT_SCOPE)
endfunction()

function(_syncnorm_define_torch_target root)
  foreach(name IN ITEMS torch_cpu c10)
    if(NOT EXISTS "${root}/lib/lib${name}.so")
      message(FATAL_ERROR "syncnorm: ${root}/lib/lib${name}.so is missing; this LibTorch is incomplete or static.")
    endif()
  endforeach()

  add_library(syncnorm::c10 SHARED IMPORTED)
  set_target_properties(syncnorm::c10 PROPERTIES IMPORTED_LOCATION "${root}/lib/libc10.so")
  add_library(syncnorm::torch SHARED IMPORTED)
  set_target_properties(syncnorm::torch PROPERTIES
    IMPORTED_LOCATION "${root}/lib/libtorch_cpu.so"
    INTERFACE_LINK_LIBRARIES syncnorm::c10
    INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_FEATURES cxx_std_17)

  # LibTorch before 2.7 came with the old string ABI as well and said so in its configuration.
  file(READ "${root}/share/cmake/Torch/TorchConfig.cmake" config)
  if(config MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
    target_compile_definitions(syncnorm::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${CMAKE_MATCH_1})
  endif()

  # libtorch_cpu looks for its own dependencies through DT_RPATH of the program, never through DT_RUNPATH.
  _syncnorm_cuda_runtime_folders("${root}" folders)
  if(folders)
    target_link_options(syncnorm::torch INTERFACE LINKER:--disable-new-dtags)
  endif()
  foreach(folder IN LISTS folders)
    target_link_options(syncnorm::torch INTERFACE "LINKER:-rpath,${folder}" "LINKER:-rpath-link,${folder}")
  endforeach()
endfunction()

_syncnorm_find_torch_root(_syncnorm_torch_root)
if(NOT _syncnorm_torch_root)
  message(FATAL_ERROR
    "syncnorm: no LibTorch found. Run launch/setup, which installs one, or name yours: "
    "-DCMAKE_PREFIX_PATH=<folder that holds share/cmake/Torch>.")
endif()
if(NOT TARGET syncnorm::torch)
  _syncnorm_define_torch_target("${_syncnorm_torch_root}")
endif()
set(SYNCNORM_TORCH_LIBRARY_FOLDER "${_syncnorm_torch_root}/lib")
_syncnorm_torch_version("${_syncnorm_torch_root}" SYNCNORM_TORCH_VERSION)
if(NOT ${CMAKE_FIND_PACKAGE_NAME}_FIND_QUIETLY)
  message(STATUS "syncnorm: LibTorch ${SYNCNORM_TORCH_VERSION} in ${_syncnorm_torch_root}")
  if(NOT SYNCNORM_TORCH_VERSION VERSION_GREATER_EQUAL SYNCNORM_TORCH_TESTED_VERSION)
    message(WARNING "syncnorm is tested with LibTorch ${SYNCNORM_TORCH_TESTED_VERSION} and later.")
  endif()
endif()
