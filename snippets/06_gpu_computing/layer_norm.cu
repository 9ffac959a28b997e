// Normalises each row with mean and variance from sums of squares, two passes, or Welford.
//
// ./layer_norm          runs the checks, then compares 16,384 rows of 4096 with a plain copy
// ./layer_norm --check  runs only the checks, with short rows of awkward lengths

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
constexpr float EPS = 1e-5f;

// --8<-- [start:block]
__device__ float sum_over_block(float value) {  // every thread gets the sum
    __shared__ float partial[BLOCK / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    __syncthreads();  // others may still read what the previous call left in `partial`
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = lane < BLOCK / 32 ? partial[lane] : 0;
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}

// --8<-- [end:block]
// --8<-- [start:sums]
__global__ void squares(const float *__restrict__ x, float *__restrict__ y, int n) {  // E[x^2] - E[x]^2
    x += (size_t)blockIdx.x * n, y += (size_t)blockIdx.x * n;
    float sum = 0, sum_of_squares = 0;
    for (int i = threadIdx.x; i < n; i += BLOCK) sum += x[i], sum_of_squares += x[i] * x[i];
    float mean = sum_over_block(sum) / n;
    float variance = fmaxf(0, sum_over_block(sum_of_squares) / n - mean * mean);
    float scale = rsqrtf(variance + EPS);
    for (int i = threadIdx.x; i < n; i += BLOCK) y[i] = (x[i] - mean) * scale;
}

__global__ void two_passes(const float *__restrict__ x, float *__restrict__ y, int n) {  // the mean first
    x += (size_t)blockIdx.x * n, y += (size_t)blockIdx.x * n;
    float sum = 0, sum_of_squares = 0;
    for (int i = threadIdx.x; i < n; i += BLOCK) sum += x[i];
    float mean = sum_over_block(sum) / n;
    for (int i = threadIdx.x; i < n; i += BLOCK) sum_of_squares += (x[i] - mean) * (x[i] - mean);
    float scale = rsqrtf(sum_over_block(sum_of_squares) / n + EPS);
    for (int i = threadIdx.x; i < n; i += BLOCK) y[i] = (x[i] - mean) * scale;
}
// --8<-- [end:sums]

// --8<-- [start:merge]
struct Moments { float count, mean, m2; };  // m2: the sum of squared distances from the mean

__device__ Moments merge(Moments a, Moments b) {
    float count = a.count + b.count, delta = b.mean - a.mean;
    if (count == 0) return a;
    float share = b.count / count;
    return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
}

// --8<-- [end:merge]
// --8<-- [start:welford]
__device__ Moments merge_warp(Moments m) {
    for (int step = 16; step > 0; step /= 2) {
        Moments other = {__shfl_xor_sync(0xffffffff, m.count, step),
                         __shfl_xor_sync(0xffffffff, m.mean, step),
                         __shfl_xor_sync(0xffffffff, m.m2, step)};
        m = merge(m, other);
    }
    return m;
}

__global__ void welford(const float *__restrict__ x, float *__restrict__ y, int n) {  // one pass, and no squares of x
    __shared__ float counts[BLOCK / 32], means[BLOCK / 32], m2s[BLOCK / 32];
    x += (size_t)blockIdx.x * n, y += (size_t)blockIdx.x * n;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Moments m = {0, 0, 0};
    for (int i = threadIdx.x; i < n; i += BLOCK) m = merge(m, {1, x[i], 0});
    m = merge_warp(m);
    if (lane == 0) counts[warp] = m.count, means[warp] = m.mean, m2s[warp] = m.m2;
    __syncthreads();
    m = {0, 0, 0};
    if (lane < BLOCK / 32) m = {counts[lane], means[lane], m2s[lane]};
    m = merge_warp(m);
    m.mean = __shfl_sync(0xffffffff, m.mean, 0);  // the merge order differs between lanes, so
    m.m2 = __shfl_sync(0xffffffff, m.m2, 0);      // last bits may differ: lane 0 decides
    float scale = rsqrtf(m.m2 / n + EPS);
    for (int i = threadIdx.x; i < n; i += BLOCK) y[i] = (x[i] - m.mean) * scale;
}
// --8<-- [end:welford]

const char *names[] = {"squares", "two_passes", "welford"};

void run(int which, const float *x, float *y, int rows, int n) {
    if (which == 0) squares<<<rows, BLOCK>>>(x, y, n);
    if (which == 1) two_passes<<<rows, BLOCK>>>(x, y, n);
    if (which == 2) welford<<<rows, BLOCK>>>(x, y, n);
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

// Returns the largest error against float64, for rows with this mean and a deviation near 1.
double error(int which, int n, float mean) {
    const int rows = 2;
    std::vector<float> x(rows * n);
    for (int i = 0; i < rows * n; i++) x[i] = mean + 1.4f * std::sin(1.0f + 0.7f * i);
    float *dx = to_device(x), *dy;
    CHECK(cudaMalloc(&dy, x.size() * sizeof(float)));
    run(which, dx, dy, rows, n);
    std::vector<float> y = to_host(dy, x.size());
    double worst = 0;
    for (int row = 0; row < rows; row++) {
        const float *p = &x[row * n];
        double middle = 0, variance = 0;
        for (int i = 0; i < n; i++) middle += p[i] / double(n);
        for (int i = 0; i < n; i++) variance += (p[i] - middle) * (p[i] - middle) / n;
        for (int i = 0; i < n; i++) {
            double want = (p[i] - middle) / std::sqrt(variance + EPS);
            require(std::isfinite(y[row * n + i]), names[which], n);  // max() would drop a NaN
            worst = std::max(worst, std::fabs(y[row * n + i] - want));
        }
    }
    CHECK(cudaFree(dx));
    CHECK(cudaFree(dy));
    return worst;
}

void check() {
    for (int which = 0; which < 3; which++) {
        for (int n : {1, 31, 33, 1000, 4097}) require(error(which, n, 0) < 1e-5, names[which], n);
        printf("%-10s equal to float64 on rows of 1, 31, 33, 1000, 4097\n", names[which]);
    }
    printf("\nlargest error where the mean is  0         100       10000\n");
    for (int which = 0; which < 3; which++) {
        double at[] = {error(which, 1000, 0), error(which, 1000, 100), error(which, 1000, 10000)};
        // At 10000, floats are 2^-10 apart, and the mean is a float. `squares` must be as wrong
        // as predicted: about 4e-4 at 100, and not one correct digit at 10000.
        bool expected = which > 0 ? at[1] < 5e-5 && at[2] < 2e-3
                                  : at[1] > 1e-4 && at[1] < 4e-3 && at[2] > 100;
        require(expected, names[which], 1000);
        printf("%-10s                       ≈%.0e    ≈%.0e    ≈%.0e\n", names[which], at[0], at[1], at[2]);
    }
}

void measure() {
    const int rows = 16384, n = 4096;
    double bytes = 4.0 * rows * n, ceiling = copy_rate(bytes);
    float *x = to_device(std::vector<float>((size_t)rows * n, 1)), *y;
    CHECK(cudaMalloc(&y, bytes));
    printf("a copy moves ≈%.0f GB/s\n", ceiling);
    for (int which = 0; which < 3; which++) {
        float ms = milliseconds([&] { run(which, x, y, rows, n); });
        double rate = 2e-6 * bytes / ms;  // if the row were read once
        printf("%-10s ≈%.0f GB/s useful, ≈%.0f%% of the copy\n", names[which], rate, 100 * rate / ceiling);
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "layer_norm needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py layer_norm.cu --check does without\n");
        return 1;
    }
    check();
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure();
    return 0;
}
