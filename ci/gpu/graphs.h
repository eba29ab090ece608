// Collectives in CUDA graphs; a part of behaviour.cu.
#pragma once

// What rank `rank` gives in turn `turn`: every turn, rank and element another number, so that an old result never passes.
__device__ static unsigned input_of(int rank, int turn, size_t i) {
  return (static_cast<unsigned>(i) * 2654435761u) ^ (static_cast<unsigned>(turn) * 40503u + static_cast<unsigned>(rank) * 977u);
}

__global__ static void fill(unsigned* data, size_t count, int rank, int turn) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) data[i] = input_of(rank, turn, i);
}

// After `times` sums in place: the first adds the ranks' numbers, each further one multiplies by the ranks, with wrap.
__global__ static void compare(const unsigned* data, size_t count, int ranks, int turn, int times, int* wrong) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    unsigned expected = 0;
    for (int rank = 0; rank < ranks; rank++) expected += input_of(rank, turn, i);
    for (int k = 1; k < times; k++) expected *= ranks;
    if (data[i] != expected) atomicAdd(wrong, 1);
  }
}

// Buffers of every rank of a cluster, and where wrong elements are counted.
struct Data {
  size_t count;
  std::vector<unsigned*> buffers;
  int* wrong;
  Data(const Cluster& cluster, size_t count) : count(count), buffers(cluster.ranks()) {
    for (auto& buffer : buffers) buffer = device<unsigned>(count);
    int zero = 0;
    wrong = device(1, &zero);
    // Kernels are loaded at their first launch, which must not come beside a rank that waits.
    fill<<<1, 1>>>(buffers[0], 0, 0, 0);
    compare<<<1, 1>>>(buffers[0], 0, 0, 0, 0, wrong);
    cuda(cudaDeviceSynchronize(), "synchronise");
  }
  ~Data() {
    for (auto buffer : buffers) cudaFree(buffer);
    cudaFree(wrong);
  }
  int wrong_elements() const {
    int found;
    cuda(cudaDeviceSynchronize(), "synchronise");
    cuda(cudaMemcpy(&found, wrong, 4, cudaMemcpyDeviceToHost), "copy");
    return found;
  }
};

// One executable graph, or one a rank.
struct Graphs {
  std::vector<cudaGraphExec_t> executables;
  void add(cudaGraph_t graph, cudaStream_t stream) {
    cudaGraphExec_t executable;
    cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    // Its first launch would do it otherwise, beside the graph of a rank that waits.
    cuda(cudaGraphUpload(executable, stream), "upload");
    cuda(cudaStreamSynchronize(stream), "synchronise");
    cuda(cudaGraphDestroy(graph), "destroy the graph");
    executables.push_back(executable);
  }
  void destroy() {
    for (auto executable : executables) cuda(cudaGraphExecDestroy(executable), "destroy the executable graph");
    executables.clear();
  }
  ~Graphs() { destroy(); }
};

// `times` sums in place of all ranks, grouped, on the given streams.
static ncclResult_t reduce_all(Cluster& cluster, const Data& data, const std::vector<cudaStream_t>& streams, int times = 1) {
  ncclGroupStart();
  for (int k = 0; k < times; k++) {
    for (int rank = 0; rank < cluster.ranks(); rank++) {
      ncclAllReduce(data.buffers[rank], data.buffers[rank], data.count, ncclInt32, ncclSum, cluster.comms[rank], streams[rank]);
    }
  }
  return ncclGroupEnd();
}

static void join(cudaStream_t from, cudaStream_t to) {
  cudaEvent_t event;
  cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  cuda(cudaEventRecord(event, from), "record");
  cuda(cudaStreamWaitEvent(to, event, 0), "wait");
  cuda(cudaEventDestroy(event), "destroy the event");
}

