// C = A B in fp32, the next tiles on their way to shared memory while these are multiplied.
//
// __pipeline_memcpy_async starts a copy and goes on; __pipeline_commit closes a group of copies;
// __pipeline_wait_prior(n) waits for all groups of this thread but the newest n. A tile is asked
// for STAGES - 1 steps before it is used.
//
// ./double_buffer          checks, then times 4096 x 4096 x 4096
// ./double_buffer --check  small awkward sizes only
// ./double_buffer FAULT    one of no_wait, short_wait, late_barrier, no_empty_group

#include <cuda_pipeline.h>
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

// A block of 256 threads computes 64 x 64, a thread 4 x 4 of it.
constexpr int BM = 64, BN = 64, BK = 16, THREADS = 256;
using ATile = float[BM][BK + 4];  // 4 more: rows 16 bytes further along the banks
using BTile = float[BK][BN];
enum Fault { NONE, NO_WAIT, SHORT_WAIT, LATE_BARRIER, NO_EMPTY_GROUP };

// Floats from one row to the next: rows begin at multiples of 16 bytes, the padding is zero.
__host__ __device__ constexpr int padded(int length) { return (length + 3) / 4 * 4; }

// --8<-- [start:fetch]
// 16 bytes of a row set out, or 16 zeros where the matrix has none.
__device__ void copy4(float *to, const float *matrix, int rows, int cols, int row, int col) {
    const bool inside = row < rows && col < padded(cols);
    const float *from = inside ? matrix + size_t(row) * padded(cols) + col : matrix;
    __pipeline_memcpy_async(to, from, 16, inside ? 0 : 16);
}

// Both tiles of a step: two copies for each of 256 threads.
__device__ void fetch(ATile &a, BTile &b, int M, int N, int K, const float *A, const float *B,
                      int step) {
    const int t = threadIdx.x, k0 = step * BK;
    copy4(&a[t / 4][t % 4 * 4], A, M, K, blockIdx.y * BM + t / 4, k0 + t % 4 * 4);
    copy4(&b[t / 16][t % 16 * 4], B, K, N, k0 + t / 16, blockIdx.x * BN + t % 16 * 4);
}
// --8<-- [end:fetch]

__device__ void multiply(const ATile &a, const BTile &b, float (&sum)[4][4]) {
    const int y = threadIdx.x / 16 * 4, x = threadIdx.x % 16 * 4;
#pragma unroll
    for (int k = 0; k < BK; k++) {
        const float4 right = *reinterpret_cast<const float4 *>(&b[k][x]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float left = a[y + i][k];
            sum[i][0] += left * right.x;
            sum[i][1] += left * right.y;
            sum[i][2] += left * right.z;
            sum[i][3] += left * right.w;
        }
    }
}

__device__ void write(int M, int N, float *C, const float (&sum)[4][4]) {
    const int row = blockIdx.y * BM + threadIdx.x / 16 * 4;
    const int col = blockIdx.x * BN + threadIdx.x % 16 * 4;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (row + i < M && col + j < N) C[size_t(row + i) * padded(N) + col + j] = sum[i][j];
}

// --8<-- [start:in_turns]
// One pair of tiles: the block waits for it, multiplies it, and only then asks for the next.
__global__ void __launch_bounds__(THREADS)
    in_turns(int M, int N, int K, const float *A, const float *B, float *C) {
    __shared__ __align__(16) ATile a;
    __shared__ __align__(16) BTile b;
    float sum[4][4] = {};
    for (int step = 0; step * BK < K; step++) {
        fetch(a, b, M, N, K, A, B, step);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();  // the copies of all threads are there
        multiply(a, b, sum);
        __syncthreads();  // no thread reads them any more
    }
    write(M, N, C, sum);
}
// --8<-- [end:in_turns]

