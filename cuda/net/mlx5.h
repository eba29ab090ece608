// The formats of mlx5 queues: work requests (WQEs), completions (CQEs), doorbell record and doorbell.
//
// They are what a ConnectX card reads and writes, so every field of more than a byte is big-endian. Whoever posts fills a
// send ring of 64-byte blocks (WQEBBs); a WQE begins on a block, consists of 16-byte units, may take several blocks and wraps
// at the ring's end. Blocks are counted by a 16-bit index that runs free. src/wire/mlx5.rs is the Rust face of the same
// formats, and a test compares both with rdma-core's mlx5dv.h.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "../core/attributes.h"

namespace ossicle::mlx5 {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the conversions below are for little-endian processors");

// Both ways: a native number to big-endian and back.
OSSICLE_DEVICE uint32_t be32(uint32_t value) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(value, 0, 0x0123);
#else
  return __builtin_bswap32(value);
#endif
}

OSSICLE_DEVICE uint64_t be64(uint64_t value) {
  return uint64_t(be32(uint32_t(value))) << 32 | be32(uint32_t(value >> 32));
}

constexpr uint32_t BLOCK_BYTES = 64;  // a WQEBB
constexpr uint32_t UNIT_BYTES = 16;   // what the ds field counts
constexpr uint32_t MAX_UNITS = 63;
constexpr uint32_t MAX_MESSAGE = 1u << 30;

enum Opcode : uint8_t {
  NOP = 0x00,
  RDMA_WRITE = 0x08,
  RDMA_WRITE_IMM = 0x09,
  SEND = 0x0a,
  SEND_IMM = 0x0b,
  RDMA_READ = 0x10,
  ATOMIC_CS = 0x11,
  ATOMIC_FA = 0x12,
};

// fm_ce_se: fence mode in bits 7 to 5, completion in bits 3 and 2, solicited in bit 1.
constexpr uint8_t FENCE_SMALL = 1 << 5, FENCE = 2 << 5, FENCE_STRONG = 3 << 5, FENCE_SMALL_AND_FENCE = 4 << 5;
constexpr uint8_t FENCE_MASK = 7 << 5;
constexpr uint8_t COMPLETE_ON_ERROR = 0 << 2, COMPLETE_ALWAYS = 2 << 2, COMPLETE_WITH_EVENT = 3 << 2;
constexpr uint8_t COMPLETE_MASK = 3 << 2;
constexpr uint8_t SOLICITED = 1 << 1;
constexpr uint8_t FLAGS_RESERVED = 1 << 4 | 1 << 0;

// Every WQE's first unit.
struct alignas(16) ControlSegment {
  uint32_t opmod_index_opcode;  // opmod << 24 | (index & 0xffff) << 8 | opcode
  uint32_t qpn_units;           // QP number << 8 | units of the whole WQE
  uint8_t signature;
  uint8_t stream_channel[2];
  uint8_t fm_ce_se;
  uint32_t immediate;
};

// Remote address: of WRITE, READ and atomics.
struct alignas(16) RemoteSegment {
  uint64_t address;
  uint32_t rkey;
  uint32_t reserved;
};

struct alignas(16) DataSegment {
  uint32_t bytes;  // top bit clear
  uint32_t lkey;
  uint64_t address;
};

struct alignas(16) AtomicSegment {
  uint64_t swap_add;
  uint64_t compare;
};

// Payload inside the WQE follows this header, up to the next unit that it does not fill.
struct InlineHeader {
  uint32_t bytes;  // INLINE_BIT | bytes
};
constexpr uint32_t INLINE_BIT = 1u << 31, INLINE_MASK = 0x3ff;

struct alignas(64) Cqe {
  uint8_t reserved0[2];
  uint16_t wqe_id;
  uint8_t reserved4[13];
  uint8_t ml_path;
  uint8_t reserved18[4];
  uint16_t slid;
  uint32_t flags_rqpn;
  uint8_t reserved28[4];
  uint32_t srqn;
  uint32_t immediate;
  uint8_t reserved40[4];
  uint32_t bytes;
  uint64_t timestamp;
  uint32_t opcode_qpn;   // of the WQE, << 24, and the QP's number
  uint16_t wqe_counter;  // index of the WQE's first block
  uint8_t signature;
  uint8_t op_own;  // kind << 4 | owner
};

