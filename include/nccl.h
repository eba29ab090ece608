/*
 * SPDX-License-Identifier: Apache-2.0
 *
 * The C interface of Ossicle's libnccl.so.2: that of NCCL 2.28.9, and the functions that later releases added.
 * Generated from src/abi/exports.table, src/abi/types.rs and cbindgen.toml; do not edit.
 * Which functions are built: docs/support.md.
 */

#ifndef NCCL_H_
#define NCCL_H_


#include <limits.h>
#include <stddef.h>
#include <stdint.h>

/* Without CUDA's headers a stream is the same pointer under the same name, so clients of the host device need no CUDA. */
#ifdef __has_include
#if __has_include(<cuda_runtime.h>)
#define NCCL_HAS_CUDA_RUNTIME_H
#endif
#else
#define NCCL_HAS_CUDA_RUNTIME_H
#endif
#ifdef NCCL_HAS_CUDA_RUNTIME_H
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#ifdef __cplusplus
#include <cuda_fp8.h>
#endif
#else
typedef struct CUstream_st *cudaStream_t;
#endif

#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_SUFFIX ""
#define NCCL_VERSION_CODE 22809
/* Releases up to 2.8 counted in thousands. */
#define NCCL_VERSION(X, Y, Z) \
  ((X) * (((X) <= 2 && (Y) <= 8) ? 1000 : 10000) + (Y) * 100 + (Z))

#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_COMM_NULL NULL
#define NCCL_SPLIT_NOCOLOR -1

/* Values of settings that the caller leaves to the library. */
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_UNDEF_FLOAT -1.0f

/* winFlags of ncclCommWindowRegister */
#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

/* CTAPolicy of ncclConfig_t */
#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

/* shrinkFlags of ncclCommShrink, revokeFlags of ncclCommRevoke */
#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01
#define NCCL_REVOKE_DEFAULT 0x00

/* size, magic, version, then every setting of ncclConfig_t in order, left to the library */
#define NCCL_CONFIG_INITIALIZER { sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION_CODE, \
  NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \
  NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, \
  NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \
  NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT }

#define NCCL_SIM_INFO_INITIALIZER { sizeof(ncclSimInfo_t), 0x74685283, NCCL_VERSION_CODE, NCCL_UNDEF_FLOAT }

/* What a call returns. */
typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclNumResults = 8
} ncclResult_t;

/* Element types. */
typedef enum {
  ncclInt8 = 0, ncclChar = ncclInt8,
  ncclUint8 = 1,
  ncclInt32 = 2, ncclInt = ncclInt32,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6, ncclHalf = ncclFloat16,
  ncclFloat32 = 7, ncclFloat = ncclFloat32,
  ncclFloat64 = 8, ncclDouble = ncclFloat64,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
} ncclDataType_t;

/* Reductions; operations made by the caller are numbered from ncclNumOps. */
typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = INT_MAX
} ncclRedOp_t;

/* Where the scalar of ncclRedOpCreatePreMulSum lies, and so when it is read. */
typedef enum {
  ncclScalarDevice = 0,
  ncclScalarHostImmediate = 1
} ncclScalarResidence_t;

/* Which amount ncclCommMemStats reports. */
typedef enum {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3
} ncclCommMemStat_t;


/*
 A communicator; an opaque handle.
 */
typedef struct ncclComm ncclComm;

/*
 What a communicator can do.
 */
typedef struct ncclCommProperties ncclCommProperties;

/*
 A communicator as kernels see it.
 */
typedef struct ncclDevComm ncclDevComm;

/*
 What such a communicator shall hold.
 */
typedef struct ncclDevCommRequirements ncclDevCommRequirements;

/*
 Memory and signals for one use.
 */
typedef struct ncclDevResourceRequirements ncclDevResourceRequirements;

/*
 A barrier over the network.
 */
typedef struct ncclGinBarrierHandle ncclGinBarrierHandle;

/*
 An inbox.
 */
typedef struct ncclGinInboxA2AHandle ncclGinInboxA2AHandle;

/*
 An outbox.
 */
typedef struct ncclGinOutboxHandle ncclGinOutboxHandle;

/*
 A low-latency all-to-all.
 */
typedef struct ncclLLA2AHandle ncclLLA2AHandle;

/*
 A barrier by load and store.
 */
typedef struct ncclLsaBarrierHandle ncclLsaBarrierHandle;

/*
 A parameter of the library.
 */
typedef struct ncclParamHandle ncclParamHandle;

/*
 A window of registered memory; on NCCL's side an address in device memory, never read on the host.
 */
typedef struct ncclWindow_vidmem ncclWindow_vidmem;

typedef struct ncclComm *ncclComm_t;

/*
 Names a rendezvous; to be carried to the other ranks as 128 bytes, NULs included.
 */
typedef struct ncclUniqueId {
  char internal[128];
} ncclUniqueId;

/*
 Settings of a communicator, as NCCL 2.28 lays them out. Start from NCCL_CONFIG_INITIALIZER.
 */
