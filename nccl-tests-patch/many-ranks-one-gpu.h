// Force-include this file to let one process of stock nccl-tests put all of its ranks on one GPU.
//
//     NVCC_APPEND_FLAGS="-include /path/to/many-ranks-one-gpu.h" make ...
//
// The tests give rank i of a process the CUDA device i. Here every device number means device 0, and there seem to be
// as many devices as anyone asks for. CUDA_VISIBLE_DEVICES says which GPU is device 0.
//
// cudaDeviceSynchronize waits for all work on the device, thus also for the collective kernels of other ranks, and
// those wait for this rank, whose thread would sit in that call. What the tests mean by it is "what I queued just now
// is done": they call it after memsets and verification kernels, which go to the default stream, while collectives
// run on streams made with cudaStreamNonBlocking and are waited for by stream. So it becomes a wait for the default
// stream, which neither waits for non-blocking streams nor is waited for by them. (With -y 1 collectives run on the
// default stream itself, which all ranks here would share: not supported.)
//
// Each name is an inline function over the real call, put in its place by a macro that is defined after it.

#ifndef OSSICLE_MANY_RANKS_ONE_GPU_H
#define OSSICLE_MANY_RANKS_ONE_GPU_H

// The tests' plain C++ files, which make no CUDA call, may be compiled without the toolkit's headers.
#if defined(__cplusplus) && defined(__has_include)
#if __has_include(<cuda_runtime.h>)

#include <cuda_runtime.h>

namespace many_ranks_one_gpu {

// More than any run can ask for, far from overflow in sums of device numbers.
constexpr int kDevicesShown = 1 << 16;

inline cudaError_t deviceCount(int* count) {
  const cudaError_t status = cudaGetDeviceCount(count);
  if (status == cudaSuccess && *count > 0) *count = kDevicesShown;
  return status;
}

inline cudaError_t setDevice(int) { return cudaSetDevice(0); }

inline cudaError_t deviceProperties(cudaDeviceProp* properties, int) { return cudaGetDeviceProperties(properties, 0); }

inline cudaError_t deviceAttribute(int* value, cudaDeviceAttr attribute, int) {
  return cudaDeviceGetAttribute(value, attribute, 0);
}

inline cudaError_t busId(char* text, int bytes, int) { return cudaDeviceGetPCIBusId(text, bytes, 0); }

inline cudaError_t synchronizeOwnWork() { return cudaStreamSynchronize(0); }

// Freeing waits for the device too, and the tests free eight bytes after every verification: they stay.
inline cudaError_t keepHostMemory(void*) { return cudaSuccess; }

}  // namespace many_ranks_one_gpu

// Some toolkits define a few of these names as macros themselves (versioned entry points).
#undef cudaGetDeviceCount
#undef cudaSetDevice
#undef cudaGetDeviceProperties
#undef cudaDeviceGetAttribute
#undef cudaDeviceGetPCIBusId
#undef cudaDeviceSynchronize
#undef cudaFreeHost

#define cudaGetDeviceCount(count) many_ranks_one_gpu::deviceCount(count)
#define cudaSetDevice(device) many_ranks_one_gpu::setDevice(device)
#define cudaGetDeviceProperties(properties, device) many_ranks_one_gpu::deviceProperties(properties, device)
#define cudaDeviceGetAttribute(value, attribute, device) many_ranks_one_gpu::deviceAttribute(value, attribute, device)
#define cudaDeviceGetPCIBusId(text, bytes, device) many_ranks_one_gpu::busId(text, bytes, device)
#define cudaDeviceSynchronize() many_ranks_one_gpu::synchronizeOwnWork()
#define cudaFreeHost(pointer) many_ranks_one_gpu::keepHostMemory(pointer)

// Releases before 2.17 make all communicators of a single process in one call with a list of devices.
#if __has_include(<nccl.h>)
#include <nccl.h>
#include <vector>

namespace many_ranks_one_gpu {

inline ncclResult_t initAll(ncclComm_t* comms, int ranks, const int*) {
  const std::vector<int> devices(ranks > 0 ? ranks : 0, 0);
  return ncclCommInitAll(comms, ranks, devices.data());
}

}  // namespace many_ranks_one_gpu

#define ncclCommInitAll(comms, ranks, devices) many_ranks_one_gpu::initAll(comms, ranks, devices)
#endif

#endif
#endif
#endif  // OSSICLE_MANY_RANKS_ONE_GPU_H
