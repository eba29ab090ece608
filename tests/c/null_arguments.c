/*
 * NULL in every argument of every function that is built, and 0xFF.. or other junk where it is a handle: the right
 * code, a sentence that begins with the call's name, nothing written, no crash. Refused functions: see tests/abi.rs.
 */

#include <nccl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;

static void expect(const char *call, const char *name, ncclResult_t got, ncclResult_t wanted) {
  const char *sentence = ncclGetLastError(NULL);
  if (got != wanted) {
    printf("%s gives %d, not %d; last error: %s\n", call, got, wanted, sentence);
    failures++;
  } else if (got != ncclSuccess && strncmp(sentence, name, strlen(name)) != 0) {
    printf("%s: the last error does not begin with %s: %s\n", call, name, sentence);
    failures++;
  }
}

static void require(const char *what, int holds) {
  if (!holds) {
    printf("not so: %s\n", what);
    failures++;
  }
}

/* A call under both of its names. */
#define CHECK(wanted, function, arguments) \
  do { \
    expect(#function #arguments, #function, function arguments, wanted); \
    expect("p" #function #arguments, #function, p##function arguments, wanted); \
  } while (0)
#define REQUIRE(condition) require(#condition, (condition))

static void *const wild = (void *)-1L;

static void library(void) {
  int version = 0, code;
  CHECK(ncclInvalidArgument, ncclGetVersion, (NULL));
  CHECK(ncclSuccess, ncclGetVersion, (&version));
  REQUIRE(version == 22809);
  for (code = -2; code < 12; code++) {
    const char *text = ncclGetErrorString((ncclResult_t)code);
    REQUIRE(text != NULL && strcmp(text, pncclGetErrorString((ncclResult_t)code)) == 0);
    REQUIRE((strcmp(text, "unknown result code") == 0) == (code < 0 || code > ncclInProgress));
  }
  REQUIRE(strcmp(ncclGetErrorString(ncclSuccess), "no error") == 0);
  REQUIRE(strcmp(ncclGetErrorString(ncclInProgress), "NCCL operation in progress") == 0);
  REQUIRE(ncclGetLastError(NULL) != NULL && pncclGetLastError((ncclComm_t)wild) != NULL);
  ncclResetDebugInit();
  pncclResetDebugInit();
}

static void initialisation(void) {
  ncclUniqueId id;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm = (ncclComm_t)wild, comms[4] = {NULL, NULL, NULL, NULL};
  int devices[4] = {99, 0, 0, 0};
  memset(&id, 0, sizeof id);
  CHECK(ncclInvalidArgument, ncclGetUniqueId, (NULL));

  CHECK(ncclInvalidArgument, ncclCommInitRank, (NULL, 1, id, 0));
  CHECK(ncclInvalidArgument, ncclCommInitRank, (&comm, 0, id, 0));
  REQUIRE(comm == NULL);
  CHECK(ncclInvalidArgument, ncclCommInitRank, (&comm, -5, id, 0));
  CHECK(ncclInvalidArgument, ncclCommInitRank, (&comm, 3, id, -1));
  CHECK(ncclInvalidArgument, ncclCommInitRank, (&comm, 3, id, 3));

  CHECK(ncclInvalidArgument, ncclCommInitRankConfig, (NULL, 1, id, 0, NULL));
  CHECK(ncclInvalidArgument, ncclCommInitRankConfig, (NULL, 1, id, 0, &config));
  CHECK(ncclInvalidArgument, ncclCommInitRankConfig, (&comm, 0, id, 0, NULL));
  comm = (ncclComm_t)wild;
  config.magic = 1;
  CHECK(ncclInvalidArgument, ncclCommInitRankConfig, (&comm, 1, id, 0, &config));
  REQUIRE(comm == NULL);
  config.magic = 0xcafebeef;
  config.blocking = 2;
  CHECK(ncclInvalidArgument, ncclCommInitRankConfig, (&comm, 1, id, 0, &config));
  config.blocking = NCCL_CONFIG_UNDEF_INT;
  config.minCTAs = 4;
  CHECK(ncclInvalidArgument, ncclCommInitRankConfig, (&comm, 1, id, 0, &config));
  config.size = 8;
  CHECK(ncclInvalidArgument, ncclCommInitRankConfig, (&comm, 1, id, 0, &config));

  CHECK(ncclInvalidArgument, ncclCommInitRankScalable, (NULL, 1, 0, 1, &id, NULL));
  CHECK(ncclInvalidArgument, ncclCommInitRankScalable, (&comm, 1, 0, 1, NULL, NULL));
  CHECK(ncclInvalidArgument, ncclCommInitRankScalable, (&comm, 1, 0, 0, &id, NULL));
  CHECK(ncclInvalidArgument, ncclCommInitRankScalable, (&comm, 1, 0, 2, &id, NULL));
  CHECK(ncclInvalidArgument, ncclCommInitRankScalable, (&comm, INT_MAX, 0, INT_MAX, &id, NULL));

  CHECK(ncclInvalidArgument, ncclCommInitAll, (NULL, 1, NULL));
  CHECK(ncclInvalidArgument, ncclCommInitAll, (NULL, 1, devices));
  CHECK(ncclInvalidArgument, ncclCommInitAll, (comms, -1, NULL));
  CHECK(ncclInvalidArgument, ncclCommInitAll, (comms, -1, devices));
  CHECK(ncclInvalidArgument, ncclCommInitAll, (comms, INT_MAX, devices));
  CHECK(ncclInvalidArgument, ncclCommInitAll, (comms, 1, devices));
}

static void handle(ncclComm_t comm) {
  int value = 12345;
  ncclResult_t state = ncclNumResults;
  ncclResult_t ending = comm == NULL ? ncclSuccess : ncclInvalidArgument;
  float data[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  CHECK(ncclInvalidArgument, ncclCommCount, (comm, &value));
  CHECK(ncclInvalidArgument, ncclCommCount, (comm, NULL));
  CHECK(ncclInvalidArgument, ncclCommUserRank, (comm, &value));
  CHECK(ncclInvalidArgument, ncclCommUserRank, (comm, NULL));
  CHECK(ncclInvalidArgument, ncclCommCuDevice, (comm, &value));
  CHECK(ncclInvalidArgument, ncclCommCuDevice, (comm, NULL));
  CHECK(ncclInvalidArgument, ncclCommGetAsyncError, (comm, &state));
  CHECK(ncclInvalidArgument, ncclCommGetAsyncError, (comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce, (data, data, 8, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce, (NULL, NULL, 0, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce, (NULL, data, 8, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce, (data, NULL, 8, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce, (data, data, 8, ncclNumTypes, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce, (data, data, 8, ncclFloat, ncclMaxRedOp, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce, (data, data, (size_t)-1 / 2, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllGather, (data, data, 8, ncclFloat, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllGather, (NULL, data, 8, ncclFloat, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllGather, (data, NULL, 8, ncclFloat, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllGather, (data, data, 8, ncclNumTypes, comm, NULL));
  CHECK(ncclInvalidArgument, ncclBroadcast, (data, data, 8, ncclFloat, 0, comm, NULL));
  CHECK(ncclInvalidArgument, ncclBroadcast, (NULL, NULL, 8, ncclFloat, 0, comm, NULL));
  CHECK(ncclInvalidArgument, ncclBroadcast, (data, data, 8, ncclNumTypes, 0, comm, NULL));
  CHECK(ncclInvalidArgument, ncclBroadcast, (data, data, 8, ncclFloat, -1, comm, NULL));
  CHECK(ncclInvalidArgument, ncclBcast, (data, 8, ncclFloat, 0, comm, NULL));
  CHECK(ncclInvalidArgument, ncclBcast, (NULL, 8, ncclFloat, 0, comm, NULL));
  CHECK(ncclInvalidArgument, ncclBcast, (data, 8, ncclNumTypes, 0, comm, NULL));
  CHECK(ending, ncclCommFinalize, (comm));
  CHECK(ending, ncclCommDestroy, (comm));
  CHECK(ending, ncclCommAbort, (comm));
  CHECK(ncclInvalidArgument, ncclRedOpDestroy, (ncclSum, comm));
  CHECK(ncclInvalidArgument, ncclRedOpDestroy, (ncclMaxRedOp, comm));
  CHECK(ncclSuccess, ncclCommDeregister, (comm, NULL));
  CHECK(ncclInvalidUsage, ncclCommDeregister, (comm, wild));
  CHECK(ncclSuccess, ncclCommWindowDeregister, (comm, NULL));
  CHECK(ncclInvalidUsage, ncclCommWindowDeregister, (comm, (ncclWindow_t)wild));
  REQUIRE(value == 12345 && state == ncclNumResults);
  REQUIRE(data[0] == 1 && data[7] == 8);
}

static void memory(void) {
  void *pointer = wild;
  CHECK(ncclInvalidArgument, ncclMemAlloc, (NULL, 0));
  CHECK(ncclInvalidArgument, ncclMemAlloc, (NULL, 16));
  CHECK(ncclSuccess, ncclMemAlloc, (&pointer, 0));
  REQUIRE(pointer == NULL);
  CHECK(ncclSuccess, ncclMemFree, (NULL));
  CHECK(ncclInvalidArgument, ncclMemFree, (wild));
  CHECK(ncclInvalidArgument, ncclMemFree, (&pointer));
}

static void groups(void) {
  CHECK(ncclInvalidUsage, ncclGroupEnd, ());
  /* Two groups, one in the other. */
  CHECK(ncclSuccess, ncclGroupStart, ());
  CHECK(ncclSuccess, ncclGroupEnd, ());
  /* A call that failed inside a group fails the group. */
  expect("start", "", ncclGroupStart(), ncclSuccess);
  CHECK(ncclInvalidArgument, ncclAllReduce, (NULL, NULL, 8, ncclFloat, ncclSum, NULL, NULL));
  expect("end after a wrong argument", "ncclGroupEnd", ncclGroupEnd(), ncclInvalidArgument);
  expect("start", "", ncclGroupStart(), ncclSuccess);
  CHECK(ncclInvalidUsage, ncclSend, (NULL, 0, ncclFloat, 0, NULL, NULL));
  expect("end after a refused call", "ncclGroupEnd", ncclGroupEnd(), ncclInvalidUsage);
  expect("start", "", ncclGroupStart(), ncclSuccess);
  expect("end of the next group", "ncclGroupEnd", ncclGroupEnd(), ncclSuccess);
}

int main(void) {
  char junk[4096];
  void *block = malloc(4096);
  const uintptr_t freed = (uintptr_t)block;
  library();
  initialisation();
  handle(NULL);
  handle((ncclComm_t)wild);
  memset(junk, 0x5a, sizeof junk);
  handle((ncclComm_t)junk);
  free(block);
  handle((ncclComm_t)freed);
  memory();
  groups();
  printf("%d failures\n", failures);
  return failures != 0;
}
