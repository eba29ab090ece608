/* The life of a communicator of one rank, from an id at an odd address; then everything that is wrong with a live one. */

#include <nccl.h>
#include <stdio.h>
#include <string.h>

#define CHECK(wanted, call) \
  do { \
    int got_ = (int)(call); \
    if (got_ != (int)(wanted)) { \
      printf("line %d: %s gives %d, not %d; last error: %s\n", __LINE__, #call, got_, (int)(wanted), \
             ncclGetLastError(NULL)); \
      return 1; \
    } \
  } while (0)

static int wrong_calls(ncclComm_t comm, float *data) {
  const size_t half = (size_t)-1 / 2;
  CHECK(ncclSuccess, ncclAllReduce(NULL, NULL, 0, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce(NULL, data, 5, ncclFloat, ncclSum, comm, NULL));
  CHECK(0, strcmp(ncclGetLastError(comm), "ncclAllReduce: sendbuff is NULL with count 5"));
  CHECK(ncclInvalidArgument, ncclAllReduce(data, NULL, 5, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce(data, data, 5, (ncclDataType_t)12, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce(data, data, 5, (ncclDataType_t)-1, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce(data, data, 5, ncclFloat, (ncclRedOp_t)5, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce(data, data, 5, ncclFloat, (ncclRedOp_t)-1, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce(data, data, half, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclAllReduce(data, data, half / 2 + 1, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclSuccess, ncclGroupStart());
  CHECK(ncclInvalidArgument, ncclAllReduce(data, data, half, ncclFloat, ncclSum, comm, NULL));
  CHECK(ncclInvalidArgument, ncclGroupEnd());
  CHECK(ncclInvalidArgument, ncclCommCount(comm, NULL));
  return 0;
}

int main(void) {
  /* 129 bytes, so that the id lies at an odd address whatever the array's is. */
  char raw[NCCL_UNIQUE_ID_BYTES + 2];
  ncclUniqueId *odd = (ncclUniqueId *)(raw + (((size_t)raw & 1) == 0));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm = NULL;
  ncclResult_t state = ncclNumResults;
  int value = -1, i;
  void *memory = NULL;
  float *data;

  config.commName = "one_rank";
  CHECK(ncclSuccess, ncclGetUniqueId(odd));
  CHECK(ncclSuccess, ncclCommInitRankConfig(&comm, 1, *odd, 0, &config));
  CHECK(ncclSuccess, ncclCommCount(comm, &value));
  CHECK(1, value);
  CHECK(ncclSuccess, ncclCommUserRank(comm, &value));
  CHECK(0, value);
  CHECK(ncclSuccess, ncclCommCuDevice(comm, &value));
  CHECK(0, value);
  CHECK(ncclSuccess, ncclCommGetAsyncError(comm, &state));
  CHECK(ncclSuccess, state);

  CHECK(ncclSuccess, ncclMemAlloc(&memory, 2 * 1000 * sizeof(float)));
  data = (float *)memory;
  for (i = 0; i < 1000; i++) data[i] = (float)i;
  CHECK(ncclSuccess, ncclAllReduce(data, data + 1000, 1000, ncclFloat, ncclSum, comm, NULL));
  for (i = 0; i < 1000; i++) CHECK(i, data[1000 + i]);
  CHECK(ncclSuccess, pncclAllReduce(data, data, 1000, ncclFloat, ncclAvg, comm, NULL));
  for (i = 0; i < 1000; i++) CHECK(i, data[i]);
  if (wrong_calls(comm, data)) return 1;
  /* Still usable. */
  CHECK(ncclSuccess, ncclAllReduce(data, data, 1000, ncclFloat, ncclMax, comm, NULL));
  CHECK(ncclSuccess, ncclCommGetAsyncError(comm, &state));
  CHECK(ncclSuccess, state);

  CHECK(ncclSuccess, ncclMemFree(memory));
  CHECK(ncclSuccess, ncclCommFinalize(comm));
  CHECK(ncclSuccess, ncclCommDestroy(comm));
  CHECK(ncclInvalidArgument, ncclCommDestroy(comm));
  CHECK(ncclInvalidArgument, ncclCommCount(comm, &value));
  CHECK(ncclInvalidArgument, ncclCommGetAsyncError(comm, &state));
  printf("one rank: all right\n");
  return 0;
}
