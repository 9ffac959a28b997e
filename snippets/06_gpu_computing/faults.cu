// What goes wrong with kernels: ./faults NAME, and ./faults NAME fixed.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(call)                                                                      \
    do {                                                                                 \
        cudaError_t status_ = (call);                                                    \
        if (status_ != cudaSuccess) {                                                    \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                \
                    cudaGetErrorString(status_));                                        \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

// --8<-- [start:past]
__global__ void fill(float *x, int n, bool fixed) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (fixed ? i < n : i <= n) x[i] = i;  // one index too many
}

__global__ void scatter(float *x, int n, bool fixed) {
    size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[fixed ? i : i << 28] = i;  // the addresses are 1 GiB apart
}

__global__ void add(float *x, const float *y) { x[threadIdx.x] += y[threadIdx.x]; }

void unwritten(float *x, bool fixed) {
    float *zeros;
    CHECK(cudaMalloc(&zeros, 256 * sizeof(float)));
    CHECK(cudaMemset(zeros, 0, fixed ? 256 * sizeof(float) : 256));  // the size is in bytes
    add<<<1, 256>>>(x, zeros);
}
// --8<-- [end:past]

// --8<-- [start:barrier]
__global__ void reverse(float *x, bool fixed) {
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    if (fixed) __syncthreads();
    x[threadIdx.x] = tile[255 - threadIdx.x];
}

__global__ void rotate(float *x, bool fixed) {
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    float next = tile[(threadIdx.x + 1) % 256];
    if (fixed) __syncthreads();  // every thread has read before any thread writes
    tile[threadIdx.x] = next;
    __syncthreads();
    x[threadIdx.x] = tile[255 - threadIdx.x];
}

__global__ void shift(float *x, bool fixed) {
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    if (fixed) __syncthreads();
    else __syncwarp();  // only for this warp, but the reader may be in the next warp
    if (threadIdx.x >= 8) x[threadIdx.x] = tile[threadIdx.x - 8];
}
// --8<-- [end:barrier]

// --8<-- [start:divergent]
__global__ void halves(float *x, bool fixed) {
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    if (fixed) {
        __syncthreads();
        if (threadIdx.x < 128) x[threadIdx.x] += tile[threadIdx.x + 128];
    } else if (threadIdx.x < 128) {
        __syncthreads();  // one half of the block waits here
        x[threadIdx.x] += tile[threadIdx.x + 128];
    } else {
        tile[threadIdx.x] *= 2;
        __syncthreads();  // and the other half waits here
    }
}

__global__ void half_warp(float *x, bool fixed) {
    float other = 0;
    if (fixed) other = __shfl_down_sync(0xffffffff, x[threadIdx.x], 16);
    if (threadIdx.x < 16) {
        if (!fixed) other = __shfl_down_sync(0xffffffff, x[threadIdx.x], 16);  // the mask names 32 lanes
        x[threadIdx.x] += other;
    } else {
        __syncwarp();
    }
}
// --8<-- [end:divergent]

// --8<-- [start:race]
__global__ void count(int *counter, bool fixed) {
    if (fixed)
        atomicAdd(counter, 1);
    else
        *counter += 1;  // load, add, store
}

__global__ void mixed(int *counter, bool fixed) {
    if (fixed || threadIdx.x % 2 == 0)
        atomicAdd(counter, 1);
    else
        *counter += 1;  // atomics of other threads do not help
}
// --8<-- [end:race]

// --8<-- [start:overflow]
__global__ void corner(float *x, int rows, int cols, bool fixed) {
    int row = rows - 1, col = cols - 1;
    size_t at = fixed ? (size_t)row * cols + col : row * cols + col;  // the product of two ints is an int
    if (at < 256) x[at] = 1;
    if (threadIdx.x == 0) printf("element %llu\n", (unsigned long long)at);
}
// --8<-- [end:overflow]

void say(const char *call, cudaError_t status) {
    printf("%-24s %s\n", call, cudaGetErrorString(status));
}

