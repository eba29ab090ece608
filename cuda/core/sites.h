// Every place that orders memory or threads, by name, so that each can be dropped and must be missed.
//
// A publish, consume, barrier, fence or arrival, or a wait for another rank's note, is written for a site: publish<Site::PROGRAM_TAIL>(flag, value). A build
// with OSSICLE_DROP_SITE set to a site's number weakens that one: publish and consume become relaxed, a barrier does
// not wait, a fence does nothing, a note is not waited for. Kernels as they ship are built without it. One name a line: ci/mutate reads this list
// and fails if any site can be dropped unnoticed. Two uses that matter separately are two sites.
#pragma once
#include <stdint.h>
#include "attributes.h"

namespace ossicle {

enum class Site : uint32_t {
  PROGRAM_READY,      // barrier_and: the block moves a chunk after thread 0 saw the slots
  PROGRAM_MOVED,      // barrier: thread 0 publishes after the block moved the chunk
  PROGRAM_POSITIONS,  // barrier: the next step reads the positions that thread 0 advanced
  PROGRAM_HEAD,       // publish: a slot was drained
  PROGRAM_TAIL,       // publish: a slot was filled
  SLOT_FREE,          // consume: the sender sees a drained slot
  SLOT_FILLED,        // consume: the receiver sees a filled slot
  CLEAR_DONE,         // barrier: the block cleared its lines of the coming epoch
  CLEAR_FIRST,        // fence: cleared before any line of the running epoch is sent
  ONE_SHOT_DONE,      // barrier: every thread of the block is done
  ONE_SHOT_MOVE_DONE, // barrier: every thread of the block is done
  BROADCAST_STARTED,  // wait: every rank that has no data has started
  TWO_SHOT_READY,     // barrier_and: the block moves chunks after its threads saw the counters
  TWO_SHOT_MOVED,     // barrier: threads tell peers after the block moved its chunks
  TWO_SHOT_SCATTER,   // publish: a chunk lies in a peer's staging
  TWO_SHOT_REDUCE,    // publish: a result lies in a peer's staging
  TWO_SHOT_SCATTERED, // consume: a peer's chunk is there
  TWO_SHOT_REDUCED,   // consume: a peer's result is there
  DIRECT_MAPPED,      // consume: all peers can reach what this rank would lend
  DIRECT_LENDS,       // barrier: the block's threads know what it lends
  DIRECT_FIRST,       // barrier_and: the block's threads agree whether it comes behind a stopped operation
  DIRECT_FILLED,      // barrier: threads tell peers after the block scattered its first chunks
  DIRECT_MET,         // barrier_and: the block reduces after its threads saw all peers' first chunks and what they lend
  DIRECT_BORROWING,   // fence: the host sees that peers' buffers may be touched, or this thread its stop word
  DIRECT_READY,       // barrier_and: the block moves chunks after its threads saw the counters
  DIRECT_MOVED,       // barrier: threads tell peers after the block moved its chunks
  DIRECT_SCATTER,     // publish: a chunk lies in a peer's staging, or what is lent is said
  DIRECT_REDUCE,      // publish: a result lies in a peer's staging or output
  DIRECT_SCATTERED,   // consume: a peer's chunk is there, or what it lends is known
  DIRECT_REDUCED,     // consume: a peer's result is there
  DIRECT_REDUCED_ALL, // barrier: threads tell peers after the block read and wrote what they lent
  DIRECT_CLOSED,      // barrier_and: the block leaves after its threads saw that all peers are done with what it lent
  DIRECT_OUT,         // publish: a stopped launch touches no peer's buffer any more
  MOVE_READY,         // barrier_and: the block moves chunks after its threads saw the counters
  MOVE_MOVED,         // barrier: threads tell peers after the block moved its chunks
  MOVE_SCATTER,       // publish: a chunk lies in a peer's staging, to be given on
  MOVE_GIVE,          // publish: a chunk lies in a peer's staging
  MOVE_SCATTERED,     // consume: the root's chunk is there
  MOVE_GIVEN,         // consume: a peer's chunk is there
  LEAVE_ARRIVE,       // arrive: the last block leaves for all of them
  LEAVE_LEFT,         // publish: the launch touches memory no more
  FAULT_SEQUENCE,     // publish: a fault record is complete
  NET_POST,           // fence: payload and requests are visible before the doorbell
  NET_COMPLETION,     // consume: a request is done, its blocks may be written
  HCA_DOORBELL,       // consume: work requests were published
  HCA_RECORD,         // consume: more of them were, before their doorbell came
  HCA_PAYLOAD,        // fence: earlier requests' payload is visible before this one's
  HCA_FLAG,           // publish: payload of one word, which may tell that earlier payload is there
  HCA_SOURCE,         // consume: a word that is read may tell that what is read next is there
  HCA_ADD,            // atomic: tells that earlier payload is there
  HCA_CQE,            // publish: a completion is complete, and so is what it tells of
  HCA_RECEIVES,       // consume: receives were posted
  HCA_PEER_STATE,     // consume: the peer's queue was set up
};

OSSICLE_DEVICE bool dropped(Site site) {
#if defined(OSSICLE_DROP_SITE)
  return static_cast<uint32_t>(site) == OSSICLE_DROP_SITE;
#else
  return static_cast<void>(site), false;
#endif
}

}  // namespace ossicle
