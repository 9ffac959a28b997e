// Counts bytes into 256 bins, with atomics in global memory or in each block's shared memory.
//
// ./histogram          runs the checks, then times 2^26 bytes, mixed and all equal
// ./histogram --check  runs only the checks, with sizes that are no multiple of 16

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

constexpr int BINS = 256, BLOCK = 256;

struct Watched { unsigned count, atomics; };  // a bin that also counts its atomics

__device__ void atomicAdd(Watched *bin, unsigned value) {
    atomicAdd(&bin->count, value);
    atomicAdd(&bin->atomics, 1u);
}

// --8<-- [start:global]
// The whole grid calls `count` once for each byte of x. A thread loads 16 bytes at a time.
template <class Count>
__device__ void each_byte(const unsigned char *__restrict__ x, int n, Count count) {
    int first = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    for (int i = first; i < n / 16; i += threads) {
        uint4 loaded = reinterpret_cast<const uint4 *>(x)[i];
        for (unsigned word : {loaded.x, loaded.y, loaded.z, loaded.w})
            for (int shift = 0; shift < 32; shift += 8) count(word >> shift & 255);
    }
    for (int i = n / 16 * 16 + first; i < n; i += threads) count(x[i]);
}

template <class Bin>
__global__ void in_global(const unsigned char *x, int n, Bin *bins) {
    each_byte(x, n, [&](int value) { atomicAdd(&bins[value], 1u); });
}
// --8<-- [end:global]

// --8<-- [start:shared]
template <class Bin>
__global__ void in_shared(const unsigned char *x, int n, Bin *bins) {
    __shared__ unsigned mine[BINS];
    for (int b = threadIdx.x; b < BINS; b += BLOCK) mine[b] = 0;
    __syncthreads();  // all bins are zero before any thread counts
    each_byte(x, n, [&](int value) { atomicAdd(&mine[value], 1u); });
    __syncthreads();  // all bytes are counted before any thread adds a bin to the total
    for (int b = threadIdx.x; b < BINS; b += BLOCK)
        if (mine[b]) atomicAdd(&bins[b], mine[b]);
}
// --8<-- [end:shared]

const char *names[] = {"in_global", "in_shared"};

template <class Bin>
void run(int which, const unsigned char *x, int n, Bin *bins, int blocks) {
    CHECK(cudaMemsetAsync(bins, 0, BINS * sizeof(Bin)));
    if (which == 0) in_global<<<blocks, BLOCK>>>(x, n, bins);
    if (which == 1) in_shared<<<blocks, BLOCK>>>(x, n, bins);
    CHECK(cudaGetLastError());
}

// `values`, copied to the device.
template <class T>
T *to_device(const std::vector<T> &values) {
    T *device;
    CHECK(cudaMalloc(&device, values.size() * sizeof(T)));
    CHECK(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

template <class T>
std::vector<T> to_host(const T *device, size_t n) {
    std::vector<T> values(n);
    CHECK(cudaMemcpy(values.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

void require(bool fine, const char *what, long n) {
    if (fine) return;
    fprintf(stderr, "%s is wrong at size %ld\n", what, n);
    exit(1);
}

// Median time of `run` in milliseconds, by events, after one run that does not count.
template <class F>
float milliseconds(F run) {
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<float> times(21);
    run();
    for (float &time : times) {
        CHECK(cudaEventRecord(start));
        run();
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        CHECK(cudaEventElapsedTime(&time, start, stop));
    }
    CHECK(cudaGetLastError());
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
    std::nth_element(times.begin(), times.begin() + 10, times.end());
    return times[10];
}

// What this GPU's memory gives: a copy of `bytes`, read and written, in GB/s.
double copy_rate(size_t bytes) {
    char *from, *to;
    CHECK(cudaMalloc(&from, bytes));
    CHECK(cudaMalloc(&to, bytes));
    CHECK(cudaMemset(from, 1, bytes));
    float ms = milliseconds([&] {
        CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice));
    });
    CHECK(cudaFree(from));
    CHECK(cudaFree(to));
    return 2e-6 * bytes / ms;
}

std::vector<unsigned char> bytes(int n, bool alike) {
    std::vector<unsigned char> x(n, 7);
    unsigned state = 1;
    if (!alike)
        for (auto &value : x) value = (state = state * 1664525u + 1013904223u) >> 24;
    return x;
}

void check() {
    const int blocks = 4;
    Watched *bins;
    CHECK(cudaMalloc(&bins, BINS * sizeof(Watched)));
    for (int which = 0; which < 2; which++) {
        for (bool alike : {false, true}) {
            long global_atomics = 0, total = 0;
            for (int n : {1, 31, 33, 1000, 40007}) {
                std::vector<unsigned char> x = bytes(n, alike);
                unsigned char *dx = to_device(x);
                run(which, dx, n, bins, blocks);
                std::vector<Watched> got = to_host(bins, BINS);
                std::vector<unsigned> want(BINS);
                std::vector<bool> seen(blocks * BINS);
                for (int i = 0; i < n; i++) {
                    int turn = i < n / 16 * 16 ? i / 16 : i % 16;  // which thread of the grid counts byte i
                    want[x[i]]++, seen[turn / BLOCK % blocks * BINS + x[i]] = true;
                }
                long atomics = 0, expected = which ? std::count(seen.begin(), seen.end(), true) : n;
                for (int b = 0; b < BINS; b++) {
                    require(got[b].count == want[b], names[which], n);
                    atomics += got[b].atomics;
                }
                require(atomics == expected, "the number of atomics", n);
                CHECK(cudaFree(dx));
                total += n, global_atomics += atomics;
            }
            printf("%-9s exact on %ld %s bytes in five sizes, %ld atomics in global memory\n", names[which],
                   total, alike ? "equal" : "mixed", global_atomics);
        }
    }
    CHECK(cudaFree(bins));
}

void measure() {
    const int n = 1 << 26, blocks = 1056;
    unsigned *bins;
    CHECK(cudaMalloc(&bins, BINS * sizeof(unsigned)));
    for (bool alike : {false, true}) {
        unsigned char *x = to_device(bytes(n, alike));
        for (int which = 0; which < 2; which++) {
            float ms = milliseconds([&] { run(which, x, n, bins, blocks); });
            printf("%-9s %s bytes ≈%.1f per ns\n", names[which], alike ? "equal" : "mixed", 1e-6 * n / ms);
        }
        CHECK(cudaFree(x));
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "histogram needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py histogram.cu --check does without\n");
        return 1;
    }
    check();
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure();
    return 0;
}