typedef struct ncclConfig_v22800 {
  /*
   Bytes of this struct; set by the initializer, as are magic and version.
   */
  size_t size;
  unsigned int magic;
  unsigned int version;
  /*
   0: calls that wait return ncclInProgress.
   */
  int blocking;
  int cgaClusterSize;
  /*
   Channels, 1 to 64. A minimum needs a maximum.
   */
  int minCTAs;
  int maxCTAs;
  const char *netName;
  int splitShare;
  int trafficClass;
  /*
   A name for the log.
   */
  const char *commName;
  int collnetEnable;
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
  int nChannelsPerNetPeer;
  int nvlinkCentricSched;
} ncclConfig_v22800;

typedef struct ncclConfig_v22800 ncclConfig_t;

/*
 Encryption of links between processes (NCCL 2.32).
 */
typedef struct ncclEncryptionConfig_t {
  size_t size;
  unsigned int magic;
  unsigned int version;
  /*
   0: none, 1: pre-shared key.
   */
  int mode;
  const char *psk;
} ncclEncryptionConfig_t;

/*
 Answer of ncclGroupSimulateEnd. Start from NCCL_SIM_INFO_INITIALIZER.
 */
typedef struct ncclSimInfo_v22200 {
  size_t size;
  unsigned int magic;
  unsigned int version;
  /*
   Microseconds.
   */
  float estimatedTime;
} ncclSimInfo_v22200;

typedef struct ncclSimInfo_v22200 ncclSimInfo_t;

/*
 Whose option a ncclConfigExt_t carries, and which.
 */
typedef struct ncclConfigExtKey_t {
  uint32_t vendorId;
  uint32_t optionId;
} ncclConfigExtKey_t;

/*
 A list of options of other vendors (NCCL 2.31).
 */
typedef struct ncclConfigExt_t {
  const struct ncclConfigExt_t *next;
  struct ncclConfigExtKey_t key;
  const void *value;
} ncclConfigExt_t;

/*
 Settings of one collective call, as NCCL 2.32 lays them out.
 */
typedef struct ncclCollConfig_t {
  size_t size;
  unsigned int magic;
  unsigned int version;
  const struct ncclConfigExt_t *ext;
  int minCTAs;
  int maxCTAs;
  int nvlsCTAs;
  int cgaClusterSize;
  const char *algSelection;
  int forceAlgSelection;
  int CTAPolicy;
  uint64_t userProfilerTag;
  void *launchCompletionEvent;
} ncclCollConfig_t;

typedef struct ncclWindow_vidmem *ncclWindow_t;

/*
 What ncclWaitSignal waits for (NCCL 2.29).
 */
typedef struct ncclWaitSignalDesc_t {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
} ncclWaitSignalDesc_t;

typedef struct ncclParamHandle *ncclParamHandle_t;

typedef struct ncclDevCommRequirements ncclDevCommRequirements_t;

typedef struct ncclDevComm ncclDevComm_t;

typedef struct ncclCommProperties ncclCommProperties_t;

/*
 A set of ranks: every stride-th.
 */
typedef struct ncclTeam {
  int nRanks;
  int rank;
  int stride;
} ncclTeam;

typedef struct ncclTeam ncclTeam_t;

typedef struct ncclLsaBarrierHandle ncclLsaBarrierHandle_t;

typedef struct ncclDevResourceRequirements ncclDevResourceRequirements_t;

typedef struct ncclGinBarrierHandle ncclGinBarrierHandle_t;

typedef struct ncclLLA2AHandle ncclLLA2AHandle_t;

/*
 A multicast address.
 */
typedef struct ncclMultimemHandle {
  void *mcBasePtr;
} ncclMultimemHandle;

typedef struct ncclMultimemHandle ncclMultimemHandle_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 22809: NCCL 2.28.9 is the release whose behaviour and structs this library keeps (since 2.3)
 */
ncclResult_t ncclGetVersion(int *version);

ncclResult_t pncclGetVersion(int *version);

/*
 NCCL's own wording, which scripts match (since 2.3)
 */
const char *ncclGetErrorString(ncclResult_t result);

const char *pncclGetErrorString(ncclResult_t result);

/*
 the newest sentence of this process; the communicator is not looked at (since 2.13.4)
 */
const char *ncclGetLastError(ncclComm_t comm);

const char *pncclGetLastError(ncclComm_t comm);

/*
 does nothing, as in NCCL since 2.24 (since 2.24.3)
 */
void ncclResetDebugInit(void);

void pncclResetDebugInit(void);

/*
 does nothing; exported by NCCL without a declaration, so only for the loader (since 2.24.3)
 */
void ncclResetDebugInitInternal(void);

/*
 128 opaque bytes with a random secret; the calling process serves the rendezvous (since 2.3)
 */
ncclResult_t ncclGetUniqueId(struct ncclUniqueId *uniqueId);

ncclResult_t pncclGetUniqueId(struct ncclUniqueId *uniqueId);

/*
 one rank joins; blocks until all ranks came, unless in a group (since 2.3)
 */
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, struct ncclUniqueId commId, int rank);

ncclResult_t pncclCommInitRank(ncclComm_t *comm, int nranks, struct ncclUniqueId commId, int rank);

