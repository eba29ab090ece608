// The software HCA of each rank, for links that go through it: its segment, and its engine as one more coroutine.
//
// A link has a queue pair for each channel at both ends: the sender's carries slots and tails, the receiver's carries heads.
#pragma once
#include "hca/engine.h"
#include "memory_model.h"

namespace ossicle::model {

constexpr uint32_t HCA_CHANNELS = 2, HCA_QPS = 2 * HCA_CHANNELS, HCA_MAX_LOG_BLOCKS = 3;
// What links call their ends.
enum End : uint32_t { SENDING = 0, RECEIVING = HCA_CHANNELS };

struct alignas(128) HcaSegment {
  hca::Header header;
  hca::Qp qp[HCA_QPS];
  hca::Cq cq[HCA_QPS];
  hca::Region region[1];
  alignas(64) uint8_t ring[HCA_QPS][mlx5::BLOCK_BYTES << HCA_MAX_LOG_BLOCKS];
  mlx5::Cqe completion[HCA_QPS][1 << HCA_MAX_LOG_BLOCKS];
  alignas(128) uint64_t record[HCA_QPS][FLAG_STRIDE];
  uint64_t doorbell[HCA_QPS][FLAG_STRIDE];

  uint64_t offset(const void* of) const {
    return uint64_t(static_cast<const uint8_t*>(of) - reinterpret_cast<const uint8_t*>(this));
  }
};

constexpr uint32_t LINK_KEY = 1, LINK_GENERATION = 1 << 12;
inline uint32_t hca_qp_number(uint32_t place) { return LINK_GENERATION | place; }

struct Hca {
  HcaSegment segment;
  uint8_t* memory[1];
  hca::View view[3];  // its own, the next rank's, the previous rank's
  hca::InjectedFault fault;
  hca::Engine engine;

  // `begin` to `begin` + `bytes` is all that requests may name.
  void open(uint8_t* begin, uint64_t bytes) {
    hca::Header& header = segment.header;
    header = hca::Header{};
    header.magic = hca::MAGIC;
    header.version = hca::VERSION;
    header.qps = header.cqs = HCA_QPS;
    header.regions = 1;
    header.qp_table = segment.offset(segment.qp);
    header.cq_table = segment.offset(segment.cq);
    header.region_table = segment.offset(segment.region);
    header.bytes = sizeof segment;
    segment.region[0] = hca::Region{reinterpret_cast<uint64_t>(begin), bytes, hca::OUTSIDE, LINK_KEY,
                                    hca::LOCAL_WRITE | hca::REMOTE_WRITE, 1, 0};
    memory[0] = begin;
    view[0] = seen();
    engine = hca::Engine{view, &fault, 1, 0};
  }

  hca::View seen() { return hca::View{reinterpret_cast<uint8_t*>(&segment), memory}; }

  // A queue pair that is connected with `peer_place` of the HCA in view[peer], and what a kernel is told of it. Indices
  // begin at `first`, so that they wrap in some runs.
  NetQueue connect(uint32_t place, uint32_t peer, uint32_t peer_place, uint32_t log_blocks, uint32_t log_completions,
                   uint32_t first) {
    hca::Qp& qp = segment.qp[place];
    qp = hca::Qp{};
    qp.number = hca_qp_number(place);
    qp.domain = 1;
    qp.send_ring = segment.offset(segment.ring[place]);
    qp.record = segment.offset(segment.record[place]);
    qp.doorbell = segment.offset(segment.doorbell[place]);
    qp.send_log_blocks = log_blocks;
    qp.send_cq = qp.receive_cq = place;
    qp.access = hca::REMOTE_WRITE;
    qp.peer = peer;
    qp.peer_number = hca_qp_number(peer_place);
    qp.timeout_ns = qp.rnr_timeout_ns = hca::FOR_EVER;
    qp.consumed = qp.published = first;
    qp.state = hca::READY_TO_SEND;
    hca::Cq& cq = segment.cq[place];
    cq = hca::Cq{};
    cq.entries = segment.offset(segment.completion[place]);
    cq.log_entries = log_completions;
    cq.flags = hca::IGNORE_OVERRUN;
    cq.produced = first;
    memset(segment.completion[place], 0xff, sizeof segment.completion[place]);
    memset(segment.ring[place], 0, sizeof segment.ring[place]);
    segment.doorbell[place][0] = 0;
    segment.record[place][0] = uint64_t(mlx5::be32(first & 0xffff)) << 32;
    engine.views = std::max(engine.views, peer + 1);

    NetQueue queue{};
    queue.ring = segment.ring[place];
    queue.completions = reinterpret_cast<const uint64_t*>(segment.completion[place]);
    queue.record = segment.record[place];
    queue.doorbell = segment.doorbell[place];
    queue.log_blocks = log_blocks;
    queue.log_completions = log_completions;
    queue.doorbell_qpn = mlx5::be32(qp.number << 8);
    const auto control = [&](uint8_t flags) {
      const uint32_t units = mlx5::be32(qp.number << 8 | REQUEST_UNITS);
      return mlx5::ControlSegment{mlx5::be32(mlx5::RDMA_WRITE), units, 0, {0, 0}, flags, 0};
    };
    queue.put.control = control(mlx5::COMPLETE_ON_ERROR);
    queue.put.remote = mlx5::RemoteSegment{0, mlx5::be32(LINK_KEY), 0};
    queue.put.data = mlx5::DataSegment{0, mlx5::be32(LINK_KEY), 0};
    queue.flag.control = control(mlx5::COMPLETE_ALWAYS);
    queue.flag.remote = queue.put.remote;
    queue.flag.word.header = mlx5::InlineHeader{mlx5::be32(mlx5::INLINE_BIT | 8)};
    queue.cursor = NetCursor{first, first, first, first};
    return queue;
  }

  bool failed() const {
    for (const hca::Qp& qp : segment.qp) {
      if (qp.state == hca::ERROR) return true;
    }
    return false;
  }
};

}  // namespace ossicle::model
