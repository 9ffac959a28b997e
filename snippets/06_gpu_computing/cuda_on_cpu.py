"""Run a CUDA C++ program on a CPU: g++ instead of nvcc, a fiber instead of each GPU thread.

    python cuda_on_cpu.py [--seeds 0,1] [--late-errors] NAME.cu [arguments of NAME]
    python cuda_on_cpu.py -o PROGRAM NAME.cu    (EMU_SEED=1 EMU_LATE=1 ./PROGRAM [arguments])

The emulator checks every load and store that two threads could share (g++ calls a hook before
each of them, by -fsanitize=thread). It reports an access outside of an allocation and memory
that was never written. It reports two threads at one address with no barrier between them, if
one of the two writes. It reports a host pointer in a kernel and a device pointer in host code,
and managed memory that the host touches before it has waited for the kernels. All the threads
that a barrier or a warp operation names must reach it. __syncthreads and __syncwarp order
memory accesses; a shuffle or a vote does not.

The threads of a block and the blocks run in order for seed 0 and in a random order for other
seeds. The program must print the same for all seeds. So the emulator finds faults that occur in
these runs, with these inputs: a run without a report is a test and not a proof.

With --late-errors a fault is reported as a GPU does: by a later call, and without its place.
The emulator is compiled once and stored in the folder for temporary files of this user.
Speed is not emulated: there are no caches, no sectors and no occupancy.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILER = os.environ.get("CXX", "g++")
COMMON = "-x c++ -std=c++17 -O1 -w -fno-pie"
CHECKED = (
    "-g1 -fsanitize=thread --param tsan-instrument-func-entry-exit=0"
    " -fsanitize=bounds,signed-integer-overflow,alignment,integer-divide-by-zero"
    " -fno-sanitize-recover=all"
)

HEADER = r"""
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <ucontext.h>
#include <unistd.h>
#include <utility>
#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define RAW __attribute__((no_sanitize("thread", "undefined")))  // our own code goes unchecked

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

#define CUDA_ERRORS(X)                                                                \
  X(cudaSuccess, 0, "no error")                                                       \
  X(cudaErrorInvalidValue, 1, "invalid argument")                                     \
  X(cudaErrorMemoryAllocation, 2, "out of memory")                                    \
  X(cudaErrorNotReady, 600, "device not ready")                                       \
  X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")         \
  X(cudaErrorLaunchFailure, 719, "unspecified launch failure")
#define X(name, code, words) name = code,
enum cudaError_t { CUDA_ERRORS(X) };
#undef X
#define X(name, code, words) \
  if (e == name) return words;
inline const char* cudaGetErrorString(cudaError_t e) { CUDA_ERRORS(X) return "unknown"; }
#undef X
#define X(name, code, words) \
  if (e == name) return #name;
inline const char* cudaGetErrorName(cudaError_t e) { CUDA_ERRORS(X) return "unknown"; }
#undef X

namespace emu {
// ---- memory: one arena, and for every byte of it who touched it last ----------------------
constexpr size_t ARENA = size_t(1) << 29, SHARED = size_t(1) << 20, LIMIT = 48 << 10;
extern char* arena;
inline size_t dynamic_limit = LIMIT;
inline uint32_t now = 2, fenced = 0;  // a clock of barriers, not of time
inline bool in_kernel = false, poisoned = false;
inline cudaError_t error = cudaSuccess;
extern const char* const file;  // the program's name and a colon
inline bool busy = true;  // until the emulator is set up
struct Busy {             // its own memory is not the kernel's
  RAW Busy() { busy = true; }
  RAW ~Busy() { busy = false; }
};

// ---- threads: fibers, switched at barriers ------------------------------------------------
enum State { READY, BARRIER, WARP, DONE };
struct Fiber {
  ucontext_t context;
  State state;
  unsigned id, mask;
  int line;
  uint32_t block_time, warp_time;  // of its last __syncthreads, __syncwarp
  bool orders;                     // whether the warp operation orders memory
  uint64_t given, seen[32];
};
inline Fiber* self = nullptr;
RAW inline unsigned block_number() {
  return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}
enum Access { READ, WRITE, ATOMIC };
// set by who wants to see every access of a kernel to the arena
inline void (*watch)(size_t at, size_t size, int access, const char* kind, uint32_t pc);
void check(const void* pointer, size_t size, Access access, void* caller);
void wait(State state, int line, unsigned mask = 0, bool orders = true);
const uint64_t* meet(unsigned mask, uint64_t value, int line, bool orders = false);
struct Variable {  // where a __shared__ variable of this block is
  uint32_t block, launch;
  size_t at;
};
void* shared(Variable& variable, size_t size);
template <class T, int ID>
RAW T& shared() {  // a __shared__ variable: one for the whole block
  static Variable variable;
  return *(T*)shared(variable, sizeof(T));
}
struct Config {
  dim3 grid, block;
  size_t dynamic;
  Config(dim3 grid, dim3 block, size_t dynamic = 0, void* = nullptr)
      : grid(grid), block(block), dynamic(dynamic) {}
};
void run(const char* what, Config c, void (*job)(void*), void* data);
template <class Body, class... Args>
RAW void launch(const char* what, Config c, Body body, Args... args) {
  auto call = [body, args...] { body(args...); };
  using Call = decltype(call);
  auto job = [](void* data) RAW {
    Call own = *(Call*)data;
    in_kernel = true;
    own();
  };
  run(what, c, job, &call);
}
cudaError_t result(bool waits, cudaError_t now_failed = cudaSuccess);
cudaError_t copy(void* to, const void* from, size_t n, int kind, bool waits);
cudaError_t allocate(void** p, size_t n, const char* kind);
}  // namespace emu

