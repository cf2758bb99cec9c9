// How a list of tensors becomes kernel launches: host code that touches no device, so that every size can be tested.
//
// A tensor is cut into chunks of kChunkBytes, one warp each. kGroupChunks consecutive chunks, of one tensor or of many
// tiny ones, are a group: the work of a block between two barriers. Both depend on the list's shapes alone: not on the
// device, and not on how many tensors its launches take.
#pragma once

#include <cstddef>
#include <cstdint>

#include "scan_cuda.h"

#ifndef NANSCAN_CUDA_WARPS  // the host-run tests use fewer, since each lane is a thread there
#define NANSCAN_CUDA_WARPS 16
#endif

namespace nanscan::cuda {

constexpr int64_t kChunkBytes = 8192;  // 64 float32 for each lane of a warp
constexpr int kGroupChunks = NANSCAN_CUDA_WARPS;
constexpr int kThreads = 32 * kGroupChunks;
constexpr int64_t kMaxChunks = int64_t{1} << 31;  // of one launch and of one tensor: 16 TiB
constexpr int64_t kTicketBytes = 64;

// A tensor in a launch. Its chunks are [first_chunk, first_chunk of the next entry - gap).
struct alignas(16) Entry {
  uint64_t address;
  uint32_t first_chunk;
  uint16_t last_count;  // elements in the last chunk
  uint8_t dtype;
  uint8_t gap;  // chunks that belong to no tensor, before the next entry
};
static_assert(kGroupChunks < 256 && sizeof(Entry) == 16 && kChunkBytes < (1 << 16),
              "metadata travels in 16 bytes per tensor");

struct ScanHead {
  uint32_t count;     // entries
  uint32_t chunks;    // of all entries
  int64_t first_row;  // row of the first entry: launches before this one had the others
  int64_t total;      // rows of all launches
  int64_t norm_count;
  Header* header;  // null in all launches but the last
  Row* rows;
  Row* continued;  // one per group: what the group found of the tensor that began in an earlier group
  uint32_t* ticket;
  const float* grad_scale;
  const float* found_inf;
  double clip_norm;
};

struct ClearHead {
  uint32_t count;
  uint32_t chunks;
  const float* flag;
};

constexpr int kSmallBytes = 4096;   // what every driver takes
constexpr int kLargeBytes = 32764;  // what CUDA 12.1 takes, from compute capability 7.0 on

// Entries that fit into kernel parameters; one more ends the last tensor.
template <class Head>
constexpr int entries_in(int bytes) {
  return (bytes - (static_cast<int>(sizeof(Head)) + 15) / 16 * 16) / 16 - 1;
}

// The first of each so many tensors begins a group, so that small launches and large ones cut the list alike.
constexpr int64_t kAligned = entries_in<ScanHead>(kSmallBytes);

// Kernel parameters of at most kBytes. Large ones take a whole number of small ones.
template <class Head, int kBytes>
struct alignas(16) Params {
  static constexpr int kFits = entries_in<Head>(kBytes);
  static constexpr int kCapacity = kFits < kAligned ? kFits : kFits - kFits % static_cast<int>(kAligned);
  Head head;
  Entry entries[kCapacity + 1];
};
static_assert(sizeof(Params<ScanHead, kSmallBytes>) <= kSmallBytes &&
              sizeof(Params<ScanHead, kLargeBytes>) <= kLargeBytes);

constexpr bool is_dtype(int32_t dtype) {
  return dtype >= 0 && dtype < static_cast<int32_t>(sizeof kComponents / sizeof kComponents[0]);
}

// Chunks of a tensor, or -1 if it is malformed or larger than kMaxChunks.
inline int64_t chunks_of(const Tensor& t) {
  if (!is_dtype(static_cast<int32_t>(t.dtype)) || t.numel < 0) return -1;
  const int64_t per_chunk = kChunkBytes / element_bytes(t.dtype);
  if (t.numel > kMaxChunks * per_chunk) return -1;
  return (t.numel + per_chunk - 1) / per_chunk;
}

inline int64_t groups_of(int64_t chunks) { return (chunks + kGroupChunks - 1) / kGroupChunks; }

// Chunks to leave out before tensor `index` of a list, where `chunks` have been given out.
inline int64_t gap_before(int64_t index, int64_t chunks) {
  return index % kAligned == 0 ? groups_of(chunks) * kGroupChunks - chunks : 0;
}

// What is wrong with a tensor, or null.
inline const char* fault_of(const Tensor& t) {
  if (!is_dtype(static_cast<int32_t>(t.dtype))) return "has an unknown dtype";
  if (t.numel < 0) return "has a negative number of elements";
  if (chunks_of(t) < 0) return "is larger than 16 TiB";
  if (t.numel > 0 && t.data == nullptr) return "has elements but no memory";
  const auto align = static_cast<uint64_t>(component_bytes(t.dtype));
  if (reinterpret_cast<uint64_t>(t.data) % align != 0) return "is not aligned to its element type";
  return nullptr;
}

inline int64_t workspace_bytes(const Tensor* tensors, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t more = chunks_of(tensors[i]);
    if (more < 0) return -1;
    chunks += gap_before(i, chunks) + more;
  }
  return kTicketBytes + groups_of(chunks) * static_cast<int64_t>(sizeof(Row));  // no launch has more groups than this
}

