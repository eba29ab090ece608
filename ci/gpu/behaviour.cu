// What the library does on a GPU besides adding right: bad pointers and streams, aborts, waits that are late, kernels and
// allocations beside a kernel that waits, graphs, memory over many communicators, the same bits as on the host device.
//
//     behaviour shared      the checks that need several ranks on one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1)
//     behaviour exclusive   what the same layouts get without that variable
//
// Prints 'N passed, N failed'. A check that hangs ends the program after LIMIT_S seconds, with its name.
#include <cuda_runtime.h>
#include <nccl.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

static const int LIMIT_S = 60;
static std::atomic<const char*> current{"start"};
static int passed = 0, failed = 0;

static void check(bool ok, const char* what) {
  ok ? passed++ : failed++;
  if (!ok) printf("failed: %s: %s (last error: %s)\n", current.load(), what, ncclGetLastError(nullptr));
}

static bool last_error_has(const char* words) { return strstr(ncclGetLastError(nullptr), words) != nullptr; }

static void cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    printf("failed: %s: %s: %s\n", current.load(), what, cudaGetErrorString(error));
    exit(1);
  }
}

// cudaFree waits for every kernel, also for one that waits for a rank that this thread has yet to launch: buffers go
// when nothing waits any more.
static std::vector<void*> discarded;
static void discard(void* pointer) { discarded.push_back(pointer); }
static void free_discarded() {
  for (void* pointer : discarded) cudaFree(pointer);
  discarded.clear();
}

struct Cluster {
  std::vector<ncclComm_t> comms;
  std::vector<cudaStream_t> streams;
  bool ok;
  explicit Cluster(int ranks) : comms(ranks), streams(ranks) {
    std::vector<int> devices(ranks, 0);
    ok = ncclCommInitAll(comms.data(), ranks, devices.data()) == ncclSuccess;
    for (auto& stream : streams) cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  }
  ~Cluster() {
    for (auto comm : comms) {
      if (comm) ncclCommDestroy(comm);
    }
    for (auto stream : streams) cudaStreamDestroy(stream);
  }
  int ranks() const { return static_cast<int>(comms.size()); }
};

