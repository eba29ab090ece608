// The kernel's own driver of the network: posts work requests, rings the doorbell, reads completions.
//
//   sender's thread 0                      HCA                                     receiver's thread 0
//   wait_filled / wait_free, wait_room
//   WRITE of the slot, inline WRITE of
//   the tail; fence; doorbell        -->   slot, then tail        -->              consume tail
//                                          head                   <--  doorbell; fence; inline WRITE of the head
//   consume head                     <--
//
// Order. One fence stands before the doorbells of a step: it covers the slot that the block filled (behind the barrier),
// the requests, and what was read of the slot that is given back. Behind it all stores are relaxed, in the order
// doorbell, record, doorbell: a card reads the record only where it missed a doorbell, and the second one is for a card
// that did so before the record was there.
// Room. A block of the send ring is written again only after a completion told that its request is done: for a card may
// read it again until then. One completion is asked for a post, with its last request, and read only when room is short.
// Errors. Every look at a completion tells an error from one that is not there yet. Whoever waits looks at all queues of
// its channel now and then, for a request of one may be what another rank, and so this one, waits for. An error is
// reported, nothing is posted any more by any channel of the rank, and the kernel parks until it is stopped.
#pragma once
#include "../core/wait.h"
#include "queue.h"

namespace ossicle::net {

enum class Looked : uint8_t { NOTHING, DONE, FAILED };

// Looks at completion `number`, which tells of all before it.
OSSICLE_DEVICE Looked look(NetQueue& queue, uint32_t number) {
  const uint32_t entry = number & ((1u << queue.log_completions) - 1);
  const uint64_t last = consume<Site::NET_COMPLETION>(queue.completions + entry * 8 + 7);
  const uint8_t op_own = static_cast<uint8_t>(last >> 56);
  if (!mlx5::owned_by_software(op_own, number, queue.log_completions)) return Looked::NOTHING;
  if (op_own >> 4 != mlx5::CQE_REQ) return Looked::FAILED;
  const uint32_t index = static_cast<uint32_t>(last >> 32 & 0xff) << 8 | static_cast<uint32_t>(last >> 40 & 0xff);
  queue.cursor.done += (index + 1 - queue.cursor.done) & 0xffff;
  queue.cursor.read = number + 1;
  return Looked::DONE;
}

// The first error; all behind it only say that they were flushed. What FaultRecord::vendor carries.
OSSICLE_DEVICE uint32_t syndromes_of_first_error(NetQueue& queue) {
  while (look(queue, queue.cursor.read) == Looked::DONE) continue;
  const uint32_t entry = queue.cursor.read & ((1u << queue.log_completions) - 1);
  const uint64_t word = load_word(queue.completions + entry * 8 + 6);  // vendor's in byte 54, the syndrome in byte 55
  return static_cast<uint32_t>(word >> 56) | static_cast<uint32_t>(word >> 48 & 0xff) << 8;
}

OSSICLE_DEVICE bool failed(Wait& wait, NetQueue& queue, uint32_t peer) {
  return wait.fail(peer, syndromes_of_first_error(queue));
}

// What a channel posts to and waits for, over all links of a program.
struct Queues {
  const ProgramWork& work;
  uint32_t channel;

  OSSICLE_DEVICE NetQueue* of(const Link& link) const {
    return link.kind == LINK_HCA ? link.queues + channel : nullptr;
  }

  OSSICLE_DEVICE const Link& link(uint32_t bit) const {
    return bit < MAX_LINKS ? work.send[bit] : work.recv[bit - MAX_LINKS];
  }

  // After a poll that failed: whether to poll again.
  OSSICLE_DEVICE bool again(Wait& wait) const {
    if (!wait.again()) return false;
    return work.posting == 0 || !wait.due() || good(wait);
  }

  // False: a request failed, here or on another channel, and the operation was stopped for it.
  // Out of line on purpose: it runs once in POLLS_A_CHECK polls.
#if defined(__CUDACC__)
  __device__ __noinline__
#endif
      bool good(Wait& wait) const {
    if (wait.failed()) return wait.park();
    for (uint32_t links = work.posting, bit = 0; links != 0; links >>= 1, ++bit) {
      if ((links & 1) == 0) continue;
      NetQueue& queue = *of(link(bit));
      Looked looked;
      while ((looked = look(queue, queue.cursor.read)) == Looked::DONE) continue;
      if (looked == Looked::FAILED) return failed(wait, queue, link(bit).peer);
    }
    return true;
  }