// Captures what `body` queues on the cluster's streams: a graph a rank, or all of them joined into one.
template <typename Body> static void capture(Cluster& cluster, bool joined, cudaStreamCaptureMode mode, Graphs& graphs, Body body) {
  const auto& streams = cluster.streams;
  for (size_t i = 0; i < streams.size(); i++) {
    if (i == 0 || !joined) cuda(cudaStreamBeginCapture(streams[i], mode), "capture");
    else join(streams[0], streams[i]);
  }
  body();
  std::vector<cudaGraph_t> captured;
  for (size_t i = 1; joined && i < streams.size(); i++) join(streams[i], streams[0]);
  for (size_t i = 0; i < (joined ? 1 : streams.size()); i++) {
    captured.push_back(nullptr);
    cuda(cudaStreamEndCapture(streams[i], &captured.back()), "end of capture");
  }
  for (size_t i = 0; i < captured.size(); i++) graphs.add(captured[i], streams[i]);
}

static void launch(const Cluster& cluster, const Graphs& graphs) {
  for (size_t i = 0; i < graphs.executables.size(); i++) cuda(cudaGraphLaunch(graphs.executables[i], cluster.streams[i]), "graph launch");
}

// One replay between new input and a check of the result, all queued in the streams that the graphs are launched in.
static void replay(const Cluster& cluster, const Graphs& graphs, const std::vector<const Data*>& all, int turn, int times) {
  auto stream = [&](int rank) { return cluster.streams[graphs.executables.size() == 1 ? 0 : rank]; };
  for (auto data : all) {
    for (int rank = 0; rank < cluster.ranks(); rank++) fill<<<16, 256, 0, stream(rank)>>>(data->buffers[rank], data->count, rank, turn);
  }
  launch(cluster, graphs);
  for (auto data : all) {
    for (int rank = 0; rank < cluster.ranks(); rank++) {
      compare<<<16, 256, 0, stream(rank)>>>(data->buffers[rank], data->count, cluster.ranks(), turn, times, data->wrong);
    }
  }
}

static void replays(bool joined, cudaStreamCaptureMode mode) {
  current = joined ? "replays of one graph" : "replays of a graph a rank";
  Cluster two(2);
  // One-shot and ring in one graph; two sums of each.
  Data small(two, 8), large(two, 1 << 20);
  Graphs graphs;
  capture(two, joined, mode, graphs, [&] {
    check(reduce_all(two, small, two.streams, 2) == ncclSuccess, "small messages under capture");
    check(reduce_all(two, large, two.streams, 2) == ncclSuccess, "large messages under capture");
  });
  bool eager = true;
  for (int turn = 0; turn < 200; turn++) {
    replay(two, graphs, {&small, &large}, turn, 2);
    if (turn % 10 == 9) {
      cuda(cudaDeviceSynchronize(), "synchronise");
      eager = eager && sums(two, turn % 20 == 9 ? 1000 : 1 << 20);
    }
  }
  check(small.wrong_elements() == 0 && large.wrong_elements() == 0, "every element of 200 replays");
  check(eager, "eager sums between the replays");
  free_discarded();
}

static void two_graphs_of_one_communicator() {
  current = "two graphs of one communicator";
  Cluster two(2);
  Data first(two, 1000), second(two, 1 << 20);
  Graphs one, other;
  capture(two, false, cudaStreamCaptureModeRelaxed, one, [&] { check(reduce_all(two, first, two.streams) == ncclSuccess, "capture"); });
  capture(two, true, cudaStreamCaptureModeGlobal, other, [&] { check(reduce_all(two, second, two.streams, 3) == ncclSuccess, "capture"); });
  for (int turn = 0; turn < 100; turn++) {
    // One is launched in both streams and the other in the first alone: between them the order is ours to keep.
    replay(two, one, {&first}, turn, 1);
    join(two.streams[1], two.streams[0]);
    replay(two, other, {&second}, turn, 3);
    join(two.streams[0], two.streams[1]);
  }
  check(first.wrong_elements() == 0 && second.wrong_elements() == 0, "every element of both");
}

