// Processes that share a GPU, one rank each, where something goes wrong: a rank that is killed at a random point, and bad
// input. Nothing may hang, who is left must hear of it by name, and the GPU must be usable afterwards.
//
//     killed random SEED TIMES   kills one of two ranks, TIMES times; then a run in which nobody is killed
//     killed bad                 pointers, numbers and communicators that are none; ranks that do not fit together
//
// Prints 'N passed, N failed'. The program starts itself again for every rank ('killed rank ...') and makes no CUDA call
// itself: a child of a process that has used CUDA could not.
#include <cuda_runtime.h>
#include <nccl.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

// Longer than everything that a rank may wait for: the rendezvous (INIT_TIMEOUT_MS) and the start of CUDA.
static const int LIMIT_MS = 60000;
static const char* INIT_TIMEOUT_MS = "15000";
// Exit statuses of a rank: its result where it could not join (100 + ncclResult_t), and these.
enum { JOIN_FAILED = 100, HEARD = 42, WRONG_ERROR = 43, WRONG_VALUE = 44, CUDA_FAILED = 45, CHECKS_FAILED = 46 };
// Where a rank finds the id (rank 0's process writes it, or the one that is told to) and where it says how far it is.
enum { ID_IN = 10, ID_OUT = 11, NEWS = 12 };

static int passed = 0, failed = 0;

static void check(bool ok, const std::string& what) {
  ok ? passed++ : failed++;
  if (!ok) printf("failed: %s (last error: %s)\n", what.c_str(), ncclGetLastError(nullptr));
}

static long now_ms() {
  using namespace std::chrono;
  return static_cast<long>(duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count());
}

// --- a rank --------------------------------------------------------------------------------------------------------

static int me = -1;

static void cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  printf("rank %d: %s: %s\n", me, what, cudaGetErrorString(error));
  fflush(stdout);
  _exit(CUDA_FAILED);
}

static void tell(char news) {
  // The parent may not listen any more.
  (void)!write(NEWS, &news, 1);
}

static bool get_id(bool makes_id, ncclUniqueId* id) {
  if (makes_id) {
    if (ncclGetUniqueId(id) != ncclSuccess) return false;
    bool written = write(ID_OUT, id, sizeof *id) == static_cast<ssize_t>(sizeof *id);
    close(ID_OUT);
    return written;
  }
  close(ID_OUT);
  return read(ID_IN, id, sizeof *id) == static_cast<ssize_t>(sizeof *id);
}

// The end of a rank that hears of a fault: abort must return, and so must the stream, whatever the peer was doing.
static void leave(ncclComm_t comm, cudaStream_t stream, ncclResult_t result) {
  printf("rank %d: %s: %s\n", me, ncclGetErrorString(result), ncclGetLastError(nullptr));
  fflush(stdout);
  if (ncclCommAbort(comm) != ncclSuccess) _exit(WRONG_ERROR);
  cuda(cudaStreamSynchronize(stream), "the stream after the abort");
  _exit(result == ncclRemoteError ? HEARD : WRONG_ERROR);
}

struct Rank {
  ncclComm_t comm;
  cudaStream_t stream;
  int ranks;

  // One all-reduce of rank + 1 + step; every element is looked at.
  void sum(size_t count, int step) {
    std::vector<int> values(count, me + 1 + step), result(count);
    int* buffer;
    cuda(cudaMalloc(reinterpret_cast<void**>(&buffer), count * 4), "cudaMalloc");
    cuda(cudaMemcpyAsync(buffer, values.data(), count * 4, cudaMemcpyHostToDevice, stream), "copy");
    cuda(cudaStreamSynchronize(stream), "synchronise");
    ncclResult_t state = ncclAllReduce(buffer, buffer, count, ncclInt32, ncclSum, comm, stream);
    if (state != ncclSuccess) leave(comm, stream, state);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {
      if (ncclCommGetAsyncError(comm, &state) != ncclSuccess) _exit(WRONG_ERROR);
      if (state != ncclSuccess) leave(comm, stream, state);
      usleep(100);
    }
    cuda(cudaMemcpyAsync(result.data(), buffer, count * 4, cudaMemcpyDeviceToHost, stream), "copy");
    cuda(cudaStreamSynchronize(stream), "synchronise");
    cuda(cudaFree(buffer), "cudaFree");
    const int wanted = ranks * (ranks + 1) / 2 + ranks * step;
    for (size_t i = 0; i < count; i++) {
      if (result[i] == wanted) continue;
      printf("rank %d: step %d: element %zu is %d, not %d\n", me, step, i, result[i], wanted);
      fflush(stdout);
      _exit(WRONG_VALUE);
    }
  }

  void bad_calls();
};