/*
 the same with a config of any size that NCCL ever had (since 2.14.3)
 */
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm,
                                    int nranks,
                                    struct ncclUniqueId commId,
                                    int rank,
                                    ncclConfig_t *config);

ncclResult_t pncclCommInitRankConfig(ncclComm_t *comm,
                                     int nranks,
                                     struct ncclUniqueId commId,
                                     int rank,
                                     ncclConfig_t *config);

/*
 the same with several ids (since 2.23.4)
 */
ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm,
                                      int nranks,
                                      int myrank,
                                      int nId,
                                      struct ncclUniqueId *commIds,
                                      ncclConfig_t *config);

ncclResult_t pncclCommInitRankScalable(ncclComm_t *newcomm,
                                       int nranks,
                                       int myrank,
                                       int nId,
                                       struct ncclUniqueId *commIds,
                                       ncclConfig_t *config);

/*
 all ranks in this process; devlist NULL means devices 0 to ndev - 1 (since 2.3)
 */
ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist);

ncclResult_t pncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist);

/*
 number of ranks (since 2.3)
 */
ncclResult_t ncclCommCount(ncclComm_t comm, int *count);

ncclResult_t pncclCommCount(ncclComm_t comm, int *count);

/*
 rank of the caller (since 2.3)
 */
ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank);

ncclResult_t pncclCommUserRank(ncclComm_t comm, int *rank);

/*
 ordinal of the device (since 2.3)
 */
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device);

ncclResult_t pncclCommCuDevice(ncclComm_t comm, int *device);

/*
 from any thread, never blocks (since 2.4.2)
 */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError);

ncclResult_t pncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError);

/*
 flushes; NULL is success (since 2.14.3)
 */
ncclResult_t ncclCommFinalize(ncclComm_t comm);

ncclResult_t pncclCommFinalize(ncclComm_t comm);

/*
 NULL is success (since 2.3)
 */
ncclResult_t ncclCommDestroy(ncclComm_t comm);

ncclResult_t pncclCommDestroy(ncclComm_t comm);

/*
 local, from any thread, also while a kernel waits; NULL is success (since 2.4.2)
 */
ncclResult_t ncclCommAbort(ncclComm_t comm);

ncclResult_t pncclCommAbort(ncclComm_t comm);

/*
 not built yet: part of the ranks as a new communicator (since 2.18.1)
 */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config);

ncclResult_t pncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config);

/*
 not built yet: a new communicator without the ranks that failed (since 2.27.3)
 */
ncclResult_t ncclCommShrink(ncclComm_t comm,
                            int *excludeRanksList,
                            int excludeRanksCount,
                            ncclComm_t *newcomm,
                            ncclConfig_t *config,
                            int shrinkFlags);

ncclResult_t pncclCommShrink(ncclComm_t comm,
                             int *excludeRanksList,
                             int excludeRanksCount,
                             ncclComm_t *newcomm,
                             ncclConfig_t *config,
                             int shrinkFlags);

/*
 not built yet: stops what is in flight (since 2.28.7)
 */
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);

ncclResult_t pncclCommRevoke(ncclComm_t comm, int revokeFlags);

/*
 not built yet: adds ranks (since 2.29.2)
 */
ncclResult_t ncclCommGrow(ncclComm_t comm,
                          int nRanks,
                          const struct ncclUniqueId *uniqueId,
                          int rank,
                          ncclComm_t *newcomm,
                          ncclConfig_t *config);

ncclResult_t pncclCommGrow(ncclComm_t comm,
                           int nRanks,
                           const struct ncclUniqueId *uniqueId,
                           int rank,
                           ncclComm_t *newcomm,
                           ncclConfig_t *config);

/*
 not built yet: the id with which new ranks join (since 2.29.2)
 */
ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, struct ncclUniqueId *uniqueId);

ncclResult_t pncclCommGetUniqueId(ncclComm_t comm, struct ncclUniqueId *uniqueId);

/*
 not built yet: releases memory for a while (since 2.29.7)
 */
ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);

ncclResult_t pncclCommSuspend(ncclComm_t comm, int flags);

/*
 not built yet: takes it again (since 2.29.7)
 */
ncclResult_t ncclCommResume(ncclComm_t comm);

ncclResult_t pncclCommResume(ncclComm_t comm);

/*
 not built yet: memory held by a communicator (since 2.29.7)
 */
ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value);

ncclResult_t pncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value);

/*
 not built yet: encrypted links (since 2.32.3)
 */
ncclResult_t ncclSetEncryption(const struct ncclEncryptionConfig_t *config);

ncclResult_t pncclSetEncryption(const struct ncclEncryptionConfig_t *config);

/*
 groups nest; the state belongs to the thread (since 2.3)
 */
ncclResult_t ncclGroupStart(void);

ncclResult_t pncclGroupStart(void);

/*
 the outermost one launches, or reports the first error and launches nothing (since 2.3)
 */
ncclResult_t ncclGroupEnd(void);

ncclResult_t pncclGroupEnd(void);

/*
 not built yet: an estimate instead of a launch (since 2.22.3)
 */
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo);