  // Waits until so many blocks may be written.
  OSSICLE_DEVICE bool wait_room(Wait& wait, NetQueue& queue, uint32_t peer, uint32_t blocks) const {
    NetCursor& cursor = queue.cursor;
    if (wait.failed()) return wait.park();
    while (cursor.posted + blocks - cursor.done > 1u << queue.log_blocks) {
      // Each costs a GPU 1 us, so one in the middle is tried first, which makes room for many posts.
      const uint32_t middle = cursor.read + (cursor.asked - cursor.read) / 2;
      Looked looked = look(queue, middle);
      if (looked == Looked::NOTHING && middle != cursor.read) looked = look(queue, cursor.read);
      if (looked == Looked::FAILED) return failed(wait, queue, peer);
      if (looked == Looked::NOTHING && !again(wait)) return false;
    }
    return true;
  }
};

// A post is at most so many blocks.
constexpr uint32_t PUT_BLOCKS = 2, FLAG_BLOCKS = 1;

template <typename Request> OSSICLE_DEVICE Request* next_block(NetQueue& queue) {
  return reinterpret_cast<Request*>(queue.ring + (queue.cursor.posted & ((1u << queue.log_blocks) - 1)) * mlx5::BLOCK_BYTES);
}

OSSICLE_DEVICE mlx5::ControlSegment numbered(mlx5::ControlSegment control, uint32_t index) {
  control.opmod_index_opcode |= mlx5::be32((index & 0xffff) << 8);
  return control;
}

// The inline WRITE of a counter, which ends a post.
OSSICLE_DEVICE void write_flag(NetQueue& queue, uint64_t value) {
  FlagRequest* request = next_block<FlagRequest>(queue);
  InlineWord word = queue.flag.word;
  word.low = static_cast<uint32_t>(value);
  word.high = static_cast<uint32_t>(value >> 32);
  slot_store(&request->control, numbered(queue.flag.control, queue.cursor.posted));
  slot_store(&request->remote, queue.flag.remote);
  slot_store(&request->word, word);
  queue.cursor.posted += FLAG_BLOCKS;
  queue.cursor.asked += 1;
}

// The WRITE of a slot's first `bytes`, which lie `offset` into the channel's slots.
OSSICLE_DEVICE void write_slot(NetQueue& queue, uint64_t offset, uint32_t bytes) {
  if (bytes == 0) return;
  PutRequest* request = next_block<PutRequest>(queue);
  mlx5::RemoteSegment remote = queue.put.remote;
  remote.address = mlx5::be64(queue.remote_slots + offset);
  mlx5::DataSegment data = queue.put.data;
  data.bytes = mlx5::be32(bytes);
  data.address = mlx5::be64(queue.local_slots + offset);
  slot_store(&request->control, numbered(queue.put.control, queue.cursor.posted));
  slot_store(&request->remote, remote);
  slot_store(&request->data, data);
  queue.cursor.posted += 1;
}

OSSICLE_DEVICE void ring_doorbell(const NetQueue& queue) {
  const uint32_t next = queue.cursor.posted;
  const uint64_t doorbell = static_cast<uint64_t>(queue.doorbell_qpn) << 32 | mlx5::be32((next & 0xffff) << 8);
  store_word(queue.doorbell, doorbell);
  store_word(queue.record, static_cast<uint64_t>(mlx5::be32(next & 0xffff)) << 32 * mlx5::RECORD_SEND);
  store_word(queue.doorbell, doorbell);
}

// Tells the HCA of what was written to both queues of a step; NULL is none.
OSSICLE_DEVICE void post(const NetQueue* credit, const NetQueue* put) {
  if (credit == nullptr && put == nullptr) return;
  order_before_lines<Site::NET_POST>();
  if (credit != nullptr) ring_doorbell(*credit);
  if (put != nullptr) ring_doorbell(*put);
}

}  // namespace ossicle::net
