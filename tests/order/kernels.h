// The kernels under test, as the library launches them.
#pragma once
#include "world.h"

namespace ossicle::model {

// All programs of programs.txt, read once.
inline std::vector<PlannedProgram> planned;

inline const PlannedProgram& planned_for(const char* name, uint32_t ranks, uint32_t rank) {
  for (const PlannedProgram& p : planned) {
    if (p.name == name && p.ranks == ranks && p.rank == rank) return p;
  }
  found("programs.txt lacks a program");
}

inline Link link_from(World& world, uint32_t sender, uint32_t receiver) {
  Rank& from = world.rank[sender];
  Rank& to = world.rank[receiver];
  if (is_proxied(world, sender)) return Link{from.net_slots, from.net_tail, from.net_head, from.notes, receiver, LINK_PROXY};
  return Link{to.slots, to.tail, from.head, {nullptr}, receiver, LINK_MEMORY};
}

// The same link as its receiver has it.
inline Link link_to(World& world, uint32_t sender, uint32_t receiver) {
  Rank& to = world.rank[receiver];
  if (is_proxied(world, sender)) return Link{to.slots, to.tail, to.net_drained, nullptr, sender, LINK_PROXY};
  return Link{to.slots, to.tail, world.rank[sender].head, nullptr, sender, LINK_MEMORY};
}

inline void add_links(World& world, uint32_t rank, const PlannedProgram& plan, ProgramWork& work) {
  Rank& me = world.rank[rank];
  work.send[0] = link_from(world, rank, plan.send);
  work.recv[0] = link_to(world, plan.recv, rank);
  if (me.posts) {
    work.send[0] = Link{me.sent, nullptr, me.head, {nullptr}, plan.send, LINK_HCA};
    work.send[0].queues = me.sending;
    work.posting |= 1;
  }
  if (world.rank[plan.recv].posts) {
    work.recv[0] = Link{me.slots, me.tail, nullptr, {nullptr}, plan.recv, LINK_HCA};
    work.recv[0].queues = me.receiving;
    work.posting |= 1u << MAX_LINKS;
  }
}

inline void prepare_program(World& world, uint32_t rank, const Op& op) {
  const PlannedProgram& plan = planned_for(op.kernel->name, world.ranks, rank);
  if (world.slots < plan.slots_needed) found("too few slots for a program");
  Rank& me = world.rank[rank];
  ProgramWork& work = me.program;
  work = ProgramWork{};
  work.input = me.input + op.offset;
  work.output = me.output + op.offset;
  work.count = op.count;
  work.state = &me.state;
  work.control = &me.control;
  work.started = &me.started;
  work.slot_bytes = world.slot_bytes;
  work.slots = world.slots;
  work.channels = op.blocks;
  work.ranks = world.ranks;
  work.chunks = plan.chunks;
  work.steps = static_cast<uint32_t>(plan.steps.size());
  add_links(world, rank, plan, work);
  std::copy(plan.steps.begin(), plan.steps.end(), work.step);
}

inline void run_program(World& world, uint32_t rank, const Op& op, const Block& block) {
  if (op.floats) program<float, Sum>(block, world.rank[rank].program);
  else program<int32_t, Sum>(block, world.rank[rank].program);
}

inline void prepare_ring_gather(World& world, uint32_t rank, const Op& op) {
  prepare_program(world, rank, op);
  ProgramWork& work = world.rank[rank].program;
  work.count = work.stride = uint64_t(op.count) * 4;
}

// The program of rank 0's broadcast stands for every root's.
inline void prepare_ring_broadcast(World& world, uint32_t rank, const Op& op) {
  prepare_program(world, rank, op);
  ProgramWork& work = world.rank[rank].program;
  work.count = uint64_t(op.count) * 4;
  work.step[0] = planned_for(op.kernel->name, world.ranks, (rank + world.ranks - op.root) % world.ranks).steps[0];
}

inline void run_ring_move(World& world, uint32_t rank, const Op&, const Block& block) {
  program<uint8_t, Sum>(block, world.rank[rank].program);
}

inline void prepare_one_shot(World& world, uint32_t rank, const Op& op) {
  Rank& me = world.rank[rank];
  me.one_shot = OneShotWork{};
  OneShotWork& work = me.one_shot;
  work.input = me.input + op.offset;
  work.output = me.output + op.offset;
  work.count = op.count;
  work.state = &me.state;
  work.control = &me.control;
  work.started = &me.started;
  work.rank = rank;
  work.ranks = world.ranks;
  work.lines = world.lines;
  work.root = op.root;
  for (uint32_t r = 0; r < world.ranks; ++r) work.area[r] = world.rank[r].area;
}

inline void run_one_shot(World& world, uint32_t rank, const Op& op, const Block& block) {
  if (op.floats) one_shot<float, Sum>(block, world.rank[rank].one_shot);
  else one_shot<int32_t, Sum>(block, world.rank[rank].one_shot);
}

inline void prepare_two_shot(World& world, uint32_t rank, const Op& op) {
  Rank& me = world.rank[rank];
  me.two_shot = TwoShotWork{};
  TwoShotWork& work = me.two_shot;
  work.output = me.output + op.offset_of(rank);
  work.input = op.in_place[rank] ? work.output : me.input + op.offset_of(rank);
  work.count = op.count;
  work.state = &me.state;
  work.control = &me.control;
  work.started = &me.started;
  work.slot_bytes = world.slot_bytes;
  work.rank = rank;
  work.ranks = world.ranks;
  work.most_blocks = BLOCKS;
  work.root = op.root;
  work.zero_copy = world.zero_copy;
  work.lends = op.lends[rank];
  if (op.mapped[rank] & LENDS_INPUT) {
    work.lent_input = LentAddress{op.in_place[rank] ? me.output_bases : me.input_bases, op.offset_of(rank) * 4};
  }
  if (op.mapped[rank] & LENDS_OUTPUT) work.lent_output = LentAddress{me.output_bases, op.offset_of(rank) * 4};
  for (uint32_t r = 0; r < world.ranks; ++r) {
    work.slots[r] = world.rank[r].staging;
    work.counters[r] = world.rank[r].counters;
  }
}

inline void run_two_shot(World& world, uint32_t rank, const Op& op, const Block& block) {
  if (op.floats) two_shot<float, Sum>(block, world.rank[rank].two_shot);
  else two_shot<int32_t, Sum>(block, world.rank[rank].two_shot);
}

inline void prepare_one_shot_move(World& world, uint32_t rank, const Op& op) {
  prepare_one_shot(world, rank, op);
  world.rank[rank].one_shot.count = uint64_t(op.count) * 4;
}

inline void run_one_shot_move(World& world, uint32_t rank, const Op&, const Block& block) {
  one_shot_move(block, world.rank[rank].one_shot);
}

inline void prepare_two_shot_move(World& world, uint32_t rank, const Op& op) {
  prepare_two_shot(world, rank, op);
  world.rank[rank].two_shot.count = uint64_t(op.count) * 4;
}

inline void run_two_shot_move(World& world, uint32_t rank, const Op&, const Block& block) {
  two_shot_move(block, world.rank[rank].two_shot);
}

inline uint32_t one_part(const World&, const Op& op) { return op.count; }
inline uint32_t part_a_rank(const World& world, const Op& op) { return op.count * world.ranks; }

inline uint32_t sum_of_all(const World& world, const Op& op, uint32_t i) {
  uint32_t sum = 0;
  for (uint32_t r = 0; r < world.ranks; ++r) sum += input_of(op, r, i);
  return sum;
}
inline uint32_t gathered(const World&, const Op& op, uint32_t i) { return input_of(op, i / op.count, i % op.count); }
inline uint32_t of_root(const World&, const Op& op, uint32_t i) { return input_of(op, op.root, i); }

inline const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all{
      {"all_reduce", prepare_program, run_program, one_part, sum_of_all, false, false, false},
      {"ring_gather", prepare_ring_gather, run_ring_move, part_a_rank, gathered, false, false, false},
      {"ring_broadcast", prepare_ring_broadcast, run_ring_move, one_part, of_root, false, true, false},
      {"two_shot", prepare_two_shot, run_two_shot, one_part, sum_of_all, false, false, true},
      {"two_shot_gather", prepare_two_shot_move, run_two_shot_move, part_a_rank, gathered, false, false, false},
      {"two_shot_broadcast", prepare_two_shot_move, run_two_shot_move, one_part, of_root, false, true, false},
      {"one_shot", prepare_one_shot, run_one_shot, one_part, sum_of_all, true, false, false},
      {"one_shot_gather", prepare_one_shot_move, run_one_shot_move, part_a_rank, gathered, true, false, false},
      {"one_shot_broadcast", prepare_one_shot_move, run_one_shot_move, one_part, of_root, true, true, false},
  };
  return all;
}

}  // namespace ossicle::model
