// Compares places for constants. Constant memory serves one address per turn to a whole warp.
//
// The 32 coefficients of a polynomial are in __constant__ memory, in the parameters of the
// kernel, or in global memory. Then each lane reads its own entry of a table with 256 values.
//
// ./constant_memory          runs the checks, then times 2^26 elements with each kernel
// ./constant_memory --check  runs only the checks, with small sizes

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
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

constexpr int TERMS = 32, ENTRIES = 256, BLOCK = 256;

// --8<-- [start:polynomial]
struct Polynomial { float c[TERMS]; };
__constant__ Polynomial kept;  // all __constant__ variables share 64 KiB
__constant__ float table[ENTRIES];

__device__ float horner(const float *c, float x) {
    float y = 0;
#pragma unroll
    for (int k = TERMS - 1; k >= 0; k--) y = y * x + c[k];  // all lanes read the same c[k]
    return y;
}

__global__ void from_constant(const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = horner(kept.c, x[i]);
}
__global__ void from_parameter(const float *x, float *y, int n,
                               const __grid_constant__ Polynomial p) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = horner(p.c, x[i]);
}
__global__ void from_global(const float *__restrict__ x, float *__restrict__ y, int n,
                            const float *__restrict__ c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = horner(c, x[i]);
}
// --8<-- [end:polynomial]

// --8<-- [start:look_up]
__global__ void from_table(const unsigned char *code, float *y, int n) {
    int threads = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads)
        y[i] = table[code[i]];  // one turn for each different code in the warp
}
__global__ void from_shared(const unsigned char *code, float *y, int n,
                            const float *entries) {
    __shared__ float copy[ENTRIES];
    for (int k = threadIdx.x; k < ENTRIES; k += BLOCK) copy[k] = entries[k];
    __syncthreads();
    int threads = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads)
        y[i] = copy[code[i]];  // lanes wait only if they need different words of the same bank
}

// --8<-- [end:look_up]
// --8<-- [start:count_turns]
// Counts the different codes of each warp. n must be a multiple of 32.
__global__ void count_turns(const unsigned char *code, int *turns, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    if (i >= n) return;
    bool first = true;
    for (int other = 0; other < 32; other++) {
        int same = __shfl_sync(~0u, int(code[i]), other) == code[i];
        if (other < lane && same) first = false;
    }
    unsigned firsts = __ballot_sync(~0u, first);
    if (lane == 0) turns[i / 32] = __popc(firsts);
}
// --8<-- [end:count_turns]

const char *names[] = {"from_constant", "from_parameter", "from_global", "from_table",
                       "from_shared"};

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

unsigned random_bits() {
    static unsigned state = 1;
    return (state = state * 1664525u + 1013904223u) >> 16;
}

// `n` codes, each of `levels` values equally likely.
std::vector<unsigned char> codes(int n, int levels) {
    std::vector<unsigned char> code(n);
    for (auto &c : code) c = (unsigned char)(random_bits() % levels);
    return code;
}

float entry(int code) { return std::sin(0.1f * code); }

// Coefficients and table in constant memory, and once more in global memory.
struct Constants {
    Polynomial p;
    float *coefficients, *entries;
};

Constants set_up() {
    Polynomial p;
    std::vector<float> entries;
    for (float &c : p.c) c = float(int(random_bits()) - 32768) / 32768;
    for (int k = 0; k < ENTRIES; k++) entries.push_back(entry(k));
    // --8<-- [start:copy]
    CHECK(cudaMemcpyToSymbol(kept, &p, sizeof p));  // by name, because the host has no pointer
    CHECK(cudaMemcpyToSymbol(table, entries.data(), ENTRIES * sizeof(float)));
    // --8<-- [end:copy]
    return {p, to_device(std::vector<float>(p.c, p.c + TERMS)), to_device(entries)};
}

void evaluate(int which, const float *x, float *y, int n, const Constants &all) {
    const int blocks = (n + BLOCK - 1) / BLOCK;
    if (which == 0) from_constant<<<blocks, BLOCK>>>(x, y, n);
    if (which == 1) from_parameter<<<blocks, BLOCK>>>(x, y, n, all.p);
    if (which == 2) from_global<<<blocks, BLOCK>>>(x, y, n, all.coefficients);
    CHECK(cudaGetLastError());
}

