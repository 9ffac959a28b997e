// Counts the sectors that a warp reads with different strides and offsets, and times the copies.
//
// ./strided_copy          runs the checks, then prints each measured time next to the expected time
// ./strided_copy --check  runs only the checks, with small sizes

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

// --8<-- [start:kernels]
// Each lane reads `stride` floats after its neighbour. Thread 0 reads the float at `offset`.
__global__ void strided_copy(const float *in, float *out, int n, int stride, int offset) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[(size_t)i * stride + offset];
}

// Each thread copies `run` consecutive floats, so neighbouring lanes are `run` floats apart.
__global__ void run_copy(const float *__restrict__ in, float *__restrict__ out, int n,
                         int run) {
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * run;
    for (int i = first; i < min(first + run, n); i++) out[i] = in[i];
}
// --8<-- [end:kernels]

// --8<-- [start:sectors]
// Returns how many 32-byte sectors the reads of the first warp touch.
int sectors(int stride, int offset) {
    int count = 0;
    long last = -1;
    for (int lane = 0; lane < 32; lane++) {
        long sector = ((long)lane * stride + offset) * sizeof(float) / 32;
        count += sector != last;
        last = sector;
    }
    return count;
}
// --8<-- [end:sectors]

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

const int patterns[][2] = {{1, 0}, {1, 1}, {1, 8}, {2, 0}, {3, 0}, {4, 0}, {8, 0}, {32, 0}};

void check() {
    for (int n : {1, 31, 33, 1000, 4097}) {
        for (auto [stride, offset] : patterns) {
            std::vector<float> in((size_t)n * stride + offset);
            for (size_t i = 0; i < in.size(); i++) in[i] = i;
            float *from = to_device(in), *to = to_device(std::vector<float>(n));
            strided_copy<<<(n + 255) / 256, 256>>>(from, to, n, stride, offset);
            CHECK(cudaGetLastError());
            std::vector<float> out = to_host(to, n);
            for (int i = 0; i < n; i++)
                require(out[i] == in[(size_t)i * stride + offset], "strided_copy", n);
            int run = stride, threads = (n + run - 1) / run;
            run_copy<<<(threads + 255) / 256, 256>>>(from, to, n, run);
            CHECK(cudaGetLastError());
            out = to_host(to, n);
            for (int i = 0; i < n; i++) require(out[i] == in[i], "run_copy", n);
            CHECK(cudaFree(from));
            CHECK(cudaFree(to));
        }
    }
    printf("both copies exact on 1, 31, 33, 1000, 4097 elements\n\n");
    printf("stride  offset  sectors a warp  bytes fetched for a byte used\n");
    for (auto [stride, offset] : patterns) {
        int count = sectors(stride, offset);
        // The formula of the page: a sector for each lane, or all sectors between the first
        // and the last address if these are fewer.
        int span = (31 * stride + offset) / 8 - offset / 8 + 1;
        require(count == std::min(span, 32), "the count of sectors", stride);
        printf("%6d  %6d  %14d  %.2f\n", stride, offset, count, count * 32 / 128.0);
    }
}

void measure() {
    const int n = 1 << 25;
    const size_t most = ((size_t)n * 32 + 8) * sizeof(float);
    float *from, *to;
    CHECK(cudaMalloc(&from, most));
    CHECK(cudaMemset(from, 0, most));
    CHECK(cudaMalloc(&to, n * sizeof(float)));
    double base = 0;
    printf("\na copy moves ≈%.0f GB/s\n", copy_rate((size_t)n * sizeof(float)));
    printf("stride  offset  time expected  measured, and the rate of the bytes expected\n");
    for (auto [stride, offset] : patterns) {
        float ms = milliseconds([&, s = stride, o = offset] {
            strided_copy<<<(n + 255) / 256, 256>>>(from, to, n, s, o);
        });
        if (base == 0) base = ms;
        double bytes = 4 * std::min(stride, 8) + 4;  // sectors of a float that is read, and 4 bytes written
        printf("%6d  %6d  %13.1f  ≈%.1f, ≈%.0f GB/s\n", stride, offset, bytes / 8, ms / base,
               1e-6 * bytes * n / ms);
    }
    for (int run : {1, 4, 32}) {
        float ms = milliseconds([&] {
            run_copy<<<(n / run + 255) / 256, 256>>>(from, to, n, run);
        });
        printf("runs of %2d floats for each thread: ≈%.1f\n", run, ms / base);
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "strided_copy needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py strided_copy.cu --check does without\n");
        return 1;
    }
    check();
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure();
    return 0;
}