ncclResult_t pncclGroupSimulateEnd(ncclSimInfo_t *simInfo);

/*
 float, bf16, fp16, int32, uint8, double with sum, max, avg; other types and operations are refused (since 2.3)
 */
ncclResult_t ncclAllReduce(const void *sendbuff,
                           void *recvbuff,
                           size_t count,
                           ncclDataType_t datatype,
                           ncclRedOp_t op,
                           ncclComm_t comm,
                           cudaStream_t stream);

ncclResult_t pncclAllReduce(const void *sendbuff,
                            void *recvbuff,
                            size_t count,
                            ncclDataType_t datatype,
                            ncclRedOp_t op,
                            ncclComm_t comm,
                            cudaStream_t stream);

/*
 every rank gets the data of all (since 2.3)
 */
ncclResult_t ncclAllGather(const void *sendbuff,
                           void *recvbuff,
                           size_t sendcount,
                           ncclDataType_t datatype,
                           ncclComm_t comm,
                           cudaStream_t stream);

ncclResult_t pncclAllGather(const void *sendbuff,
                            void *recvbuff,
                            size_t sendcount,
                            ncclDataType_t datatype,
                            ncclComm_t comm,
                            cudaStream_t stream);

/*
 not built yet: every rank gets its part of the reduction (since 2.3)
 */
ncclResult_t ncclReduceScatter(const void *sendbuff,
                               void *recvbuff,
                               size_t recvcount,
                               ncclDataType_t datatype,
                               ncclRedOp_t op,
                               ncclComm_t comm,
                               cudaStream_t stream);

ncclResult_t pncclReduceScatter(const void *sendbuff,
                                void *recvbuff,
                                size_t recvcount,
                                ncclDataType_t datatype,
                                ncclRedOp_t op,
                                ncclComm_t comm,
                                cudaStream_t stream);

/*
 every rank gets the root's data (since 2.3)
 */
ncclResult_t ncclBroadcast(const void *sendbuff,
                           void *recvbuff,
                           size_t count,
                           ncclDataType_t datatype,
                           int root,
                           ncclComm_t comm,
                           cudaStream_t stream);

ncclResult_t pncclBroadcast(const void *sendbuff,
                            void *recvbuff,
                            size_t count,
                            ncclDataType_t datatype,
                            int root,
                            ncclComm_t comm,
                            cudaStream_t stream);

/*
 the same in place (since 2.3)
 */
ncclResult_t ncclBcast(void *buff,
                       size_t count,
                       ncclDataType_t datatype,
                       int root,
                       ncclComm_t comm,
                       cudaStream_t stream);

ncclResult_t pncclBcast(void *buff,
                        size_t count,
                        ncclDataType_t datatype,
                        int root,
                        ncclComm_t comm,
                        cudaStream_t stream);

/*
 not built yet: the root gets the reduction (since 2.3)
 */
ncclResult_t ncclReduce(const void *sendbuff,
                        void *recvbuff,
                        size_t count,
                        ncclDataType_t datatype,
                        ncclRedOp_t op,
                        int root,
                        ncclComm_t comm,
                        cudaStream_t stream);

ncclResult_t pncclReduce(const void *sendbuff,
                         void *recvbuff,
                         size_t count,
                         ncclDataType_t datatype,
                         ncclRedOp_t op,
                         int root,
                         ncclComm_t comm,
                         cudaStream_t stream);

/*
 not built yet: every rank sends a part to every other (since 2.28.3)
 */
ncclResult_t ncclAlltoAll(const void *sendbuff,
                          void *recvbuff,
                          size_t count,
                          ncclDataType_t datatype,
                          ncclComm_t comm,
                          cudaStream_t stream);

ncclResult_t pncclAlltoAll(const void *sendbuff,
                           void *recvbuff,
                           size_t count,
                           ncclDataType_t datatype,
                           ncclComm_t comm,
                           cudaStream_t stream);

/*
 not built yet: the root gets the data of all (since 2.28.3)
 */
ncclResult_t ncclGather(const void *sendbuff,
                        void *recvbuff,
                        size_t count,
                        ncclDataType_t datatype,
                        int root,
                        ncclComm_t comm,
                        cudaStream_t stream);

ncclResult_t pncclGather(const void *sendbuff,
                         void *recvbuff,
                         size_t count,
                         ncclDataType_t datatype,
                         int root,
                         ncclComm_t comm,
                         cudaStream_t stream);

/*
 not built yet: every rank gets its part of the root's data (since 2.28.3)
 */
ncclResult_t ncclScatter(const void *sendbuff,
                         void *recvbuff,
                         size_t count,
                         ncclDataType_t datatype,
                         int root,
                         ncclComm_t comm,
                         cudaStream_t stream);

ncclResult_t pncclScatter(const void *sendbuff,
                          void *recvbuff,
                          size_t count,
                          ncclDataType_t datatype,
                          int root,
                          ncclComm_t comm,
                          cudaStream_t stream);

/*
 not built yet: the same with settings for this call (since 2.31.2)
 */
