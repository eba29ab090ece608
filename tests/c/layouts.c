/* Prints every size, offset, enumerator and macro of nccl.h 2.28.9: equal text means that the headers agree. */

#include <nccl.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>

#define SIZE(type) printf("sizeof %s %lu\n", #type, (unsigned long)sizeof(type))
#define FIELD(type, field) \
  printf("%s.%s at %lu of %lu\n", #type, #field, (unsigned long)offsetof(type, field), \
         (unsigned long)sizeof(((type *)0)->field))
#define VALUE(name) printf("%s %ld\n", #name, (long)(name))

#if NCCL_VERSION_CODE != NCCL_VERSION(2, 28, 9) || NCCL_VERSION_CODE < NCCL_VERSION(2, 8, 4)
#error NCCL_VERSION must work in conditions
#endif

static void structs(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  struct ncclConfig_v22800 *tagged = &config;
  struct ncclSimInfo_v22200 *taggedInfo = &info;
  const unsigned char *bytes = (const unsigned char *)tagged;
  size_t i;
  SIZE(ncclUniqueId);
  SIZE(ncclComm_t);
  SIZE(ncclWindow_t);
  SIZE(cudaStream_t);
  SIZE(ncclConfig_t);
  SIZE(ncclSimInfo_t);
  FIELD(ncclUniqueId, internal);
  FIELD(ncclConfig_t, size);
  FIELD(ncclConfig_t, magic);
  FIELD(ncclConfig_t, version);
  FIELD(ncclConfig_t, blocking);
  FIELD(ncclConfig_t, cgaClusterSize);
  FIELD(ncclConfig_t, minCTAs);
  FIELD(ncclConfig_t, maxCTAs);
  FIELD(ncclConfig_t, netName);
  FIELD(ncclConfig_t, splitShare);
  FIELD(ncclConfig_t, trafficClass);
  FIELD(ncclConfig_t, commName);
  FIELD(ncclConfig_t, collnetEnable);
  FIELD(ncclConfig_t, CTAPolicy);
  FIELD(ncclConfig_t, shrinkShare);
  FIELD(ncclConfig_t, nvlsCTAs);
  FIELD(ncclConfig_t, nChannelsPerNetPeer);
  FIELD(ncclConfig_t, nvlinkCentricSched);
  FIELD(ncclSimInfo_t, size);
  FIELD(ncclSimInfo_t, magic);
  FIELD(ncclSimInfo_t, version);
  FIELD(ncclSimInfo_t, estimatedTime);
  printf("config initializer");
  for (i = 0; i < sizeof config; i++) printf(" %02x", bytes[i]);
  printf("\nsimulation initializer %lu %x %u %g\n", (unsigned long)taggedInfo->size, info.magic, info.version,
         (double)info.estimatedTime);
}

static void enumerators(void) {
  SIZE(ncclResult_t);
  VALUE(ncclSuccess);
  VALUE(ncclUnhandledCudaError);
  VALUE(ncclSystemError);
  VALUE(ncclInternalError);
  VALUE(ncclInvalidArgument);
  VALUE(ncclInvalidUsage);
  VALUE(ncclRemoteError);
  VALUE(ncclInProgress);
  VALUE(ncclNumResults);
  SIZE(ncclDataType_t);
  VALUE(ncclInt8);
  VALUE(ncclChar);
  VALUE(ncclUint8);
  VALUE(ncclInt32);
  VALUE(ncclInt);
  VALUE(ncclUint32);
  VALUE(ncclInt64);
  VALUE(ncclUint64);
  VALUE(ncclFloat16);
  VALUE(ncclHalf);
  VALUE(ncclFloat32);
  VALUE(ncclFloat);
  VALUE(ncclFloat64);
  VALUE(ncclDouble);
  VALUE(ncclBfloat16);
  VALUE(ncclFloat8e4m3);
  VALUE(ncclFloat8e5m2);
  VALUE(ncclNumTypes);
  SIZE(ncclRedOp_t);
  VALUE(ncclSum);
  VALUE(ncclProd);
  VALUE(ncclMax);
  VALUE(ncclMin);
  VALUE(ncclAvg);
  VALUE(ncclNumOps);
  VALUE(ncclMaxRedOp);
  SIZE(ncclScalarResidence_t);
  VALUE(ncclScalarDevice);
  VALUE(ncclScalarHostImmediate);
}

static void macros(void) {
  VALUE(NCCL_MAJOR);
  VALUE(NCCL_MINOR);
  VALUE(NCCL_PATCH);
  printf("NCCL_SUFFIX \"%s\"\n", NCCL_SUFFIX);
  VALUE(NCCL_VERSION_CODE);
  VALUE(NCCL_VERSION(2, 8, 4));
  VALUE(NCCL_VERSION(2, 9, 0));
  VALUE(NCCL_VERSION(2, 28, 9));
  VALUE(NCCL_VERSION(3, 1, 2));
  VALUE(NCCL_UNIQUE_ID_BYTES);
  printf("NCCL_COMM_NULL %d\n", NCCL_COMM_NULL == (ncclComm_t)0);
  VALUE(NCCL_SPLIT_NOCOLOR);
  VALUE(NCCL_CONFIG_UNDEF_INT);
  printf("NCCL_CONFIG_UNDEF_PTR %d\n", (const char *)NCCL_CONFIG_UNDEF_PTR == (const char *)0);
  printf("NCCL_UNDEF_FLOAT %g of %lu\n", (double)NCCL_UNDEF_FLOAT, (unsigned long)sizeof(NCCL_UNDEF_FLOAT));
  VALUE(NCCL_WIN_DEFAULT);
  VALUE(NCCL_WIN_COLL_SYMMETRIC);
  VALUE(NCCL_WIN_REQUIRED_ALIGNMENT);
  VALUE(NCCL_CTA_POLICY_DEFAULT);
  VALUE(NCCL_CTA_POLICY_EFFICIENCY);
  VALUE(NCCL_CTA_POLICY_ZERO);
  VALUE(NCCL_SHRINK_DEFAULT);
  VALUE(NCCL_SHRINK_ABORT);
  VALUE(NCCL_REVOKE_DEFAULT);
}

int main(void) {
  structs();
  enumerators();
  macros();
  return 0;
}