// The calls of one capture come on two streams a rank in turns, with no event of ours between them.
static void streams_of_one_capture() {
  current = "streams of one capture";
  Cluster two(2);
  Data data(two, 1 << 20);
  std::vector<cudaStream_t> more(2);
  for (auto& stream : more) cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Graphs graphs;
  capture(two, true, cudaStreamCaptureModeThreadLocal, graphs, [&] {
    for (auto stream : more) join(two.streams[0], stream);
    bool ok = true;
    for (int k = 0; k < 6; k++) ok = ok && reduce_all(two, data, k % 2 ? more : two.streams) == ncclSuccess;
    check(ok, "six sums on two streams a rank");
    for (auto stream : more) join(stream, two.streams[0]);
  });
  for (int turn = 0; turn < 20; turn++) replay(two, graphs, {&data}, turn, 6);
  check(data.wrong_elements() == 0, "each sum follows the one before");
  for (auto stream : more) cudaStreamDestroy(stream);
}

// All ranks on one stream, group by group: eager between new input and a check, then captured and replayed.
static void ranks_on_one_stream(int ranks) {
  current = "ranks on one stream";
  Cluster cluster(ranks);
  Data small(cluster, 8), large(cluster, 1 << 20);
  cudaStream_t blocking;
  cuda(cudaStreamCreate(&blocking), "stream");
  // The default stream and a blocking one take turns.
  std::vector<cudaStream_t> taking_turns(ranks, blocking);
  taking_turns[0] = nullptr;
  const std::vector<std::vector<cudaStream_t>> layouts{
      std::vector<cudaStream_t>(ranks, cluster.streams[0]), std::vector<cudaStream_t>(ranks, blocking),
      std::vector<cudaStream_t>(ranks, nullptr), taking_turns, cluster.streams};
  auto each = [&](const std::vector<cudaStream_t>& streams, int turn, bool before) {
    for (auto data : {&small, &large}) {
      for (int rank = 0; rank < ranks; rank++) {
        if (before) fill<<<16, 256, 0, streams[rank]>>>(data->buffers[rank], data->count, rank, turn);
        else compare<<<16, 256, 0, streams[rank]>>>(data->buffers[rank], data->count, ranks, turn, 3, data->wrong);
      }
    }
  };
  bool ok = true;
  for (int turn = 0; turn < 50; turn++) {
    const auto& streams = layouts[turn % layouts.size()];
    each(streams, turn, true);
    for (auto data : {&small, &large}) {
      ok = ok && reduce_all(cluster, *data, streams, 2) == ncclSuccess && reduce_all(cluster, *data, streams) == ncclSuccess;
    }
    each(streams, turn, false);
    // The next layout has other streams, which nothing orders behind these.
    cuda(cudaDeviceSynchronize(), "synchronise");
  }
  check(ok, "eager groups");
  check(small.wrong_elements() == 0 && large.wrong_elements() == 0, "every element of eager groups");
  for (auto mode : {cudaStreamCaptureModeRelaxed, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal}) {
    cudaGraph_t graph;
    Graphs graphs;
    cuda(cudaStreamBeginCapture(cluster.streams[0], mode), "capture");
    for (auto data : {&small, &large}) {
      ok = ok && reduce_all(cluster, *data, layouts[0], 2) == ncclSuccess && reduce_all(cluster, *data, layouts[0]) == ncclSuccess;
    }
    check(ok, "groups under capture");
    cuda(cudaStreamEndCapture(cluster.streams[0], &graph), "end of capture: all branches are joined");
    graphs.add(graph, cluster.streams[0]);
    for (int turn = 0; turn < 50; turn++) replay(cluster, graphs, {&small, &large}, turn, 3);
    check(small.wrong_elements() == 0 && large.wrong_elements() == 0, "every element of replays");
    check(sums(cluster, 1000), "an eager sum after the replays");
  }
  cudaStreamDestroy(blocking);
  free_discarded();
}