// What every process must be told at the call, and that the communicator works on afterwards.
void Rank::bad_calls() {
  float *a, plain[8] = {};
  const size_t count = 1000;
  cuda(cudaMalloc(reinterpret_cast<void**>(&a), count * 4), "cudaMalloc");
  const auto sum_of = [&](const void* send, void* recv, size_t elements, int type, int op, ncclComm_t of) {
    return ncclAllReduce(send, recv, elements, static_cast<ncclDataType_t>(type), static_cast<ncclRedOp_t>(op), of, stream);
  };
  const auto refused = [&](ncclResult_t result, const char* what) {
    check(result == ncclInvalidArgument && strlen(ncclGetLastError(nullptr)) > 0, "rank " + std::to_string(me) + ": " + what);
  };
  refused(sum_of(nullptr, a, 8, ncclFloat, ncclSum, comm), "NULL to send");
  refused(sum_of(a, nullptr, 8, ncclFloat, ncclSum, comm), "NULL to receive");
  refused(sum_of(a, a, 8, 99, ncclSum, comm), "type 99");
  refused(sum_of(a, a, 8, -1, ncclSum, comm), "type -1");
  refused(sum_of(a, a, 8, ncclFloat, 99, comm), "operation 99");
  refused(sum_of(a, a, 8, ncclFloat, ncclSum, nullptr), "no communicator");
  refused(sum_of(a, a, 8, ncclFloat, ncclSum, reinterpret_cast<ncclComm_t>(plain)), "a communicator that is none");
  refused(sum_of(reinterpret_cast<char*>(a) + 2, a, 8, ncclFloat, ncclSum, comm), "between two elements");
  refused(ncclBroadcast(a, a, 8, ncclFloat, ranks, comm, stream), "a root past the last rank");
  refused(ncclBroadcast(a, a, 8, ncclFloat, -1, comm, stream), "root -1");
  if (getenv("OSSICLE_DEVICE") == nullptr) {
    refused(sum_of(plain, a, 8, ncclFloat, ncclSum, comm), "plain host memory to send");
    refused(sum_of(a, plain, 8, ncclFloat, ncclSum, comm), "plain host memory to receive");
    refused(sum_of(a, a, size_t(1) << 40, ncclFloat, ncclSum, comm), "past the end of an allocation");
  }
  sum(1000, 3);
  cuda(cudaFree(a), "cudaFree");
}

// 'killed rank RANK RANKS MAKES_ID STEPS': joins and works STEPS times, for ever if that is 0, or makes bad calls if -1.
static int be_a_rank(char** words) {
  me = atoi(words[0]);
  const int ranks = atoi(words[1]), steps = atoi(words[3]);
  Rank rank{nullptr, nullptr, ranks};
  ncclUniqueId id;
  cuda(cudaSetDevice(0), "cudaSetDevice");
  cuda(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "stream");
  if (!get_id(atoi(words[2]) != 0, &id)) {
    printf("rank %d: nobody sends the id\n", me);
    return JOIN_FAILED + ncclRemoteError;
  }
  const ncclResult_t joined = ncclCommInitRank(&rank.comm, ranks, id, me);
  if (joined != ncclSuccess) {
    printf("rank %d: %s: %s\n", me, ncclGetErrorString(joined), ncclGetLastError(nullptr));
    return strlen(ncclGetLastError(nullptr)) > 0 ? JOIN_FAILED + joined : WRONG_ERROR;
  }
  tell('j');
  const size_t sizes[] = {1, 1000, 30000, 300001, 1 << 20};
  for (int step = 0; step < steps || steps == 0; step++) rank.sum(sizes[step % 5], step % 1000);
  if (steps < 0) rank.bad_calls();
  if (ncclCommDestroy(rank.comm) != ncclSuccess) return WRONG_ERROR;
  cuda(cudaStreamDestroy(rank.stream), "stream");
  return failed ? CHECKS_FAILED : 0;
}

// --- the parent ----------------------------------------------------------------------------------------------------

struct Word {
  int rank, ranks;
  bool makes_id;
};

// Ranks in processes of their own, and the pipes between them and this one.
struct Processes {
  std::vector<pid_t> pids;
  int news;

  Processes(const std::vector<Word>& words, int steps) {
    int id[2], said[2];
    if (pipe(id) != 0 || pipe(said) != 0) exit(2);
    for (const Word& word : words) {
      const pid_t pid = fork();
      if (pid == 0) start(word, steps, id, said);
      pids.push_back(pid);
    }
    close(id[0]);
    close(id[1]);
    close(said[1]);
    news = said[0];
  }
  ~Processes() { close(news); }

  [[noreturn]] static void start(const Word& word, int steps, const int* id, const int* said) {
    dup2(id[0], ID_IN);
    dup2(id[1], ID_OUT);
    dup2(said[1], NEWS);
    for (int fd : {id[0], id[1], said[0], said[1]}) close(fd);
    const std::string rank = std::to_string(word.rank), ranks = std::to_string(word.ranks), count = std::to_string(steps);
    execl("/proc/self/exe", "killed", "rank", rank.c_str(), ranks.c_str(), word.makes_id ? "1" : "0", count.c_str(), nullptr);
    _exit(2);
  }

  // Waits until all ranks have joined, or a rank has ended without that.
  bool joined() {
    char byte;
    for (size_t i = 0; i < pids.size(); i++) {
      if (read(news, &byte, 1) != 1) return false;
    }
    return true;
  }

