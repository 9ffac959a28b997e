// Computes the softmax of each row in three passes over the row, in two passes (the online
// softmax), and in one pass, which keeps the row in registers.
//
// ./softmax          runs the checks, then compares rows of 32,768 and 8192 with a plain copy
// ./softmax --check  runs only the checks, with short rows of awkward lengths

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

// --8<-- [start:block]
struct Max { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };
struct Sum { __device__ float operator()(float a, float b) const { return a + b; } };

// Combines the values of all threads of the block with `op`. Every thread gets the result.
template <class Op>
__device__ float over_block(float value, Op op, float nothing) {
    __shared__ float partial[BLOCK / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 16; step > 0; step /= 2)
        value = op(value, __shfl_xor_sync(0xffffffff, value, step));
    __syncthreads();  // others may still read what the previous call left in `partial`
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = lane < BLOCK / 32 ? partial[lane] : nothing;
    for (int step = 16; step > 0; step /= 2)
        value = op(value, __shfl_xor_sync(0xffffffff, value, step));
    return value;
}

// --8<-- [end:block]
// --8<-- [start:three]
// One block computes one row. It reads the row three times: for maximum, sum and result.
__global__ void three_passes(const float *__restrict__ x, float *__restrict__ y, int n) {
    x += (size_t)blockIdx.x * n, y += (size_t)blockIdx.x * n;
    float top = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < n; i += BLOCK) top = fmaxf(top, x[i]);
    top = over_block(top, Max(), -INFINITY);
    for (int i = threadIdx.x; i < n; i += BLOCK) sum += expf(x[i] - top);
    float scale = 1 / over_block(sum, Sum(), 0);
    for (int i = threadIdx.x; i < n; i += BLOCK) y[i] = expf(x[i] - top) * scale;
}
// --8<-- [end:three]

// --8<-- [start:merge]
// The maximum of the elements that were merged so far, and their sum of exp(x - top).
struct Running { float top, sum; };

__device__ Running merge(Running a, Running b) {
    float top = fmaxf(a.top, b.top);
    if (top == -INFINITY) return {top, 0};  // no finite value yet, and inf - inf is NaN
    return {top, a.sum * expf(a.top - top) + b.sum * expf(b.top - top)};
}

// --8<-- [end:merge]
// --8<-- [start:online]
__device__ Running merge_warp(Running r) {
    for (int step = 16; step > 0; step /= 2) {
        Running other = {__shfl_xor_sync(0xffffffff, r.top, step),
                         __shfl_xor_sync(0xffffffff, r.sum, step)};
        r = merge(r, other);
    }
    return r;
}

// Reads the row twice: once for the maximum and the sum, and once for the result.
__global__ void online(const float *__restrict__ x, float *__restrict__ y, int n) {
    __shared__ float tops[BLOCK / 32], sums[BLOCK / 32];
    x += (size_t)blockIdx.x * n, y += (size_t)blockIdx.x * n;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Running r = {-INFINITY, 0};
    for (int i = threadIdx.x; i < n; i += BLOCK) r = merge(r, {x[i], 1});
    r = merge_warp(r);
    if (lane == 0) tops[warp] = r.top, sums[warp] = r.sum;
    __syncthreads();
    r = {-INFINITY, 0};
    if (lane < BLOCK / 32) r = {tops[lane], sums[lane]};
    r = merge_warp(r);
    float scale = 1 / r.sum;
    for (int i = threadIdx.x; i < n; i += BLOCK) y[i] = expf(x[i] - r.top) * scale;
}
// --8<-- [end:online]

// --8<-- [start:held]
constexpr int EACH = 32;  // values per thread, so a row may have up to 8192 values

// Reads the row once and keeps it in registers.
__global__ void held(const float *__restrict__ x, float *__restrict__ y, int n) {
    x += (size_t)blockIdx.x * n, y += (size_t)blockIdx.x * n;
    float mine[EACH], top = -INFINITY, sum = 0;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        int i = k * BLOCK + threadIdx.x;
        mine[k] = i < n ? x[i] : -INFINITY;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) top = fmaxf(top, mine[k]);
    top = over_block(top, Max(), -INFINITY);