ncclResult_t ncclAllReduceConfig(const void *sendbuff,
                                 void *recvbuff,
                                 size_t count,
                                 ncclDataType_t datatype,
                                 ncclRedOp_t op,
                                 ncclComm_t comm,
                                 cudaStream_t stream,
                                 const struct ncclCollConfig_t *config);

ncclResult_t pncclAllReduceConfig(const void *sendbuff,
                                  void *recvbuff,
                                  size_t count,
                                  ncclDataType_t datatype,
                                  ncclRedOp_t op,
                                  ncclComm_t comm,
                                  cudaStream_t stream,
                                  const struct ncclCollConfig_t *config);

/*
 not built yet: the same with settings for this call (since 2.31.2)
 */
ncclResult_t ncclAllGatherConfig(const void *sendbuff,
                                 void *recvbuff,
                                 size_t sendcount,
                                 ncclDataType_t datatype,
                                 ncclComm_t comm,
                                 cudaStream_t stream,
                                 const struct ncclCollConfig_t *config);

ncclResult_t pncclAllGatherConfig(const void *sendbuff,
                                  void *recvbuff,
                                  size_t sendcount,
                                  ncclDataType_t datatype,
                                  ncclComm_t comm,
                                  cudaStream_t stream,
                                  const struct ncclCollConfig_t *config);

/*
 not built yet: the same with settings for this call (since 2.31.2)
 */
ncclResult_t ncclReduceScatterConfig(const void *sendbuff,
                                     void *recvbuff,
                                     size_t recvcount,
                                     ncclDataType_t datatype,
                                     ncclRedOp_t op,
                                     ncclComm_t comm,
                                     cudaStream_t stream,
                                     const struct ncclCollConfig_t *config);

ncclResult_t pncclReduceScatterConfig(const void *sendbuff,
                                      void *recvbuff,
                                      size_t recvcount,
                                      ncclDataType_t datatype,
                                      ncclRedOp_t op,
                                      ncclComm_t comm,
                                      cudaStream_t stream,
                                      const struct ncclCollConfig_t *config);

/*
 not built yet: the same with settings for this call (since 2.31.2)
 */
ncclResult_t ncclBroadcastConfig(const void *sendbuff,
                                 void *recvbuff,
                                 size_t count,
                                 ncclDataType_t datatype,
                                 int root,
                                 ncclComm_t comm,
                                 cudaStream_t stream,
                                 const struct ncclCollConfig_t *config);

ncclResult_t pncclBroadcastConfig(const void *sendbuff,
                                  void *recvbuff,
                                  size_t count,
                                  ncclDataType_t datatype,
                                  int root,
                                  ncclComm_t comm,
                                  cudaStream_t stream,
                                  const struct ncclCollConfig_t *config);

/*
 not built yet: the same with settings for this call (since 2.31.2)
 */
ncclResult_t ncclReduceConfig(const void *sendbuff,
                              void *recvbuff,
                              size_t count,
                              ncclDataType_t datatype,
                              ncclRedOp_t op,
                              int root,
                              ncclComm_t comm,
                              cudaStream_t stream,
                              const struct ncclCollConfig_t *config);

ncclResult_t pncclReduceConfig(const void *sendbuff,
                               void *recvbuff,
                               size_t count,
                               ncclDataType_t datatype,
                               ncclRedOp_t op,
                               int root,
                               ncclComm_t comm,
                               cudaStream_t stream,
                               const struct ncclCollConfig_t *config);

/*
 not built yet: the same with settings for this call (since 2.31.2)
 */
ncclResult_t ncclAlltoAllConfig(const void *sendbuff,
                                void *recvbuff,
                                size_t count,
                                ncclDataType_t datatype,
                                ncclComm_t comm,
                                cudaStream_t stream,
                                const struct ncclCollConfig_t *config);

ncclResult_t pncclAlltoAllConfig(const void *sendbuff,
                                 void *recvbuff,
                                 size_t count,
                                 ncclDataType_t datatype,
                                 ncclComm_t comm,
                                 cudaStream_t stream,
                                 const struct ncclCollConfig_t *config);

/*
 not built yet: the same with settings for this call (since 2.31.2)
 */
ncclResult_t ncclGatherConfig(const void *sendbuff,
                              void *recvbuff,
                              size_t count,
                              ncclDataType_t datatype,
                              int root,
                              ncclComm_t comm,
                              cudaStream_t stream,
                              const struct ncclCollConfig_t *config);

ncclResult_t pncclGatherConfig(const void *sendbuff,
                               void *recvbuff,
                               size_t count,
                               ncclDataType_t datatype,
                               int root,
                               ncclComm_t comm,
                               cudaStream_t stream,
                               const struct ncclCollConfig_t *config);

/*
 not built yet: the same with settings for this call (since 2.31.2)
 */
ncclResult_t ncclScatterConfig(const void *sendbuff,
                               void *recvbuff,
                               size_t count,
                               ncclDataType_t datatype,
                               int root,
                               ncclComm_t comm,
                               cudaStream_t stream,
                               const struct ncclCollConfig_t *config);

ncclResult_t pncclScatterConfig(const void *sendbuff,
                                void *recvbuff,
                                size_t count,
                                ncclDataType_t datatype,
                                int root,
                                ncclComm_t comm,
                                cudaStream_t stream,
                                const struct ncclCollConfig_t *config);

