/* All-reduce through the C ABI, built once against NVIDIA's header and run on whatever libnccl.so.2 the loader finds.
 *
 * The data are small integers, so that sum, max and (with a power of two of ranks) avg are exact in every type and in
 * any order: a result is right or wrong, there is no tolerance. */
#include "ranks.h"

static const ncclDataType_t TYPES[] = {ncclFloat32, ncclFloat64, ncclFloat16, ncclBfloat16, ncclInt32, ncclUint8};
static const size_t BYTES[] = {4, 8, 2, 2, 4, 1};
static const ncclRedOp_t OPS[] = {ncclSum, ncclMax, ncclAvg};
static const size_t COUNTS[] = {0, 1, 3, 17, 1000, 4097, 65537, 300001};

/* A small number as an element; exact in every type for |value| <= 256 in steps of 1/8. */
static void encode(ncclDataType_t type, double value, unsigned char *out) {
  float f = (float)value;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  int32_t integer = (int32_t)value;
  uint16_t sixteen = 0;
  switch (type) {
    case ncclFloat32: memcpy(out, &f, 4); break;
    case ncclFloat64: memcpy(out, &value, 8); break;
    case ncclInt32: memcpy(out, &integer, 4); break;
    case ncclUint8: out[0] = (unsigned char)integer; break;
    case ncclBfloat16: sixteen = (uint16_t)(bits >> 16); memcpy(out, &sixteen, 2); break;
    default:
      if (f != 0) sixteen = (uint16_t)((bits - 0x38000000u) >> 13);
      memcpy(out, &sixteen, 2);
  }
}

static double input(size_t i, int rank) { return (double)((i * 7 + (size_t)rank * 5) % 17); }

static double expected(size_t i, ncclDataType_t type, ncclRedOp_t op) {
  double sum = 0, max = 0;
  for (int r = 0; r < ranks; r++) {
    sum += input(i, r);
    if (input(i, r) > max) max = input(i, r);
  }
  if (op == ncclMax) return max;
  if (op == ncclSum) return sum;
  return type == ncclInt32 || type == ncclUint8 ? (double)((long)sum / ranks) : sum / ranks;
}

static void one(struct rank *me, ncclComm_t comm, int t, int o, size_t count, int in_place) {
  size_t bytes = count * BYTES[t];
  unsigned char *send = NULL, *raw = NULL;
  if (ncclMemAlloc((void **)&raw, bytes + 2 * GUARD_BYTES) != ncclSuccess || ncclMemAlloc((void **)&send, bytes + 8) != ncclSuccess) {
    check(me, 0, "ncclMemAlloc", TYPES[t], OPS[o], count);
    return;
  }
  unsigned char *recv = raw + GUARD_BYTES;
  memset(raw, 0xA5, bytes + 2 * GUARD_BYTES);
  unsigned char *from = in_place ? recv : send;
  for (size_t i = 0; i < count; i++) encode(TYPES[t], input(i, me->number), from + i * BYTES[t]);
  ncclResult_t result = ncclAllReduce(from, recv, count, TYPES[t], OPS[o], comm, NULL);
  check(me, result == ncclSuccess, "ncclAllReduce", TYPES[t], OPS[o], count);
  long wrong = 0;
  for (size_t i = 0; i < count; i++) {
    unsigned char want[8];
    encode(TYPES[t], expected(i, TYPES[t], OPS[o]), want);
    wrong += memcmp(want, recv + i * BYTES[t], BYTES[t]) != 0;
  }
  for (int i = 0; i < GUARD_BYTES; i++) wrong += raw[i] != 0xA5 || recv[bytes + i] != 0xA5;
  check(me, wrong == 0, "wrong values", TYPES[t], OPS[o], count);
  ncclMemFree(raw);
  ncclMemFree(send);
}

static void work(struct rank *me, ncclComm_t comm) {
  for (int t = 0; t < 6; t++)
    for (int o = 0; o < 3; o++)
      for (int c = 0; c < 8; c++) one(me, comm, t, o, COUNTS[c], (t + o + c) % 2);
}
