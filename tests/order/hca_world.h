// The software HCA's engine over the weak memory: a poster, the engine, and a receiver at the other end of a loopback QP pair.
//
// Each round sends the receiver something that tells that payload is there, in one of the ways that there are: a flag word, a
// word within longer payload, an atomic, an immediate; or reads a flag and then what it tells of. Each round's payload must
// be there whenever the receiver, or the poster, was told. The poster writes as a kernel does, record or doorbell first.
#pragma once
#include "hca/engine.h"
#include "order_primitives.h"

namespace ossicle::model {

constexpr uint32_t HCA_POSTER = 0, HCA_ENGINE = 1, HCA_RECEIVER = 2, HCA_BLOCKS = 4, IMMEDIATES = 3;
// The receiver's CQ has one place, which it gives back with every receive that it posts.
constexpr uint32_t HCA_LOG_ENTRIES[2] = {2, 0}, HCA_ENTRIES = 4;
constexpr uint32_t POSTER_QP = 0x1000, RECEIVER_QP = 0x1001, HCA_KEY = 0x101;

struct alignas(128) HcaMemory {
  hca::Header header;
  hca::Qp qp[2];
  hca::Cq cq[2];
  hca::Region region[2];
  alignas(64) uint8_t ring[HCA_BLOCKS * mlx5::BLOCK_BYTES];
  mlx5::Cqe entries[2][HCA_ENTRIES];
  mlx5::DoorbellRecord record[4];  // of the QPs, then of the CQs
  uint64_t doorbell[2];
  // What requests name: sources and sinks at the poster's, targets at the receiver's, words that the receiver offers.
  alignas(16) uint64_t source[2], sink[2], target[2], message[2], offered[2];
  uint64_t flag, counter;
  // The receiver is done with a round.
  uint64_t read;
};

class HcaWorld {
 public:
  explicit HcaWorld(Random& random) : rounds_(2 + random.below(4)), record_first_(random.one_in(2)) {
    m_.reset(new HcaMemory());
    HcaMemory& m = *m_;
    const auto at = [&m](const void* part) { return uint64_t(static_cast<const uint8_t*>(part) - reinterpret_cast<uint8_t*>(&m)); };
    m.header.qps = m.header.cqs = m.header.regions = 2;
    m.header.qp_table = at(m.qp);
    m.header.cq_table = at(m.cq);
    m.header.region_table = at(m.region);
    for (uint32_t i = 0; i < 2; ++i) {
      hca::Qp& qp = m.qp[i];
      qp.number = POSTER_QP + i;
      qp.send_ring = at(m.ring);
      qp.record = at(&m.record[i]);
      qp.doorbell = at(&m.doorbell[i]);
      qp.send_log_blocks = 2;
      qp.receives = 1;
      qp.send_cq = i;
      qp.receive_cq = i;
      qp.flags = record_first_ ? uint32_t(hca::RECORD_FIRST) : 0;
      qp.timeout_ns = qp.rnr_timeout_ns = hca::FOR_EVER;
      m.cq[i].entries = at(m.entries[i]);
      m.cq[i].record = at(&m.record[2 + i]);
      m.cq[i].log_entries = HCA_LOG_ENTRIES[i];
    }
    m.qp[0].state = hca::READY_TO_SEND;
    m.qp[0].peer_number = RECEIVER_QP;
    memset(m.entries, 0xff, sizeof m.entries);
    m.region[1] = hca::Region{reinterpret_cast<uint64_t>(&m), sizeof m, 0, HCA_KEY, 15, 0, 0};
    view_ = hca::View{reinterpret_cast<uint8_t*>(&m), nullptr};
    for (uint32_t round = 0; round < rounds_; ++round) ways_.push_back(random.below(6));
  }

  void post() {
    for (uint32_t round = 1; round <= rounds_; ++round) {
      const uint32_t way = ways_[round - 1];
      const uint32_t messages = way == IMMEDIATE || way == EMPTY ? IMMEDIATES : 1;
      for (uint32_t i = 0; i < messages; ++i) post_message(way, round * 8 + i);
      if (way == READ) {
        // A flag that was read tells of what was read after it.
        const uint64_t flag = memory->load(&m_->sink[0], 8, Kind::PAYLOAD);
        if (memory->load(&m_->sink[1], 8, Kind::PAYLOAD) < flag) found("hca: a read that is older than the one before it");
      }
      while (memory->load(&m_->read, 8, Kind::ORDERED) < round) pause();
    }
    done_ = true;
  }