/*
 not built yet: a sum of scaled inputs (since 2.11.4)
 */
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op,
                                      void *scalar,
                                      ncclDataType_t datatype,
                                      ncclScalarResidence_t residence,
                                      ncclComm_t comm);

ncclResult_t pncclRedOpCreatePreMulSum(ncclRedOp_t *op,
                                       void *scalar,
                                       ncclDataType_t datatype,
                                       ncclScalarResidence_t residence,
                                       ncclComm_t comm);

/*
 partly built: always ncclInvalidArgument: the built-in ones cannot be destroyed, and none can be created yet (since 2.11.4)
 */
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op,
                              ncclComm_t comm);

ncclResult_t pncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

/*
 not built yet: to one peer (since 2.7.3)
 */
ncclResult_t ncclSend(const void *sendbuff,
                      size_t count,
                      ncclDataType_t datatype,
                      int peer,
                      ncclComm_t comm,
                      cudaStream_t stream);

ncclResult_t pncclSend(const void *sendbuff,
                       size_t count,
                       ncclDataType_t datatype,
                       int peer,
                       ncclComm_t comm,
                       cudaStream_t stream);

/*
 not built yet: from one peer (since 2.7.3)
 */
ncclResult_t ncclRecv(void *recvbuff,
                      size_t count,
                      ncclDataType_t datatype,
                      int peer,
                      ncclComm_t comm,
                      cudaStream_t stream);

ncclResult_t pncclRecv(void *recvbuff,
                       size_t count,
                       ncclDataType_t datatype,
                       int peer,
                       ncclComm_t comm,
                       cudaStream_t stream);

/*
 not built yet: into a peer's window, with a signal (since 2.29.2)
 */
ncclResult_t ncclPutSignal(const void *localbuff,
                           size_t count,
                           ncclDataType_t datatype,
                           int peer,
                           ncclWindow_t peerWin,
                           size_t peerWinOffset,
                           int sigIdx,
                           int ctx,
                           unsigned int flags,
                           ncclComm_t comm,
                           cudaStream_t stream);

ncclResult_t pncclPutSignal(const void *localbuff,
                            size_t count,
                            ncclDataType_t datatype,
                            int peer,
                            ncclWindow_t peerWin,
                            size_t peerWinOffset,
                            int sigIdx,
                            int ctx,
                            unsigned int flags,
                            ncclComm_t comm,
                            cudaStream_t stream);

/*
 not built yet: the signal alone (since 2.29.2)
 */
ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream);

ncclResult_t pncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream);

/*
 not built yet: waits for signals (since 2.29.2)
 */
ncclResult_t ncclWaitSignal(int nDesc, struct ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream);

ncclResult_t pncclWaitSignal(int nDesc, struct ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream);

/*
 memory of the process's device; size 0 gives NULL, as cudaMalloc does (since 2.19.1)
 */
ncclResult_t ncclMemAlloc(void **ptr, size_t size);

ncclResult_t pncclMemAlloc(void **ptr, size_t size);

/*
 NULL is success, as with cudaFree (since 2.19.1)
 */
ncclResult_t ncclMemFree(void *ptr);

ncclResult_t pncclMemFree(void *ptr);

/*
 not built yet: a buffer for zero-copy (since 2.19.1)
 */
ncclResult_t ncclCommRegister(ncclComm_t comm, void *buff, size_t size, void **handle);

ncclResult_t pncclCommRegister(ncclComm_t comm, void *buff, size_t size, void **handle);

/*
 partly built: a NULL handle is success; nothing can be registered yet (since 2.19.1)
 */
ncclResult_t ncclCommDeregister(ncclComm_t comm, void *handle);

ncclResult_t pncclCommDeregister(ncclComm_t comm, void *handle);

/*
 not built yet: a buffer that peers address (since 2.27.3)
 */
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags);

ncclResult_t pncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags);

/*
 partly built: a NULL window is success; nothing can be registered yet (since 2.27.3)
 */
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);

ncclResult_t pncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);

/*
 not built yet: the buffer behind a window (since 2.29.2)
 */
ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr);

ncclResult_t pncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr);

/*
 not built yet: a handle of a parameter (since 2.30.4)
 */
ncclResult_t ncclParamBind(ncclParamHandle_t *out, const char *key);

ncclResult_t pncclParamBind(ncclParamHandle_t *out, const char *key);

/*
 not built yet: its value as bytes (since 2.30.4)
 */
ncclResult_t ncclParamGet(ncclParamHandle_t h, void *out, int maxLen, int *len);

ncclResult_t pncclParamGet(ncclParamHandle_t h, void *out, int maxLen, int *len);

/*
 not built yet: its value (since 2.30.4)
 */
ncclResult_t ncclParamGetI8(ncclParamHandle_t h, int8_t *out);

ncclResult_t pncclParamGetI8(ncclParamHandle_t h, int8_t *out);

/*
 not built yet: its value (since 2.30.4)
 */
ncclResult_t ncclParamGetI16(ncclParamHandle_t h, int16_t *out);

