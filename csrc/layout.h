// How a tensor lies in memory: reduced to the fewest (size, stride) pairs that visit each of its elements.
#pragma once

#include <cstdint>
#include <vector>

namespace nanscan {

struct Dim {
  int64_t size;
  int64_t stride;  // elements
};

struct Layout {
  std::vector<Dim> dims;   // outermost first, strides falling; broadcast (stride 0) and size-1 dimensions are gone
  int64_t numel = 0;       // elements visited once: the logical count divided by `repeat`
  int64_t repeat = 1;      // how often each visited element occurs (product of the broadcast sizes)
  bool flat = false;       // the visited elements are one gap-free run of memory starting at the data pointer
  bool row_major = false;  // flat, and memory order is the logical order
};

// True if `strides` (null: yes) describe a row-major contiguous tensor: the common case, decided without a Layout.
bool is_row_major(int32_t ndim, const int64_t* shape, const int64_t* strides);

Layout make_layout(int32_t ndim, const int64_t* shape, const int64_t* strides);

// Number of elements; 0 if a size is 0.
int64_t count_elements(int32_t ndim, const int64_t* shape);

// Copies `count` elements of `element_bytes` each, from the `begin`-th in layout order, into `out`.
void gather(const Layout& layout, const char* data, int64_t element_bytes, int64_t begin, int64_t count, char* out);

// Visits elements in logical (row-major) order and returns the flat logical index of the first one for which
// `is_bad(context, element pointer)` holds, -1 if none does. Broadcast dimensions are visited once.
int64_t find_first(int32_t ndim, const int64_t* shape, const int64_t* strides, const char* data, int64_t element_bytes,
                   bool (*is_bad)(const void* context, const char* element), const void* context);

}  // namespace nanscan
