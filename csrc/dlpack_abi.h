// The few binary structures of DLPack 1.x that the engine reads (source: the DLPack specification, dmlc/dlpack).
// A test compiles this file beside PyTorch's bundled copy and compares sizes and offsets.
#pragma once

#include <cstdint>

namespace nanscan::dlpack {

constexpr uint32_t kMajorVersion = 1;

enum DeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLROCM = 10, kDLCUDAManaged = 13 };

enum TypeCode : uint8_t {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLComplex = 5,
  kDLBool = 6,
  kDLFloat8_e4m3fn = 10,
  kDLFloat8_e5m2 = 12,
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct Device {
  DeviceType device_type;
  int32_t device_id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null means row-major contiguous
  uint64_t byte_offset;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* prev_api;
};

// The table behind `type(tensor).__dlpack_c_exchange_api__`. Functions return 0, or -1 with a Python error set.
struct ExchangeApi {
  ExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* py_object, Tensor* out);
  int (*current_work_stream)(DeviceType device_type, int32_t device_id, void** out_stream);
};

constexpr const char* kCapsuleName = "dlpack_exchange_api";

}  // namespace nanscan::dlpack