ncclResult_t pncclParamGetI16(ncclParamHandle_t h, int16_t *out);

/*
 not built yet: its value (since 2.30.4)
 */
ncclResult_t ncclParamGetI32(ncclParamHandle_t h, int32_t *out);

ncclResult_t pncclParamGetI32(ncclParamHandle_t h, int32_t *out);

/*
 not built yet: its value (since 2.30.4)
 */
ncclResult_t ncclParamGetI64(ncclParamHandle_t h, int64_t *out);

ncclResult_t pncclParamGetI64(ncclParamHandle_t h, int64_t *out);

/*
 not built yet: its value (since 2.30.4)
 */
ncclResult_t ncclParamGetU8(ncclParamHandle_t h, uint8_t *out);

ncclResult_t pncclParamGetU8(ncclParamHandle_t h, uint8_t *out);

/*
 not built yet: its value (since 2.30.4)
 */
ncclResult_t ncclParamGetU16(ncclParamHandle_t h, uint16_t *out);

ncclResult_t pncclParamGetU16(ncclParamHandle_t h, uint16_t *out);

/*
 not built yet: its value (since 2.30.4)
 */
ncclResult_t ncclParamGetU32(ncclParamHandle_t h, uint32_t *out);

ncclResult_t pncclParamGetU32(ncclParamHandle_t h, uint32_t *out);

/*
 not built yet: its value (since 2.30.4)
 */
ncclResult_t ncclParamGetU64(ncclParamHandle_t h, uint64_t *out);

ncclResult_t pncclParamGetU64(ncclParamHandle_t h, uint64_t *out);

/*
 not built yet: its value (since 2.30.4)
 */
ncclResult_t ncclParamGetStr(ncclParamHandle_t h, const char **out);

ncclResult_t pncclParamGetStr(ncclParamHandle_t h, const char **out);

/*
 not built yet: its value by name (since 2.30.4)
 */
ncclResult_t ncclParamGetParameter(const char *key, const char **value, int *valueLen);

ncclResult_t pncclParamGetParameter(const char *key, const char **value, int *valueLen);

/*
 not built yet: all names (since 2.30.4)
 */
ncclResult_t ncclParamGetAllParameterKeys(const char ***table, int *tableLen);

ncclResult_t pncclParamGetAllParameterKeys(const char ***table, int *tableLen);

/*
 not built yet: prints nothing (since 2.30.4)
 */
void ncclParamDumpAll(void);

void pncclParamDumpAll(void);

/*
 not built yet: a communicator for kernels; refused also because its struct is private to each NCCL release (since 2.28.3)
 */
ncclResult_t ncclDevCommCreate(ncclComm_t comm,
                               const ncclDevCommRequirements_t *requirements,
                               ncclDevComm_t *outDevComm);

ncclResult_t pncclDevCommCreate(ncclComm_t comm,
                                const ncclDevCommRequirements_t *requirements,
                                ncclDevComm_t *outDevComm);

/*
 not built yet: its end (since 2.28.3)
 */
ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t *devComm);

ncclResult_t pncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t *devComm);

/*
 not built yet: what a communicator can do on the device (since 2.29.2)
 */
ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t *props);

ncclResult_t pncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t *props);

/*
 not built yet: all ranks; an empty team is returned (since 2.28.3)
 */
ncclTeam_t ncclTeamWorld(ncclComm_t comm);

ncclTeam_t pncclTeamWorld(ncclComm_t comm);

/*
 not built yet: ranks reachable by load and store; an empty team is returned (since 2.28.3)
 */
ncclTeam_t ncclTeamLsa(ncclComm_t comm);

ncclTeam_t pncclTeamLsa(ncclComm_t comm);

/*
 not built yet: the ranks of one rail; an empty team is returned (since 2.28.3)
 */
ncclTeam_t ncclTeamRail(ncclComm_t comm);

ncclTeam_t pncclTeamRail(ncclComm_t comm);

/*
 not built yet: an empty team is returned (since 2.31.2)
 */
ncclTeam_t ncclTeamCft(ncclComm_t comm, int mode);

ncclTeam_t pncclTeamCft(ncclComm_t comm, int mode);

/*
 not built yet: an empty team is returned (since 2.31.2)
 */
ncclTeam_t ncclTeamCftMultimem(ncclComm_t comm);

ncclTeam_t pncclTeamCftMultimem(ncclComm_t comm);

/*
 not built yet: -1 is returned (since 2.28.3)
 */
int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank);

int pncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank);

/*
 not built yet: -1 is returned (since 2.28.3)
 */
int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank);

int pncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank);

/*
 not built yet: memory for a barrier by load and store (since 2.28.3)
 */
ncclResult_t ncclLsaBarrierCreateRequirement(ncclTeam_t team,
                                             int nBarriers,
                                             ncclLsaBarrierHandle_t *outHandle,
                                             ncclDevResourceRequirements_t *outReq);

ncclResult_t pncclLsaBarrierCreateRequirement(ncclTeam_t team,
                                              int nBarriers,
                                              ncclLsaBarrierHandle_t *outHandle,
                                              ncclDevResourceRequirements_t *outReq);