// ---- what a kernel may call ---------------------------------------------------------------
#define LINE int line = __builtin_LINE()
inline void __syncthreads(LINE) { emu::wait(emu::BARRIER, line); }
RAW inline void __syncwarp(unsigned mask = ~0u, LINE) { emu::wait(emu::WARP, line, mask); }
RAW inline void __threadfence() { emu::fenced = ++emu::now; }
RAW inline void __threadfence_block() {}
template <class T>
RAW T emu_shuffle(unsigned mask, T value, int from, int line) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emu::meet(mask, bits, line)[from];
  memcpy(&value, &bits, sizeof(T));
  return value;
}
RAW inline int emu_lane() { return emu::self->id % 32; }
template <class T>
RAW T __shfl_sync(unsigned m, T v, int from, int width = 32, LINE) {
  return emu_shuffle(m, v, (emu_lane() & -width) + (from & (width - 1)), line);
}
template <class T>
RAW T __shfl_xor_sync(unsigned m, T v, int x, int width = 32, LINE) {
  int lane = emu_lane(), from = lane ^ x;
  return emu_shuffle(m, v, from <= (lane | (width - 1)) ? from : lane, line);
}
template <class T>
RAW T __shfl_down_sync(unsigned m, T v, int by, int width = 32, LINE) {
  int lane = emu_lane();
  return emu_shuffle(m, v, lane + by <= (lane | (width - 1)) ? lane + by : lane, line);
}
template <class T>
RAW T __shfl_up_sync(unsigned m, T v, int by, int width = 32, LINE) {
  int lane = emu_lane();
  return emu_shuffle(m, v, lane - by >= (lane & -width) ? lane - by : lane, line);
}
RAW inline unsigned __ballot_sync(unsigned mask, int vote, LINE) {
  const uint64_t* votes = emu::meet(mask, vote != 0, line);
  unsigned all = 0;
  for (int k = 0; k < 32; k++) all |= unsigned(votes[k] == 1) << k;
  return all;
}
RAW inline int __any_sync(unsigned mask, int vote, LINE) {
  return __ballot_sync(mask, vote, line) != 0;
}
RAW inline int __all_sync(unsigned mask, int vote, LINE) {
  return !__ballot_sync(mask, !vote, line);
}

#define ATOMIC(name, result)                                            \
  template <class T>                                                    \
  RAW T name(T* p, std::common_type_t<T> v) {                           \
    emu::check(p, sizeof(T), emu::ATOMIC, __builtin_return_address(0)); \
    T old = *p;                                                         \
    *p = result;                                                        \
    return old;                                                         \
  }
