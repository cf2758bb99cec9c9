// The kernels. Written so that the host can run them: tests/cpp/host_cuda.h stands in for what nvcc and the device
// offer.
//
// scan_kernel, from top to bottom: each block takes groups of chunks, a warp per chunk; writes what a group found of
// each tensor; the block that finishes last folds these parts, in an order that depends on shapes only, and writes the
// answer.
#pragma once

#include "scan_cuda_chunk.cuh"

namespace nanscan::cuda {

constexpr int64_t kFoldByThread = 4;  // parts of a tensor that one thread adds up; above it a warp does
constexpr int64_t kFoldByWarp = 256;  // ... and above it the whole block

template <class P>
struct Shared {
  Row chunk[2][kGroupChunks];  // two, so that one barrier per group suffices
  Place place[2][kGroupChunks];
  Row warp[kGroupChunks];
  Row counted;
  uint32_t listed;
  uint32_t list[P::kCapacity];  // tensors with more than kFoldByThread parts, in any order
  bool last;
};

// ---- where a chunk belongs -----------------------------------------------------------------------------------------

template <class P>
NANSCAN_DEVICE uint32_t end_of(const P& params, uint32_t entry) {
  return params.entries[entry + 1].first_chunk - params.entries[entry].gap;
}

// The last entry that begins at or before `chunk`.
template <class P>
NANSCAN_DEVICE uint32_t search(const P& params, uint32_t chunk) {
  uint32_t low = 0, high = params.head.count;
  NANSCAN_NO_UNROLL
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (params.entries[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Names no entry if the chunk is in none.
template <class P>
NANSCAN_DEVICE Place locate(const P& params, uint32_t chunk) {
  if (chunk >= params.head.chunks) return {kNoIndex, 0, 0};
  const uint32_t entry = search(params, chunk), end = end_of(params, entry);
  if (chunk >= end) return {kNoIndex, 0, 0};
  return {entry, chunk - params.entries[entry].first_chunk, end - chunk - 1};
}

// ---- groups --------------------------------------------------------------------------------------------------------

// The lane of the first chunk that a group has of a tensor adds up those behind it. Where the tensor begins in the
// group the sum is its row so far; else it is one of the parts that the last block adds to that row.
template <class P>
NANSCAN_DEVICE void store_parts(const P& params, Shared<P>& shared, uint32_t group, int parity, uint32_t warp) {
  const Place place = shared.place[parity][warp];
  if (place.entry == kNoIndex || (warp != 0 && shared.place[parity][warp - 1].entry == place.entry)) return;
  Row sum = shared.chunk[parity][warp];
  const int64_t per_chunk = kChunkBytes / element_bytes_of(dtype_of(params.entries[place.entry]));
  NANSCAN_NO_UNROLL
  for (uint32_t w = warp + 1; w < kGroupChunks && shared.place[parity][w].entry == place.entry; ++w) {
    Row next = shared.chunk[parity][w];
    next.first_bad = next.first_bad < 0 ? -1 : next.first_bad + (w - warp) * per_chunk;
    merge(sum, next);
  }
  sum.first_bad = sum.first_bad < 0 ? -1 : sum.first_bad + place.index * per_chunk;
  Row* const to =
      place.index == 0 ? params.head.rows + params.head.first_row + place.entry : params.head.continued + group;
  *to = sum;
}

template <class P>
NANSCAN_DEVICE void scan_groups(const P& params, Shared<P>& shared) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int parity = 0;
  for (uint32_t group = blockIdx.x; group * kGroupChunks < params.head.chunks; group += gridDim.x, parity ^= 1) {
    const Place place = locate(params, group * kGroupChunks + warp);
    if (lane == 0) shared.place[parity][warp] = place;
    if (place.entry != kNoIndex) {
      const Row found = read_chunk(params.entries[place.entry], place, lane);
      if (lane == 0) shared.chunk[parity][warp] = found;
    }
    __syncthreads();
    if (lane == 0) store_parts(params, shared, group, parity, warp);
  }
}

// ---- the last block ------------------------------------------------------------------------------------------------

// True, for all threads, in the one block that comes last; that one can read all that the others wrote, by ordinary
// loads. In the order of CUDA's memory model: writes, barrier, fence, atomic there; atomic, fence, barrier, reads here.
template <class P>
NANSCAN_DEVICE bool is_last_block(const P& params, Shared<P>& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    // atomicInc wraps to 0 at the last block, so that the ticket is ready for the next launch whatever its grid.
    shared.last = atomicInc(params.head.ticket, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
    shared.listed = 0;
  }
  __syncthreads();
  return shared.last;
}

struct Parts {
  const Row* first;
  int64_t count;
};

// What groups after the first found of an entry.
template <class P>
NANSCAN_DEVICE Parts parts_of(const P& params, uint32_t entry) {
  const uint32_t begin = params.entries[entry].first_chunk, end = end_of(params, entry);
  if (begin == end) return {nullptr, 0};
  const uint32_t first = begin / kGroupChunks, last = (end - 1) / kGroupChunks;
  return {params.head.continued + first + 1, static_cast<int64_t>(last - first)};
}

// What `count` threads at a stride find together; this one is the `begin`-th.
NANSCAN_DEVICE Row fold_strided(const Parts& parts, int64_t begin, int64_t stride) {
  Row sum = empty_row();
  for (int64_t k = begin; k < parts.count; k += stride) merge(sum, parts.first[k]);
  return sum;
}

template <class P>
NANSCAN_DEVICE void add_to_row(const P& params, uint32_t entry, const Row& more) {
  Row* const to = params.head.rows + params.head.first_row + entry;
  Row row = *to;
  merge(row, more);
  *to = row;
}

// Every thread gets the sum over the block. All threads must come here together.
template <class P>
NANSCAN_DEVICE Row block_merge(Shared<P>& shared, const Row& mine) {
  const Row sum = warp_merge(mine);
  __syncthreads();  // the former use of shared.warp is over
  if (threadIdx.x % 32 == 0) shared.warp[threadIdx.x / 32] = sum;
  __syncthreads();
  Row all = shared.warp[0];
  NANSCAN_NO_UNROLL
  for (int w = 1; w < kGroupChunks; ++w) merge(all, shared.warp[w]);
  return all;
}

// Tensors within one group have their row already; an empty one gets it here; short ones are finished, long ones
// listed.
template <class P>
NANSCAN_DEVICE void fold_short(const P& params, Shared<P>& shared) {
  for (uint32_t entry = threadIdx.x; entry < params.head.count; entry += kThreads) {
    const Parts parts = parts_of(params, entry);
    if (parts.first == nullptr) {
      params.head.rows[params.head.first_row + entry] = empty_row();
    } else if (parts.count > kFoldByThread) {
      shared.list[atomicAdd(&shared.listed, 1u)] = entry;
    } else if (parts.count > 0) {
      add_to_row(params, entry, fold_strided(parts, 0, 1));
    }
  }
}

template <class P>
NANSCAN_DEVICE void fold_long(const P& params, Shared<P>& shared) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (uint32_t k = warp; k < shared.listed; k += kGroupChunks) {
    const Parts parts = parts_of(params, shared.list[k]);
    if (parts.count > kFoldByWarp) continue;
    const Row sum = warp_merge(fold_strided(parts, lane, 32));
    if (lane == 0) add_to_row(params, shared.list[k], sum);
  }
  for (uint32_t k = 0; k < shared.listed; ++k) {
    const Parts parts = parts_of(params, shared.list[k]);
    if (parts.count <= kFoldByWarp) continue;
    const Row sum = block_merge(shared, fold_strided(parts, threadIdx.x, kThreads));
    if (threadIdx.x == 0) add_to_row(params, shared.list[k], sum);
  }
}

// The sum over rows [begin, end); first_bad is the index of the first row with a NaN or Inf.
template <class P>
NANSCAN_DEVICE Row fold_rows(const P& params, Shared<P>& shared, int64_t begin, int64_t end) {
  Row sum = empty_row();
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    Row row = params.head.rows[t];
    row.first_bad = row.first_bad < 0 ? -1 : t;
    merge(sum, row);
  }
  return block_merge(shared, sum);
}

// ---- the answer ----------------------------------------------------------------------------------------------------

// How much the fused optimizer must divide by beyond the incoming scale, >= 1: torch's clip_grad_norm_, turned around.
NANSCAN_DEVICE double clip_divisor(double norm, double scale, double clip_norm) {
  return fmax(1.0, (norm / scale + 1e-6) / clip_norm);
}

NANSCAN_DEVICE void write_header(const ScanHead& head, const Row& counted, const Row& others) {
  const double root = sqrt(counted.sumsq);
  const double norm = root * (counted.exponent > 0 ? kUp : counted.exponent < 0 ? kDown : 1.0);
  const double scale = head.grad_scale == nullptr ? 1.0 : static_cast<double>(*head.grad_scale);
  const double divisor = clip_divisor(norm, scale, head.clip_norm);
  const double largest = 0x1.fffffep127;
  const bool dead = !(scale > 0.0 && scale <= largest);  // a loss scale that went to 0 or Inf: nothing can be unscaled
  const bool incoming = dead || (head.found_inf != nullptr && !(*head.found_inf <= 0.0f));  // NaN counts as found
  Header& out = *head.header;
  out.finite_norm = norm;
  out.norm = counted.nan_count > 0   ? static_cast<double>(NAN)
             : counted.inf_count > 0 ? static_cast<double>(INFINITY)
                                     : norm;
  out.absmax = counted.absmax;
  out.nan_count = counted.nan_count + others.nan_count;
  out.inf_count = counted.inf_count + others.inf_count;
  out.first_bad_tensor = counted.first_bad >= 0 ? counted.first_bad : others.first_bad;
  const bool found = out.nan_count + out.inf_count > 0 || incoming;
  out.found_inf = found ? 1.0f : 0.0f;
  const double product = scale * divisor;
  out.grad_scale = static_cast<float>(product > largest ? largest : product);
  out.clip_factor = found ? 1.0 : 1.0 / divisor;
}

// A barrier lies between each row's writing and its reading; the rows of earlier launches are complete.
template <class P>
NANSCAN_DEVICE void finish(const P& params, Shared<P>& shared) {
  fold_short(params, shared);
  __syncthreads();
  fold_long(params, shared);
  if (params.head.header == nullptr) return;  // a later launch has the rest of the tensors
  __syncthreads();
  const Row counted = fold_rows(params, shared, 0, params.head.norm_count);
  if (threadIdx.x == 0) shared.counted = counted;
  const Row others = fold_rows(params, shared, params.head.norm_count, params.head.total);
  if (threadIdx.x == 0) write_header(params.head, shared.counted, others);
}

template <class P>
__global__ void __launch_bounds__(kThreads, 2) scan_kernel(const NANSCAN_PARAMS P params) {
  NANSCAN_SHARED(Shared<P>, shared);
  scan_groups(params, shared);
  if (is_last_block(params, shared)) finish(params, shared);
}

// ---- clear ---------------------------------------------------------------------------------------------------------

NANSCAN_DEVICE void fill_zero(char* data, uint32_t bytes, uint32_t lane) {
  const uint32_t offset = static_cast<uint32_t>(reinterpret_cast<uint64_t>(data) & 15);
  uint32_t head = offset == 0 ? 0 : 16 - offset;
  head = head < bytes ? head : bytes;
  const uint32_t vectors = (bytes - head) / 16, tail = head + 16 * vectors;
  for (uint32_t i = lane; i < head; i += 32) data[i] = 0;
  for (uint32_t i = lane; i < vectors; i += 32) reinterpret_cast<uint4*>(data + head)[i] = uint4{0, 0, 0, 0};
  for (uint32_t i = tail + lane; i < bytes; i += 32) data[i] = 0;
}

template <class P>
__global__ void __launch_bounds__(kThreads) clear_kernel(const NANSCAN_PARAMS P params) {
  if (*params.head.flag != 1.0f) return;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (uint32_t group = blockIdx.x; group * kGroupChunks < params.head.chunks; group += gridDim.x) {
    const Place place = locate(params, group * kGroupChunks + warp);
    if (place.entry == kNoIndex) continue;
    const Entry& entry = params.entries[place.entry];
    fill_zero(const_cast<char*>(address_of(entry, place)), bytes_of(entry, place), lane);
  }
}

}  // namespace nanscan::cuda