// --8<-- [start:ahead]
template <int STAGES, Fault fault = NONE>
__global__ void __launch_bounds__(THREADS)
    ahead(int M, int N, int K, const float *A, const float *B, float *C) {
    __shared__ __align__(16) ATile a[STAGES];
    __shared__ __align__(16) BTile b[STAGES];
    float sum[4][4] = {};
    const int steps = (K + BK - 1) / BK;
    for (int step = 0; step < STAGES - 1; step++) {  // the first copies start
        if (step < steps) fetch(a[step], b[step], M, N, K, A, B, step);
        __pipeline_commit();
    }
    for (int step = 0; step < steps; step++) {
        // STAGES - 1 groups are on their way, and this step needs the oldest of them
        if (fault != NO_WAIT) __pipeline_wait_prior(STAGES - 2 + (fault == SHORT_WAIT));
        // all parts have arrived, and no thread reads the tiles of the last step any more
        if (fault != LATE_BARRIER) __syncthreads();
        const int next = step + STAGES - 1;
        if (next < steps) fetch(a[next % STAGES], b[next % STAGES], M, N, K, A, B, next);
        if (next < steps || fault != NO_EMPTY_GROUP) __pipeline_commit();
        if (fault == LATE_BARRIER) __syncthreads();
        multiply(a[step % STAGES], b[step % STAGES], sum);
    }
    write(M, N, C, sum);
}
// --8<-- [end:ahead]

using Kernel = void (*)(int, int, int, const float *, const float *, float *);

struct Rung {
    const char *name;
    int stages;
    Kernel kernel;
};

static const Rung LADDER[] = {
    {"in turns", 1, in_turns}, {"2 stages", 2, ahead<2>}, {"3 stages", 3, ahead<3>},
    {"4 stages", 4, ahead<4>}};

struct Matrix {  // on the host and on the device, padding included
    int rows, cols;
    std::vector<float> host;
    float *device = nullptr;

    Matrix(int rows, int cols, unsigned seed) : rows(rows), cols(cols) {
        host.assign(size_t(rows) * padded(cols), 0.0f);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols && seed; j++) {
                seed = seed * 1664525u + 1013904223u;
                host[size_t(i) * padded(cols) + j] = int(seed >> 8) / 8388608.0f - 1;
            }
        CHECK(cudaMalloc(&device, bytes()));
        CHECK(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice));
    }
    ~Matrix() { cudaFree(device); }
    Matrix(const Matrix &) = delete;
    size_t bytes() const { return host.size() * sizeof(float); }
    double at(int i, int j) const { return host[size_t(i) * padded(cols) + j]; }
};

static void launch(Kernel kernel, const Matrix &A, const Matrix &B, Matrix &C, int dynamic = 0) {
    const dim3 grid((C.cols + BN - 1) / BN, (C.rows + BM - 1) / BM);
    kernel<<<grid, THREADS, dynamic>>>(C.rows, C.cols, A.cols, A.device, B.device, C.device);
    CHECK(cudaGetLastError());
}

// Largest error of C against float64, as a share of the bound K 2^-24 sum |a b|.
static double worst_error(const Matrix &A, const Matrix &B, Matrix &C, int step = 1) {
    CHECK(cudaMemcpy(C.host.data(), C.device, C.bytes(), cudaMemcpyDeviceToHost));
    double worst = 0;
    for (long e = 0; e < long(C.rows) * C.cols; e += step) {
        const int i = int(e / C.cols), j = int(e % C.cols);
        double exact = 0, size = 0;
        for (int k = 0; k < A.cols; k++) {
            exact += A.at(i, k) * B.at(k, j);
            size += std::fabs(A.at(i, k) * B.at(k, j));
        }
        const double bound = A.cols * std::ldexp(size, -24);
        if (!(std::fabs(C.at(i, j) - exact) <= bound)) {
            fprintf(stderr, "wrong: C[%d][%d] of %d x %d x %d is %g, should be %g\n", i, j,
                    C.rows, C.cols, A.cols, C.at(i, j), exact);
            exit(1);
        }
        worst = std::max(worst, std::fabs(C.at(i, j) - exact) / bound);
    }
    return worst;
}

static const std::vector<std::vector<int>> SIZES = {{1, 1, 17}, {67, 3, 130}, {5, 66, 49}};

