// Runs the kernels of cuda/ over the weak memory, with one or four threads a block, for a range of seeds.
//
//     order PROGRAMS SITE FIRST COUNT
//     order litmus
//
// PROGRAMS is programs.txt, SITE the number of the site to drop or "none". Says nothing and ends with 0 if no seed of
// [FIRST, FIRST + COUNT) shows a wrong value, a hang or a broken promise, else prints the first that does and ends with 1.
// "litmus" tests the weak memory.
#include <signal.h>
#include <stdint.h>
namespace ossicle::model {
inline uint32_t dropped_site = ~0u;
}
#define OSSICLE_ORDER_MODEL 1
#define OSSICLE_DROP_SITE ::ossicle::model::dropped_site
#include <fstream>
#include <sstream>
#include "hca_world.h"
#include "kernels.h"
#include "litmus.h"
#include "proxy.h"

namespace ossicle::model {
namespace {

std::vector<PlannedProgram> read_programs(const char* path) {
  std::vector<PlannedProgram> programs;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream row(line);
    PlannedProgram p;
    row >> p.name >> p.ranks >> p.rank >> p.chunks >> p.slots_needed >> p.send >> p.recv;
    uint32_t flags, chunk;
    for (char colon; row >> flags >> colon >> chunk;) p.steps.push_back(Step{uint8_t(flags), 0, 0, uint8_t(chunk)});
    programs.push_back(p);
  }
  return programs;
}

// Links of the ring that go through HCAs, and perhaps a request that fails.
void add_hcas(World& world, Random& random) {
  const bool any = random.one_in(2);
  for (uint32_t r = 0; r < world.ranks; ++r) {
    Rank& rank = world.rank[r];
    rank.posts = any && !is_proxied(world, r) && random.one_in(2);
    rank.hca.open(reinterpret_cast<uint8_t*>(&rank), sizeof(Rank));
  }
  const auto address = [](const void* of) { return reinterpret_cast<uint64_t>(of); };
  for (uint32_t r = 0; r < world.ranks; ++r) {
    Rank &rank = world.rank[r], &next = world.rank[(r + 1) % world.ranks];
    rank.hca.view[1] = next.hca.seen();
    next.hca.view[2] = rank.hca.seen();
    if (!rank.posts) continue;
    const uint32_t bytes = world.slots * world.slot_bytes;
    for (uint32_t c = 0; c < BLOCKS; ++c) {
      const uint32_t log = random.below(HCA_MAX_LOG_BLOCKS), first = random.one_in(2) ? 0xfffc + random.below(4) : 0;
      NetQueue& sending = rank.sending[c];
      sending = rank.hca.connect(SENDING + c, 1, RECEIVING + c, log + 1, log + 1, first);
      sending.local_slots = address(rank.sent + c * bytes);
      sending.remote_slots = address(next.slots + c * bytes);
      sending.flag.remote.address = mlx5::be64(address(next.tail + c * FLAG_STRIDE));
      NetQueue& receiving = next.receiving[c];
      receiving = next.hca.connect(RECEIVING + c, 2, SENDING + c, log, log, first + 1);
      receiving.flag.remote.address = mlx5::be64(address(rank.head + c * FLAG_STRIDE));
    }
    if (!random.one_in(8)) continue;
    Hca& failing = random.one_in(2) ? rank.hca : next.hca;
    const uint32_t end = &failing == &rank.hca ? SENDING : RECEIVING;
    failing.fault = hca::InjectedFault{random.below(8), hca_qp_number(end + random.below(BLOCKS)), hca::FAULT_SYNDROME,
                                       mlx5::REMOTE_ACCESS, 0x45, 0};
    failing.engine.faults = 1;
  }
}

World make_world(Random& random) {
  World world{};
  world.ranks = 2 + random.below(RANKS - 1);
  world.slots = 2 + random.below(2);
  world.slot_bytes = 32u << random.below(3);
  world.zero_copy = random.one_in(3) ? 0 : 1;
  world.rank.reset(new Rank[world.ranks]());
  const bool clears = random.one_in(3);
  const uint64_t base = random.below(5), epoch = clears ? CLEAR_PERIOD - 1 - random.below(2) : random.below(4);
  const bool reports = random.one_in(2);
  // Rings of the plan go from each rank to the next.
  world.proxied = random.one_in(2) ? 0 : random.below(1u << world.ranks);
  for (uint32_t r = 0; r < world.ranks; ++r) {
    Rank& rank = world.rank[r];
    rank.control.report_after_ns = reports ? 1 : 0;
    rank.state.ll_epoch = epoch;
    for (uint32_t peer = 0; peer < world.ranks; ++peer) {
      rank.control.started[peer] = world.proxied ? nullptr : &world.rank[peer].started;
    }
    for (uint32_t b = 0; b < BLOCKS; ++b) {
      rank.state.sent[0][b] = rank.state.received[0][b] = base;
      rank.state.rounds[b] = base;
      for (uint64_t* counter : {rank.tail, rank.head, rank.net_tail, rank.net_head, rank.net_drained}) {
        counter[b * FLAG_STRIDE] = base;
      }
      rank.buffers[b] = memory->add_buffer();
    }
    for (uint32_t c = 0; c < 2 * (world.ranks - 1) * BLOCKS; ++c) {
      rank.counters[c * FLAG_STRIDE] = base;
    }
    rank.hca_buffer = memory->add_buffer();
  }
  add_hcas(world, random);
  const uint32_t ops = 2 + random.below(4);
  for (uint32_t number = 0; number < ops; ++number) {
    Op op{};
    op.kernel = &kernels()[random.below(uint32_t(kernels().size()))];
    op.number = number;
    op.count = 1 + random.below(COUNT >> random.below(7));
    while (clears && !op.kernel->lines && !random.one_in(8)) op.kernel = &kernels()[random.below(uint32_t(kernels().size()))];
    op.threads = random.one_in(4) ? 1 : THREADS;
    op.blocks = 1 + random.below(BLOCKS);
    if (op.kernel->lines) {
      const uint32_t lines = (op.count + 1) / 2;
      world.lines = std::max(world.lines, lines);
      op.blocks = std::min(op.blocks, (lines + op.threads - 1) / op.threads);
    }
    op.root = op.kernel->rooted ? random.below(world.ranks) : NO_ROOT;
    op.offset = random.one_in(4) ? 1 : 0;
    op.floats = random.one_in(2);
    if (op.kernel->lends) {
      // All, none, or any mix.
      const uint32_t like = random.below(3);
      for (uint32_t r = 0; r < world.ranks; ++r) {
        if (world.zero_copy) op.lends[r] = uint8_t(like == 0 ? LENDS_INPUT | LENDS_OUTPUT : like == 1 ? 0 : random.below(4));
        op.mapped[r] = random.one_in(3) ? uint8_t(random.below(4)) : 0;
        op.in_place[r] = random.one_in(3);
        op.shifted[r] = random.one_in(8);
      }
    }
    world.ops.push_back(op);
  }
  world.aborted_in = random.one_in(3) ? random.below(ops) : World::NEVER;
  world.absent = random.one_in(2) ? random.below(world.ranks) : World::NEVER;
  for (uint32_t r = 0; r < world.ranks; ++r) {
    world.rank[r].input_mapped_in = random.below(ops);
    world.rank[r].output_mapped_in = random.below(ops);
  }
  return world;
}

// The record that a late wait left, if there is a new one.
void check_fault(const World& world, uint32_t r, const Op& op, uint64_t& known) {
  const FaultRecord& fault = world.rank[r].control.fault;
  const uint64_t sequence = memory->load(&fault.sequence, 8, Kind::ORDERED);
  if (sequence == known) return;
  known = sequence;
  const uint64_t ordinal = memory->load(&fault.ordinal, 8, Kind::RELAXED);
  const uint64_t waited = memory->load(&fault.waited_ns, 8, Kind::RELAXED);
  const uint64_t cause = memory->load(&fault.cause, 4, Kind::RELAXED);
  const uint64_t peer = memory->load(&fault.peer, 4, Kind::RELAXED);
  const uint64_t channel = memory->load(&fault.channel, 4, Kind::RELAXED);
  // What the peer had started by then, where that can be seen: no more than what it has by now.
  const uint64_t peer_started = memory->load(&fault.peer_started, 8, Kind::RELAXED);
  const bool started = peer >= world.ranks || (world.proxied ? peer_started == STARTED_UNKNOWN
                                                             : peer_started <= world.rank[peer].started);
  const bool right = started && ordinal + 1 == sequence && ordinal == op.number && waited > 0 && cause == FAULT_LATE &&
                     peer < world.ranks && peer != r && channel < op.blocks;
  if (!right) found("a fault record with wrong contents");
}

// The record of a failed work request, if there is one.
bool check_failure(const World& world, uint32_t r, const Op& op) {
  const FaultRecord& failure = world.rank[r].control.failure;
  const uint64_t sequence = memory->load(&failure.sequence, 8, Kind::ORDERED);
  if (sequence == 0) return false;
  const uint64_t ordinal = memory->load(&failure.ordinal, 8, Kind::RELAXED);
  const uint64_t cause = memory->load(&failure.cause, 4, Kind::RELAXED);
  const uint64_t peer = memory->load(&failure.peer, 4, Kind::RELAXED);
  const uint64_t channel = memory->load(&failure.channel, 4, Kind::RELAXED);
  const uint64_t vendor = memory->load(&failure.vendor, 4, Kind::RELAXED);
  const hca::InjectedFault& fault = world.rank[r].hca.fault;
  const uint32_t place = fault.qp & hca::QP_PLACE_MASK;
  const uint32_t failing = (place < RECEIVING ? r + 1 : r + world.ranks - 1) % world.ranks;
  const bool right = ordinal + 1 == sequence && ordinal == op.number && cause == FAULT_COMPLETION && peer == failing &&
                     channel == place % BLOCKS && vendor == (fault.vendor_syndrome << 8 | fault.syndrome);
  if (!right) found("a record of a failed work request with wrong contents");
  return true;
}

// One rank's host: launches its operations in stream order and looks at each as soon as it has left.
class Host {
 public:
  Host(World& world, uint32_t rank) : world_(world), r_(rank), me_(world.rank[rank]) {}

