#define SYNCNORM_CAPABILITY baseline
#include "kernels/cpu/loops.inl"
