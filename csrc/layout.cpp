#include "layout.h"

#include <algorithm>
#include <cstring>

namespace nanscan {

bool is_row_major(int32_t ndim, const int64_t* shape, const int64_t* strides) {
  if (strides == nullptr) return true;
  int64_t expected = 1;
  for (int32_t d = ndim - 1; d >= 0; --d) {
    if (shape[d] == 1) continue;
    if (strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

int64_t count_elements(int32_t ndim, const int64_t* shape) {
  int64_t n = 1;
  for (int32_t d = 0; d < ndim; ++d) n *= shape[d];
  return n;
}

static void merge_adjacent(std::vector<Dim>& dims) {
  std::vector<Dim> merged;
  for (const Dim& dim : dims) {
    if (!merged.empty() && merged.back().stride == dim.size * dim.stride) {
      merged.back() = {merged.back().size * dim.size, dim.stride};
    } else {
      merged.push_back(dim);
    }
  }
  dims = std::move(merged);
}

Layout make_layout(int32_t ndim, const int64_t* shape, const int64_t* strides) {
  Layout layout;
  layout.numel = count_elements(ndim, shape);
  layout.row_major = is_row_major(ndim, shape, strides);
  if (layout.row_major || layout.numel == 0) {
    layout.dims = {{layout.numel, 1}};
    layout.flat = layout.row_major = true;
    return layout;
  }
  for (int32_t d = 0; d < ndim; ++d) {
    if (shape[d] == 1) continue;
    if (strides[d] == 0) {
      layout.repeat *= shape[d];
    } else {
      layout.dims.push_back({shape[d], strides[d]});
    }
  }
  layout.numel /= layout.repeat;
  std::stable_sort(layout.dims.begin(), layout.dims.end(),
                   [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  merge_adjacent(layout.dims);
  if (layout.dims.empty()) layout.dims = {{1, 1}};
  layout.flat = layout.dims.size() == 1 && layout.dims[0].stride == 1;
  return layout;
}

static void copy_run(const char* from, int64_t stride_bytes, int64_t element_bytes, int64_t count, char* to) {
  if (stride_bytes == element_bytes) {
    std::memcpy(to, from, static_cast<size_t>(count * element_bytes));
    return;
  }
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * element_bytes, from + i * stride_bytes, element_bytes);
}

void gather(const Layout& layout, const char* data, int64_t element_bytes, int64_t begin, int64_t count, char* out) {
  const auto& dims = layout.dims;
  const int inner = static_cast<int>(dims.size()) - 1;
  std::vector<int64_t> index(dims.size());
  int64_t rest = begin;
  for (int d = inner; d >= 0; --d) {
    index[d] = rest % dims[d].size;
    rest /= dims[d].size;
  }
  while (count > 0) {
    int64_t offset = 0;
    for (int d = 0; d <= inner; ++d) offset += index[d] * dims[d].stride;
    const int64_t run = std::min(count, dims[inner].size - index[inner]);
    copy_run(data + offset * element_bytes, dims[inner].stride * element_bytes, element_bytes, run, out);
    out += run * element_bytes;
    count -= run;
    index[inner] += run;
    for (int d = inner; d > 0 && index[d] == dims[d].size; --d) {
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

int64_t find_first(int32_t ndim, const int64_t* shape, const int64_t* strides, const char* data, int64_t element_bytes,
                   bool (*is_bad)(const void* context, const char* element), const void* context) {
  if (count_elements(ndim, shape) == 0) return -1;
  std::vector<int64_t> index(ndim, 0), logical(ndim, 1);
  for (int32_t d = ndim - 2; d >= 0; --d) logical[d] = logical[d + 1] * shape[d + 1];
  int64_t memory = 0;
  for (;;) {
    if (is_bad(context, data + memory * element_bytes)) {
      int64_t flat = 0;
      for (int32_t d = 0; d < ndim; ++d) flat += index[d] * logical[d];
      return flat;
    }
    int32_t d = ndim - 1;
    for (; d >= 0; --d) {
      const int64_t stride = strides == nullptr ? logical[d] : strides[d];
      const int64_t size = stride == 0 ? 1 : shape[d];
      if (++index[d] < size) {
        memory += stride;
        break;
      }
      memory -= (size - 1) * stride;
      index[d] = 0;
    }
    if (d < 0) return -1;
  }
}

}  // namespace nanscan