static void refusals_under_capture() {
  current = "refusals under capture";
  Cluster two(2);
  Data data(two, 8);
  cudaGraph_t graph;
  auto refused = [&](const std::vector<cudaStream_t>& streams, const char* words, const char* what) {
    cuda(cudaStreamBeginCapture(two.streams[0], cudaStreamCaptureModeThreadLocal), "capture");
    check(reduce_all(two, data, streams) == ncclInvalidUsage && last_error_has(words), what);
    check(cudaStreamEndCapture(two.streams[0], &graph) == cudaSuccess, "the capture survives the refusal");
    cudaGraphDestroy(graph);
  };
  refused({two.streams[0], two.streams[1]}, "the other is not", "one rank under capture and one not");
  // In one group ranks may share a captured stream; in two the second would be behind the first.
  cuda(cudaStreamBeginCapture(two.streams[0], cudaStreamCaptureModeThreadLocal), "capture");
  auto reduce = [&](int rank) {
    return ncclAllReduce(data.buffers[rank], data.buffers[rank], 8, ncclInt32, ncclSum, two.comms[rank], two.streams[0]);
  };
  check(reduce(0) == ncclSuccess, "one rank alone under capture");
  check(reduce(1) == ncclInvalidUsage && last_error_has("one stream"), "the other on its stream, in another group");
  check(cudaStreamEndCapture(two.streams[0], &graph) == cudaSuccess, "the capture survives the refusal");
  cudaGraphDestroy(graph);
  cudaStream_t blocking;
  cuda(cudaStreamCreate(&blocking), "stream");
  cuda(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal), "capture");
  ncclResult_t result = ncclAllReduce(data.buffers[0], data.buffers[0], 8, ncclInt32, ncclSum, two.comms[0], nullptr);
  check(result == ncclInvalidUsage && last_error_has("takes turns"), "the default stream beside a blocking one under capture");
  check(cudaStreamEndCapture(blocking, &graph) == cudaSuccess, "the blocking stream's capture survives");
  cudaGraphDestroy(graph);
  cudaStreamDestroy(blocking);
  cuda(cudaStreamBeginCapture(two.streams[0], cudaStreamCaptureModeGlobal), "capture");
  void* memory;
  check(cudaMalloc(&memory, 8) != cudaSuccess, "an allocation breaks a capture");
  result = ncclAllReduce(data.buffers[0], data.buffers[0], 8, ncclInt32, ncclSum, two.comms[0], two.streams[0]);
  check(result == ncclInvalidUsage && last_error_has("made invalid"), "a broken capture");
  check(cudaStreamEndCapture(two.streams[0], &graph) != cudaSuccess, "the capture was broken");
  cudaGetLastError();
  check(sums(two, 1000), "the communicators work on");
  free_discarded();
}

static void graphs_and_the_end_of_communicators(size_t count) {
  current = "graphs and the end of communicators";
  auto end = [](Cluster& cluster) {
    bool ok = true;
    for (auto& comm : cluster.comms) ok = ncclCommDestroy(comm) == ncclSuccess && ok;
    cluster.comms.assign(cluster.comms.size(), nullptr);
    return ok;
  };
  for (bool graph_first : {false, true}) {
    Cluster two(2);
    Data data(two, count);
    Graphs graphs;
    capture(two, false, cudaStreamCaptureModeThreadLocal, graphs, [&] { check(reduce_all(two, data, two.streams) == ncclSuccess, "capture"); });
    replay(two, graphs, {&data}, 1, 1);
    check(sums(two, 1000), "an eager sum after a replay");
    check(data.wrong_elements() == 0, "the replay");
    if (graph_first) graphs.destroy();
    check(end(two), "ncclCommDestroy");
    if (graph_first) continue;
    // Another communicator takes what memory is free; the graph's is not.
    Cluster next(2);
    cuda(cudaGraphLaunch(graphs.executables[0], two.streams[0]), "launch after the end");
    cuda(cudaStreamSynchronize(two.streams[0]), "a replay of one rank after the end returns");
    check(next.ok && sums(next, 1000), "another communicator works");
    launch(two, graphs);
    cuda(cudaDeviceSynchronize(), "replays of both ranks after the end return");
    graphs.destroy();
    check(sums(next, 1 << 20), "another communicator works on");
  }
  free_discarded();
}

