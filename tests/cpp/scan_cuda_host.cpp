// Runs the CUDA kernels on the host and compares them with plain float64 code. One test per argument; see tests[]
// below.
//
//   scan_cuda_host TEST               run one test: exit status 0 and a line "ok TEST: ...", else 1 and what differs
//   scan_cuda_host --without N TEST   leave out barrier or fence number N of the kernels, counted from 0 in the source
#include "host_cuda.h"
// The kernels come after what stands in for the device.
#include "host_scan.h"

namespace {

using namespace host_scan;

// ---- values --------------------------------------------------------------------------------------------------------

// Nothing, a few elements, odd ones, and those around one chunk and more.
std::vector<int64_t> sizes_of(DType dtype) {
  const int64_t chunk = kChunkBytes / element_bytes(dtype);
  return {0, 1, 3, 16, 17, 100, chunk - 1, chunk, chunk + 1, 2 * chunk + chunk / 3};
}

// Size x alignment x magnitude x planted value, many tensors to a launch.
void test_values(DType dtype, const std::vector<int64_t>& sizes, const std::vector<Magnitude>& magnitudes) {
  List list;
  uint64_t seed = 1;
  for (const int64_t size : sizes) {
    for (const int64_t shift : shifts(dtype)) {
      for (const Magnitude magnitude : magnitudes) {
        for (const Planted planted : planted_with(magnitude)) list.add(dtype, size, shift, magnitude, planted, seed++);
      }
    }
    if (list.tensors.size() < 120) continue;
    compare(list, run(list));
    list = List();
  }
  compare(list, run(list));
}

template <DType T>
void values_of() {
  test_values(T, sizes_of(T), all_magnitudes());
}

void few_values() {
  for (const DType dtype : kDTypes) test_values(dtype, {0, 1, 17, 2049, 5000}, {Magnitude::Usual});
}

// Every bit pattern of the small formats, one tensor each, so that no error hides behind a larger neighbour.
void every_pattern() {
  for (const DType dtype : {DType::Float8E4M3FN, DType::Float8E5M2}) {
    List list;
    for (int bits = 0; bits < 256; ++bits) list.add_bytes(dtype, {static_cast<uint8_t>(bits)});
    compare(list, run(list));
  }
  for (const DType dtype : {DType::Float16, DType::BFloat16}) {
    List list;
    for (uint32_t high = 0; high < 256; ++high) {
      std::vector<uint8_t> bytes;
      for (uint32_t low = 0; low < 256; ++low) bytes.insert(bytes.end(), {uint8_t(low), uint8_t(high)});
      list.add_bytes(dtype, bytes);
    }
    compare(list, run(list));
  }
}

// ---- long tensors and many of them ---------------------------------------------------------------------------------

// Tensors whose parts a thread, a warp and the whole block add up, with a bad element in the last, partial chunk only;
// and tiny ones, so that the last thing a block does is to write from all its warps.
void long_tensors() {
  List list;
  const int64_t chunk = kChunkBytes / 4, group = chunk * kGroupChunks;
  list.add(DType::Float32, 5, 0, Magnitude::Usual, Planted::None, 1);
  list.add(DType::Float32, group * kFoldByThread + 1, 0, Magnitude::Usual, Planted::NanLast, 2);
  list.add(DType::Float32, group * (kFoldByThread + 9) + 3, 4, Magnitude::Usual, Planted::InfLast, 3);
  list.add(DType::Float32, group * (kFoldByWarp + 2) + 7, 0, Magnitude::Usual, Planted::NanLast, 4);
  list.add(DType::Float64, group * (kFoldByThread + 2), 8, Magnitude::Mixed, Planted::None, 5);
  list.add(DType::Float32, 0, 0, Magnitude::Usual, Planted::None, 6);
  list.add(DType::Float32, group * (kFoldByThread + 5) - 1, 0, Magnitude::Usual, Planted::NanAndInf, 7);
  for (int i = 0; i < 20; ++i) list.add(DType::Float32, 10, 0, Magnitude::Usual, Planted::None, 8 + i);
  compare(list, run(list));
}

List mixed_list(uint64_t seed, int tensors) {
  List list;
  for (int i = 0; i < tensors; ++i) {
    const DType dtype = kDTypes[(seed + i) % std::size(kDTypes)];
    const int64_t size = i % 7 == 3 ? 0 : i % 5 == 0 ? 4000 + 37 * i : 1 + (i * 29) % 90;
    const Planted planted = i % 11 == 10 ? Planted::NanAndInf : i % 13 == 12 ? Planted::InfLast : Planted::None;
    list.add(dtype, size, shifts(dtype)[i % shifts(dtype).size()], Magnitude::Usual, planted, seed + i);
  }
  return list;
}

// Several launches into one list of rows.
void several_launches() {
  const List list = mixed_list(3, 60);
  using P = Params<ScanHead, 256>;
  const Answer many = run<P>(list);
  check(many.launches == (60 + P::kCapacity - 1) / P::kCapacity && many.launches > 5,
        "60 tensors take several launches");
  compare(list, many);
}

// The bits are those of one launch with parameters of 32 KB, wherever the parameters of 4 KB make it several.
void small_and_large_parameters() {
  List list;
  const int64_t group = kChunkBytes / 2 * kGroupChunks;
  for (int i = 0; i < 2 * kAligned + 9; ++i) {
    const int64_t size = i % 50 == 49 ? 6 * group + i : i % kAligned == kAligned - 1 ? 0 : 1 + i % 9;
    list.add(DType::Float16, size, 0, Magnitude::Usual, i % 100 == 99 ? Planted::NanLast : Planted::None, i);
  }
  const Answer small = run(list), large = run<Params<ScanHead, kLargeBytes>>(list);
  check(small.launches == 3 && large.launches == 1, "three launches or one");
  compare(list, small);
  check_same(small, large, "another size of the parameters");
}

// Where each chunk lies in its group, for all launches of a list; nothing is run.
template <class P>
std::vector<uint32_t> places_in_groups(const std::vector<Tensor>& tensors) {
  static P params;
  std::vector<uint32_t> places;
  Scan scan{};
  scan.tensors = tensors.data();
  scan.count = static_cast<int64_t>(tensors.size());
  plan_scan(scan, params, [&](P& p) {
    for (uint32_t i = 0; i < p.head.count; ++i) places.push_back(p.entries[i].first_chunk % kGroupChunks);
    return 0;
  });
  return places;
}

// Several launches of either size too.
void many_large_parameters() {
  std::vector<Tensor> tensors;
  for (int64_t i = 0; i < 5000; ++i)
    tensors.push_back({reinterpret_cast<void*>(64), kChunkBytes * (1 + i * i % 7), DType::Float8E5M2, 0});
  check(places_in_groups<Params<ScanHead, kSmallBytes>>(tensors) ==
            places_in_groups<Params<ScanHead, kLargeBytes>>(tensors),
        "5,000 tensors are cut alike");
}

// The same bits for any number of blocks, fewer and more than there are groups, and for any alignment.
void same_bits() {
  const List list = mixed_list(5, 40);
  const Answer first = run(list, {.blocks = 1, .at_once = 1});
  for (const uint32_t blocks : {2u, 3u, 7u, 40u}) check_same(first, run(list, {.blocks = blocks}), "another grid");
  for (const DType dtype : kDTypes) {
    List aligned, shifted;
    for (const int64_t shift : shifts(dtype)) {
      aligned.add(dtype, 3000, 0, Magnitude::Usual, Planted::None, 9);
      shifted.add(dtype, 3000, shift, Magnitude::Usual, Planted::None, 9);
    }
    check_same(run(aligned), run(shifted), "another alignment");
  }
}

// One workspace, scans of different lists and grids, one after the other: the ticket is always left ready.
void workspace_reuse() {
  const List big = mixed_list(7, 50), small = mixed_list(8, 3), none;
  Workspace workspace(big);
  for (int round = 0; round < 3; ++round) {
    for (const List* list : {&big, &small, &none}) compare(*list, run(*list, {.blocks = 1u + round}, workspace));
  }
}

// ---- the header ----------------------------------------------------------------------------------------------------

void empty_lists() {
  compare(List(), run(List()));
  List zero;
  for (int i = 0; i < 3; ++i) zero.add(DType::BFloat16, 0, 0, Magnitude::Usual, Planted::None, 0);
  compare(zero, run(zero));
  Tensor null = {nullptr, 0, DType::Float32, 0};
  check(fault_of(null) == nullptr, "an empty tensor may have no memory");
}

// The loss joins the counts and the flag, not the norms.
void extra_tensors() {
  for (const Planted planted : {Planted::None, Planted::NanLast}) {
    List list = mixed_list(2, 8);
    list.add(DType::Float32, 1, 0, Magnitude::Usual, planted, 5);
    list.norm_count = 8;
    const Answer answer = run(list);
    compare(list, answer);
    check(std::isfinite(answer.header().norm), "a NaN loss leaves the norm of finite gradients alone");
    check(answer.header().found_inf == (planted == Planted::None ? 0.0f : 1.0f), "a NaN loss is found");
    check(answer.header().first_bad_tensor == (planted == Planted::None ? -1 : 8), "and named");
  }
}

void clipping() {
  const List list = mixed_list(2, 3);
  for (const float scale : {1.0f, 65536.0f, 0.125f}) {
    for (const double clip : {1e-3, 1e9, static_cast<double>(INFINITY)}) {
      compare(list, run(list, {.blocks = 1, .clip_norm = clip, .scale = &scale}));
    }
  }
  compare(list, run(list, {.clip_norm = 1e-3}));
  const float largest = FLT_MAX;
  compare(list, run(list, {.clip_norm = 1e-3, .scale = &largest}));
}

// Whatever comes in as the flag, what goes out is 0 or 1.
void incoming_flag() {
  const List list = mixed_list(2, 3);
  for (const float found : {0.0f, -0.0f, 1.0f, 2.0f, INFINITY, NAN}) {
    const Answer answer = run(list, {.clip_norm = 1e-3, .found = &found});
    compare(list, answer);
    check(answer.header().found_inf == (found == 0.0f ? 0.0f : 1.0f), "the incoming flag is passed on");
  }
  for (const float scale : {0.0f, -1.0f, INFINITY, NAN}) {
    check(run(list, {.scale = &scale}).header().found_inf == 1.0f, "a loss scale that unscales nothing is a flag");
  }
}

// ---- clear ---------------------------------------------------------------------------------------------------------

void clear_where_flagged() {
  for (const float flag : {0.0f, 1.0f, 2.0f, NAN}) {
    List list = mixed_list(4, 60);
    const List before = list.copy();
    clear(list, flag);
    for (size_t i = 0; i < list.tensors.size(); ++i) {
      const auto now = list.bytes(i), was = before.bytes(i);
      check(now == (flag == 1.0f ? std::vector<uint8_t>(now.size(), 0) : was),
            "cleared if, and only if, the flag is 1");
    }
    check(list.guards_intact(), "nothing beside the tensors was written");
  }
}

// ---- sizes, without memory -----------------------------------------------------------------------------------------

void huge_sizes() {
  const int64_t n = (int64_t{1} << 33) + 5;
  const Tensor tensors[] = {{reinterpret_cast<void*>(64), n, DType::Float32, 0},
                            {reinterpret_cast<void*>(64), 1, DType::Float16, 0}};
  check(chunks_of(tensors[0]) == (n + 2047) / 2048, "chunks of a tensor of more than 2^33 elements");
  const int64_t groups = (chunks_of(tensors[0]) + 1 + kGroupChunks - 1) / kGroupChunks;
  check(workspace_bytes(tensors, 2) == kTicketBytes + groups * int64_t{sizeof(Row)}, "its workspace");
  Params<ScanHead, kSmallBytes> params;
  check(pack(tensors, 0, 2, params) == 2 && params.entries[0].last_count == 5, "its last chunk");
  const Place place = locate(params, static_cast<uint32_t>(chunks_of(tensors[0])) - 1);
  check(place.entry == 0 && place.after == 0, "its last chunk is found");
  check(address_of(params.entries[0], place) == reinterpret_cast<char*>(64) + (n - 5) * 4, "at a 64-bit address");
  check(bytes_of(params.entries[0], place) == 20, "with its bytes");
  const Place first = locate(params, 0);
  check(first.index == 0 && first.after == chunks_of(tensors[0]) - 1, "its first chunk has all others behind it");
  const Tensor too_large = {reinterpret_cast<void*>(64), int64_t{1} << 43, DType::Float64, 0};
  check(chunks_of(too_large) == -1 && fault_of(too_large) != nullptr, "a tensor above 16 TiB is refused");
  const Tensor largest = {reinterpret_cast<void*>(64), int64_t{1} << 41, DType::Float64, 0};
  const Tensor two[] = {largest, tensors[1]};
  check(pack(two, 0, 2, params) == 1 && pack(two, 1, 2, params) == 2, "what does not fit takes another launch");
  check(workspace_bytes(&too_large, 1) == -1, "and has no workspace");
}

void faults() {
  alignas(16) char memory[64];
  const auto fault = [&](const void* data, int64_t numel, int dtype) {
    const char* text = fault_of({data, numel, static_cast<DType>(dtype), 0});
    return std::string(text == nullptr ? "" : text);
  };
  check(fault(memory, 3, 0) == "", "a good tensor");
  check(fault(memory + 1, 3, 0) == "is not aligned to its element type", "misaligned float32");
  check(fault(memory + 4, 3, static_cast<int>(DType::Float64)) == "is not aligned to its element type",
        "misaligned float64");
  check(fault(memory + 8, 1, static_cast<int>(DType::Complex128)) == "", "complex128 at 8 bytes");
  check(fault(nullptr, 3, 0) == "has elements but no memory", "null");
  check(fault(memory, -1, 0) == "has a negative number of elements", "negative");
  check(fault(memory, 1, 99) == "has an unknown dtype" && fault(memory, 1, -1) == "has an unknown dtype", "dtype");
}

const std::pair<const char*, void (*)()> kTests[] = {
#define NANSCAN_TEST(name, ...) {"values_" #name, values_of<DType::name>},
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_TEST)
#undef NANSCAN_TEST
        {"few_values", few_values},
    {"every_pattern", every_pattern},
    {"long_tensors", long_tensors},
    {"several_launches", several_launches},
    {"small_and_large_parameters", small_and_large_parameters},
    {"many_large_parameters", many_large_parameters},
    {"same_bits", same_bits},
    {"workspace_reuse", workspace_reuse},
    {"empty_lists", empty_lists},
    {"extra_tensors", extra_tensors},
    {"clipping", clipping},
    {"incoming_flag", incoming_flag},
    {"clear_where_flagged", clear_where_flagged},
    {"huge_sizes", huge_sizes},
    {"faults", faults},
};

}  // namespace

int main(int argc, char** argv) {
  int next = 1;
  if (argc > 2 && std::string(argv[1]) == "--without") {
    host_cuda::left_out = std::atoi(argv[2]);
    next = 3;
  }
  for (const auto& [name, test] : kTests) {
    if (next >= argc) std::printf("%s\n", name);
    if (next >= argc || std::string(argv[next]) != name) continue;
    test();
    return report(name);
  }
  return next >= argc ? 0 : 2;
}
