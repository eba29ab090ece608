// One source, two compilers: what a block is.
//
// nvcc compiles a block as a CTA. The host compiler compiles it as one thread (thread 0 of 1), so that a machine
// without a GPU runs the same kernels. Work inside a block is `for (i = block.thread; i < n; i += block.threads)`.
#pragma once
#include "sites.h"

namespace ossicle {

struct Block {
  uint32_t thread, threads;
  uint32_t index, blocks;
};

// Memory of one block, declared in a kernel's body, empty of meaning until the block writes it.
#if defined(__CUDACC__)
#define OSSICLE_BLOCK_MEMORY(Type, name) __shared__ Type name
#elif defined(OSSICLE_ORDER_MODEL)
#define OSSICLE_BLOCK_MEMORY(Type, name) Type& name = ::ossicle::model::block_memory<Type>()
#else
#define OSSICLE_BLOCK_MEMORY(Type, name) Type name
#endif

#if !defined(OSSICLE_ORDER_MODEL)  // which brings its own
// Every thread of the block arrives before any goes on, and sees what the others wrote before.
template <Site SITE> OSSICLE_DEVICE void barrier(const Block& block) {
  if (dropped(SITE)) return;
#if defined(__CUDACC__)
  __syncthreads();
#endif
  (void)block;
}

// A barrier whose result is true only if every thread came with true.
template <Site SITE> OSSICLE_DEVICE bool barrier_and(const Block& block, bool ok) {
  if (dropped(SITE)) return ok;
#if defined(__CUDACC__)
  return __syncthreads_and(ok);
#endif
  (void)block;
  return ok;
}
#endif

// The same kernel body for both: `ossicle_<name>` is the symbol in the fatbin and in the host library. On the host
// the launcher calls it once a block.
#if defined(__CUDACC__)
#define OSSICLE_KERNEL(name, Work, body)                                                          \
  extern "C" __global__ void __launch_bounds__(512) ossicle_##name(const __grid_constant__ Work work) { \
    body(::ossicle::Block{threadIdx.x, blockDim.x, blockIdx.x, gridDim.x}, work);                 \
  }
#else
#define OSSICLE_KERNEL(name, Work, body)                                                \
  extern "C" void ossicle_##name(const Work* work, uint32_t index, uint32_t blocks) {   \
    body(::ossicle::Block{0, 1, index, blocks}, *work);                                 \
  }
#endif

}  // namespace ossicle
