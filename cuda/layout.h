// Structs that the library writes and kernels read, shared with src/launch/layout.rs, which asserts the same sizes and
// offsets. All of them are plain data in native byte order.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ossicle {

constexpr uint32_t MAX_RANKS = 16;
constexpr uint32_t MAX_CHANNELS = 128;
constexpr uint32_t MAX_LINKS = 16;
constexpr uint32_t MAX_STEPS = 32;
// The root of what has none: all but a broadcast.
constexpr uint32_t NO_ROOT = ~0u;

// What kernels must stop for, one word (Control::stop): bits, and above them the first operation that a lost peer leaves
// unfinished. Written by the host, read by every wait.
enum Stop : uint64_t { STOP_NONE = 0, STOP_ABORT = 1, STOP_PEER_LOST = 2 };
constexpr uint32_t STOP_FROM_SHIFT = 2;

// What a report says of a peer whose started word is out of reach.
constexpr uint64_t STARTED_UNKNOWN = ~0ull;

enum FaultCause : uint32_t { FAULT_NONE = 0, FAULT_LATE = 1, FAULT_COMPLETION = 2 };

// What a wait reports: that it passed its clock bound, or that it found a failed work request. `sequence` is published
// last: ordinal + 1 of the reporting operation.
struct FaultRecord {
  uint64_t sequence;
  uint64_t ordinal;
  uint64_t waited_ns;
  uint64_t peer_started;  // operations that the peer's kernels had started by then
  uint32_t cause;
  uint32_t peer;
  uint32_t channel;
  uint32_t step;
  uint32_t vendor;  // of a failed work request: vendor's syndrome << 8 | syndrome
  uint32_t pad;
};

// One rank's word to its kernels and their word back; pinned host memory.
struct alignas(128) Control {
  uint64_t stop;
  // Clock bound of a wait in nanoseconds; 0 is none.
  uint64_t report_after_ns;
  // Launches whose last block has left, whether it finished or was stopped; written by kernels.
  uint64_t left;
  FaultRecord fault;
  // By rank: its started word, see enter, or null where it lies on another host. Read only for a report, since it costs
  // a load from host memory.
  const uint64_t* started[MAX_RANKS];
  // Of zero copy, written by kernels: ordinal + 1 of the last operation that may have touched what peers lend, and of the
  // last that was stopped and touches that no more.
  uint64_t borrowing;
  uint64_t out;
  // A wait that parks for good after its report (OSSICLE_WAIT_FAIL=1) instead of going on.
  uint32_t park_after_report;
  FaultRecord failure;  // of a work request
};

// What one rank's kernels keep from launch to launch; device memory. A replayed graph makes no library call, so every
// counter that identifies an operation or a slot is advanced here, by the kernel.
struct State {
  uint64_t ordinal;      // launches left; the operation's number in its communicator
  uint64_t ll_epoch;     // operations that used LL lines, from 0
  uint64_t fault_claim;  // ordinal + 1 of the last operation that reported
  uint32_t arrivals;     // blocks of the running kernel that finished
  uint32_t stopped;      // a wait of this rank was stopped: what comes behind it touches no peer
  uint64_t cleared;      // ordinal + 1 of the last operation whose blocks may touch what peers lend
  uint32_t failed;       // a work request of this rank failed: no more are posted
  uint32_t pad;
  uint64_t sent[MAX_LINKS][MAX_CHANNELS];      // slots filled so far
  uint64_t received[MAX_LINKS][MAX_CHANNELS];  // slots drained so far
  uint64_t rounds[MAX_CHANNELS];               // rounds of two-shot that a block has done so far
};

// What a link's other end is: the peer's kernel; the CPU proxy, which moves slots over the network; an HCA, to which the
// kernel posts work requests itself.
enum LinkKind : uint32_t { LINK_MEMORY = 0, LINK_PROXY = 1, LINK_HCA = 2 };

struct NetQueue;

// What a filled slot holds, for who cannot know it from a plan: the proxy, and the proxy at the other end.
struct SlotNote {
  uint32_t bytes;
  uint32_t step;
  uint64_t ordinal;
};

// One direction of a link to one peer, channel 0; a channel's slots, flags and notes lie `slot_bytes * slots`, FLAG_STRIDE
// and `slots`, rounded up to NOTE_LINE, further on. Of LINK_HCA each side has slots of its own, and only the counter that it
// waits for: the other one is at the peer.
struct Link {
  uint8_t* slots;
  uint64_t* tail;   // slots filled; written by the sender, lies with the slots at the receiver
  uint64_t* head;   // slots drained; written by the receiver, lies at the sender
  union {
    SlotNote* notes;   // of LINK_PROXY, by slot; written by the sender before the tail passes the slot
    NetQueue* queues;  // of LINK_HCA, by channel; see net/queue.h
  };
  uint32_t peer;
  uint32_t kind;    // LinkKind
};

