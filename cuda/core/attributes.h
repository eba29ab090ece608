// How the two compilers are told that a function is device code, and inlined.
#pragma once

#if defined(__CUDACC__)
#define OSSICLE_DEVICE __device__ __forceinline__
#else
#define OSSICLE_DEVICE inline __attribute__((always_inline))
#endif