  void run() {
    operate();
    // A request that no kernel of this rank has to wait for may fail: peers wait for it.
    for (++world_.ended; world_.ended < world_.ranks; pause()) {
      if (me_.hca.failed() && !world_.failed) fail();
    }
  }

  // Nobody writes to an aborted rank's buffers.
  void check_taken_over() const {
    if (taken_over_ && !std::equal(std::begin(me_.output), std::end(me_.output), after_.begin())) {
      found("an aborted rank's output written");
    }
  }

 private:
  void operate() {
    Agent& host = memory->agents[host_of(r_)];
    for (const Op& op : world_.ops) {
      if (world_.failed) break;
      Random& random = memory->schedule.random;
      if (random.one_in(4)) memory->schedule.sleep(random.below(1500));
      const bool before = random.one_in(2);
      if (before) map(op);
      const bool aborted = op.number == world_.aborted_in;
      if (!aborted || r_ != world_.absent) launch(op, host);
      if (!before) map(op);
      if (aborted) {
        memory->schedule.sleep(random.below(1500));
        abort();
        // A replay of a graph may come later.
        if (r_ == world_.absent) launch(op, host);
      }
      await(op, host, !aborted);
      if (world_.failed) break;
      if (!aborted) continue;
      // A kernel that is queued behind, or another replay. (One whose data goes as lines may overwrite those of two operations
      // before, which a peer then waits for in vain; it will be aborted too.)
      const size_t next = op.number + 1;
      if (next < world_.ops.size() && !world_.ops[next].kernel->lines && random.one_in(2)) {
        launch(world_.ops[next], host);
        await(world_.ops[next], host, false);
      }
      return take_over();
    }
  }

