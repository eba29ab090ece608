// How the two compilers are told that a function is device code, and inlined, or never.
#pragma once

#if defined(__CUDACC__)
#define OSSICLE_DEVICE __device__ __forceinline__
#define OSSICLE_APART static __device__ __noinline__
#else
#define OSSICLE_DEVICE inline __attribute__((always_inline))
#define OSSICLE_APART inline
#endif