ATOMIC(atomicAdd, old + v)
ATOMIC(atomicSub, old - v)
ATOMIC(atomicExch, v)
ATOMIC(atomicMin, v < old ? v : old)
ATOMIC(atomicMax, v > old ? v : old)
ATOMIC(atomicAnd, old & v)
ATOMIC(atomicOr, old | v)
ATOMIC(atomicXor, old ^ v)
ATOMIC(atomicInc, old >= v ? 0 : old + 1)
template <class T>
RAW T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> v) {
  emu::check(p, sizeof(T), emu::ATOMIC, __builtin_return_address(0));
  T old = *p;
  if (old == expected) *p = v;
  return old;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
#define MINMAX(T)                                  \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
MINMAX(int)
MINMAX(unsigned)
MINMAX(long)
MINMAX(unsigned long)
MINMAX(long long)
MINMAX(unsigned long long)
MINMAX(float)
MINMAX(double)
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class To, class From>
To emu_bits(From x) {
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
#define VECTORS(T, name)                                                        \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                            \
  struct name##3 { T x, y, z; };                                                \
  struct alignas(sizeof(T) < 8 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                    \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }            \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define uint3 emu_uint3  // there is one already
VECTORS(float, float)
VECTORS(double, double)
VECTORS(int, int)
VECTORS(unsigned, uint)
VECTORS(unsigned char, uchar)
VECTORS(short, short)
#undef uint3

// ---- 16-bit floats: stored as bits, computed in float -------------------------------------
inline uint16_t emu_round(float x, int exponent_bits) {  // to nearest, ties to even
  uint32_t u = emu_bits<uint32_t>(x), sign = u >> 16 & 0x8000;
  if (exponent_bits == 8) return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  if (x != x) return 0x7fff;
  float a = std::fabs(x);
  if (a >= 65520) return sign | 0x7c00;
  if (a < 6.103515625e-05f) return sign | (int)std::nearbyint(a * 16777216.0f);
  u = emu_bits<uint32_t>(a);
  return sign | ((u + 0xfff + (u >> 13 & 1) - (112u << 23)) >> 13);
}
static const bool emu_even = emu_round(0x1.03p0f, 8) == 0x3f82 || (abort(), false);  // a tie
inline float emu_widen(uint16_t h, int exponent_bits) {
  if (exponent_bits == 8) return emu_bits<float>(uint32_t(h) << 16);
  int e = h >> 10 & 31, m = h & 1023;
  float a = e == 31 ? (m ? NAN : INFINITY)
            : e     ? std::ldexp(1024 + m, e - 25)
                    : std::ldexp(m, -24);
  return h & 0x8000 ? -a : a;
}
template <int E>
struct emu_float16 {
  uint16_t bits;
  emu_float16() = default;
  emu_float16(float x) : bits(emu_round(x, E)) {}
  emu_float16(double x) : emu_float16((float)x) {}
  emu_float16(int x) : emu_float16((float)x) {}
  operator float() const { return emu_widen(bits, E); }
};
using __half = emu_float16<5>;
using half = __half;
using __nv_bfloat16 = emu_float16<8>;
inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return x; }
struct alignas(4) __half2 { half x, y; };
using half2 = __half2;
inline half2 __float2half2_rn(float x) { return {x, x}; }
inline float2 __half22float2(half2 v) { return {v.x, v.y}; }
inline half2 __hsub2(half2 a, half2 b) { return {a.x - b.x, a.y - b.y}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {a.x * b.x + c.x, a.y * b.y + c.y}; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }

// ---- tensor cores: every lane holds every 32nd element of a fragment ----------------------
namespace nvcuda::wmma {
struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32 {};
}  // namespace precision
template <class T>
struct stored {
  using type = T;
};
template <>
struct stored<precision::tf32> {
  using type = float;
};
template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
  static constexpr int rows = std::is_same_v<Use, matrix_b> ? K : M;
  static constexpr int columns = std::is_same_v<Use, matrix_a> ? K : N;
  static constexpr int num_elements = rows * columns / 32;
  typename stored<T>::type x[num_elements];
  RAW typename stored<T>::type at(int row, int column, const fragment* const* lanes) const {
    int e = row * columns + column;
    return lanes[e % 32]->x[e / 32];
  }
};
inline float __float_to_tf32(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000) & 0xffffe000);
}
template <class F, class T>
void fill_fragment(F& f, T value) {
  for (auto& x : f.x) x = value;
}
#define EACH(f) for (int k = 0, e = emu_lane(); k < f.num_elements; k++, e += 32)
#define AT(f, by_row) \
  ((by_row) ? e / f.columns * ld + e % f.columns : e % f.columns * ld + e / f.columns)
template <class U, int M, int N, int K, class T, class L, class P>
__attribute__((always_inline)) inline void load_matrix_sync(fragment<U, M, N, K, T, L>& f,
                                                            const P* p, unsigned ld) {
  EACH(f) f.x[k] = p[AT(f, (std::is_same_v<L, row_major>))];
}
template <class U, int M, int N, int K, class T, class P>
__attribute__((always_inline)) inline void load_matrix_sync(fragment<U, M, N, K, T>& f,
                                                            const P* p, unsigned ld,
                                                            layout_t l) {
  EACH(f) f.x[k] = p[AT(f, l == mem_row_major)];
}
template <class U, int M, int N, int K, class T, class P>
__attribute__((always_inline)) inline void store_matrix_sync(P* p,
                                                             const fragment<U, M, N, K, T>& f,
                                                             unsigned ld, layout_t l) {
  EACH(f) p[AT(f, l == mem_row_major)] = f.x[k];
}
template <int M, int N, int K, class T, class LA, class LB, class C>
RAW void mma_sync(fragment<accumulator, M, N, K, C>& d,
                  const fragment<matrix_a, M, N, K, T, LA>& a,
                  const fragment<matrix_b, M, N, K, T, LB>& b,
                  const fragment<accumulator, M, N, K, C>& c, LINE) {
  const fragment<matrix_a, M, N, K, T, LA>* as[32];
  const fragment<matrix_b, M, N, K, T, LB>* bs[32];
  memcpy(as, emu::meet(~0u, (uint64_t)&a, line), sizeof as);
  memcpy(bs, emu::meet(~0u, (uint64_t)&b, line), sizeof bs);
  EACH(d) {
    float sum = c.x[k];
    for (int i = 0; i < K; i++) sum += (float)a.at(e / N, i, as) * (float)b.at(i, e % N, bs);
    d.x[k] = sum;
  }
  emu::meet(~0u, 0, line);  // nobody changes a fragment that another lane still reads
}
}  // namespace nvcuda::wmma

// ---- asynchronous copies to shared memory: done when they are waited for, not before ------
void __pipeline_memcpy_async(void* to, const void* from, size_t n, size_t zero = 0);
void __pipeline_commit();
void __pipeline_wait_prior(unsigned keep);

// ---- what the host may call ---------------------------------------------------------------
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
using cudaStream_t = void*;
using cudaEvent_t = timespec*;
struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
  int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock,
      maxThreadsPerMultiProcessor, regsPerBlock, l2CacheSize;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
inline const unsigned cudaEventDefault = 0, cudaEventDisableTiming = 2,
                      cudaStreamNonBlocking = 1, cudaMemAttachGlobal = 1;
using emu::result;
template <class T>
cudaError_t cudaMalloc(T** p, size_t n) {
  return emu::allocate((void**)p, n, "device");
}
template <class T>
cudaError_t cudaMallocManaged(T** p, size_t n, unsigned = 1) {
  return emu::allocate((void**)p, n, "managed");
}
template <class T>
cudaError_t cudaMallocHost(T** p, size_t n) {
  return *p = (T*)malloc(n), cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* p) { return free(p), cudaSuccess; }