  void engine() {
    hca::Engine engine{&view_, nullptr, 1, 0};
    while (!done_) {
      hca::step(engine);
      pause();
    }
  }

  void receive() {
    HcaMemory& m = *m_;
    memory->store(&m.qp[1].access, 4, 15, Kind::PAYLOAD);
    memory->store(&m.qp[1].peer_number, 4, POSTER_QP, Kind::PAYLOAD);
    memory->store(&m.qp[1].state, 4, hca::READY_TO_RECEIVE, Kind::ORDERED);
    post_receive();
    for (uint32_t round = 1; round <= rounds_; ++round) {
      const uint64_t value = round * 8;
      switch (ways_[round - 1]) {
        case FLAG:
          while (memory->load(&m.flag, 8, Kind::ORDERED) != value) pause();
          expect(m.target, value);
          break;
        case MESSAGE:
          while (memory->load(&m.message[1], 8, Kind::ORDERED) != value) pause();
          expect(m.target, value);
          break;
        case ADD:
          while (counted() != value) pause();
          expect(m.target, value);
          break;
        case IMMEDIATE:
        case EMPTY:
          for (uint32_t i = 0; i < IMMEDIATES; ++i) {
            const bool empty = ways_[round - 1] == EMPTY;
            await_completion(1, received_++, mlx5::CQE_RESP_WRITE_IMM, empty ? 0 : 16);
            if (!empty) expect(m.target, value + i);
            // The next message may overwrite it from here on.
            post_receive();
          }
          break;
        default:
          memory->store(&m.offered[1], 8, value, Kind::RELAXED);
          memory->store(&m.offered[0], 8, value, Kind::ORDERED);
      }
      memory->store(&m.read, 8, round, Kind::ORDERED);
    }
  }

 private:
  enum Way : uint32_t { FLAG, MESSAGE, ADD, IMMEDIATE, EMPTY, READ };

  void expect(const uint64_t* words, uint64_t value) {
    for (uint32_t i = 0; i < 2; ++i) {
      if (memory->load(&words[i], 8, Kind::PAYLOAD) != value) found("hca: payload is not there although it was told");
    }
  }

  uint64_t counted() {
    uint64_t value = 0;
    memory->change(&m_->counter, Kind::ORDERED, [&] { value = m_->counter; });
    return value;
  }

  void post_receive() {
    memory->store(&m_->record[1].word[mlx5::RECORD_RECEIVE], 4, mlx5::be32(++receives_), Kind::ORDERED);
  }

  void put32(uint32_t offset, uint32_t value) {
    uint8_t* to = m_->ring + (next_ % HCA_BLOCKS) * mlx5::BLOCK_BYTES + offset;
    memory->store(to, 4, mlx5::be32(value), Kind::PAYLOAD);
  }
  void put64(uint32_t offset, uint64_t value) {
    put32(offset, uint32_t(value >> 32));
    put32(offset + 4, uint32_t(value));
  }

  // One request of one block; `local` NULL: none.
  void put_request(uint8_t opcode, uint32_t units, const void* remote, const void* local, uint32_t bytes) {
    put32(0, (next_ & 0xffff) << 8 | opcode);
    put32(4, POSTER_QP << 8 | units);
    put32(8, mlx5::COMPLETE_ALWAYS);
    put64(16, reinterpret_cast<uint64_t>(remote));
    put32(24, HCA_KEY);
    const uint32_t data = opcode == mlx5::ATOMIC_FA ? 48 : 32;
    put32(data, bytes);
    put32(data + 4, HCA_KEY);
    put64(data + 8, reinterpret_cast<uint64_t>(local));
    ++next_;
  }

  void put_flag(uint64_t* to, uint64_t value) {
    put32(0, (next_ & 0xffff) << 8 | mlx5::RDMA_WRITE);
    put32(4, POSTER_QP << 8 | 3);
    put32(8, mlx5::COMPLETE_ALWAYS);
    put64(16, reinterpret_cast<uint64_t>(to));
    put32(24, HCA_KEY);
    put32(32, mlx5::INLINE_BIT | 8);
    put32(36, mlx5::be32(uint32_t(value)));
    put32(40, mlx5::be32(uint32_t(value >> 32)));
    ++next_;
  }

  // What was written is published once or twice, so that the record may be ahead of the doorbell that the engine sees.
  void ring() {
    uint32_t* record = &m_->record[0].word[mlx5::RECORD_SEND];
    const uint64_t bell = mlx5::doorbell(next_, POSTER_QP);
    if (record_first_) memory->store(record, 4, mlx5::be32(next_ & 0xffff), Kind::ORDERED);
    memory->store(&m_->doorbell[0], 8, bell, Kind::ORDERED);
    if (!record_first_) memory->store(record, 4, mlx5::be32(next_ & 0xffff), Kind::ORDERED);
  }