  void await(const Op& op, Agent& host, bool completed) {
    while (memory->load(&me_.control.left, 8, Kind::ORDERED) <= op.number) {
      check_fault(world_, r_, op, fault_);
      // Sooner or later the host sees by itself one that no kernel of this rank has to wait for: peers wait for it.
      const bool seen = me_.hca.failed() && memory->schedule.random.one_in(256);
      if (!world_.failed && (check_failure(world_, r_, op) || seen)) fail();
      pause();
    }
    const View at_left = host.view;
    check_fault(world_, r_, op, fault_);
    if (completed && !world_.failed) check_output(op);
    while (!ended(op)) pause();
    end(op, host, at_left);
  }

  // The rank's buffers are its user's again: nobody still reads them, and nobody writes them later.
  void take_over() {
    for (uint32_t& element : me_.input) memory->write(&element, 4, 0xddddddddu);
    for (uint32_t& element : me_.output) memory->write(&element, 4, 0xddddddddu);
    after_.assign(std::begin(me_.output), std::end(me_.output));
    taken_over_ = true;
  }

  // Fills the rows of addresses whose time has come.
  void map(const Op& op) {
    if (op.number == me_.input_mapped_in) map(me_.input_bases, me_.input);
    if (op.number == me_.output_mapped_in) map(me_.output_bases, me_.output);
  }