cudaError_t cudaFree(void* p);
RAW inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
  return emu::copy(to, from, n, kind, true);
}
RAW inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n,
                                       cudaMemcpyKind kind, cudaStream_t = 0) {
  return emu::copy(to, from, n, kind, false);
}
template <class T>
cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t n) {
  if (n > sizeof symbol) return result(true, cudaErrorInvalidValue);
  return memcpy((void*)&symbol, from, n), result(true);
}
template <class T>
cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t n) {
  if (n > sizeof symbol) return result(true, cudaErrorInvalidValue);
  return memcpy(to, (void*)&symbol, n), result(true);
}
cudaError_t cudaMemset(void* p, int value, size_t n);
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t = 0) {
  return cudaMemset(p, value, n);
}
inline cudaError_t cudaDeviceSynchronize() { return result(true); }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return result(true); }
inline cudaError_t cudaPeekAtLastError() { return emu::error; }
inline cudaError_t cudaGetLastError() {
  cudaError_t last = emu::error;
  if (!emu::poisoned) emu::error = cudaSuccess;  // the fault of a kernel stays
  return last;
}
inline cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* d) { return *d = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceReset() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = {"a CPU in the place of a GPU (cuda_on_cpu.py)",
        emu::ARENA,
        emu::LIMIT,
        99 << 10,
        9,
        0,
        1,
        32,
        1024,
        2048,
        65536,
        0};
  return cudaSuccess;
}
template <class F>
cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int n) {
  return n > 227 << 10 ? result(false, cudaErrorInvalidValue)
                       : (emu::dynamic_limit = n, cudaSuccess);
}
inline cudaError_t cudaEventCreate(cudaEvent_t* e) {
  return *e = new timespec, cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  return cudaEventCreate(e);
}
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t = 0) {
  return clock_gettime(CLOCK_MONOTONIC, e), cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return result(true); }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t e) { return delete e, cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  double seconds = difftime(b->tv_sec, a->tv_sec);
  return *ms = seconds * 1e3 + (b->tv_nsec - a->tv_nsec) * 1e-6, cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* s) { return *s = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  return cudaStreamCreate(s);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) {
  return cudaSuccess;
}
"""

EMULATOR = r"""
#include "emulator.h"

#include <map>
#include <string>
#include <sys/mman.h>
#include <tuple>
#include <vector>

