# Finds LibTorch and defines syncnorm::torch. First delivery: libtorch_cpu and libc10 only.
include_guard(GLOBAL)

if(NOT TORCH_ROOT_DIR)
  find_path(TORCH_ROOT_DIR share/cmake/Torch/TorchConfig.cmake
    HINTS ${Torch_DIR}/../../.. ${CMAKE_PREFIX_PATH} $ENV{CMAKE_PREFIX_PATH}
    PATH_SUFFIXES torch
    NO_DEFAULT_PATH)
  if(NOT TORCH_ROOT_DIR)
    foreach(hint IN LISTS SYNCNORM_TORCH_HINTS)
      file(GLOB candidates "${hint}/lib/python3*/site-packages/torch")
      find_path(TORCH_ROOT_DIR share/cmake/Torch/TorchConfig.cmake PATHS ${candidates} NO_DEFAULT_PATH)
    endforeach()
  endif()
endif()
if(NOT TORCH_ROOT_DIR)
  message(FATAL_ERROR "syncnorm: no LibTorch found. Run launch/setup, or give CMAKE_PREFIX_PATH.")
endif()

add_library(syncnorm_torch_c10 SHARED IMPORTED)
set_target_properties(syncnorm_torch_c10 PROPERTIES IMPORTED_LOCATION "${TORCH_ROOT_DIR}/lib/libc10.so")
add_library(syncnorm::torch SHARED IMPORTED)
file(GLOB syncnorm_cuda_dirs "${TORCH_ROOT_DIR}/../nvidia/*/lib" "/usr/local/cuda/lib64")
set_target_properties(syncnorm::torch PROPERTIES
  IMPORTED_LOCATION "${TORCH_ROOT_DIR}/lib/libtorch_cpu.so"
  INTERFACE_LINK_LIBRARIES syncnorm_torch_c10
  INTERFACE_INCLUDE_DIRECTORIES
    "${TORCH_ROOT_DIR}/include;${TORCH_ROOT_DIR}/include/torch/csrc/api/include"
  INTERFACE_COMPILE_DEFINITIONS _GLIBCXX_USE_CXX11_ABI=1)
foreach(dir IN LISTS syncnorm_cuda_dirs)
  target_link_options(syncnorm::torch INTERFACE "LINKER:-rpath-link,${dir}" "LINKER:-rpath,${dir}")
endforeach()
message(STATUS "syncnorm: LibTorch ${TORCH_ROOT_DIR}")