  // The exit status of a rank; -1 where it hung and was ended, -2 where a signal ended it.
  int status_of(size_t at) {
    int status;
    for (const long begun = now_ms(); now_ms() - begun < LIMIT_MS; usleep(2000)) {
      if (waitpid(pids[at], &status, WNOHANG) == pids[at]) return WIFEXITED(status) ? WEXITSTATUS(status) : -2;
    }
    kill(pids[at], SIGKILL);
    waitpid(pids[at], &status, 0);
    return -1;
  }
};

static std::string named(int status) {
  if (status == -1) return "it hung";
  if (status == -2) return "a signal ended it";
  if (status >= JOIN_FAILED) return std::string("could not join: ") + ncclGetErrorString(static_cast<ncclResult_t>(status - JOIN_FAILED));
  return "exit status " + std::to_string(status);
}

static void nobody_is_killed() {
  Processes two({{0, 2, true}, {1, 2, false}}, 10);
  for (size_t rank = 0; rank < 2; rank++) {
    const int status = two.status_of(rank);
    check(status == 0, "rank " + std::to_string(rank) + " of a run in which nobody is killed: " + named(status));
  }
}

static void random_kills(unsigned seed, int times) {
  std::mt19937 random(seed);
  long slowest_ms = 0;
  printf("seed %u\n", seed);
  for (int i = 0; i < times; i++) {
    const size_t victim = random() % 2;
    // A third is killed on its way to the communicator, the others in mid-operation.
    const bool early = random() % 3 == 0;
    const int delay_ms = static_cast<int>(random() % (early ? 1500 : 300));
    Processes two({{0, 2, true}, {1, 2, false}}, 0);
    const bool working = !early && two.joined();
    usleep(delay_ms * 1000);
    kill(two.pids[victim], SIGKILL);
    const long begun = now_ms();
    const int status = two.status_of(1 - victim);
    const long took_ms = now_ms() - begun;
    if (took_ms > slowest_ms) slowest_ms = took_ms;
    const std::string what = "kill " + std::to_string(i) + " of rank " + std::to_string(victim) + ", " + std::to_string(delay_ms) + " ms after " +
                             (early ? "the start" : "both had joined") + ": the other, " + std::to_string(took_ms) + " ms later: " + named(status);
    printf("%s\n", what.c_str());
    const bool could_not_join = status == JOIN_FAILED + ncclRemoteError || status == JOIN_FAILED + ncclSystemError;
    check((early || working) && (status == HEARD || (early && could_not_join)), what);
    two.status_of(victim);
    if (i == 0) nobody_is_killed();
  }
  printf("slowest to hear of it: %ld ms\n", slowest_ms);
  nobody_is_killed();
}

// All ranks must end with this status.
static void all_end(const std::vector<Word>& words, int steps, int wanted, const char* what) {
  Processes processes(words, steps);
  for (size_t at = 0; at < words.size(); at++) {
    const int status = processes.status_of(at);
    check(status == wanted, std::string(what) + ": process " + std::to_string(at) + ": " + named(status));
  }
}

static void bad_input() {
  const std::vector<Word> good = {{0, 2, true}, {1, 2, false}};
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (getenv("OSSICLE_DEVICE") == nullptr) all_end(good, 1, JOIN_FAILED + ncclInvalidUsage, "two ranks on one GPU without the switch");
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  all_end(good, -1, 0, "bad calls");
  all_end({{0, 2, true}, {0, 2, false}}, 1, JOIN_FAILED + ncclInvalidUsage, "rank 0 twice");
  all_end({{0, 2, true}, {1, 3, false}}, 1, JOIN_FAILED + ncclInvalidUsage, "two numbers of ranks");
  all_end({{2, 2, true}}, 1, JOIN_FAILED + ncclInvalidArgument, "rank 2 of 2");
  setenv("OSSICLE_INIT_TIMEOUT_MS", "2000", 1);
  all_end({{0, 2, true}}, 1, JOIN_FAILED + ncclSystemError, "a rank that never comes");
  setenv("OSSICLE_INIT_TIMEOUT_MS", INIT_TIMEOUT_MS, 1);
  setenv("NCCL_ALGO", "Nonsense", 1);
  all_end(good, 1, JOIN_FAILED + ncclInvalidUsage, "NCCL_ALGO=Nonsense");
  unsetenv("NCCL_ALGO");
  nobody_is_killed();
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  // A rank that is gone shows in what a write returns.
  signal(SIGPIPE, SIG_IGN);
  if (argc == 6 && !strcmp(argv[1], "rank")) return be_a_rank(argv + 2);
  setenv("OSSICLE_INIT_TIMEOUT_MS", INIT_TIMEOUT_MS, 1);
  if (argc == 4 && !strcmp(argv[1], "random")) {
    random_kills(static_cast<unsigned>(strtoul(argv[2], nullptr, 10)), atoi(argv[3]));
  } else if (argc == 2 && !strcmp(argv[1], "bad")) {
    bad_input();
  } else {
    fprintf(stderr, "usage: killed random SEED TIMES | killed bad\n");
    return 2;
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