namespace emu {
// ---- memory -------------------------------------------------------------------------------
struct Touch {
  uint32_t time, thread, pc;  // time 0: not yet; thread: block * 1024 + index
};
struct Shadow {
  Touch write, read, other_read;  // the last write, and the last reads by two threads
  bool atomic;                    // the write was
};
struct Region {
  size_t size;
  const char* kind;
  bool live;
};
char* reserve(size_t bytes) {  // address space; memory only for what is touched
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* p = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (p == MAP_FAILED) {
    fprintf(stderr, "cuda_on_cpu.py needs %zu GiB of address space\n", bytes >> 30);
    _exit(1);
  }
  return (char*)p;
}
char* arena = reserve(ARENA);
Shadow* shadow = (Shadow*)reserve(ARENA * sizeof(Shadow));
std::map<size_t, Region> regions;  // by offset in the arena
size_t global_top = SHARED, shared_top = 0, dynamic_bytes = 0;
uint32_t launched = 2;
uint32_t waited = 2;  // when the host last waited for the kernels
bool late = getenv("EMU_LATE");
cudaError_t pending = cudaSuccess;
std::string kernel;

constexpr size_t STACK = 256 << 10;
Fiber* fibers = new Fiber[1024];
char* stacks = reserve(STACK * 1024);
ucontext_t scheduler;
std::vector<std::tuple<void*, const void*, size_t, size_t>> copies[1024];  // not waited for
void (*job)(void*);
void* job_data;
unsigned seed = getenv("EMU_SEED") ? atoi(getenv("EMU_SEED")) : 0;

std::string place(uint32_t pc) {
  std::string command = "addr2line -s -i -e /proc/" + std::to_string(getpid()) + "/exe ";
  char text[256], found[256] = "";
  snprintf(text, sizeof text, "0x%x", pc - 1);
  FILE* pipe = popen((command + text).c_str(), "r");
  while (fgets(text, sizeof text, pipe))
    if (strstr(text, ".cu:")) {
      strcpy(found, text);
      break;
    }
  pclose(pipe);
  found[strcspn(found, " \n")] = 0;
  return *found ? found : "the runtime";
}
std::string name(unsigned index, dim3 shape, const char* what) {
  std::string x = std::to_string(index % shape.x),
              y = std::to_string(index / shape.x % shape.y);
  if (shape.z > 1)
    return what + (" (" + x + "," + y + ",") + std::to_string(index / shape.x / shape.y) + ")";
  return what + (shape.y > 1 ? " (" + x + "," + y + ")" : " " + x);
}
std::string who(unsigned thread, bool with_block) {
  std::string text = name(thread % 1024, blockDim, "thread");
  return with_block ? name(thread / 1024, gridDim, "block") + ", " + text : text;
}
void fail(const std::string& where, const std::string& what, cudaError_t code) {
  if (late && self) {  // as a GPU: the grid dies, and a later call says so
    pending = code, in_kernel = busy = false;
    Fiber* dead = self;
    swapcontext(&dead->context, &scheduler);
  }
  busy = true;
  fflush(stdout);
  std::string by = self
                       ? "kernel " + kernel + ", " + who(block_number() * 1024 + self->id, true)
                       : "host code";
  fprintf(stderr, "%s: %s: %s\n", where.c_str(), by.c_str(), what.c_str());
  fflush(stderr);
  _exit(1);
}

size_t low = 1, high = 0;  // bounds of the region of the last access
const Region* region;
extern "C" char __executable_start, end;
void check(const void* pointer, size_t size, Access access, void* caller) {
  if (busy) return;
  Busy guard;
  size_t at = (char*)pointer - arena;
  const char* verb = access == READ ? "reads" : access == WRITE ? "writes" : "updates";
  uint32_t pc = (uint32_t)(size_t)caller;
  if (at >= ARENA) {  // a kernel may touch its own stacks and static data, nothing else
    bool own = (size_t)((char*)pointer - stacks) < STACK * 1024 ||
               ((char*)pointer >= &__executable_start && (char*)pointer < &end);
    if (in_kernel && !own) {
      fail(place(pc), std::string(verb) + " memory of the host, or of nobody",
           cudaErrorIllegalAddress);
    }
    return;
  }
  if (at < low || at + size > high || !region->live) {
    auto next = regions.upper_bound(at);
    if (next == regions.begin()) next = regions.end();
    else --next;
    region = next == regions.end() ? nullptr : &next->second;
    low = region ? next->first : 1, high = region ? low + region->size : 0;
    if (!region || at + size > high || !region->live) {
      size_t over = region ? at + size - high : 0;
      std::string text = !region         ? "no memory at all"
                         : !region->live ? "memory that was freed"
                                         : std::to_string(size) + " bytes that end " +
                                               std::to_string(over) + " bytes behind " +
                                               std::to_string(region->size) + " bytes of " +
                                               region->kind + " memory";
      low = 1, high = 0;
      return fail(place(pc), verb + (" " + text), cudaErrorIllegalAddress);
    }
  }
  if (!in_kernel) {
    if (self == nullptr && *region->kind != 'm')
      fail(place(pc), std::string(verb) + " device memory: copy it with cudaMemcpy",
           cudaErrorInvalidValue);
    for (size_t i = at; i < at + size; i++) {
      Shadow& s = shadow[i];
      bool read = s.read.time > waited || s.other_read.time > waited;
      if (s.write.time > waited || (access != READ && read))
        fail(place(pc),
             verb + (" " + std::string(region->kind)) +
                 " memory of a kernel that the host has not waited for",
             cudaErrorInvalidValue);
      if (access != READ) s.write = {1, 0, pc};
    }
    return;
  }
  if (watch) watch(at, size, access, region->kind, pc);
  uint32_t me = block_number() * 1024 + self->id;
  auto conflict =
      [&](const Touch& t) {  // by another thread, and nothing has ordered the two
        if (t.time < launched || t.thread == me) return false;
        if (t.thread / 1024 != me / 1024) return *region->kind != 's' && t.time >= fenced;
        bool same_warp = t.thread / 32 == me / 32;
        return t.time >= self->block_time && !(same_warp && t.time < self->warp_time);
      };
  for (size_t i = at; i < at + size; i++) {
    Shadow& s = shadow[i];
    if (access != WRITE && s.write.time == 0)
      return fail(
          place(pc),
          std::string(verb) + " " + region->kind + " memory " +
              (s.write.pc ? "to which a copy of " + who(s.write.thread, false) + " at " +
                                place(s.write.pc) + " is still on its way"
                          : "that nobody has written yet"),
          cudaErrorLaunchFailure);
    const Touch* other = nullptr;
    if (conflict(s.write) && !(access == ATOMIC && s.atomic)) other = &s.write;
    if (access != READ && conflict(s.other_read)) other = &s.other_read;
    if (access != READ && conflict(s.read)) other = &s.read;
    if (other)
      return fail(place(pc),
                  std::string(verb) + " " + region->kind + " memory that " +
                      who(other->thread, other->thread / 1024 != me / 1024) +
                      (other == &s.write ? " writes" : " reads") + " at " + place(other->pc) +
                      ", and no barrier orders the two",
                  cudaErrorLaunchFailure);
    if (access == READ) {
      if (s.read.thread != me) s.other_read = s.read;
      s.read = {now, me, pc};
    } else s.write = {now, me, pc}, s.atomic = access == ATOMIC;
  }
}

// ---- waiting ------------------------------------------------------------------------------
void wait(State state, int line, unsigned mask, bool orders) {
  Fiber* me = self;
  if (state == WARP && !(mask >> me->id % 32 & 1))
    fail(file + std::to_string(line), "this lane is not in its own mask",
         cudaErrorLaunchFailure);
  me->state = state, me->line = line, me->mask = mask, me->orders = orders;
  in_kernel = false;
  swapcontext(&me->context, &scheduler);
  in_kernel = true;
}
const uint64_t* meet(unsigned mask, uint64_t value, int line, bool orders) {
  self->given = value;
  wait(WARP, line, mask, orders);
  return self->seen;
}
void entry() {
  job(job_data);
  in_kernel = false;
  self->state = DONE;
  swapcontext(&self->context, &scheduler);
}
unsigned random_below(unsigned n) {
  static uint64_t state = seed;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (state >> 33) % n;
}
std::vector<unsigned> order(unsigned n) {
  std::vector<unsigned> o(n);
  for (unsigned i = 0; i < n; i++) o[i] = i;
  if (seed)
    for (unsigned i = n; i > 1; i--) std::swap(o[i - 1], o[random_below(i)]);
  return o;
}
bool release(unsigned n) {  // wake whoever waits for nobody more; false: nobody woke
  bool woke = false;
  for (unsigned i = 0; i < n; i++) {
    Fiber& f = fibers[i];
    if (f.state != WARP) continue;
    unsigned base = i / 32 * 32, all = true;
    for (unsigned k = base; k < base + 32 && k < n; k++)
      if (f.mask >> (k - base) & 1 && fibers[k].state != DONE)
        all &= fibers[k].state == WARP && fibers[k].mask == f.mask && fibers[k].line == f.line;
    if (!all) continue;
    uint64_t values[32];
    unsigned mask = f.mask;
    ++now;
    for (unsigned k = 0; k < 32; k++)
      values[k] = mask >> k & 1 && base + k < n && fibers[base + k].state == WARP
                      ? fibers[base + k].given
                      : ~uint64_t(0);
    for (unsigned k = base; k < base + 32 && k < n; k++)
      if (mask >> (k - base) & 1 && fibers[k].state == WARP) {
        memcpy(fibers[k].seen, values, sizeof values);
        fibers[k].state = READY;
        if (fibers[k].orders) fibers[k].warp_time = now;  // a shuffle orders no memory
      }
    woke = true;
  }
  if (woke) return true;
  Fiber *first = nullptr, *other = nullptr;
  for (unsigned i = 0; i < n; i++) {
    Fiber& f = fibers[i];
    if (f.state == DONE) continue;
    if (!first) first = &f;
    else if (f.state != first->state || f.line != first->line) other = &f;
  }
  if (!first) return false;
  if (other || first->state != BARRIER) {
    auto at = [](Fiber* f) {
      return (f->state == WARP ? "the warp operation in line " : "the barrier in line ") +
             std::to_string(f->line);
    };
    self = first;
    fail(file + std::to_string(first->line),
         "waits at " + at(first) +
             (other ? " while " + who(other->id, false) + " waits at " + at(other)
                    : " for lanes that never come"),
         cudaErrorLaunchFailure);
  }
  ++now;
  for (unsigned i = 0; i < n; i++)
    if (fibers[i].state == BARRIER) fibers[i].state = READY, fibers[i].block_time = now;
  return true;
}
void run_block(unsigned number) {
  unsigned n = blockDim.x * blockDim.y * blockDim.z;
  blockIdx = {number % gridDim.x, number / gridDim.x % gridDim.y,
              number / gridDim.x / gridDim.y};
  ++now;
  low = 1, high = 0;
  regions.erase(regions.begin(), regions.lower_bound(SHARED));
  memset(arena, 0xff, shared_top + dynamic_bytes);  // NaN, for floats
  memset((void*)shadow, 0, (shared_top + dynamic_bytes) * sizeof(Shadow));
  shared_top = (dynamic_bytes + 127) / 128 * 128;
  if (dynamic_bytes) regions[0] = {dynamic_bytes, "shared", true};
  for (unsigned i = 0; i < n; i++) {
    Fiber& f = fibers[i];
    f.state = READY, f.id = i, f.block_time = f.warp_time = now;
    copies[i].clear();
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks + i * STACK;
    f.context.uc_stack.ss_size = STACK;
    makecontext(&f.context, entry, 0);
  }
  std::vector<unsigned> turn = order(n);
  do {
    for (unsigned i : turn) {
      if (fibers[i].state != READY) continue;
      self = &fibers[i];
      threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
      swapcontext(&scheduler, &self->context);
      if (pending) {
        self = nullptr;
        return;
      }
    }
    self = nullptr;
  } while (release(n));
}
void* shared(Variable& v, size_t size) {
  if (v.block != block_number() + 1 || v.launch != launched) {
    Busy guard;
    v = {block_number() + 1, launched, shared_top};
    shared_top += (size + 255) / 128 * 128;
    memset(arena + v.at, 0xff, size);
    memset((void*)(shadow + v.at), 0, size * sizeof(Shadow));
    regions[v.at] = {size, "shared", true};
  }
  return arena + v.at;
}
void run(const char* what, Config c, void (*call)(void*), void* data) {
  unsigned long long n = (unsigned long long)c.block.x * c.block.y * c.block.z;
  bool bad = n == 0 || n > 1024 || c.block.z > 64 || !c.grid.x || !c.grid.y || !c.grid.z ||
             c.grid.x > 0x7fffffff || c.grid.y > 65535 || c.grid.z > 65535 ||
             c.dynamic > dynamic_limit;
  if (bad) {
    error = cudaErrorInvalidValue;
    return;
  }
  if (poisoned) {
    error = pending;
    return;
  }
  job = call, job_data = data;
  kernel = what, gridDim = c.grid, blockDim = c.block, dynamic_bytes = c.dynamic;
  launched = ++now;
  for (unsigned b : order(c.grid.x * c.grid.y * c.grid.z)) {
    run_block(b);
    if (pending) return;
  }
  launched = ++now;
}
cudaError_t result(bool waits, cudaError_t now_failed) {
  if (waits) waited = now;
  if (pending && waits) poisoned = true;  // from here on every call fails
  if (poisoned) return error = pending;
  if (now_failed) error = now_failed;
  return now_failed;
}
cudaError_t copy(void* to, const void* from, size_t n, int kind, bool waits) {
  size_t a = (char*)to - arena, b = (char*)from - arena;
  bool to_device = a < ARENA, from_device = b < ARENA;
  if (result(waits)) return error;
  if (kind < 4 && (to_device != (kind == 1 || kind == 3) || from_device != (kind >= 2)))
    return result(false, cudaErrorInvalidValue);
  for (size_t at : {a, b}) {
    if (at >= ARENA) continue;
    auto r = regions.upper_bound(at);
    if (r == regions.begin() || (--r, !r->second.live || at + n > r->first + r->second.size))
      return result(false, cudaErrorInvalidValue);
  }
  memmove(to, from, n);
  if (to_device)
    for (size_t i = 0; i < n; i++)
      shadow[a + i].write = from_device ? shadow[b + i].write : Touch{1, 0, 0};
  return cudaSuccess;
}
cudaError_t allocate(void** p, size_t n, const char* kind) {
  if (result(false)) return error;
  if (n > ARENA - global_top - 512) return result(false, cudaErrorMemoryAllocation);
  *p = arena + global_top;
  regions[global_top] = {n, kind, true};
  memset(*p, 0xff, n);
  global_top += (n + 511) / 256 * 256;
  return cudaSuccess;
}
bool ready = (busy = false, true);
}  // namespace emu

