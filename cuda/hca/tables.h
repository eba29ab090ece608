// What the software HCA knows of its queues and memory: plain structs in one segment an HCA, shared with
// src/transport/hca/tables.rs, which asserts the same sizes and offsets.
//
//   segment   Header | Qp[qps] | Cq[cqs] | Region[regions] | rings, doorbell records, doorbells
//
// The segment is memory that several processes and their GPUs may map, each elsewhere: positions in it are offsets from
// its beginning. A QP's initiator does the whole transfer, so it also writes the receive queue and CQ of its peer.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ossicle::hca {

constexpr uint32_t MAGIC = 0x6f736863, VERSION = 1;
// A QP's number is generation << 12 | its place in the table; a region's key is its place << 8 | generation.
constexpr uint32_t QP_PLACE_MASK = 0xfff, KEY_PLACE_SHIFT = 8;

// The numbers of ibv_qp_state.
enum State : uint32_t { RESET = 0, INIT = 1, READY_TO_RECEIVE = 2, READY_TO_SEND = 3, DRAINED = 5, ERROR = 6 };

// The numbers of ibv_access_flags.
enum Access : uint32_t { LOCAL_WRITE = 1, REMOTE_WRITE = 2, REMOTE_READ = 4, REMOTE_ATOMIC = 8 };

// Set: the doorbell record must be at least as far as a doorbell that is seen. Clear: the doorbell may come first.
enum QpFlags : uint32_t { RECORD_FIRST = 1 };

// Set: the consumer's record is not looked at, and completions that were not read are overwritten.
enum CqFlags : uint32_t { IGNORE_OVERRUN = 1 };
enum CqState : uint32_t { CQ_GOOD = 0, CQ_OVERRUN = 1 };

constexpr uint64_t FOR_EVER = ~0ull;

struct alignas(128) Header {
  uint32_t magic, version;
  uint32_t qps, cqs, regions, pad;
  uint64_t qp_table, cq_table, region_table;
  uint64_t bytes;
};

struct alignas(128) Qp {
  // From set-up.
  uint32_t number, domain;
  uint64_t send_ring, receive_ring;
  uint64_t record;    // DoorbellRecord
  uint64_t doorbell;  // 8 bytes, of this QP alone
  uint32_t send_log_blocks;
  uint32_t receives;  // depth of the receive queue, 0 or a power of two
  uint32_t send_cq, receive_cq;  // places in the table
  uint32_t access, flags;        // what peers may do here; QpFlags
  uint32_t peer, peer_number;    // place in Engine::view, QP number there
  uint64_t timeout_ns;      // how long a peer that does not answer is waited for
  uint64_t rnr_timeout_ns;  // and one that posted no receive
  uint64_t pad0[5];
  // The initiator's engine's own.
  uint64_t seen_doorbell;
  uint64_t executed;          // WQEs that left the queue
  uint64_t waiting_since_ns;  // 0: does not wait
  uint32_t consumed, published;  // blocks; free-running, also beyond 16 bits
  uint64_t pad1[12];
  // Changed by the engines of both ends.
  uint32_t state;
  uint32_t received;  // receive WQEs consumed
  uint64_t pad2[15];
};

struct alignas(128) Cq {
  uint64_t entries;  // Cqe[1 << log_entries]
  uint64_t record;   // DoorbellRecord
  uint32_t log_entries, flags;
  uint64_t pad[13];
  // Changed by the engines of all QPs that complete here.
  uint32_t produced, state;
  uint64_t pad1[15];
};

struct Region {
  uint64_t address;  // as WQEs name it
  uint64_t bytes;
  uint64_t offset;  // in the segment, or OUTSIDE
  uint32_t key;     // 0: none
  uint32_t access;
  uint32_t domain;
  uint32_t pad;
};
constexpr uint64_t OUTSIDE = ~0ull;

// An HCA as one engine sees it: its segment, and by a region's place where memory outside the segment lies. NULL instead
// of the latter: out of this engine's reach, which holds for HCAs of other processes.
struct View {
  uint8_t* segment;
  uint8_t* const* outside;
};

