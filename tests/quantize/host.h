// What a GPU's compiler knows by itself, for a kernel that a C++ compiler makes for the processor.
#include <cstring>
#define __global__
#define __device__ static
struct Place { int x, y; };
static thread_local Place blockIdx, blockDim, threadIdx;
struct alignas(16) uint4 { unsigned x, y, z, w; };
static int __float_as_int(float number) { int bits; std::memcpy(&bits, &number, 4); return bits; }
static float __int_as_float(int bits) { float number; std::memcpy(&number, &bits, 4); return number; }
