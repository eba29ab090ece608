// What a kernel needs to post work requests: for each channel of a link to another host a queue pair, which is connected
// with the peer's. Shared with src/initiated/queue.rs, which asserts the same sizes and offsets.
//
// Everything but the cursor is resolved before the first launch: addresses as this device's kernels see them, keys and
// the QP's number in the card's byte order, requests with all fields filled in that do not change. A kernel patches
// index, addresses and bytes (post.h). It lies in device memory; only thread 0 of the channel's block touches it.
#pragma once
#include "../layout.h"
#include "mlx5.h"

namespace ossicle {

// RDMA WRITE of a slot.
struct alignas(16) PutRequest {
  mlx5::ControlSegment control;
  mlx5::RemoteSegment remote;
  mlx5::DataSegment data;
};

// Inline payload of one 64-bit word, in a unit of its own.
struct alignas(16) InlineWord {
  mlx5::InlineHeader header;
  uint32_t low, high;
  uint32_t pad;
};

// Inline RDMA WRITE of a counter.
struct alignas(16) FlagRequest {
  mlx5::ControlSegment control;
  mlx5::RemoteSegment remote;
  InlineWord word;
};

constexpr uint32_t REQUEST_UNITS = 3;  // of both
static_assert(REQUEST_UNITS * mlx5::UNIT_BYTES <= mlx5::BLOCK_BYTES, "a request takes one block");

// Where the kernels of all launches have come to; counts run free.
struct NetCursor {
  uint32_t posted;  // blocks written
  uint32_t done;    // blocks whose requests are known to be done: they may be written again
  uint32_t asked;   // completions asked for, one a post
  uint32_t read;    // completions known to be there
};

struct alignas(128) NetQueue {
  uint8_t* ring;
  const uint64_t* completions;  // Cqe[1 << log_completions], as words
  uint64_t* record;             // DoorbellRecord, as one word; of a QP without receives
  uint64_t* doorbell;
  uint64_t local_slots;   // channel's slots, as the local key names them
  uint64_t remote_slots;  // and the peer's, as its key names them
  uint32_t log_blocks;
  // At least as many as blocks: so that none is overwritten unread although the CQ is told of no reads.
  uint32_t log_completions;
  uint32_t doorbell_qpn;  // big-endian qpn << 8
  uint32_t pad;
  PutRequest put;
  FlagRequest flag;
  NetCursor cursor;
  uint32_t pad1[20];
};

static_assert(sizeof(PutRequest) == 48 && sizeof(FlagRequest) == 48 && offsetof(FlagRequest, word) == 32, "requests");
static_assert(sizeof(NetCursor) == 16 && sizeof(NetQueue) == 256, "NetQueue");
static_assert(offsetof(NetQueue, local_slots) == 32 && offsetof(NetQueue, log_blocks) == 48, "NetQueue");
static_assert(offsetof(NetQueue, put) == 64 && offsetof(NetQueue, flag) == 112 && offsetof(NetQueue, cursor) == 160, "NetQueue");

}  // namespace ossicle