// Notes of different channels stand in different 128-byte lines: a channel's are rounded up to so many.
constexpr uint32_t NOTE_LINE = 8;

// Flags of different channels stand in different 128-byte lines.
constexpr uint32_t FLAG_STRIDE = 16;  // in uint64_t

enum StepFlags : uint8_t {
  STEP_RECV = 1,    // take a chunk from the receive link's next slot
  STEP_LOAD = 2,    // take the chunk from the input; with RECV: reduce both
  STEP_SEND = 4,    // put the result into the send link's next slot
  STEP_STORE = 8,   // put the result into the output
  STEP_FINISH = 16  // the reduction is complete here: apply its final operation
};

struct Step {
  uint8_t flags;
  uint8_t send;  // index into ProgramWork::send
  uint8_t recv;  // index into ProgramWork::recv
  uint8_t chunk;
};

// A plan's program for one rank: every channel walks `steps` once for each iteration over its part of the data.
struct ProgramWork {
  const void* input;
  void* output;
  uint64_t count;  // elements
  State* state;
  Control* control;
  uint64_t* started;
  uint64_t slot_bytes;
  // Of an all-gather, whose steps name a rank as their chunk: elements from one rank's block of the output to the next.
  // Else 0: a step's chunk is a part of the iteration.
  uint64_t stride;
  uint32_t slots;
  uint32_t channels;
  uint32_t ranks;
  uint32_t chunks;  // parts of one iteration
  uint32_t steps;
  uint32_t posting;  // links of LINK_HCA, a bit each: send[0] and on, then recv[0] and on
  Link send[MAX_LINKS];
  Link recv[MAX_LINKS];
  Step step[MAX_STEPS];
};

// Eight payload bytes and two flags; each half is one 8-byte store, so a reader that sees a flag sees its data.
struct alignas(16) Line {
  uint64_t half[2];
};

// Every rank writes its data as lines into its region of every peer's area and reduces or copies what arrives. An area is
// [parity][source rank][lines].
struct OneShotWork {
  const void* input;
  void* output;
  uint64_t count;  // elements; of a move bytes, in an all-gather one rank's
  State* state;
  Control* control;
  uint64_t* started;
  uint32_t rank;
  uint32_t ranks;
  uint32_t lines;  // lines of one region
  uint32_t root;
  Line* area[MAX_RANKS];
};

// What a rank lends its peers in an all-reduce (collective/two_shot_direct.h).
enum Lends : uint32_t { LENDS_INPUT = 1, LENDS_OUTPUT = 2 };

// Where peers' kernels see a buffer: `bases` has, for each rank, the address at which that rank sees the allocation, and the
// buffer begins `offset` behind it. This rank's own place is published last: while it is 0, peers see nothing. Without a
// bases (null) all see the buffer where this rank does.
struct LentAddress {
  const uint64_t* bases;
  uint64_t offset;
};

// Every rank reduces its chunk of each round and gives the result to all, through staging at every rank or straight from
// and to the users' buffers: slots [phase][source][block][parity][slot_bytes] and counters [phase][source][block], both of
// most_blocks blocks.
struct TwoShotWork {
  const void* input;
  void* output;
  uint64_t count;  // elements; of a move bytes, in an all-gather one rank's
  State* state;
  Control* control;
  uint64_t* started;
  uint64_t slot_bytes;
  uint32_t rank;
  uint32_t ranks;
  uint32_t most_blocks;
  uint32_t root;
  uint32_t zero_copy;  // ranks of the communicator may lend, for all of them alike
  uint32_t lends;      // Lends, of what peers can reach
  LentAddress lent_input;
  LentAddress lent_output;
  uint8_t* slots[MAX_RANKS];
  uint64_t* counters[MAX_RANKS];
};

static_assert(sizeof(FaultRecord) == 56 && sizeof(Control) == 384, "Control");
static_assert(offsetof(Control, fault) == 24 && offsetof(Control, started) == 80 && offsetof(Control, borrowing) == 208 && offsetof(Control, failure) == 232, "Control");
static_assert(2 * MAX_LINKS <= 32, "ProgramWork::posting");
static_assert(sizeof(State) == 48 + (2 * MAX_LINKS + 1) * MAX_CHANNELS * 8, "State");
static_assert(sizeof(Link) == 40 && sizeof(SlotNote) == 16 && sizeof(Step) == 4 && sizeof(Line) == 16, "Link and its parts");
static_assert(sizeof(ProgramWork) == 88 + 2 * MAX_LINKS * 40 + MAX_STEPS * 4, "ProgramWork");
static_assert(sizeof(OneShotWork) == 64 + MAX_RANKS * 8, "OneShotWork");
static_assert(sizeof(TwoShotWork) == 112 + 2 * MAX_RANKS * 8, "TwoShotWork");

}  // namespace ossicle