  void post_message(uint32_t way, uint64_t value) {
    HcaMemory& m = *m_;
    const uint32_t first = next_;
    if (way == EMPTY) {
      put_request(mlx5::RDMA_WRITE_IMM, 2, nullptr, nullptr, 0);
    } else if (way == READ) {
      put_request(mlx5::RDMA_READ, 3, &m.offered[0], &m.sink[0], 8);
      if (memory->schedule.random.one_in(2)) ring();
      put_request(mlx5::RDMA_READ, 3, &m.offered[1], &m.sink[1], 8);
    } else {
      for (uint64_t& word : m.source) memory->store(&word, 8, value, Kind::PAYLOAD);
      put_request(way == IMMEDIATE ? mlx5::RDMA_WRITE_IMM : mlx5::RDMA_WRITE, 3, m.target, m.source, 16);
      if (memory->schedule.random.one_in(2)) ring();
      if (way == FLAG) put_flag(&m.flag, value);
      if (way == MESSAGE) put_request(mlx5::RDMA_WRITE, 3, m.message, m.source, 16);
      if (way == ADD) {
        put64(32, value - counted_so_far_);
        counted_so_far_ = value;
        put_request(mlx5::ATOMIC_FA, 4, &m.counter, m.sink, 8);
      }
    }
    ring();
    for (uint32_t index = first; index != next_; ++index) {
      const uint32_t bytes = way == EMPTY ? 0 : way == READ || (way != MESSAGE && index != first) ? 8 : 16;
      await_completion(0, index, mlx5::CQE_REQ, bytes);
    }
  }

  // Reads a whole completion, and gives its place back.
  void await_completion(uint32_t cq, uint32_t index, uint8_t kind, uint32_t bytes) {
    auto* words = reinterpret_cast<uint64_t*>(&m_->entries[cq][index % (1u << HCA_LOG_ENTRIES[cq])]);
    uint64_t last;
    do {
      last = memory->load(&words[7], 8, Kind::ORDERED);
      pause();
    } while (!mlx5::owned_by_software(uint8_t(last >> 56), index, HCA_LOG_ENTRIES[cq]));
    if (last >> 60 != kind) {
      static char text[96];
      const uint64_t syndromes = memory->load(&words[6], 8, Kind::PAYLOAD) >> 48;
      snprintf(text, sizeof text, "hca: a request failed, check and syndrome %04llx", static_cast<unsigned long long>(syndromes));
      found(text);
    }
    if (mlx5::be32(uint32_t(memory->load(&words[5], 8, Kind::PAYLOAD) >> 32)) != bytes) found("hca: a completion that is not complete");
    memory->store(&m_->record[2 + cq].word[mlx5::RECORD_CONSUMER], 4, mlx5::be32((index + 1) & 0xffffff), Kind::ORDERED);
  }

  std::unique_ptr<HcaMemory> m_;
  hca::View view_{};
  std::vector<uint32_t> ways_;
  uint32_t rounds_;
  bool record_first_, done_ = false;
  uint32_t next_ = 0, receives_ = 0, received_ = 0;
  uint64_t counted_so_far_ = 0;
};

inline void run_hca(uint64_t number) {
  seed = number;
  alarm(60);
  Memory model;
  memory = &model;
  Random random{number ^ 0x4843410000000000ull};
  HcaWorld world(random);
  model.schedule.random = random;
  model.schedule.switch_rate = 1 + random.below(8);
  model.schedule.sleep_rate = 8u << random.below(5);
  model.drain_rate = 1u << random.below(4);
  model.stale_rate = 2 + random.below(4);
  model.longest_linger = random.one_in(2) ? 1 : 1024u << random.below(3);
  for (uint32_t id : {HCA_POSTER, HCA_ENGINE, HCA_RECEIVER}) {
    Buffer* buffer = model.add_buffer();
    buffer->threads = 1;
    model.agents[id] = Agent{id, buffer, View{}, View{}, nullptr};
  }
  model.schedule.start(HCA_POSTER, [&world] { world.post(); });
  model.schedule.start(HCA_ENGINE, [&world] { world.engine(); });
  model.schedule.start(HCA_RECEIVER, [&world] { world.receive(); });
  model.schedule.run();
}

}  // namespace ossicle::model
