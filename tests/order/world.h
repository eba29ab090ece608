// Ranks with the memory that the library gives them: inboxes, links, counters, control blocks, HCAs (src/transport/inbox.rs,
// src/launch/connect.rs), small enough that every ring wraps within a few chunks.
#pragma once
#include <string>
#include "collective/one_shot.h"
#include "collective/one_shot_move.h"
#include "collective/program.h"
#include "collective/two_shot_direct.h"
#include "collective/two_shot_move.h"
#include "hca.h"

namespace ossicle::model {

constexpr uint32_t BLOCKS = 2, THREADS = 4, COUNT = 96, LINES = COUNT / 2;
constexpr uint32_t AGENTS_A_RANK = 2 + BLOCKS * THREADS;
static_assert(BLOCKS == HCA_CHANNELS, "queue pairs of every channel");
constexpr uint32_t RANKS = 4;
// Behind the ranks' agents come their proxies', one each.
static_assert(RANKS * (AGENTS_A_RANK + 1) <= MAX_AGENTS && 3 * RANKS <= MAX_RANKS, "views are too short");

struct Kernel;

// One operation, the same on all ranks.
struct Op {
  const Kernel* kernel;
  uint32_t number, count, blocks, threads, root;
  // Buffers begin so many elements past a multiple of 16 bytes.
  uint32_t offset;
  bool floats;
  // By rank, where the kernel can: buffers that it lends (Lends), whether it is in place, whether it is misaligned alone.
  uint8_t lends[RANKS];
  // Those whose address peers find in a row (Lends).
  uint8_t mapped[RANKS];
  bool in_place[RANKS], shifted[RANKS];

  uint32_t offset_of(uint32_t rank) const { return offset + (shifted[rank] ? 1 : 0); }
};

// A kernel under test. To add one: give it a `prepare` that fills its work struct in Rank, a `body` that runs it as one
// thread, and what it must compute; put it in kernels() of kernels.h, its work struct into Rank, its staging memory and
// flags into Rank and World, and its sites into cuda/core/sites.h. ci/mutate finds the sites there.
struct Kernel {
  const char* name;
  void (*prepare)(struct World& world, uint32_t rank, const Op& op);
  void (*body)(struct World& world, uint32_t rank, const Op& op, const Block& block);
  // Elements of the output, and of each the value.
  uint32_t (*outputs)(const struct World& world, const Op& op);
  uint32_t (*expected)(const struct World& world, const Op& op, uint32_t i);
  // Its data goes as lines: no block is without one (src/plan/choose.rs), and the line epoch counts.
  bool lines;
  // One rank's data goes to all.
  bool rooted;
  // Ranks may lend each other their buffers.
  bool lends;
};

// A row of programs.txt: what plan/ makes for one rank.
struct PlannedProgram {
  std::string name;
  uint32_t ranks, rank, chunks, slots_needed, send, recv;
  std::vector<Step> steps;
};

struct alignas(128) Rank {
  Control control;
  State state;
  uint32_t input[RANKS * COUNT + 4], output[RANKS * COUNT + 4];
  alignas(16) uint8_t slots[BLOCKS * 3 * 128];
  alignas(16) uint8_t sent[BLOCKS * 3 * 128];  // the sender's own slots, where the link goes through the HCA
  uint64_t tail[BLOCKS * FLAG_STRIDE], head[BLOCKS * FLAG_STRIDE];
  // Of links that a proxy moves: the ring that this rank fills, and the head of the one that it drains (slots and tail).
  alignas(16) uint8_t net_slots[BLOCKS * 3 * 128];
  SlotNote notes[BLOCKS * NOTE_LINE];
  uint64_t net_tail[BLOCKS * FLAG_STRIDE], net_head[BLOCKS * FLAG_STRIDE], net_drained[BLOCKS * FLAG_STRIDE];
  Line area[2 * RANKS * LINES];
  ProgramWork program;
  uint64_t started;
  alignas(16) uint8_t staging[2 * (RANKS - 1) * BLOCKS * 2 * 128];
  uint64_t counters[2 * (RANKS - 1) * BLOCKS * FLAG_STRIDE];
  OneShotWork one_shot;
  TwoShotWork two_shot;
  // Rows for input and output (LentAddress), and the operations during or before which they are filled.
  uint64_t input_bases[RANKS], output_bases[RANKS];
  uint32_t input_mapped_in, output_mapped_in;
  // What happened before the next launch.
  View view;
  Buffer* buffers[BLOCKS];
  // The link to the next rank goes through the HCA, so both ends post.
  bool posts;
  NetQueue sending[BLOCKS], receiving[BLOCKS];
  Hca hca;
  Buffer* hca_buffer;
};

struct World {
  uint32_t ranks, slots, slot_bytes, zero_copy;
  uint32_t lines;  // of a region: what the longest operation needs
  std::vector<Op> ops;
  // All ranks are aborted in this operation, which one may lack, or before it; NEVER: none is.
  static constexpr uint32_t NEVER = ~0u;
  uint32_t aborted_in;
  uint32_t absent;
  // A work request failed: all are stopped.
  bool failed;
  // By bits: the ranks whose slots go to the next rank by a proxy.
  uint32_t proxied;
  uint32_t ended;  // ranks
  std::unique_ptr<Rank[]> rank;
};

inline uint32_t host_of(uint32_t rank) { return rank * AGENTS_A_RANK; }
inline uint32_t agent_of(uint32_t rank, uint32_t block, uint32_t thread) {
  return host_of(rank) + 1 + block * THREADS + thread;
}
inline uint32_t engine_of(uint32_t rank) { return host_of(rank) + AGENTS_A_RANK - 1; }

inline uint32_t proxy_of(uint32_t rank) { return RANKS * AGENTS_A_RANK + rank; }
inline bool is_proxied(const World& world, uint32_t sender) { return world.proxied >> sender & 1; }

// Rank r's element i of an operation's input; never 0, which fresh memory holds, and small enough for exact sums.
inline uint32_t input_of(const Op& op, uint32_t rank, uint32_t i) { return 1 + (op.number * 37 + rank * 11 + i * 5) % 97; }

inline uint32_t bits_of(const Op& op, uint32_t value) {
  return op.floats ? bits_of_float(static_cast<float>(value)) : value;
}

}  // namespace ossicle::model