template <typename T> static T* device(size_t count, const T* values = nullptr) {
  T* pointer;
  cuda(cudaMalloc(reinterpret_cast<void**>(&pointer), count * sizeof(T)), "cudaMalloc");
  if (values) cuda(cudaMemcpy(pointer, values, count * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return pointer;
}

// One grouped all-reduce of all ranks in place, and whether every element on every rank is the sum.
static bool sums(Cluster& cluster, size_t count) {
  std::vector<int*> buffers;
  for (int rank = 0; rank < cluster.ranks(); rank++) {
    std::vector<int> values(count, rank + 1);
    buffers.push_back(device(count, values.data()));
  }
  ncclGroupStart();
  for (int rank = 0; rank < cluster.ranks(); rank++) {
    ncclAllReduce(buffers[rank], buffers[rank], count, ncclInt32, ncclSum, cluster.comms[rank], cluster.streams[rank]);
  }
  bool right = ncclGroupEnd() == ncclSuccess;
  for (int rank = 0; rank < cluster.ranks(); rank++) {
    std::vector<int> result(count);
    cuda(cudaStreamSynchronize(cluster.streams[rank]), "synchronise");
    cuda(cudaMemcpyAsync(result.data(), buffers[rank], count * 4, cudaMemcpyDeviceToHost, cluster.streams[rank]), "copy");
    cuda(cudaStreamSynchronize(cluster.streams[rank]), "synchronise");
    for (int value : result) right = right && value == cluster.ranks() * (cluster.ranks() + 1) / 2;
    discard(buffers[rank]);
  }
  return right;
}

#include "graphs.h"

static void pointers() {
  current = "pointers";
  Cluster one(1);
  check(one.ok, "a communicator of one");
  auto reduce = [&](const void* send, void* recv, size_t count) {
    ncclResult_t result = ncclAllReduce(send, recv, count, ncclFloat, ncclAvg, one.comms[0], one.streams[0]);
    cuda(cudaStreamSynchronize(one.streams[0]), "synchronise");
    return result;
  };
  float* good = device<float>(1000);
  float* other = device<float>(1000);
  std::vector<float> plain(1000);
  check(reduce(good, other, 1000) == ncclSuccess, "cudaMalloc");
  check(reduce(plain.data(), other, 1000) == ncclInvalidArgument && last_error_has("sendbuff"), "plain host memory to send");
  check(reduce(good, plain.data(), 1000) == ncclInvalidArgument && last_error_has("recvbuff"), "plain host memory to receive");
  check(reduce(good, other, 1u << 30) == ncclInvalidArgument, "past the end of an allocation");
  check(reduce(reinterpret_cast<char*>(good) + 2, other, 10) == ncclInvalidArgument, "between two elements");
  float *pinned, *managed, *pooled;
  cuda(cudaHostAlloc(reinterpret_cast<void**>(&pinned), 4000, 0), "cudaHostAlloc");
  cuda(cudaMallocManaged(reinterpret_cast<void**>(&managed), 4000), "cudaMallocManaged");
  cuda(cudaMallocAsync(reinterpret_cast<void**>(&pooled), 4000, one.streams[0]), "cudaMallocAsync");
  check(reduce(pinned, other, 1000) == ncclSuccess, "pinned host memory");
  check(reduce(managed, other, 1000) == ncclSuccess, "managed memory");
  check(reduce(pooled, other, 1000) == ncclSuccess, "memory of a pool");
  void* ours;
  check(ncclMemAlloc(&ours, 4001) == ncclSuccess && reduce(ours, other, 1000) == ncclSuccess, "ncclMemAlloc");
  check(ncclMemFree(ours) == ncclSuccess && ncclMemFree(plain.data()) == ncclInvalidArgument, "ncclMemFree");
  cudaFreeAsync(pooled, one.streams[0]);
  cudaFreeHost(pinned);
  cudaFree(managed);
  cudaFree(other);
  cudaFree(good);
}

static void streams() {
  current = "streams";
  Cluster two(2);
  float *a = device<float>(8), *b = device<float>(8);
  check(ncclAllReduce(a, a, 8, ncclFloat, ncclSum, two.comms[0], two.streams[0]) == ncclSuccess, "rank 0 on a stream");
  check(ncclAllReduce(b, b, 8, ncclFloat, ncclSum, two.comms[1], two.streams[0]) == ncclInvalidUsage && last_error_has("one stream"),
        "rank 1 behind it, in another group");
  check(ncclAllReduce(b, b, 8, ncclFloat, ncclSum, two.comms[1], two.streams[1]) == ncclSuccess, "rank 1 on its own stream");
  check(sums(two, 1000), "the communicator works on after the refusal");
  {
    cudaStream_t blocking;
    cuda(cudaStreamCreate(&blocking), "stream");
    // A blocking stream and the default stream take turns, so they are one stream in this.
    check(ncclAllReduce(a, a, 8, ncclFloat, ncclSum, two.comms[0], nullptr) == ncclSuccess, "rank 0 on the default stream");
    check(ncclAllReduce(b, b, 8, ncclFloat, ncclSum, two.comms[1], blocking) == ncclInvalidUsage && last_error_has("one stream"),
          "rank 1 on a blocking stream, in another group");
    check(ncclAllReduce(b, b, 8, ncclFloat, ncclSum, two.comms[1], two.streams[1]) == ncclSuccess, "rank 1 beside it");
    // Rank 0 is two operations ahead, and rank 1 comes on the stream of the first.
    ncclAllReduce(a, a, 8, ncclFloat, ncclSum, two.comms[0], two.streams[0]);
    ncclAllReduce(a, a, 8, ncclFloat, ncclSum, two.comms[0], blocking);
    check(ncclAllReduce(b, b, 8, ncclFloat, ncclSum, two.comms[1], two.streams[0]) == ncclInvalidUsage, "behind a rank that is ahead");
    for (int i = 0; i < 2; i++) {
      check(ncclAllReduce(b, b, 8, ncclFloat, ncclSum, two.comms[1], two.streams[1]) == ncclSuccess, "beside it");
    }
    for (auto stream : {two.streams[0], two.streams[1], blocking}) cuda(cudaStreamSynchronize(stream), "synchronise");
    cuda(cudaStreamSynchronize(nullptr), "synchronise");
    cudaStreamDestroy(blocking);
    // A stream may go once its work is done.
    for (int rank = 0; rank < 2; rank++) {
      cudaStreamDestroy(two.streams[rank]);
      cuda(cudaStreamCreateWithFlags(&two.streams[rank], cudaStreamNonBlocking), "stream");
    }
    check(sums(two, 1000), "after the streams of the last operation were destroyed");
  }
  {
    Cluster one(1);
    check(ncclAllReduce(a, b, 8, ncclFloat, ncclAvg, one.comms[0], nullptr) == ncclSuccess, "the default stream");
    check(ncclAllReduce(a, b, 8, ncclFloat, ncclAvg, one.comms[0], cudaStreamPerThread) == ncclSuccess, "the thread's stream");
    cuda(cudaStreamSynchronize(cudaStreamPerThread), "synchronise");
    cuda(cudaStreamSynchronize(nullptr), "synchronise");
  }
  cudaFree(a);
  cudaFree(b);
}

// A communicator used on one stream after another keeps its order: each of the sums doubles the one before.
static void stream_order() {
  current = "stream order";
  Cluster two(2);
  const size_t count = 1 << 22;
  std::vector<float> ones(count, 1.0f);
  std::vector<float*> buffers{device(count, ones.data()), device(count, ones.data())};
  std::vector<std::vector<cudaStream_t>> more(2, std::vector<cudaStream_t>(3));
  for (auto& rank : more) {
    for (auto& stream : rank) cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  }
  for (int i = 0; i < 9; i++) {
    ncclGroupStart();
    for (int rank = 0; rank < 2; rank++) {
      ncclAllReduce(buffers[rank], buffers[rank], count, ncclFloat, ncclSum, two.comms[rank], more[rank][i % 3]);
    }
    check(ncclGroupEnd() == ncclSuccess, "launch");
  }
  cuda(cudaDeviceSynchronize(), "synchronise");
  std::vector<float> result(count);
  cuda(cudaMemcpy(result.data(), buffers[1], count * 4, cudaMemcpyDeviceToHost), "copy");
  bool right = true;
  for (float value : result) right = right && value == 512.0f;
  check(right, "nine sums in a row on three streams");
  for (auto& rank : more) {
    for (auto& stream : rank) cudaStreamDestroy(stream);
  }
  for (auto buffer : buffers) cudaFree(buffer);
}

static unsigned char byte_of(size_t i, int rank) { return static_cast<unsigned char>(i * 31 + rank * 101 + i / 251); }

// All-gather and broadcast of every rank count and alignment, with guards, on buffers that begin anywhere.
static void moves() {
  current = "all-gather and broadcast";
  for (int ranks : {1, 2, 3, 8}) {
    Cluster cluster(ranks);
    for (size_t count : {size_t(1), size_t(4), size_t(1000), size_t(4097), size_t(3000001)}) {
      for (size_t shift : {0, 1, 16}) {
        std::vector<unsigned char*> outputs, inputs;
        const size_t all = count * ranks, room = all + 128;
        for (int rank = 0; rank < ranks; rank++) {
          std::vector<unsigned char> data(count + shift), guarded(room, 0xA5);
          for (size_t i = 0; i < count; i++) data[shift + i] = byte_of(i, rank);
          inputs.push_back(device(data.size(), data.data()));
          outputs.push_back(device(room, guarded.data()));
        }
        auto result = [&](int rank) {
          std::vector<unsigned char> found(room);
          cuda(cudaStreamSynchronize(cluster.streams[rank]), "synchronise");
          cuda(cudaMemcpy(found.data(), outputs[rank], room, cudaMemcpyDeviceToHost), "copy");
          return found;
        };
        ncclGroupStart();
        for (int rank = 0; rank < ranks; rank++) {
          ncclAllGather(inputs[rank] + shift, outputs[rank] + 64, count, ncclUint8, cluster.comms[rank], cluster.streams[rank]);
        }
        bool right = ncclGroupEnd() == ncclSuccess;
        for (int rank = 0; rank < ranks; rank++) {
          std::vector<unsigned char> found = result(rank);
          for (size_t i = 0; i < all; i++) right = right && found[64 + i] == byte_of(i % count, static_cast<int>(i / count));
          for (size_t i = 0; i < 64; i++) right = right && found[i] == 0xA5 && found[64 + all + i] == 0xA5;
        }
        check(right, "ncclAllGather");
        const int root = ranks - 1;
        ncclGroupStart();
        for (int rank = 0; rank < ranks; rank++) {
          ncclBroadcast(rank == root ? inputs[rank] + shift : nullptr, outputs[rank] + 64 + shift, count, ncclUint8, root,
                        cluster.comms[rank], cluster.streams[rank]);
        }
        right = ncclGroupEnd() == ncclSuccess;
        for (int rank = 0; rank < ranks; rank++) {
          std::vector<unsigned char> found = result(rank);
          for (size_t i = 0; i < count; i++) right = right && found[64 + shift + i] == byte_of(i, root);
          discard(inputs[rank]);
          discard(outputs[rank]);
        }
        check(right, "ncclBroadcast");
      }
    }
  }
  free_discarded();
}

// While rank 0's kernel waits for rank 1: another communicator is made (allocations, zeroing, registration) and runs
// kernels that never ran before, and user memory comes and goes.
static void beside_a_waiting_kernel() {
  current = "beside a waiting kernel";
  Cluster two(2);
  float *a = device<float>(8), *b = device<float>(8);
  double* wide = device<double>(1 << 20);
  check(ncclAllReduce(a, a, 8, ncclFloat, ncclSum, two.comms[0], two.streams[0]) == ncclSuccess, "launch");
  usleep(50000);
  check(cudaStreamQuery(two.streams[0]) == cudaErrorNotReady, "rank 0 waits");
  {
    Cluster four(4);
    check(four.ok && sums(four, 100) && sums(four, 1 << 20), "another communicator works");
    ncclResult_t result = ncclSuccess;
    ncclGroupStart();
    for (int rank = 0; rank < 4; rank++) {
      result = ncclAllReduce(wide + rank * 1000, wide + rank * 1000, 1000, ncclDouble, ncclMax, four.comms[rank], four.streams[rank]);
    }
    check(ncclGroupEnd() == ncclSuccess && result == ncclSuccess, "a kernel's first launch");
    for (auto stream : four.streams) cuda(cudaStreamSynchronize(stream), "synchronise");
    void* memory;
    check(ncclMemAlloc(&memory, 64 << 20) == ncclSuccess, "ncclMemAlloc");
    check(ncclMemFree(memory) == ncclSuccess, "ncclMemFree");
  }
  check(cudaStreamQuery(two.streams[0]) == cudaErrorNotReady, "rank 0 still waits");
  check(ncclAllReduce(b, b, 8, ncclFloat, ncclSum, two.comms[1], two.streams[1]) == ncclSuccess, "rank 1 comes");
  cuda(cudaStreamSynchronize(two.streams[0]), "synchronise");
  cuda(cudaStreamSynchronize(two.streams[1]), "synchronise");
  cudaFree(a);
  cudaFree(b);
  cudaFree(wide);
  free_discarded();
}

// Two communicators of 8 ranks in one group, their calls interleaved: more blocks than the GPU holds at once.
static void two_communicators_at_once() {
  current = "two communicators at once";
  Cluster first(8), second(8);
  const size_t count = 8 << 20;
  std::vector<float*> buffers;
  for (int i = 0; i < 16; i++) buffers.push_back(device<float>(count));
  ncclGroupStart();
  for (int rank = 0; rank < 8; rank++) {
    ncclAllReduce(buffers[rank], buffers[rank], count, ncclFloat, ncclSum, first.comms[rank], first.streams[rank]);
    ncclAllReduce(buffers[8 + rank], buffers[8 + rank], count, ncclFloat, ncclSum, second.comms[rank], second.streams[rank]);
  }
  check(ncclGroupEnd() == ncclSuccess, "launch");
  for (auto stream : first.streams) cuda(cudaStreamSynchronize(stream), "synchronise");
  for (auto stream : second.streams) cuda(cudaStreamSynchronize(stream), "synchronise");
  for (auto buffer : buffers) discard(buffer);
  free_discarded();
}

// A kernel of the user breaks the context: nothing hangs, and the error is said. The last check of a process.
__global__ void fault() { *reinterpret_cast<volatile int*>(8) = 1; }
static void after_a_fault() {
  current = "after a fault";
  Cluster two(2);
  check(two.ok && sums(two, 100), "two ranks");
  fault<<<1, 1>>>();
  check(cudaDeviceSynchronize() != cudaSuccess, "the context is broken");
  ncclResult_t state = ncclSuccess;
  check(ncclCommGetAsyncError(two.comms[0], &state) == ncclSuccess && state == ncclUnhandledCudaError, "the asynchronous error says so");
  check(ncclCommFinalize(two.comms[0]) != ncclSuccess, "ncclCommFinalize returns");
  check(ncclCommDestroy(two.comms[0]) != ncclInvalidArgument, "ncclCommDestroy returns");
  ncclCommAbort(two.comms[1]);
  printf("%d passed, %d failed\n", passed, failed);
  fflush(stdout);
  _exit(failed != 0);
}

static void abort_of_a_waiting_rank(size_t count) {
  current = "abort of a waiting rank";
  Cluster two(2);
  float* a = device<float>(count);
  check(ncclAllReduce(a, a, count, ncclFloat, ncclSum, two.comms[0], two.streams[0]) == ncclSuccess, "launch");
  // OSSICLE_WAIT_REPORT_MS=200 in ci/gpu/check-and-time.sh: the late wait is reported, and is no error.
  usleep(500000);
  ncclResult_t state = ncclInternalError;
  check(ncclCommGetAsyncError(two.comms[0], &state) == ncclSuccess && state == ncclSuccess, "a late peer is no error");
  check(cudaStreamQuery(two.streams[0]) == cudaErrorNotReady, "the kernel waits");
  check(ncclCommAbort(two.comms[0]) == ncclSuccess, "ncclCommAbort");
  cuda(cudaStreamSynchronize(two.streams[0]), "the stream after the abort");
  for (int i = 0; i < 1000 && state == ncclSuccess; i++) {
    usleep(1000);
    ncclCommGetAsyncError(two.comms[1], &state);
  }
  check(state == ncclRemoteError, "the other rank hears of it");
  check(ncclCommAbort(two.comms[1]) == ncclSuccess, "abort of the other rank");
  two.comms = {nullptr, nullptr};
  Cluster next(2);
  check(next.ok && sums(next, 1000), "a new communicator works");
  cudaFree(a);
}

// Ranks of a process lend each other their buffers. Rank 0 is aborted while large operations are under way, eager or as
// replays: from then on its buffer is its user's, whatever rank 1's kernels do until they are aborted too.
static void abort_of_a_lender(unsigned delay_us, bool replayed) {
  current = replayed ? "abort of a lender in replays" : "abort of a lender";
  const size_t count = 1 << 24;
  const int operations = 12;
  Cluster two(2);
  float* buffers[2] = {device<float>(count), device<float>(count)};
  cudaGraphExec_t graphs[2] = {nullptr, nullptr};
  auto one = [&](int rank) { return ncclAllReduce(buffers[rank], buffers[rank], count, ncclFloat, ncclSum, two.comms[rank], two.streams[rank]); };
  for (int rank = 0; replayed && rank < 2; rank++) {
    cudaGraph_t graph;
    cuda(cudaStreamBeginCapture(two.streams[rank], cudaStreamCaptureModeThreadLocal), "capture");
    check(one(rank) == ncclSuccess, "captured");
    cuda(cudaStreamEndCapture(two.streams[rank], &graph), "end of the capture");
    cuda(cudaGraphInstantiate(&graphs[rank], graph, 0), "instantiate");
    cuda(cudaGraphDestroy(graph), "graph");
  }
  for (int i = 0; i < operations; i++) {
    for (int rank = 0; rank < 2; rank++) {
      if (replayed) cuda(cudaGraphLaunch(graphs[rank], two.streams[rank]), "replay");
      else check(one(rank) == ncclSuccess, "launch");
    }
  }
  usleep(delay_us);
  const auto begun = std::chrono::steady_clock::now();
  check(ncclCommAbort(two.comms[0]) == ncclSuccess, "ncclCommAbort");
  check(std::chrono::steady_clock::now() - begun < std::chrono::seconds(2), "the abort does not wait for its bound");
  cuda(cudaStreamSynchronize(two.streams[0]), "the stream after the abort");
  std::vector<float> pattern(count, 12345.0f), found(count);
  cudaStream_t own;
  cuda(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), "stream");
  auto untouched = [&] {
    cuda(cudaMemcpyAsync(found.data(), buffers[0], count * sizeof(float), cudaMemcpyDeviceToHost, own), "read");
    cuda(cudaStreamSynchronize(own), "read");
    return found == pattern;
  };
  cuda(cudaMemcpyAsync(buffers[0], pattern.data(), count * sizeof(float), cudaMemcpyHostToDevice, own), "fill");
  cuda(cudaStreamSynchronize(own), "fill");
  usleep(5000);
  check(untouched(), "nobody writes to the aborted rank's buffer");
  check(ncclCommAbort(two.comms[1]) == ncclSuccess, "abort of the other rank");
  cuda(cudaStreamSynchronize(two.streams[1]), "the other stream after its abort");
  check(untouched(), "nor until the other rank's kernels are done");
  two.comms = {nullptr, nullptr};
  for (auto graph : graphs) {
    if (graph) cuda(cudaGraphExecDestroy(graph), "graph");
  }
  cuda(cudaStreamDestroy(own), "stream");
  for (auto buffer : buffers) cudaFree(buffer);
}

static void aborts_of_lenders() {
  // An operation takes some 110 us.
  for (unsigned delay_us : {0u, 90u, 230u, 470u, 800u, 1200u}) {
    for (bool replayed : {false, true}) abort_of_a_lender(delay_us, replayed);
  }
  Cluster next(2);
  check(next.ok && sums(next, 1 << 20), "a new communicator works");
}

static void memory_comes_back() {
  current = "memory over many communicators";
  auto cycle = [] {
    Cluster four(4);
    check(four.ok && sums(four, 1000), "four ranks");
  };
  for (int i = 0; i < 3; i++) cycle();
  free_discarded();
  size_t before, after, total;
  cuda(cudaMemGetInfo(&before, &total), "memory");
  for (int i = 0; i < 30; i++) cycle();
  free_discarded();
  cuda(cudaMemGetInfo(&after, &total), "memory");
  check(before == after, "device memory after 30 communicators is what it was after 3");
}

// The same data on the host device: the bits must be equal, random patterns included.
template <typename T> static bool same_bits(ncclDataType_t type, ncclRedOp_t op, Cluster& gpu, std::vector<ncclComm_t>& host) {
  const size_t count = 999;
  const int ranks = gpu.ranks();
  std::vector<std::vector<T>> data(ranks, std::vector<T>(count)), result(ranks, std::vector<T>(count));
  std::vector<T*> buffers;
  for (int rank = 0; rank < ranks; rank++) {
    for (auto& element : data[rank]) {
      // No NaN: which NaN comes out of two is not promised.
      double value = (rand() % 2001 - 1000) * (rand() % 3 ? 0.37 : 1e-3);
      if (sizeof(T) == 8) memcpy(&element, &value, 8);
      float single = static_cast<float>(value);
      if (sizeof(T) == 4) memcpy(&element, &single, 4);
      uint16_t half = static_cast<uint16_t>(rand() & 0xbbff);
      if (sizeof(T) == 2) memcpy(&element, &half, 2);
      if (sizeof(T) == 1) element = static_cast<T>(rand());
    }
    buffers.push_back(device(count, data[rank].data()));
  }
  ncclGroupStart();
  for (int rank = 0; rank < ranks; rank++) {
    ncclAllReduce(data[rank].data(), result[rank].data(), count, type, op, host[rank], nullptr);
  }
  bool equal = ncclGroupEnd() == ncclSuccess;
  ncclGroupStart();
  for (int rank = 0; rank < ranks; rank++) {
    ncclAllReduce(buffers[rank], buffers[rank], count, type, op, gpu.comms[rank], gpu.streams[rank]);
  }
  equal = ncclGroupEnd() == ncclSuccess && equal;
  for (int rank = 0; rank < ranks; rank++) {
    std::vector<T> found(count);
    cuda(cudaStreamSynchronize(gpu.streams[rank]), "synchronise");
    cuda(cudaMemcpy(found.data(), buffers[rank], count * sizeof(T), cudaMemcpyDeviceToHost), "copy");
    equal = equal && memcmp(found.data(), result[rank].data(), count * sizeof(T)) == 0;
    discard(buffers[rank]);
  }
  return equal;
}

static void the_bits_of_the_host_device() {
  current = "the bits of the host device";
  for (const char* algorithm : {"OneShot", "Ring"}) {
    setenv("NCCL_ALGO", algorithm, 1);
    // One channel and chunks below a slot: both devices cut the data alike.
    setenv("NCCL_MAX_NCHANNELS", "1", 1);
    Cluster gpu(3);
    setenv("OSSICLE_DEVICE", "host", 1);
    std::vector<ncclComm_t> host(3);
    check(ncclCommInitAll(host.data(), 3, nullptr) == ncclSuccess, "a communicator on the host device");
    unsetenv("OSSICLE_DEVICE");
    for (ncclRedOp_t op : {ncclSum, ncclMax, ncclAvg}) {
      check(same_bits<float>(ncclFloat, op, gpu, host), "float");
      check(same_bits<double>(ncclDouble, op, gpu, host), "double");
      check(same_bits<uint16_t>(ncclHalf, op, gpu, host), "half");
      check(same_bits<uint16_t>(ncclBfloat16, op, gpu, host), "bfloat16");
      check(same_bits<int32_t>(ncclInt32, op, gpu, host), "int32");
      check(same_bits<uint8_t>(ncclUint8, op, gpu, host), "uint8");
    }
    for (auto comm : host) ncclCommDestroy(comm);
  }
  unsetenv("NCCL_ALGO");
  unsetenv("NCCL_MAX_NCHANNELS");
}

static void exclusive() {
  current = "ranks of one GPU without the switch";
  ncclComm_t comms[2];
  int same[2] = {0, 0};
  check(ncclCommInitAll(comms, 2, same) == ncclInvalidUsage && !comms[0] && !comms[1], "ncclCommInitAll with one device twice");
  int missing = 99;
  check(ncclCommInitAll(comms, 1, &missing) == ncclInvalidArgument && last_error_has("99"), "a device that is not there");
  ncclUniqueId id;
  check(ncclGetUniqueId(&id) == ncclSuccess, "id");
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; rank++) {
    threads.emplace_back([&, rank] {
      ncclComm_t comm;
      refused += ncclCommInitRank(&comm, 2, id, rank) == ncclInvalidUsage && comm == nullptr;
    });
  }
  for (auto& thread : threads) thread.join();
  check(refused == 2, "both ranks are refused");
  check(last_error_has("ranks 0") && last_error_has("NCCL_MULTI_RANK_GPU_ENABLE") && last_error_has("0000:"), "by name and bus id");
  Cluster one(1);
  check(one.ok && sums(one, 10), "one rank works then");
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  std::thread([] {
    const char* last = nullptr;
    for (int seconds = 0; seconds < LIMIT_S; seconds++) {
      if (current.load() != last) seconds = 0;
      last = current.load();
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    printf("failed: %s: no progress for %d s\n%d passed, %d failed\n", last, LIMIT_S, passed, failed + 1);
    _exit(1);
  }).detach();
  cuda(cudaSetDevice(0), "device");
  if (argc > 1 && !strcmp(argv[1], "exclusive")) {
    exclusive();
  } else {
    pointers();
    streams();
    stream_order();
    moves();
    graphs();
    beside_a_waiting_kernel();
    abort_of_a_waiting_rank(8);
    abort_of_a_waiting_rank(1 << 20);
    aborts_of_lenders();
    memory_comes_back();
    two_communicators_at_once();
    the_bits_of_the_host_device();
    after_a_fault();
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