void look_up(int which, const unsigned char *code, float *y, int n, const Constants &all) {
    const int blocks = std::min(1056, (n + BLOCK - 1) / BLOCK);
    if (which == 3) from_table<<<blocks, BLOCK>>>(code, y, n);
    if (which == 4) from_shared<<<blocks, BLOCK>>>(code, y, n, all.entries);
    CHECK(cudaGetLastError());
}

void check() {
    const Constants all = set_up();
    double worst = 0;
    for (int n : {1, 31, 33, 1000}) {
        std::vector<float> x(n), first;
        for (int i = 0; i < n; i++) x[i] = 2.0f * (i + 1) / (n + 1) - 1;
        float *dx = to_device(x), *dy = to_device(x);
        for (int which : {0, 1, 2}) {
            evaluate(which, dx, dy, n, all);
            const std::vector<float> y = to_host(dy, n);
            for (int i = 0; i < n; i++) {  // Horner in float64, and the sum of the sizes
                double exact = 0, size = 0;
                for (int k = TERMS - 1; k >= 0; k--) {
                    exact = exact * x[i] + all.p.c[k];
                    size = size * std::fabs(x[i]) + std::fabs(all.p.c[k]);
                }
                const double bound = 2 * TERMS * std::ldexp(size, -24);  // a rounding each
                const double error = std::fabs(y[i] - exact);
                require(error <= bound, names[which], n);
                worst = std::max(worst, error / bound);
            }
            if (which == 0) first = y;
            require(y == first, "the order of operations", n);
        }
        CHECK(cudaFree(dx));
        CHECK(cudaFree(dy));
    }
    printf("polynomial: the same bits three times on four sizes, error ≈%.2f of its bound\n", worst);

    const int n = 4096;
    for (int levels : {1, 16, 256}) {
        const std::vector<unsigned char> code = codes(n, levels);
        unsigned char *dc = to_device(code);
        int *turns;
        float *dy;
        CHECK(cudaMalloc(&turns, n / 32 * sizeof(int)));
        CHECK(cudaMalloc(&dy, n * sizeof(float)));
        for (int which : {3, 4}) {
            look_up(which, dc, dy, n, all);
            const std::vector<float> y = to_host(dy, n);
            for (int i = 0; i < n; i++)
                require(y[i] == entry(code[i]), names[which], n);
        }
        count_turns<<<n / BLOCK, BLOCK>>>(dc, turns, n);
        CHECK(cudaGetLastError());
        double mean = 0;
        const std::vector<int> counted = to_host(turns, n / 32);
        for (int warp = 0; warp < n / 32; warp++) {
            const std::set<int> different(&code[32 * warp], &code[32 * warp] + 32);
            require(counted[warp] == (int)different.size(), "the turns of a warp", levels);
            mean += counted[warp] / (n / 32.0);
        }
        const double expected = levels * (1 - std::pow(1 - 1.0 / levels, 32));
        require(std::fabs(mean - expected) < 0.5, "the number of turns", levels);
        printf("table, %3d codes: right, %5.2f different addresses a warp, expected %5.2f\n", levels,
               mean, expected);
        CHECK(cudaFree(dc));
        CHECK(cudaFree(turns));
        CHECK(cudaFree(dy));
    }
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
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
    std::nth_element(times.begin(), times.begin() + 10, times.end());
    return times[10];
}

void measure() {
    const int n = 1 << 26;
    const Constants all = set_up();
    float *x = to_device(std::vector<float>(n, 0.5f)), *y;
    CHECK(cudaMalloc(&y, n * sizeof(float)));
    const float copy = milliseconds([&] {
        CHECK(cudaMemcpyAsync(y, x, n * sizeof(float), cudaMemcpyDeviceToDevice));
    });
    printf("a copy: ≈%.3f ms\n", copy);
    for (int which : {0, 1, 2}) {
        const float ms = milliseconds([&] { evaluate(which, x, y, n, all); });
        printf("%-14s ≈%.3f ms, ≈%.2f copies\n", names[which], ms, ms / copy);
    }
    for (int levels : {1, 16, 256}) {
        unsigned char *code = to_device(codes(n, levels));
        for (int which : {3, 4}) {
            const float ms = milliseconds([&] { look_up(which, code, y, n, all); });
            printf("%-11s %3d codes ≈%.3f ms\n", names[which], levels, ms);
        }
        CHECK(cudaFree(code));
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "constant_memory needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py constant_memory.cu --check does without\n");
        return 1;
    }
    check();
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure();
    return 0;
}
