// Placeholder: every symbol as an empty kernel, so that the library builds and loads until the real kernels stand here.
#include <stdint.h>

struct Arguments {
    uint8_t bytes[256];
};

#if defined(__CUDACC__)
#define KERNEL(family, type, op) \
    extern "C" __global__ void ossicle_##family##_##type##_##op(const __grid_constant__ Arguments arguments) { (void)arguments; }
#else
#define KERNEL(family, type, op) \
    extern "C" void ossicle_##family##_##type##_##op(const Arguments* arguments) { (void)arguments; }
#endif

#define OPS(family, type) KERNEL(family, type, sum) KERNEL(family, type, max) KERNEL(family, type, avg)
#define TYPES(family) \
    OPS(family, float) OPS(family, bfloat16) OPS(family, half) OPS(family, int32) OPS(family, uint8) OPS(family, double)

TYPES(program)
TYPES(one_shot)
