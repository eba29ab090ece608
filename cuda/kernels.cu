// Every kernel of the library: a family of reductions for each element type and operation, and the moves. nvcc makes the fatbin of this file, the
// host C++ compiler the host device's kernels; src/device/mod.rs (Kernel) names the same set.
#include "collective/one_shot.h"
#include "collective/one_shot_move.h"
#include "collective/program.h"
#include "collective/two_shot_direct.h"
#include "collective/two_shot_move.h"
// No kernel runs it yet; so nvcc sees it all the same.
#include "hca/engine.h"

#define OSSICLE_PROGRAM(type, name, Op, op) \
  OSSICLE_KERNEL(program_##name##_##op, ossicle::ProgramWork, (ossicle::program<type, ossicle::Op>))
#define OSSICLE_ONE_SHOT(type, name, Op, op) \
  OSSICLE_KERNEL(one_shot_##name##_##op, ossicle::OneShotWork, (ossicle::one_shot<type, ossicle::Op>))
#define OSSICLE_TWO_SHOT(type, name, Op, op) \
  OSSICLE_KERNEL(two_shot_##name##_##op, ossicle::TwoShotWork, (ossicle::two_shot<type, ossicle::Op>))

#define OSSICLE_OPS(EACH, type, name) \
  EACH(type, name, Sum, sum)          \
  EACH(type, name, Max, max)          \
  EACH(type, name, Avg, avg)
#define OSSICLE_TYPES(EACH)                           \
  OSSICLE_OPS(EACH, float, float)                     \
  OSSICLE_OPS(EACH, ossicle::Bfloat16, bfloat16)      \
  OSSICLE_OPS(EACH, ossicle::Float16, half)           \
  OSSICLE_OPS(EACH, int32_t, int32)                   \
  OSSICLE_OPS(EACH, uint8_t, uint8)                   \
  OSSICLE_OPS(EACH, double, double)

OSSICLE_TYPES(OSSICLE_PROGRAM)
OSSICLE_TYPES(OSSICLE_ONE_SHOT)
OSSICLE_TYPES(OSSICLE_TWO_SHOT)
OSSICLE_KERNEL(one_shot_move, ossicle::OneShotWork, ossicle::one_shot_move)
OSSICLE_KERNEL(two_shot_move, ossicle::TwoShotWork, ossicle::two_shot_move)

#if !defined(__CUDACC__)
// The host device finds kernels by position, in the order of Kernel::all.
#define OSSICLE_PROGRAM_ENTRY(type, name, Op, op) reinterpret_cast<HostKernel>(ossicle_program_##name##_##op),
#define OSSICLE_ONE_SHOT_ENTRY(type, name, Op, op) reinterpret_cast<HostKernel>(ossicle_one_shot_##name##_##op),
#define OSSICLE_TWO_SHOT_ENTRY(type, name, Op, op) reinterpret_cast<HostKernel>(ossicle_two_shot_##name##_##op),
using HostKernel = void (*)(const void*, uint32_t, uint32_t);
extern "C" const HostKernel ossicle_host_kernels[];
const HostKernel ossicle_host_kernels[] = {OSSICLE_TYPES(OSSICLE_PROGRAM_ENTRY) OSSICLE_TYPES(OSSICLE_ONE_SHOT_ENTRY)
                                           OSSICLE_TYPES(OSSICLE_TWO_SHOT_ENTRY)
                                           reinterpret_cast<HostKernel>(ossicle_one_shot_move),
                                           reinterpret_cast<HostKernel>(ossicle_two_shot_move)};
#endif