// --8<-- [start:late]
void late(float *x, bool fixed) {
    scatter<<<1, 256>>>(x, 256, fixed);
    say("launch:", cudaGetLastError());
    say("cudaDeviceSynchronize:", cudaDeviceSynchronize());
    say("cudaGetLastError:", cudaGetLastError());
    say("cudaMalloc:", cudaMalloc(&x, 4));  // this call is correct
    say("cudaGetLastError:", cudaGetLastError());
}
// --8<-- [end:late]

// --8<-- [start:silent]
void silent(float *x, bool fixed) {
    const int threads = fixed ? 256 : 2048;
    float first;
    CHECK(cudaMemset(x, 0, 256 * sizeof(float)));
    fill<<<1, threads>>>(x + 1, 255, true);
    CHECK(cudaMemcpy(&first, x + 255, sizeof(float), cudaMemcpyDeviceToHost));
    printf("the last element is %.0f, and should be 254\n", first);
    say("cudaGetLastError:", cudaGetLastError());
}
// --8<-- [end:silent]

void words() {  // the runtime can print its messages without a GPU
    for (int code : {1, 2, 9, 35, 100, 209, 700, 701, 716, 717, 719})
        printf("%3d %-32s %s\n", code, cudaGetErrorName((cudaError_t)code),
               cudaGetErrorString((cudaError_t)code));
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    const bool fixed = argc > 2 && strcmp(argv[2], "fixed") == 0;
    auto is = [&](const char *other) { return strcmp(name, other) == 0; };
    if (is("words")) return words(), 0;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "faults needs an NVIDIA GPU; python cuda_on_cpu.py faults.cu NAME does without\n");
        return 1;
    }
    std::vector<float> host(256);
    for (int i = 0; i < 256; i++) host[i] = i;
    float *x;
    int *counter;
    CHECK(cudaMalloc(&x, host.size() * sizeof(float)));
    CHECK(cudaMalloc(&counter, sizeof(int)));
    CHECK(cudaMemset(counter, 0, sizeof(int)));
    CHECK(cudaMemcpy(x, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice));
    if (is("past")) fill<<<2, 256>>>(x, 256, fixed);
    else if (is("host_pointer")) fill<<<1, 256>>>(fixed ? x : host.data(), 256, true);
    else if (is("unwritten")) unwritten(x, fixed);
    else if (is("reverse")) reverse<<<1, 256>>>(x, fixed);
    else if (is("rotate")) rotate<<<1, 256>>>(x, fixed);
    else if (is("shift")) shift<<<1, 256>>>(x, fixed);
    else if (is("halves")) halves<<<1, 256>>>(x, fixed);
    else if (is("half_warp")) half_warp<<<1, 32>>>(x, fixed);
    else if (is("count")) count<<<2, 128>>>(counter, fixed);
    else if (is("two_blocks")) count<<<2, 1>>>(counter, fixed);
    else if (is("mixed")) mixed<<<1, 256>>>(counter, fixed);
    else if (is("corner")) corner<<<1, 32>>>(x, 65536, 65536, fixed);
    else if (is("too_many")) fill<<<1, fixed ? 256 : 2048>>>(x, 256, true);
    else if (is("silent")) return silent(x, fixed), 0;
    else if (is("late")) return late(x, fixed), 0;
    else return fprintf(stderr, "faults: no fault is called '%s'\n", name), 1;
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    auto right = [&](int i) {  // what x[i] should be now
        if (is("reverse")) return 255 - i;
        if (is("rotate")) return (256 - i) % 256;
        if (is("shift")) return i < 8 ? i : i - 8;
        if (is("halves")) return i < 128 ? i + (i + 128) : i;
        if (is("half_warp")) return i < 16 ? i + (i + 16) : i;
        return i;
    };
    int counted, all = is("count") || is("mixed") ? 256 : is("two_blocks") ? 2 : 0, wrong = 0;
    CHECK(cudaMemcpy(host.data(), x, 256 * sizeof(float), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&counted, counter, sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < 256; i++) wrong += host[i] != right(i);
    if (!fixed)
        printf("no error; ≈%d of 256 wrong, counted ≈%d of %d\n", wrong, counted, all);
    else if (wrong || counted != all)
        return fprintf(stderr, "%d of 256 wrong, counted %d\n", wrong, counted), 1;
    else
        printf("no error\n");
    return 0;
}
