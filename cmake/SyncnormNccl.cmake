# Decides whether the NCCL backend is built, and says so: SYNCNORM_NCCL_BUILT, and SYNCNORM_NCCL_INCLUDE_DIRS for its
# headers. Nothing is linked: the libraries are those that LibTorch has loaded, found at run time.
option(SYNCNORM_NCCL "Build the NCCL backend where nccl.h, a CUDA toolkit and a LibTorch with CUDA are found" ON)

# Sets <out> to why there is no NCCL to build with, or to "".
function(_syncnorm_nccl_missing out)
  set(why "")
  # A LibTorch with CUDA has libc10_cuda, which names the runtime it was built for.
  execute_process(COMMAND "${CMAKE_READELF}" -d "${SYNCNORM_TORCH_LIBRARY_FOLDER}/libc10_cuda.so"
    OUTPUT_VARIABLE dynamic ERROR_QUIET)
  string(REGEX MATCH "libcudart\\.so\\.([0-9]+)" runtime "${dynamic}")
  set(runtime "${CMAKE_MATCH_1}")
  if(NOT SYNCNORM_NCCL)
    set(why "switched off")
  elseif(NOT CUDAToolkit_FOUND)
    set(why "no CUDA toolkit")
  elseif(NOT runtime)
    set(why "LibTorch is without CUDA")
  elseif(NOT runtime EQUAL CUDAToolkit_VERSION_MAJOR)
    set(why "LibTorch is for CUDA ${runtime}, the toolkit is ${CUDAToolkit_VERSION}")
  elseif(NOT SYNCNORM_NCCL_HEADERS)
    set(why "no nccl.h")
  endif()
  set(${out} "${why}" PARENT_SCOPE)
endfunction()

find_path(SYNCNORM_NCCL_HEADERS nccl.h
  HINTS ${CUDAToolkit_INCLUDE_DIRS} "${SYNCNORM_TORCH_LIBRARY_FOLDER}/../../nvidia/nccl/include"
  DOC "Folder of nccl.h")
mark_as_advanced(SYNCNORM_NCCL_HEADERS)
_syncnorm_nccl_missing(_syncnorm_why)
if(_syncnorm_why)
  set(SYNCNORM_NCCL_BUILT FALSE)
  message(STATUS "syncnorm: no NCCL (${_syncnorm_why})")
else()
  set(SYNCNORM_NCCL_BUILT TRUE)
  set(SYNCNORM_NCCL_INCLUDE_DIRS ${CUDAToolkit_INCLUDE_DIRS} "${SYNCNORM_NCCL_HEADERS}")
  list(REMOVE_DUPLICATES SYNCNORM_NCCL_INCLUDE_DIRS)
  file(STRINGS "${SYNCNORM_NCCL_HEADERS}/nccl.h" _syncnorm_numbers REGEX "^#define NCCL_(MAJOR|MINOR) ")
  list(TRANSFORM _syncnorm_numbers REPLACE ".* " "")
  list(JOIN _syncnorm_numbers "." _syncnorm_numbers)
  message(STATUS "syncnorm: NCCL ${_syncnorm_numbers}, headers in ${SYNCNORM_NCCL_HEADERS}")
endif()