  void map(uint64_t* bases, const uint32_t* buffer) {
    const uint64_t address = reinterpret_cast<uintptr_t>(buffer);
    if (bases[r_] != 0) return;
    for (uint32_t peer = 0; peer < world_.ranks; ++peer) {
      if (peer == r_) continue;
      memory->write(&bases[peer], 8, address);
      pause();
    }
    memory->write(&bases[r_], 8, address, Kind::ORDERED);
  }

  // As src/launch/lending.rs does it.
  void abort() {
    const uint64_t known = me_.control.stop;
    uint64_t from = memory->load(&me_.control.left, 8, Kind::ORDERED);
    if (known & STOP_PEER_LOST) from = std::min(from, known >> STOP_FROM_SHIFT);
    for (uint32_t r = 0; world_.zero_copy && r < world_.ranks; ++r) {
      if (r == r_) continue;
      uint64_t& stop = world_.rank[r].control.stop;
      const uint64_t least = stop & STOP_PEER_LOST ? std::min(from, stop >> STOP_FROM_SHIFT) : from;
      memory->write(&stop, 8, least << STOP_FROM_SHIFT | STOP_PEER_LOST | (stop & STOP_ABORT));
    }
    memory->fence_in_turn();
    for (uint32_t r = 0; world_.zero_copy && r < world_.ranks; ++r) {
      while (r != r_ && may_use(world_.rank[r].control, from)) pause();
    }
    memory->write(&me_.control.stop, 8, me_.control.stop | STOP_ABORT);
  }

  static bool may_use(const Control& peer, uint64_t from) {
    const uint64_t borrowing = memory->load(&peer.borrowing, 8, Kind::RELAXED);
    return borrowing > from && memory->load(&peer.out, 8, Kind::ORDERED) < borrowing &&
           memory->load(&peer.left, 8, Kind::ORDERED) < borrowing;
  }

  void launch(const Op& op, Agent& host) {
    const uint32_t offset = op.offset_of(r_);
    for (uint32_t i = 0; i < op.kernel->outputs(world_, op); ++i) memory->write(me_.output + offset + i, 4, 0xffffffffu);
    uint32_t* input = op.in_place[r_] ? me_.output : me_.input;
    for (uint32_t i = 0; i < op.count; ++i) memory->write(input + offset + i, 4, bits_of(op, input_of(op, r_, i)));
    op.kernel->prepare(world_, r_, op);
    me_.view.join(host.view);
    const Release begin = std::make_shared<const View>(me_.view);
    for (uint32_t b = 0; b < op.blocks; ++b) {
      *me_.buffers[b] = Buffer{};
      me_.buffers[b]->threads = op.threads;
      for (uint32_t t = 0; t < op.threads; ++t) {
        const uint32_t id = agent_of(r_, b, t);
        memory->agents[id] = Agent{r_, me_.buffers[b], me_.view, View{}, begin};
        memory->schedule.start(id, [this, op, b, t] {
          op.kernel->body(world_, r_, op, Block{t, op.threads, b, op.blocks});
        });
      }
    }
  }

  void stop_all() {
    for (uint32_t r = 0; r < world_.ranks; ++r) {
      uint64_t& stop = world_.rank[r].control.stop;
      memory->write(&stop, 8, stop | STOP_ABORT);
    }
  }

  void fail() {
    world_.failed = true;
    stop_all();
  }

  void check_output(const Op& op) {
    for (uint32_t i = 0; i < op.kernel->outputs(world_, op); ++i) {
      const uint32_t got = uint32_t(memory->load(me_.output + op.offset_of(r_) + i, 4, Kind::PAYLOAD));
      if (got == bits_of(op, op.kernel->expected(world_, op, i))) continue;
      char text[128];
      snprintf(text, sizeof text, "a wrong value: %s, operation %u, rank %u, element %u", op.kernel->name, op.number, r_, i);
      found(text);
    }
  }

