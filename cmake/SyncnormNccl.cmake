# Decides whether the NCCL backend is built, and says so: SYNCNORM_NCCL_BUILT, and SYNCNORM_NCCL_INCLUDE_DIRS for its
# headers. Nothing is linked: the libraries are those that LibTorch has loaded, found at run time.
option(SYNCNORM_NCCL "Build the NCCL backend where nccl.h, a CUDA toolkit and a LibTorch with CUDA are found" ON)

find_path(SYNCNORM_NCCL_HEADERS nccl.h
  HINTS ${CUDAToolkit_INCLUDE_DIRS} "${SYNCNORM_TORCH_LIBRARY_FOLDER}/../../nvidia/nccl/include"
  DOC "Folder of nccl.h")
mark_as_advanced(SYNCNORM_NCCL_HEADERS)
set(_syncnorm_why "${SYNCNORM_CUDA_PROBLEM}")
if(NOT SYNCNORM_NCCL)
  set(_syncnorm_why "switched off")
elseif(NOT _syncnorm_why AND NOT SYNCNORM_NCCL_HEADERS)
  set(_syncnorm_why "no nccl.h")
endif()
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
