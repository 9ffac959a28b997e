// z = x + y in three kernels: one element per thread, a grid-stride loop, and four elements.
//
// ./vector_add          checks, then times 2^26 elements beside a plain copy
// ./vector_add --check  small awkward sizes only

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

// --8<-- [start:add]
__global__ void add(const float *x, const float *y, float *z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) z[i] = x[i] + y[i];  // the last block has extra threads
}
// --8<-- [end:add]

// --8<-- [start:loop]
// Works with any grid: of T threads, each adds every T-th element. `__restrict__` promises
// that z does not overlap x or y, so the loads of four turns may come before the stores.
__global__ void add_loop(const float *__restrict__ x, const float *__restrict__ y,
                         float *__restrict__ z, int n) {
    int threads = gridDim.x * blockDim.x;
#pragma unroll 4
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) z[i] = x[i] + y[i];
}
// --8<-- [end:loop]

// --8<-- [start:wide]
// A thread loads 16 bytes with one instruction. The addresses must be multiples of 16.
__global__ void add_wide(const float *x, const float *y, float *z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (4 * i + 3 < n) {
        float4 a = reinterpret_cast<const float4 *>(x)[i];
        float4 b = reinterpret_cast<const float4 *>(y)[i];
        reinterpret_cast<float4 *>(z)[i] =
            make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    } else {
        for (int k = 4 * i; k < n; k++) z[k] = x[k] + y[k];  // up to three elements remain
    }
}
// --8<-- [end:wide]

const char *names[] = {"add", "add_loop", "add_wide"};

// --8<-- [start:launch]
void run(int which, const float *x, const float *y, float *z, int n) {
    const int block = 256;
    const int quads = (n + 3) / 4;
    if (which == 0) add<<<(n + block - 1) / block, block>>>(x, y, z, n);
    if (which == 1) add_loop<<<std::min(1056, (n + block - 1) / block), block>>>(x, y, z, n);
    if (which == 2) add_wide<<<(quads + block - 1) / block, block>>>(x, y, z, n);
    CHECK(cudaGetLastError());  // a launch itself returns no error
}
// --8<-- [end:launch]

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
    for (int which = 0; which < 3; which++) {
        int blocks = 0;
        for (int n : {1, 31, 33, 1000, 4097}) {
            std::vector<float> x(n), y(n);
            for (int i = 0; i < n; i++) x[i] = 0.37f * i, y[i] = 1.0f / (1 + i);
            float *dx = to_device(x), *dy = to_device(y), *dz;
            CHECK(cudaMalloc(&dz, n * sizeof(float)));
            if (which == 1 && n == 4097)
                add_loop<<<3, 256>>>(dx, dy, dz, n);  // few threads: the loop goes round
            else
                run(which, dx, dy, dz, n);
            std::vector<float> z = to_host(dz, n);  // waits for the kernel
            for (int i = 0; i < n; i++)             // the double sum, rounded once
                require(z[i] == float(double(x[i]) + double(y[i])), names[which], n);
            for (float *p : {dx, dy, dz}) CHECK(cudaFree(p));
            blocks += (n + 255) / 256;
        }
        printf("%-8s equal to the rounded float64 sum on 1, 31, 33, 1000, 4097 elements\n",
               names[which]);
        if (which == 0) printf("         %d threads launched for 5162 elements\n", blocks * 256);
    }
}

void measure() {
    const int n = 1 << 26;
    double ceiling = copy_rate(n * sizeof(float));
    float *x = to_device(std::vector<float>(n, 1)), *y = to_device(std::vector<float>(n, 2)), *z;
    CHECK(cudaMalloc(&z, n * sizeof(float)));
    printf("a copy moves ≈%.0f GB/s\n", ceiling);
    for (int which = 0; which < 3; which++) {
        float ms = milliseconds([&] { run(which, x, y, z, n); });
        double rate = 3e-6 * n * sizeof(float) / ms;  // two read, one written
        printf("%-8s ≈%.0f GB/s, ≈%.0f%% of the copy\n", names[which], rate, 100 * rate / ceiling);
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "vector_add needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py vector_add.cu --check does without\n");
        return 1;
    }
    check();
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure();
    return 0;
}