// The same 64 bytes where the kind is an error.
struct alignas(64) ErrorCqe {
  uint8_t reserved0[32];
  uint32_t srqn;
  uint8_t reserved36[16];
  uint8_t hardware_syndrome;
  uint8_t hardware_syndrome_type;
  uint8_t vendor_syndrome;
  uint8_t syndrome;
  uint32_t opcode_qpn;
  uint16_t wqe_counter;
  uint8_t signature;
  uint8_t op_own;
};

enum CqeKind : uint8_t {
  CQE_REQ = 0,
  CQE_RESP_WRITE_IMM = 1,
  CQE_REQ_ERR = 13,
  CQE_RESP_ERR = 14,
  CQE_INVALID = 15,  // what software fills a new ring with: op_own 0xf0, or all bytes 0xff
};

enum Syndrome : uint8_t {
  SYNDROME_NONE = 0x00,
  LOCAL_LENGTH = 0x01,
  LOCAL_QP_OP = 0x02,
  LOCAL_PROTECTION = 0x04,
  WR_FLUSH = 0x05,
  REMOTE_INVALID_REQUEST = 0x12,
  REMOTE_ACCESS = 0x13,
  REMOTE_OPERATION = 0x14,
  TRANSPORT_RETRY_EXCEEDED = 0x15,
  RNR_RETRY_EXCEEDED = 0x16,
};

// Two big-endian words a queue. Of a QP: received, then sent (next free block & 0xffff); of a CQ: consumer index & 0xffffff, arm.
struct alignas(8) DoorbellRecord {
  uint32_t word[2];
};
constexpr uint32_t RECORD_RECEIVE = 0, RECORD_SEND = 1, RECORD_CONSUMER = 0;

// What software stores with one 8-byte store to the doorbell register: the first eight bytes of a control segment, of
// which only index and QP number are looked at. `next` is the next free block.
OSSICLE_DEVICE uint64_t doorbell(uint32_t next, uint32_t qpn) {
  return uint64_t(be32(qpn << 8)) << 32 | be32((next & 0xffff) << 8);
}

// A CQE is the software's if its kind is not CQE_INVALID and its owner bit is the parity of the consumer's round.
OSSICLE_DEVICE bool owned_by_software(uint8_t op_own, uint32_t consumer, uint32_t log_entries) {
  return op_own >> 4 != CQE_INVALID && (op_own & 1) == ((consumer >> log_entries) & 1);
}

static_assert(sizeof(ControlSegment) == 16 && offsetof(ControlSegment, signature) == 8, "ControlSegment");
static_assert(offsetof(ControlSegment, fm_ce_se) == 11 && offsetof(ControlSegment, immediate) == 12, "ControlSegment");
static_assert(sizeof(RemoteSegment) == 16 && offsetof(RemoteSegment, rkey) == 8, "RemoteSegment");
static_assert(sizeof(DataSegment) == 16 && offsetof(DataSegment, lkey) == 4 && offsetof(DataSegment, address) == 8, "DataSegment");
static_assert(sizeof(AtomicSegment) == 16 && offsetof(AtomicSegment, compare) == 8, "AtomicSegment");
static_assert(sizeof(InlineHeader) == 4 && sizeof(DoorbellRecord) == 8, "InlineHeader, DoorbellRecord");
static_assert(sizeof(Cqe) == 64 && offsetof(Cqe, wqe_id) == 2 && offsetof(Cqe, ml_path) == 17, "Cqe");
static_assert(offsetof(Cqe, slid) == 22 && offsetof(Cqe, flags_rqpn) == 24 && offsetof(Cqe, srqn) == 32, "Cqe");
static_assert(offsetof(Cqe, immediate) == 36 && offsetof(Cqe, bytes) == 44 && offsetof(Cqe, timestamp) == 48, "Cqe");
static_assert(offsetof(Cqe, opcode_qpn) == 56 && offsetof(Cqe, wqe_counter) == 60 && offsetof(Cqe, op_own) == 63, "Cqe");
static_assert(sizeof(ErrorCqe) == 64 && offsetof(ErrorCqe, srqn) == 32 && offsetof(ErrorCqe, hardware_syndrome) == 52, "ErrorCqe");
static_assert(offsetof(ErrorCqe, vendor_syndrome) == 54 && offsetof(ErrorCqe, syndrome) == 55, "ErrorCqe");
static_assert(offsetof(ErrorCqe, opcode_qpn) == 56 && offsetof(ErrorCqe, wqe_counter) == 60, "ErrorCqe");

}  // namespace ossicle::mlx5
