/* All-gather and broadcast through the C ABI: every type, every root, in place and not, with guards around what is
 * written; what a bad root gets. */
#include "ranks.h"

static const size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static const size_t COUNTS[] = {0, 1, 3, 1000, 4097, 100003};

static unsigned char byte(size_t i, int rank) { return (unsigned char)(i * 31 + (size_t)rank * 101 + i / 251); }

static void fill(unsigned char *to, size_t bytes, int rank) {
  for (size_t i = 0; i < bytes; i++) to[i] = byte(i, rank);
}

static long differences(const unsigned char *found, size_t bytes, int rank) {
  long wrong = 0;
  for (size_t i = 0; i < bytes; i++) wrong += found[i] != byte(i, rank);
  return wrong;
}

static long broken(const unsigned char *raw, size_t bytes) {
  long wrong = 0;
  for (int i = 0; i < GUARD_BYTES; i++) wrong += raw[i] != 0xA5 || raw[GUARD_BYTES + bytes + i] != 0xA5;
  return wrong;
}

static void gather(struct rank *me, ncclComm_t comm, int type, size_t count, int in_place) {
  size_t bytes = count * BYTES[type], all = bytes * (size_t)ranks;
  unsigned char *raw = malloc(all + 2 * GUARD_BYTES), *send = malloc(bytes + 1), *recv = raw + GUARD_BYTES;
  memset(raw, 0xA5, all + 2 * GUARD_BYTES);
  unsigned char *from = in_place ? recv + bytes * (size_t)me->number : send;
  fill(from, bytes, me->number);
  check(me, ncclAllGather(from, recv, count, (ncclDataType_t)type, comm, NULL) == ncclSuccess, "ncclAllGather", type, -1, count);
  long wrong = broken(raw, all);
  for (int rank = 0; rank < ranks; rank++) wrong += differences(recv + bytes * (size_t)rank, bytes, rank);
  check(me, wrong == 0, "gathered bytes", type, -1, count);
  free(raw);
  free(send);
}

static void broadcast(struct rank *me, ncclComm_t comm, int type, size_t count, int root, int in_place) {
  size_t bytes = count * BYTES[type];
  unsigned char *raw = malloc(bytes + 2 * GUARD_BYTES), *send = malloc(bytes + 1), *recv = raw + GUARD_BYTES;
  memset(raw, 0xA5, bytes + 2 * GUARD_BYTES);
  int mine = me->number == root;
  if (mine) fill(in_place ? recv : send, bytes, root);
  /* Only the root sends, so only the root needs a buffer for it. */
  ncclResult_t result = in_place ? ncclBcast(recv, count, (ncclDataType_t)type, root, comm, NULL)
                                 : ncclBroadcast(mine ? send : NULL, recv, count, (ncclDataType_t)type, root, comm, NULL);
  check(me, result == ncclSuccess, "ncclBroadcast", type, root, count);
  check(me, differences(recv, bytes, root) + broken(raw, bytes) == 0, "bytes of the root", type, root, count);
  free(raw);
  free(send);
}

static void refusals(struct rank *me, ncclComm_t comm) {
  int buffer[4];
  const int roots[] = {-1, ranks, 2147483647};
  for (int i = 0; i < 3; i++)
    check(me, ncclBroadcast(buffer, buffer, 4, ncclInt32, roots[i], comm, NULL) == ncclInvalidArgument, "a bad root", 2, roots[i], 4);
  check(me, ncclAllGather(NULL, buffer, 4, ncclInt32, comm, NULL) == ncclInvalidArgument, "NULL to send", 2, -1, 4);
  check(me, ncclAllGather(buffer, NULL, 4, ncclInt32, comm, NULL) == ncclInvalidArgument, "NULL to receive", 2, -1, 4);
  check(me, ncclAllGather(buffer, buffer, SIZE_MAX / 8, ncclInt32, comm, NULL) == ncclInvalidArgument, "too much", 2, -1, SIZE_MAX / 8);
  if (me->number == 0)
    check(me, ncclBroadcast(NULL, buffer, 4, ncclInt32, 0, comm, NULL) == ncclInvalidArgument, "NULL on the root", 2, 0, 4);
}

static void work(struct rank *me, ncclComm_t comm) {
  refusals(me, comm);
  for (int type = 0; type < 12; type++)
    for (int c = 0; c < 6; c++) {
      gather(me, comm, type, COUNTS[c], (type + c) % 2);
      broadcast(me, comm, type, COUNTS[c], (type + c) % ranks, (type + c / 2) % 2);
    }
  for (int root = 0; root < ranks; root++) broadcast(me, comm, 7, 1000, root, 0);
}
