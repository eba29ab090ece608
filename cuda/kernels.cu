// Every kernel of the library: a family for each element type and operation. nvcc makes the fatbin of this file, the
// host C++ compiler the host device's kernels; src/device/mod.rs (Kernel) names the same set.
#include "collective/one_shot.h"
#include "collective/program.h"

#define OSSICLE_ALL_REDUCE(type, name, Op, op)                                                \
  OSSICLE_KERNEL(program_##name##_##op, ossicle::ProgramWork, (ossicle::program<type, ossicle::Op>)) \
  OSSICLE_KERNEL(one_shot_##name##_##op, ossicle::OneShotWork, (ossicle::one_shot<type, ossicle::Op>))

#define OSSICLE_TYPE(type, name)            \
  OSSICLE_ALL_REDUCE(type, name, Sum, sum)  \
  OSSICLE_ALL_REDUCE(type, name, Max, max)  \
  OSSICLE_ALL_REDUCE(type, name, Avg, avg)

OSSICLE_TYPE(float, float)
OSSICLE_TYPE(ossicle::Bfloat16, bfloat16)
OSSICLE_TYPE(ossicle::Float16, half)
OSSICLE_TYPE(int32_t, int32)
OSSICLE_TYPE(uint8_t, uint8)
OSSICLE_TYPE(double, double)
