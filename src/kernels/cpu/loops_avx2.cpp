#define SYNCNORM_CAPABILITY avx2
#include "kernels/cpu/loops.inl"