static void check() {
    for (const Rung &rung : LADDER) {
        double worst = 0;
        for (const auto &size : SIZES) {
            Matrix A(size[0], size[2], 1), B(size[2], size[1], 2), C(size[0], size[1], 0);
            CHECK(cudaMemset(C.device, 0xff, C.bytes()));  // NaN until it is written
            launch(rung.kernel, A, B, C);
            worst = std::max(worst, worst_error(A, B, C));
        }
        // --8<-- [start:flight]
        const int flying = (rung.stages - 1) * (BM + BN) * BK * 4;
        // clocks: a multiply-add takes 2 bytes from shared memory, which gives 128 a clock
        const double multiply = BM * BN * BK * 2 / 128.0, latency = 1000;
        const double share = rung.stages == 1
                                 ? multiply / (multiply + latency)
                                 : std::min(1.0, (rung.stages - 1) * multiply / latency);
        // --8<-- [end:flight]
        printf("%s: error ≈%.2f of its bound; %5d bytes ahead, multiplies %3.0f%% of the time\n",
               rung.name, worst, flying, 100 * share);
    }
}

// Milliseconds of one call: the median of eleven by events, after two calls to warm up.
template <class Call>
static double milliseconds(Call call) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int i = 0; i < 2; i++) call();
    std::vector<float> times(11);
    for (float &took : times) {
        CHECK(cudaEventRecord(begin));
        call();
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&took, begin, end));
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    std::nth_element(times.begin(), times.begin() + 5, times.end());
    return times[5];
}

static void measure(int n) {
    cudaDeviceProp gpu;
    CHECK(cudaGetDeviceProperties(&gpu, 0));
    Matrix A(n, n, 1), B(n, n, 2), C(n, n, 0);
    // memory that nobody uses, so that no second block fits beside: more than half of an SM's
    const int alone = int(gpu.sharedMemPerBlockOptin - 4 * (sizeof(ATile) + sizeof(BTile)));
    for (const Rung &rung : LADDER) {
        const auto dynamic = cudaFuncAttributeMaxDynamicSharedMemorySize;
        CHECK(cudaFuncSetAttribute(rung.kernel, dynamic, alone));
        double tflops[2];
        for (int many : {0, 1}) {
            CHECK(cudaMemset(C.device, 0xff, C.bytes()));
            const int unused = many ? 0 : alone;
            const double ms = milliseconds([&] { launch(rung.kernel, A, B, C, unused); });
            worst_error(A, B, C, 999983);
            tflops[many] = 2.0 * n * n * n / ms / 1e9;
        }
        printf("%s: ≈%.1f TFLOP/s with one block to an SM, ≈%.1f with as many as fit\n",
               rung.name, tflops[0], tflops[1]);
    }
}

// A kernel with a fault, on two blocks and five steps.
static int wrong(const char *fault) {
    const int M = 64, N = 128, K = 80;
    Matrix A(M, K, 1), B(K, N, 2), C(M, N, 0);
    const float *a = A.device, *b = B.device;
    const auto is = [&](const char *name) { return strcmp(fault, name) == 0; };
    if (is("no_wait"))
        ahead<3, NO_WAIT><<<dim3(2, 1), THREADS>>>(M, N, K, a, b, C.device);
    else if (is("short_wait"))
        ahead<3, SHORT_WAIT><<<dim3(2, 1), THREADS>>>(M, N, K, a, b, C.device);
    else if (is("late_barrier"))
        ahead<3, LATE_BARRIER><<<dim3(2, 1), THREADS>>>(M, N, K, a, b, C.device);
    else if (is("no_empty_group"))
        ahead<3, NO_EMPTY_GROUP><<<dim3(2, 1), THREADS>>>(M, N, K, a, b, C.device);
    else {
        fprintf(stderr, "double_buffer knows no fault %s\n", fault);
        return 1;
    }
    CHECK(cudaGetLastError());
    worst_error(A, B, C);
    printf("%s: right, this time\n", fault);
    return 0;
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "double_buffer needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py double_buffer.cu --check does without\n");
        return 1;
    }
    if (argc > 1 && strcmp(argv[1], "--check") != 0) return wrong(argv[1]);
    check();
    if (argc < 2) measure(4096);
    return 0;
}
