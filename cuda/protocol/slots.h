// Slots: a link's ring of fixed-size buffers at the receiver, with two counters.
//
//   sender                                    receiver
//   wait head + slots > position              wait tail > position
//   write slot[position % slots]              read slot[position % slots]
//   publish tail = position + 1     ------>
//                                   <------   publish head = position + 1
//
// Each side polls a counter that lies in its own memory. Positions count up for ever (64 bits), across launches.
// To another host the CPU proxy is the receiver, or the sender, of a ring in host memory of this rank (src/proxy/). It
// has no plan: what a slot holds the sender says in a note beside it. Where the kernel itself posts to an HCA, the sender
// fills a slot of its own, and work requests take slot and tail to the receiver, and the head back.
#pragma once
#include "../net/post.h"

namespace ossicle {

// One channel's view of one direction of a link. Held by every thread; only thread 0 waits and publishes.
struct SlotRing {
  uint8_t* slots;
  uint64_t* tail;
  uint64_t* head;
  uint64_t position;
  uint64_t slot_bytes;
  uint32_t count;
  uint32_t peer;
  NetQueue* queue;  // where this side posts to an HCA, else NULL

  OSSICLE_DEVICE static SlotRing open(const Link& link, const ProgramWork& work, uint32_t channel, uint64_t position) {
    return SlotRing{link.slots + channel * work.slot_bytes * work.slots,
                    link.tail + channel * FLAG_STRIDE,
                    link.head + channel * FLAG_STRIDE,
                    position,
                    work.slot_bytes,
                    work.slots,
                    link.peer,
                    net::Queues{work, channel}.of(link)};
  }

  OSSICLE_DEVICE uint64_t offset() const { return position % count * slot_bytes; }
  OSSICLE_DEVICE uint8_t* slot() const { return slots + offset(); }

  // Sender to a proxy: says what the slot holds, before it is published. One thread.
  OSSICLE_DEVICE void note(const Link& link, uint32_t channel, const SlotNote& note) const {
    const uint32_t stride = (count + NOTE_LINE - 1) / NOTE_LINE * NOTE_LINE;
    slot_store(link.notes + channel * stride + position % count, note);
  }

  // Sender: waits until the next slot is free, and what tells the receiver of it has room. One thread.
  OSSICLE_DEVICE bool wait_free(const ProgramWork& work, uint32_t channel, uint32_t step) const {
    Wait wait = Wait::for_peer(work.control, work.state, peer, channel, step);
    const net::Queues queues{work, channel};
    while (consume<Site::SLOT_FREE>(head) + count <= position) {
      if (!queues.again(wait)) return false;
    }
    return queue == nullptr || queues.wait_room(wait, *queue, peer, net::PUT_BLOCKS);
  }

  // Receiver: waits until the next slot is filled, and what gives it back has room. One thread.
  OSSICLE_DEVICE bool wait_filled(const ProgramWork& work, uint32_t channel, uint32_t step) const {
    Wait wait = Wait::for_peer(work.control, work.state, peer, channel, step);
    const net::Queues queues{work, channel};
    while (consume<Site::SLOT_FILLED>(tail) <= position) {
      if (!queues.again(wait)) return false;
    }
    return queue == nullptr || queues.wait_room(wait, *queue, peer, net::FLAG_BLOCKS);
  }
};

}  // namespace ossicle