  bool ended(const Op& op) const {
    for (uint32_t b = 0; b < op.blocks; ++b) {
      if (!me_.buffers[b]->stores.empty()) return false;
      for (uint32_t t = 0; t < op.threads; ++t) {
        if (!memory->schedule.finished(agent_of(r_, b, t))) return false;
      }
    }
    return true;
  }

  // The stream's end of the launch, and the promise of `left`.
  void end(const Op& op, Agent& host, const View& at_left) {
    for (uint32_t b = 0; b < op.blocks; ++b) {
      for (uint32_t t = 0; t < op.threads; ++t) {
        const uint32_t id = agent_of(r_, b, t);
        const Agent& agent = memory->agents[id];
        if (!at_left.has(id, agent.view.seen[id])) found("memory touched after the launch had left");
        me_.view.join(agent.view);
        me_.view.join(agent.relaxed);
      }
    }
    host.view.join(me_.view);
    if (me_.state.ordinal != op.number + 1) found("a wrong ordinal");
  }

  World& world_;
  uint32_t r_;
  Rank& me_;
  uint64_t fault_ = 0;
  bool taken_over_ = false;
  std::vector<uint32_t> after_;
};

// Beside the kernels, until all hosts are done. What they left in the queues then is nobody's.
void run_engine(World& world, Rank& rank) {
  while (world.ended < world.ranks) {
    if ((hca::step(rank.hca.engine) & hca::WORKED) == 0) pause();
  }
}

void run(uint64_t number) {
  seed = number;
  // Only a kernel that never comes to a primitive gets so far; any other hang the scheduler finds.
  alarm(60);
  Memory model;
  memory = &model;
  Random random{number};
  World world = make_world(random);
  model.schedule.random = random;
  model.schedule.switch_rate = 1 + random.below(8);
  model.schedule.sleep_rate = 8u << random.below(5);
  for (uint32_t slow = random.below(5); slow > 0; --slow) model.schedule.slow_down(random.below(world.ranks * AGENTS_A_RANK));
  model.drain_rate = 1u << random.below(6);
  model.stale_rate = 2 + random.below(4);
  model.longest_linger = random.one_in(2) ? 1 : 1024u << random.below(6);
  std::vector<Host> hosts;
  for (uint32_t r = 0; r < world.ranks; ++r) hosts.emplace_back(world, r);
  for (uint32_t r = 0; r < world.ranks; ++r) {
    model.agents[host_of(r)].rank = r;
    model.schedule.start(host_of(r), [&hosts, r] { hosts[r].run(); });
    // An engine sees memory as no rank's kernels do.
    model.agents[engine_of(r)].rank = 2 * RANKS + r;
    model.agents[engine_of(r)].buffer = world.rank[r].hca_buffer;
    model.schedule.start(engine_of(r), [&world, r] { run_engine(world, world.rank[r]); });
  }
  std::vector<Proxy> proxies;
  for (uint32_t r = 0; r < world.ranks; ++r) proxies.emplace_back(world, r);
  for (uint32_t r = 0; r < world.ranks; ++r) {
    if (!is_proxied(world, r)) continue;
    Agent& agent = model.agents[proxy_of(r)];
    agent.rank = RANKS + r;
    agent.buffer = model.add_buffer();
    agent.buffer->threads = 1;
    model.schedule.start(proxy_of(r), [&proxies, r] { proxies[r].run(); });
  }
  model.schedule.run();
  for (const Host& host : hosts) host.check_taken_over();
}

}  // namespace
}  // namespace ossicle::model

int main(int argc, char** argv) {
  using namespace ossicle::model;
  if (argc == 2 && strcmp(argv[1], "litmus") == 0) return litmus_passes() ? 0 : 1;
  if (argc != 5) {
    fprintf(stderr, "usage: %s PROGRAMS SITE|none FIRST COUNT, or %s litmus\n", argv[0], argv[0]);
    return 2;
  }
  // An address that a rank did not lend.
  signal(SIGSEGV, [](int) { found("memory touched that is nobody's"); });
  planned = read_programs(argv[1]);
  if (strcmp(argv[2], "none") != 0) dropped_site = uint32_t(strtoul(argv[2], nullptr, 10));
  const uint64_t first = strtoull(argv[3], nullptr, 10), count = strtoull(argv[4], nullptr, 10);
  for (uint64_t i = 0; i < count; ++i) {
    run(first + i);
    run_hca(first + i);
  }
  return 0;
}
