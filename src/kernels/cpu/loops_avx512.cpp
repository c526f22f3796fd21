#define SYNCNORM_CAPABILITY avx512
#include "kernels/cpu/loops.inl"
