// The sum of a vector in three ways: a tree in shared memory, warp shuffles, and atomics.
//
// ./reduction          checks, then times 2^28 elements beside a plain copy
// ./reduction --check  small awkward sizes only

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

constexpr int BLOCK = 256;

// --8<-- [start:tree]
// Returns the sum of `value` over the block to thread 0. Uses log2(256) + 1 barriers.
__device__ float sum_by_tree(float value, int &barriers) {
    __shared__ float partial[BLOCK];
    partial[threadIdx.x] = value;
    __syncthreads(), barriers++;
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads(), barriers++;  // outside of the if: all threads of the block get here
    }
    return partial[0];
}
// --8<-- [end:tree]

// --8<-- [start:shuffle]
// Returns the sum over a warp to lane 0, from register to register, without shared memory.
__device__ float sum_of_warp(float value) {
    for (int step = 16; step > 0; step /= 2)
        value += __shfl_down_sync(0xffffffff, value, step);
    return value;
}

// Returns the sum over the block to thread 0. Uses one barrier.
__device__ float sum_by_shuffles(float value, int &barriers) {
    __shared__ float partial[BLOCK / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = sum_of_warp(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads(), barriers++;
    if (warp == 0) value = sum_of_warp(lane < BLOCK / 32 ? partial[lane] : 0);
    return value;
}
// --8<-- [end:shuffle]

// --8<-- [start:kernel]
enum { TREE, SHUFFLES, ATOMIC };

// Each block writes its partial sum to out[block]. With ATOMIC, it adds the sum to out[0].
// The address `x` must be a multiple of 16.
template <int HOW>
__global__ void reduce(const float *x, long long n, float *out, int *barriers_met) {
    float value = 0;
    int barriers = 0;
    const long long quads = n / 4, threads = (long long)gridDim.x * blockDim.x;
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll 2
    for (long long i = first; i < quads; i += threads) {  // most of the additions need no barrier
        float4 four = reinterpret_cast<const float4 *>(x)[i];
        value += (four.x + four.y) + (four.z + four.w);
    }
    if (4 * quads + first < n) value += x[4 * quads + first];  // up to three elements remain
    value = HOW == TREE ? sum_by_tree(value, barriers) : sum_by_shuffles(value, barriers);
    if (threadIdx.x != 0) return;
    if (HOW == ATOMIC)
        atomicAdd(out, value);
    else
        out[blockIdx.x] = value;
    if (blockIdx.x == 0) *barriers_met = barriers;
}
// --8<-- [end:kernel]

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

const char *names[] = {"tree", "shuffles", "atomic"};

// `scratch` holds one float per block, and the sum behind them.
void sum(int how, const float *x, long long n, float *scratch, int blocks, int *barriers) {
    float *out = scratch + blocks;
    if (how == ATOMIC) {
        CHECK(cudaMemsetAsync(out, 0, sizeof(float)));
        reduce<ATOMIC><<<blocks, BLOCK>>>(x, n, out, barriers);
    } else if (how == TREE) {
        reduce<TREE><<<blocks, BLOCK>>>(x, n, scratch, barriers);
        reduce<TREE><<<1, BLOCK>>>(scratch, blocks, out, barriers);
    } else {
        reduce<SHUFFLES><<<blocks, BLOCK>>>(x, n, scratch, barriers);
        reduce<SHUFFLES><<<1, BLOCK>>>(scratch, blocks, out, barriers);
    }
    CHECK(cudaGetLastError());
}

void check() {
    int *barriers;
    CHECK(cudaMalloc(&barriers, sizeof(int)));
    for (int how : {TREE, SHUFFLES, ATOMIC}) {
        for (int n : {1, 31, 33, 1000, 4097}) {
            std::vector<float> x(n);
            double want = 0, size = 0;
            for (int i = 0; i < n; i++) x[i] = std::sin(i + 1.0), want += x[i], size += std::fabs(x[i]);
            int blocks = std::min(3, (n + BLOCK - 1) / BLOCK);  // so few go round twice
            float *dx = to_device(x), *scratch = to_device(std::vector<float>(blocks + 1));
            sum(how, dx, n, scratch, blocks, barriers);
            float first = to_host(scratch + blocks, 1)[0];
            require(std::fabs(first - want) < 20 * 6e-8 * size, names[how], n);
            sum(how, dx, n, scratch, blocks, barriers);
            float second = to_host(scratch + blocks, 1)[0];
            bool near = std::fabs(second - want) < 20 * 6e-8 * size;
            require(how == ATOMIC ? near : first == second, "the second run", n);  // bit for bit
            CHECK(cudaFree(dx));
            CHECK(cudaFree(scratch));
        }
        int met = to_host(barriers, 1)[0];
        require(met == (how == TREE ? 9 : 1), "the number of barriers", BLOCK);
        printf("%-8s equal to float64 on 1, 31, 33, 1000, 4097 elements; a block meets %d barrier%s\n",
               names[how], met, how == TREE ? "s" : "");
    }
    CHECK(cudaFree(barriers));
}

void measure() {
    const size_t n = 1 << 28;
    const int blocks = 1056;  // eight for each of an H200's 132 SMs
    double ceiling = copy_rate(n * sizeof(float));
    float *x = to_device(std::vector<float>(n, 1)), *scratch = to_device(std::vector<float>(blocks + 1));
    int *barriers = to_device(std::vector<int>(1));
    printf("a copy moves ≈%.0f GB/s\n", ceiling);
    for (int how : {TREE, SHUFFLES, ATOMIC}) {
        float ms = milliseconds([&] { sum(how, x, n, scratch, blocks, barriers); });
        double rate = 1e-6 * n * sizeof(float) / ms;
        printf("%-8s ≈%.0f GB/s, ≈%.0f%% of the copy\n", names[how], rate, 100 * rate / ceiling);
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "reduction needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py reduction.cu --check does without\n");
        return 1;
    }
    check();
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure();
    return 0;
}