inline int64_t output_bytes(int64_t count) { return kRowsOffset + count * static_cast<int64_t>(sizeof(Row)); }

// Puts as many tensors into `params` as fit, from `begin` on; returns the index of the first that does not.
// The tensors have passed fault_of(), so that one always fits.
template <class P>
int64_t pack(const Tensor* tensors, int64_t begin, int64_t count, P& params) {
  int64_t chunks = 0, i = begin;
  for (; i < count && i - begin < P::kCapacity; ++i) {
    const Tensor& t = tensors[i];
    const int64_t more = chunks_of(t), gap = gap_before(i, chunks);
    if (chunks + gap + more > kMaxChunks) break;
    if (i > begin) params.entries[i - begin - 1].gap = static_cast<uint8_t>(gap);
    chunks += gap;
    const int64_t before_last = more == 0 ? 0 : (more - 1) * (kChunkBytes / element_bytes(t.dtype));
    params.entries[i - begin] = {reinterpret_cast<uint64_t>(t.data), static_cast<uint32_t>(chunks),
                                 static_cast<uint16_t>(t.numel - before_last), static_cast<uint8_t>(t.dtype), 0};
    chunks += more;
  }
  params.entries[i - begin] = {0, static_cast<uint32_t>(chunks), 0, 0, 0};
  params.head.count = static_cast<uint32_t>(i - begin);
  params.head.chunks = static_cast<uint32_t>(chunks);
  return i;
}

// Calls launch(params) for each launch of a scan, in order, until one returns non-zero; an empty list is one launch.
template <class P, class Launch>
int32_t plan_scan(const Scan& scan, P& params, Launch&& launch) {
  auto* output = static_cast<char*>(scan.output);
  auto* workspace = static_cast<char*>(scan.workspace);
  ScanHead& head = params.head;
  head.total = scan.count;
  head.norm_count = scan.norm_count;
  head.rows = reinterpret_cast<Row*>(output + kRowsOffset);
  head.ticket = reinterpret_cast<uint32_t*>(workspace);
  head.continued = reinterpret_cast<Row*>(workspace + kTicketBytes);
  head.grad_scale = scan.grad_scale;
  head.found_inf = scan.found_inf;
  head.clip_norm = scan.clip_norm;
  int64_t next = 0;
  do {
    head.first_row = next;
    next = pack(scan.tensors, next, scan.count, params);
    head.header = next == scan.count ? reinterpret_cast<Header*>(output) : nullptr;
    if (const int32_t error = launch(params)) return error;
  } while (next < scan.count);
  return 0;
}

// The same for a clear; an empty list is no launch.
template <class P, class Launch>
int32_t plan_clear(const Clear& clear, P& params, Launch&& launch) {
  params.head.flag = clear.flag;
  for (int64_t next = 0; next < clear.count;) {
    next = pack(clear.tensors, next, clear.count, params);
    if (params.head.chunks == 0) continue;
    if (const int32_t error = launch(params)) return error;
  }
  return 0;
}

}  // namespace nanscan::cuda