#pragma unroll
    for (int k = 0; k < EACH; k++) sum += mine[k] = expf(mine[k] - top);
    float scale = 1 / over_block(sum, Sum(), 0);
#pragma unroll
    for (int k = 0; k < EACH; k++)
        if (k * BLOCK + threadIdx.x < n) y[k * BLOCK + threadIdx.x] = mine[k] * scale;
}
// --8<-- [end:held]

const char *names[] = {"three passes", "online", "held"};

void run(int which, const float *x, float *y, int rows, int n) {
    if (which == 0) three_passes<<<rows, BLOCK>>>(x, y, n);
    if (which == 1) online<<<rows, BLOCK>>>(x, y, n);
    if (which == 2) held<<<rows, BLOCK>>>(x, y, n);
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

void check() {
    const int rows = 2;
    for (int which = 0; which < 3; which++) {
        double worst = 0;
        for (int n : {1, 31, 33, 1000, 8191}) {
            std::vector<float> x(rows * n);
            auto middle = [&](int i) { return i < n ? 1000 : -1000; };  // exp: inf, 0
            for (int i = 0; i < rows * n; i++) x[i] = middle(i) + 8 * std::sin(0.7 * i);
            for (int i = 1; i < n; i += 5) x[i] = -INFINITY;  // a mask
            float *dx = to_device(x), *dy;
            CHECK(cudaMalloc(&dy, x.size() * sizeof(float)));
            run(which, dx, dy, rows, n);
            std::vector<float> y = to_host(dy, x.size());
            for (int row = 0; row < rows; row++) {
                double sum = 0, top = middle(row * n);
                for (int i = 0; i < n; i++) sum += std::exp(x[row * n + i] - top);
                for (int i = 0; i < n; i++) {
                    double want = std::exp(x[row * n + i] - top) / sum, got = y[row * n + i];
                    double off = want ? std::fabs(got / want - 1) : got;
                    require(off < 1e-5, names[which], n);  // a NaN fails this, too
                    worst = std::max(worst, off);
                }
            }
            CHECK(cudaFree(dx));
            CHECK(cudaFree(dy));
        }
        printf("%-12s equal to float64 on rows of 1, 31, 33, 1000, 8191, relative error at most ≈%.0e\n",
               names[which], worst);
    }
}

// One NaN must turn its whole row into NaN. `online` is an exception that its user must know:
// `merge` drops a NaN that a thread reads before its first finite element.
void check_nan() {
    const int n = 1000;
    for (int which = 0; which < 3; which++) {
        for (int bad : {0, BLOCK}) {  // the first and the second element that thread 0 reads
            std::vector<float> x(n, 1);
            x[bad] = NAN;
            float *dx = to_device(x), *dy;
            CHECK(cudaMalloc(&dy, n * sizeof(float)));
            run(which, dx, dy, 1, n);
            std::vector<float> y = to_host(dy, n);
            int found = std::count_if(y.begin(), y.end(), [](float v) { return std::isnan(v); });
            bool dropped = which == 1 && bad == 0;
            require(found == (dropped ? 1 : n), "a row with a NaN", n);
            CHECK(cudaFree(dx));
            CHECK(cudaFree(dy));
        }
    }
}

void measure() {
    const size_t size = 1 << 27, bytes = size * sizeof(float);
    double ceiling = copy_rate(bytes);
    float *x = to_device(std::vector<float>(size, 1)), *y;
    CHECK(cudaMalloc(&y, bytes));
    printf("a copy moves ≈%.0f GB/s\n", ceiling);
    for (int n : {32768, EACH * BLOCK}) {
        for (int which = 0; which < (n > EACH * BLOCK ? 2 : 3); which++) {
            float ms = milliseconds([&] { run(which, x, y, size / n, n); });
            double rate = 2e-6 * bytes / ms;  // if the row were read once
            printf("rows of %5d, %-12s ≈%.0f GB/s useful, ≈%.0f%% of the copy\n", n, names[which],
                   rate, 100 * rate / ceiling);
        }
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "softmax needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py softmax.cu --check does without\n");
        return 1;
    }
    check();
    check_nan();
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure();
    return 0;
}
