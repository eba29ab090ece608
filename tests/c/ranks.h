/* What the client programs share: ranks as threads or as processes, and counting.
 *
 *   program threads RANKS          all ranks as threads of this process
 *   program process RANKS RANK ID  one rank; rank 0 writes the unique id to the file ID
 *
 * A program defines `work`, which a rank runs on its communicator. Prints 'N passed, N failed'. */
#define _DEFAULT_SOURCE
#include <nccl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GUARD_BYTES 64
static int ranks;

struct rank {
  int number;
  ncclUniqueId id;
  long passed, failed;
};

static void work(struct rank *me, ncclComm_t comm);

static void check(struct rank *me, int ok, const char *what, int type, int op, size_t count) {
  if (ok) {
    me->passed++;
  } else {
    me->failed++;
    fprintf(stderr, "rank %d: %s (datatype %d op %d count %zu): %s\n", me->number, what, type, op, count, ncclGetLastError(NULL));
  }
}

static void *run(void *argument) {
  struct rank *me = argument;
  ncclComm_t comm;
  int number = -1, count = -1, version = 0;
  if (ncclCommInitRank(&comm, ranks, me->id, me->number) != ncclSuccess) {
    check(me, 0, "ncclCommInitRank", -1, -1, 0);
    return NULL;
  }
  check(me, ncclCommUserRank(comm, &number) == ncclSuccess && number == me->number, "ncclCommUserRank", -1, -1, 0);
  check(me, ncclCommCount(comm, &count) == ncclSuccess && count == ranks, "ncclCommCount", -1, -1, 0);
  check(me, ncclGetVersion(&version) == ncclSuccess && version == NCCL_VERSION_CODE, "ncclGetVersion", -1, -1, 0);
  work(me, comm);
  ncclResult_t state = ncclInternalError;
  check(me, ncclCommGetAsyncError(comm, &state) == ncclSuccess && state == ncclSuccess, "async error", -1, -1, 0);
  check(me, ncclCommFinalize(comm) == ncclSuccess, "ncclCommFinalize", -1, -1, 0);
  check(me, ncclCommDestroy(comm) == ncclSuccess, "ncclCommDestroy", -1, -1, 0);
  return NULL;
}

static int threads(void) {
  struct rank *all = calloc((size_t)ranks, sizeof *all);
  pthread_t *thread = calloc((size_t)ranks, sizeof *thread);
  long passed = 0, failed = 0;
  ncclUniqueId id;
  if (ncclGetUniqueId(&id) != ncclSuccess) return 2;
  for (int r = 0; r < ranks; r++) {
    all[r].number = r;
    all[r].id = id;
    pthread_create(&thread[r], NULL, run, &all[r]);
  }
  for (int r = 0; r < ranks; r++) {
    pthread_join(thread[r], NULL);
    passed += all[r].passed;
    failed += all[r].failed;
  }
  free(all);
  free(thread);
  printf("%ld passed, %ld failed\n", passed, failed);
  return failed != 0;
}

static int process(int number, const char *path) {
  struct rank me = {.number = number};
  char temporary[4096];
  snprintf(temporary, sizeof temporary, "%s.new", path);
  if (number == 0) {
    if (ncclGetUniqueId(&me.id) != ncclSuccess) return 2;
    FILE *file = fopen(temporary, "wb");
    if (!file || fwrite(&me.id, sizeof me.id, 1, file) != 1 || fclose(file) || rename(temporary, path)) return 2;
  } else {
    FILE *file = NULL;
    for (int i = 0; i < 3000 && !(file = fopen(path, "rb")); i++) usleep(10000);
    if (!file || fread(&me.id, sizeof me.id, 1, file) != 1) return 2;
    fclose(file);
  }
  run(&me);
  printf("%ld passed, %ld failed\n", me.passed, me.failed);
  return me.failed != 0;
}

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  ranks = atoi(argv[2]);
  if (!strcmp(argv[1], "threads")) return threads();
  return argc == 5 ? process(atoi(argv[3]), argv[4]) : 2;
}