// g++ calls these before every load and store; the library that belongs to them is not linked
#define HOOK(name, size, access)                                     \
  extern "C" void __tsan_##name(void* p) {                       \
    emu::check(p, size, emu::access, __builtin_return_address(0));   \
  }
#define HOOKS(n)                   \
  HOOK(read##n, n, READ)           \
  HOOK(write##n, n, WRITE)         \
  HOOK(unaligned_read##n, n, READ) \
  HOOK(unaligned_write##n, n, WRITE)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" void __tsan_read_range(void* p, size_t n) {
  emu::check(p, n, emu::READ, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* p, size_t n) {
  emu::check(p, n, emu::WRITE, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}

// ---- what the host and asynchronous copies need -------------------------------------------
void __pipeline_memcpy_async(void* to, const void* from, size_t n, size_t zero) {
  void* caller = __builtin_return_address(0);
  size_t at = (char*)to - emu::arena;
  if ((n != 4 && n != 8 && n != 16) || zero > n || at % n || (size_t)from % n)
    emu::fail(emu::place((uint32_t)(size_t)caller),
              "copies neither 4, 8 nor 16 bytes between addresses that are multiples of that",
              cudaErrorLaunchFailure);
  if (n > zero) emu::check(from, n - zero, emu::READ, caller);
  emu::check(to, n, emu::WRITE, caller);
  emu::Busy guard;
  for (size_t i = at; i < at + n; i++) emu::shadow[i].write.time = 0;  // not there to be read
  emu::copies[emu::self->id].push_back({to, from, n, zero});
}
void __pipeline_commit() {
  emu::Busy guard;
  emu::copies[emu::self->id].push_back({nullptr, nullptr, 0, 0});
}
void __pipeline_wait_prior(unsigned keep) {
  auto& c = emu::copies[emu::self->id];
  emu::busy = true;
  size_t groups = 0, i = 0;
  for (auto& copy : c) groups += !std::get<0>(copy);
  for (; groups > keep && i < c.size(); i++) {
    auto [to, from, n, zero] = c[i];
    if (!to) {
      groups--;
      continue;
    }
    emu::busy = false;
    emu::check(to, n, emu::WRITE, __builtin_return_address(0));
    emu::busy = true;
    memcpy(to, from, n - zero);
    memset((char*)to + n - zero, 0, zero);
  }
  c.erase(c.begin(), c.begin() + i);
  emu::busy = false;
}
cudaError_t cudaFree(void* p) {
  if (result(true) || !p) return emu::error;
  auto r = emu::regions.find((char*)p - emu::arena);
  if (r == emu::regions.end() || !r->second.live) return result(false, cudaErrorInvalidValue);
  r->second.live = false;
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t n) {
  std::vector<char> bytes(n, (char)value);
  return emu::copy(p, bytes.data(), n, cudaMemcpyHostToDevice, false);
}
"""

HEADERS = (
    "cuda_runtime.h cuda_fp16.h cuda_bf16.h mma.h cuda_pipeline.h device_launch_parameters.h"
)


def matching(text: str, at: int, pair: str, step: int) -> int:
    """Index of the bracket that closes (step 1) or opens (step -1) the one at `at`."""
    depth = 0
    while True:
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if depth == 0:
            return at
        at += step


def without_comments(text: str) -> str:
    """`text` with comments blanked; strings and line numbers stay as they are."""
    pattern = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        return found if found[0] == '"' else re.sub(r"[^\n]", " ", found)

    return re.sub(pattern, blank, text, flags=re.S)


def rewrite(text: str) -> str:
    """CUDA C++ to C++: launches become calls, shared variables become references."""
    text = without_comments(text)
    while (at := text.find("<<<")) >= 0:
        start = len(text[:at].rstrip())
        if text[start - 1] == ">":
            start = matching(text, start - 1, "<>", -1)
        start = re.search(r"[\w:]+\s*$", text[:start]).start()
        kernel = text[start:at].strip()
        stop = text.index(">>>", at)
        opening = text.index("(", stop)
        closing = matching(text, opening, "()", 1)
        arguments = text[opening + 1 : closing]
        call = (
            f'emu::launch("{kernel}", emu::Config({text[at + 3 : stop]}), '
            f"[=](auto... a) {{ {kernel}(a...); }}"
            f"{', ' if arguments.strip() else ''}{arguments})"
        )
        text = text[:start] + call + text[closing + 1 :]

    count = 0

    def reference(match: re.Match[str]) -> str:
        nonlocal count
        dynamic, kind, names = match[1], match[3], match[4]
        if dynamic:
            name = names.split("[")[0].strip()
            return f"{kind}* {name} = ({kind}*)emu::arena;"
        out = []
        for name, sizes in re.findall(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)(?:,|$)", names):
            count += 1
            out.append(
                f"typedef {kind} emu_{count} {sizes}; "
                f"emu_{count}& {name} = emu::shared<emu_{count}, {count}>();"
            )
        return " ".join(out)

    align = r"(?:__align__|alignas)\s*\([^)]*\)\s*"
    return re.sub(
        rf"(extern\s+)?({align})?__shared__\s+(?:{align})?"
        r"((?:[\w:]+\s+)*?[\w:]+(?:\s*<[^;]*>)?)\s+((?:\w+\s*(?:\[[^\]]*\]\s*)*,?\s*)+);",
        reference,
        text,
    )


def compile_to(result: Path, source: str, *options: str | Path) -> bool:
    """Compile C++ to an object file; False if it is wrong, and the compiler has said why."""
    command = [COMPILER, *COMMON.split(), *options, "-c", "-", "-o", result]
    return subprocess.run(command, input=source, text=True).returncode == 0


def emulator(headers: Path) -> Path:
    """The emulator's object file, compiled by whoever comes first: programs take a fraction."""
    name = hashlib.sha256(f"{COMPILER} {COMMON} {HEADER} {EMULATOR}".encode()).hexdigest()[:16]
    made = Path(tempfile.gettempdir(), f"cuda_on_cpu-{os.getuid()}-{name}.o")
    if not made.exists() or made.lstat().st_uid != os.getuid():
        compile_to(new := headers / "emulator.o", EMULATOR, "-I", headers)
        try:
            shutil.move(new, made)
        except OSError:  # it is somebody else's
            return new
    return made


def build(program: Path, binary: Path) -> None:
    """Compile `program` to `binary`."""
    if not shutil.which(COMPILER):
        sys.exit(f"cuda_on_cpu.py needs {COMPILER}, the GNU C++ compiler, version 12 or newer.")
    if not program.is_file():
        sys.exit(f"cuda_on_cpu.py: there is no file {program}.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "emulator.h").write_text(HEADER)
        for header in HEADERS.split():
            (folder / header).write_text('#include "emulator.h"\n')
        source = f'#include "emulator.h"\nconst char* const emu::file = "{program.name}:";\n'
        source += f'#line 1 "{program.name}"\n{rewrite(program.read_text())}'
        options = [*CHECKED.split(), "-I", folder, "-I", program.parent]
        if not compile_to(folder / "program.o", source, *options):
            sys.exit(f"cuda_on_cpu.py: {program} does not compile")
        # first the emulator, which must be set up first; and without -fsanitize=thread: the
        # hooks that it calls are the emulator's
        link = [COMPILER, "-no-pie", "-fsanitize=undefined", emulator(folder)]
        subprocess.run([*link, folder / "program.o", "-ldl", "-o", binary], check=True)


def main() -> int:
    """Compile, run once for each seed, compare what was printed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0,1", help="orders of the threads to try")
    parser.add_argument(
        "--late-errors", action="store_true", help="report faults as a GPU does"
    )
    parser.add_argument("-o", "--output", type=Path, help="compile only, to this file")
    parser.add_argument("program", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.output:
        build(args.program, args.output)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / args.program.stem
        build(args.program, binary)
        outputs = set()
        for seed in args.seeds.split(","):
            env = (
                os.environ
                | {"EMU_SEED": seed}
                | ({"EMU_LATE": "1"} if args.late_errors else {})
            )
            command = [binary, *args.arguments]
            run = subprocess.run(command, env=env, capture_output=True, text=True)
            if run.returncode:
                break
            # times may differ from run to run, results may not
            outputs.add(re.sub(r"≈\s*[-+\d.e]+", "≈", run.stdout))
    print(run.stdout, end="", flush=True)
    print(run.stderr, end="", file=sys.stderr)
    if run.returncode < 0:
        print(f"{args.program}: killed by signal {-run.returncode}", file=sys.stderr)
    if run.returncode:
        return abs(run.returncode)
    if len(outputs) > 1:
        print(f"{args.program}: results depend on the order of the threads", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