/*
 not built yet: memory for a barrier over the network (since 2.28.7)
 */
ncclResult_t ncclGinBarrierCreateRequirement(ncclComm_t comm,
                                             ncclTeam_t team,
                                             int nBarriers,
                                             ncclGinBarrierHandle_t *outHandle,
                                             ncclDevResourceRequirements_t *outReq);

ncclResult_t pncclGinBarrierCreateRequirement(ncclComm_t comm,
                                              ncclTeam_t team,
                                              int nBarriers,
                                              ncclGinBarrierHandle_t *outHandle,
                                              ncclDevResourceRequirements_t *outReq);

/*
 not built yet: 0 is returned (since 2.28.3)
 */
int ncclLLA2ACalcSlots(int maxElts, int maxEltSize);

int pncclLLA2ACalcSlots(int maxElts, int maxEltSize);

/*
 not built yet: memory for a low-latency all-to-all (since 2.28.3)
 */
ncclResult_t ncclLLA2ACreateRequirement(int nBlocks,
                                        int nSlots,
                                        ncclLLA2AHandle_t *outHandle,
                                        ncclDevResourceRequirements_t *outReq);

ncclResult_t pncclLLA2ACreateRequirement(int nBlocks,
                                         int nSlots,
                                         ncclLLA2AHandle_t *outHandle,
                                         ncclDevResourceRequirements_t *outReq);

/*
 not built yet: memory for an outbox (since 2.30.3)
 */
ncclResult_t ncclGinOutboxCreateRequirement(int nBlocks,
                                            int sizeLog2,
                                            struct ncclGinOutboxHandle *outHandle,
                                            ncclDevResourceRequirements_t *outReq);

ncclResult_t pncclGinOutboxCreateRequirement(int nBlocks,
                                             int sizeLog2,
                                             struct ncclGinOutboxHandle *outHandle,
                                             ncclDevResourceRequirements_t *outReq);

/*
 not built yet: memory for an inbox (since 2.30.3)
 */
ncclResult_t ncclGinInboxA2ACreateRequirement(ncclTeam_t peers,
                                              int nBlocks,
                                              int sizeLog2,
                                              struct ncclGinInboxA2AHandle *outHandle,
                                              ncclDevResourceRequirements_t *outReq);

ncclResult_t pncclGinInboxA2ACreateRequirement(ncclTeam_t peers,
                                               int nBlocks,
                                               int sizeLog2,
                                               struct ncclGinInboxA2AHandle *outHandle,
                                               ncclDevResourceRequirements_t *outReq);

/*
 not built yet: a peer's window by load and store (since 2.29.2)
 */
ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t win, size_t offset, int lsaRank, void **outPtr);

ncclResult_t pncclGetLsaDevicePointer(ncclWindow_t win, size_t offset, int lsaRank, void **outPtr);

/*
 not built yet: a peer's window (since 2.29.2)
 */
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t win, size_t offset, int peer, void **outPtr);

ncclResult_t pncclGetPeerDevicePointer(ncclWindow_t win, size_t offset, int peer, void **outPtr);

/*
 not built yet: the multicast address of a window (since 2.29.2)
 */
ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t win, size_t offset, void **outPtr);

ncclResult_t pncclGetLsaMultimemDevicePointer(ncclWindow_t win, size_t offset, void **outPtr);

/*
 not built yet: the multicast address of a window (since 2.29.2)
 */
ncclResult_t ncclGetMultimemDevicePointer(ncclWindow_t win,
                                          size_t offset,
                                          ncclMultimemHandle_t multimem,
                                          void **outPtr);

ncclResult_t pncclGetMultimemDevicePointer(ncclWindow_t win,
                                           size_t offset,
                                           ncclMultimemHandle_t multimem,
                                           void **outPtr);

/*
 not built yet: where a window lies (since 2.31.2)
 */
ncclResult_t ncclGetMultimemDeviceLeInfo(ncclWindow_t win, size_t offset, uint32_t *leId, size_t *leOffset);

ncclResult_t pncclGetMultimemDeviceLeInfo(ncclWindow_t win, size_t offset, uint32_t *leId, size_t *leOffset);

/*
 not built yet: where a window lies (since 2.31.2)
 */
ncclResult_t ncclGetPeerDeviceLeInfo(ncclWindow_t win, size_t offset, int peer, uint32_t *leId, size_t *leOffset);

ncclResult_t pncclGetPeerDeviceLeInfo(ncclWindow_t win, size_t offset, int peer, uint32_t *leId, size_t *leOffset);

/*
 not built yet: where a window lies (since 2.31.2)
 */
ncclResult_t ncclGetCftDeviceLeInfo(ncclWindow_t win,
                                    size_t offset,
                                    int rank,
                                    ncclTeam_t team,
                                    uint32_t *leId,
                                    size_t *leOffset);

ncclResult_t pncclGetCftDeviceLeInfo(ncclWindow_t win,
                                     size_t offset,
                                     int rank,
                                     ncclTeam_t team,
                                     uint32_t *leId,
                                     size_t *leOffset);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* NCCL_H_ */
