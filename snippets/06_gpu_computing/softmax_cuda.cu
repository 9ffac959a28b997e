// Softmax of rows in CUDA C++: a block of 256 threads keeps a row in registers.
//
// ./softmax_cuda          runs the checks, then compares the speed with a plain copy
// ./softmax_cuda --check  runs only the checks

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

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int VECTORS = 4;  // vectors of 4 values per thread, so a row has up to 4096 values

// --8<-- [start:block]
struct Max { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };
struct Sum { __device__ float operator()(float a, float b) const { return a + b; } };

// Combines the values of all threads of the block with `op`. Every thread gets the result.
template <class Op>
__device__ float over_block(float value, Op op, float neutral) {
    __shared__ float partial[WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 16; step > 0; step /= 2)
        value = op(value, __shfl_xor_sync(0xffffffff, value, step));
    __syncthreads();  // others may still read what the previous call left in `partial`
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = lane < WARPS ? partial[lane] : neutral;
    for (int step = 16; step > 0; step /= 2)
        value = op(value, __shfl_xor_sync(0xffffffff, value, step));
    return value;
}
// --8<-- [end:block]

// --8<-- [start:kernel]
// One block computes one row of n values, where n is a multiple of 4.
__global__ void __launch_bounds__(THREADS)
softmax(const float *__restrict__ x, float *__restrict__ y, int n) {
    auto in = reinterpret_cast<const float4 *>(x + (size_t)blockIdx.x * n);
    auto out = reinterpret_cast<float4 *>(y + (size_t)blockIdx.x * n);
    float4 mine[VECTORS];
    float top = -INFINITY, sum = 0;
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        int i = k * THREADS + threadIdx.x;
        mine[k] = 4 * i < n ? in[i] : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        top = fmaxf(top, fmaxf(fmaxf(mine[k].x, mine[k].y), fmaxf(mine[k].z, mine[k].w)));
    }
    top = over_block(top, Max(), -INFINITY);
#pragma unroll
    for (float4 &v : mine) {
        v = make_float4(expf(v.x - top), expf(v.y - top), expf(v.z - top), expf(v.w - top));
        sum += (v.x + v.y) + (v.z + v.w);
    }
    sum = over_block(sum, Sum(), 0);
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        int i = k * THREADS + threadIdx.x;
        float4 v = mine[k];
        if (4 * i < n) out[i] = make_float4(v.x / sum, v.y / sum, v.z / sum, v.w / sum);
    }
}
// --8<-- [end:kernel]

void run(const float *x, float *y, int rows, int n) {
    if (n % 4 || n > 4 * VECTORS * THREADS) {
        fprintf(stderr, "a row needs a multiple of 4 and at most 4096 values, not %d\n", n);
        exit(1);
    }
    softmax<<<rows, THREADS>>>(x, y, n);
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

// Median time of one call in milliseconds. A sample has 10 calls, so that the GPU never waits.
template <class F>
float milliseconds(F run) {
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<float> times(15);
    for (int i = 0; i < 3; i++) run();
    for (float &time : times) {
        CHECK(cudaEventRecord(start));
        for (int i = 0; i < 10; i++) run();
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        CHECK(cudaEventElapsedTime(&time, start, stop));
        time /= 10;
    }
    CHECK(cudaGetLastError());
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
    std::nth_element(times.begin(), times.begin() + 7, times.end());
    return times[7];
}

const std::vector<double> OFFSETS = {0, 1000, -1000};
const std::vector<int> WIDTHS = {4096, 1000};
const double BOUND = 160 * std::pow(2.0, -24);
const int LARGE_ROWS = 16384, LARGE_COLUMNS = 4096;

void check() {
    for (int n : WIDTHS) {
        int rows = OFFSETS.size();
        std::vector<float> x(rows * n);
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < n; i++) x[row * n + i] = OFFSETS[row] + 8 * std::sin(0.7 * i);
        float *dx = to_device(x), *dy;
        CHECK(cudaMalloc(&dy, x.size() * sizeof(float)));
        run(dx, dy, rows, n);
        std::vector<float> y = to_host(dy, x.size());
        double worst = 0;
        for (int row = 0; row < rows; row++) {
            double sum = 0;
            for (int i = 0; i < n; i++) sum += std::exp((double)x[row * n + i] - OFFSETS[row]);
            for (int i = 0; i < n; i++) {
                double want = std::exp((double)x[row * n + i] - OFFSETS[row]) / sum;
                double error = std::fabs(y[row * n + i] / want - 1);
                if (!(error <= BOUND)) {  // a NaN fails, too
                    fprintf(stderr, "CUDA, rows of %d: the relative error is %.1e\n", n, error);
                    exit(1);
                }
                worst = std::max(worst, error);
            }
        }
        CHECK(cudaFree(dx));
        CHECK(cudaFree(dy));
        printf("CUDA, rows of %d: equal to float64, relative error ≈%.0e\n", n, worst);
    }
}

void measure() {
    size_t size = (size_t)LARGE_ROWS * LARGE_COLUMNS, bytes = size * sizeof(float);
    float *x = to_device(std::vector<float>(size, 1)), *y;
    CHECK(cudaMalloc(&y, bytes));
    auto copy = [&] { CHECK(cudaMemcpyAsync(y, x, bytes, cudaMemcpyDeviceToDevice)); };
    float copy_ms = milliseconds(copy);
    float ms = milliseconds([&] { run(x, y, LARGE_ROWS, LARGE_COLUMNS); });
    for (int i = 0; i < 5000; i++) copy();  // work for about a second: the clocks are read
    int sm = 0, memory = 0;
    FILE *smi = popen("nvidia-smi --query-gpu=clocks.sm,clocks.mem --format=csv,noheader,nounits",
                      "r");
    if (!smi || fscanf(smi, "%d, %d", &sm, &memory) != 2) {
        fprintf(stderr, "nvidia-smi does not print the clocks\n");
        exit(1);
    }
    pclose(smi);
    printf("a copy moves ≈%.0f GB/s at SM clock ≈%d MHz, memory clock ≈%d MHz\n",
           2e-6 * bytes / copy_ms, sm, memory);
    printf("CUDA: ≈%.0f%% of the copy's speed\n", 100 * copy_ms / ms);
    CHECK(cudaDeviceSynchronize());
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "softmax_cuda needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py softmax_cuda.cu --check does without\n");
        return 1;
    }
    check();
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure();
    return 0;
}