enum FaultKind : uint32_t { FAULT_SYNDROME = 1, FAULT_DROP_CQE = 2, FAULT_DELAY = 3 };

// What shall go wrong with a QP's nth WQE.
struct InjectedFault {
  uint64_t nth;  // from 0
  uint32_t qp;   // number
  uint32_t kind;
  uint32_t syndrome, vendor_syndrome;
  uint64_t steps;  // of a delay
};

struct Engine {
  View* view;  // [0] is its own HCA
  InjectedFault* fault;
  uint32_t views, faults;
};

// vendor_err_synd of an error CQE: which check failed.
enum Check : uint8_t {
  CHECK_NONE = 0,
  CHECK_DOORBELL_QP = 1,       // the doorbell names another QP
  CHECK_DOORBELL_RANGE = 2,    // doorbell or record is further than the ring is deep
  CHECK_RECORD_BEHIND = 3,     // the doorbell came before its record, on a QP with RECORD_FIRST
  CHECK_WQE_INDEX = 4,         // not the index of this place: an old WQE, or one that was not visible yet
  CHECK_WQE_QP = 5,            // names another QP
  CHECK_WQE_UNITS = 6,         // none, or reaches beyond what was published
  CHECK_WQE_OPCODE = 7,        // unknown opcode, or a modifier that it does not have
  CHECK_WQE_FLAGS = 8,         // reserved bits, or an unknown fence mode
  CHECK_WQE_SEGMENTS = 9,      // segments missing or left over
  CHECK_INLINE = 10,           // inline payload that is longer than the WQE, or where none may be
  CHECK_MESSAGE_LENGTH = 11,   // a data segment of no bytes, too long a message, an atomic's sink that is not 8 bytes
  CHECK_LOCAL_KEY = 12,        // no region has this lkey
  CHECK_LOCAL_DOMAIN = 13,     // it belongs to another protection domain
  CHECK_LOCAL_RANGE = 14,      // not within the region
  CHECK_LOCAL_ACCESS = 15,     // the region may not be written
  CHECK_REMOTE_KEY = 16,       // no region of the peer has this rkey
  CHECK_REMOTE_DOMAIN = 17,
  CHECK_REMOTE_RANGE = 18,
  CHECK_REMOTE_ACCESS = 19,    // the region does not allow this
  CHECK_PEER_ACCESS = 20,      // the peer's QP does not allow this
  CHECK_ATOMIC_ALIGNMENT = 21,
  CHECK_PEER_SILENT = 22,      // the peer's QP does not receive
  CHECK_NO_RECEIVE = 23,       // the peer posted no receive
  CHECK_PEER_CQ = 24,          // the peer's CQ overran
  CHECK_FLUSHED = 25,          // an earlier error, or a QP that software put into the error state
  CHECK_NOT_BUILT = 26,        // SEND, compare-and-swap
  CHECK_UNMAPPED = 27,         // the peer's region lies where this engine cannot reach it
};

static_assert(sizeof(Header) == 128 && offsetof(Header, qp_table) == 24 && offsetof(Header, bytes) == 48, "Header");
static_assert(sizeof(Qp) == 384 && offsetof(Qp, send_ring) == 8 && offsetof(Qp, send_log_blocks) == 40, "Qp");
static_assert(offsetof(Qp, timeout_ns) == 72 && offsetof(Qp, seen_doorbell) == 128 && offsetof(Qp, state) == 256, "Qp");
static_assert(sizeof(Cq) == 256 && offsetof(Cq, log_entries) == 16 && offsetof(Cq, produced) == 128, "Cq");
static_assert(sizeof(Region) == 40 && offsetof(Region, key) == 24, "Region");
static_assert(sizeof(View) == 16 && sizeof(InjectedFault) == 32 && sizeof(Engine) == 24, "View, InjectedFault, Engine");

}  // namespace ossicle::hca