static void abort_of_a_replay(size_t count) {
  current = "abort of a replay";
  {
    Cluster two(2);
    Data data(two, count);
    Graphs graphs;
    capture(two, false, cudaStreamCaptureModeThreadLocal, graphs, [&] { check(reduce_all(two, data, two.streams) == ncclSuccess, "capture"); });
    cuda(cudaGraphLaunch(graphs.executables[0], two.streams[0]), "launch");
    usleep(100000);
    check(cudaStreamQuery(two.streams[0]) == cudaErrorNotReady, "rank 0 waits for a replay of rank 1");
    check(ncclCommAbort(two.comms[0]) == ncclSuccess, "ncclCommAbort");
    cuda(cudaStreamSynchronize(two.streams[0]), "the stream after the abort");
    check(ncclCommAbort(two.comms[1]) == ncclSuccess, "abort of the other rank");
    two.comms = {nullptr, nullptr};
    launch(two, graphs);
    cuda(cudaDeviceSynchronize(), "replays after the abort return");
  }
  Cluster next(2);
  check(next.ok && sums(next, 1000), "a new communicator works");
  free_discarded();
}

static void many_graphs() {
  current = "many graphs";
  Cluster two(2);
  Data data(two, 1000);
  auto resident_pages = [] {
    long all = 0, resident = 0;
    if (FILE* file = fopen("/proc/self/statm", "r")) {
      if (fscanf(file, "%ld %ld", &all, &resident) != 2) resident = 0;
      fclose(file);
    }
    return resident;
  };
  auto cycle = [&](int graphs_count) {
    for (int i = 0; i < graphs_count; i++) {
      Graphs graphs;
      capture(two, i % 2, cudaStreamCaptureModeThreadLocal, graphs, [&] { reduce_all(two, data, two.streams); });
      replay(two, graphs, {&data}, i, 1);
      cuda(cudaDeviceSynchronize(), "synchronise");
    }
  };
  cycle(50);
  const long before = resident_pages();
  cycle(500);
  check((resident_pages() - before) * 4 < 64 << 10, "500 graphs leave less than 64 MiB");
  check(data.wrong_elements() == 0, "every element");
}

// PyTorch makes a communicator at its first use, which may be in a capture: under CUDA's default mode every thread's unsafe
// calls would break it.
static void init_in_a_capture() {
  current = "a communicator made in a capture";
  Cluster two(2);
  for (auto& comm : two.comms) ncclCommDestroy(comm);
  two.comms = {nullptr, nullptr};
  Data data(two, 1 << 20);
  Graphs graphs;
  capture(two, false, cudaStreamCaptureModeGlobal, graphs, [&] {
    int same[2] = {0, 0};
    check(ncclCommInitAll(two.comms.data(), 2, same) == ncclSuccess, "ncclCommInitAll");
    check(reduce_all(two, data, two.streams) == ncclSuccess, "a sum");
  });
  for (int turn = 0; turn < 20; turn++) replay(two, graphs, {&data}, turn, 1);
  check(data.wrong_elements() == 0, "every element");
}

static void graphs() {
  for (auto mode : {cudaStreamCaptureModeRelaxed, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal}) {
    replays(true, mode);
    replays(false, mode);
  }
  two_graphs_of_one_communicator();
  streams_of_one_capture();
  for (int ranks : {2, 8}) ranks_on_one_stream(ranks);
  refusals_under_capture();
  init_in_a_capture();
  for (size_t count : {size_t(8), size_t(1) << 20}) {
    graphs_and_the_end_of_communicators(count);
    abort_of_a_replay(count);
  }
  many_graphs();
}
