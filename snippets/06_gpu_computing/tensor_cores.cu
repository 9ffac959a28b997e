// C = A B on tensor cores: fp16 in, fp32 sums and result, twice, through CUDA's wmma interface.
//
// A warp multiplies squares of 16 x 16 together; no lane knows which elements it holds. Rows and
// columns are padded to multiples of 16 with zeros, so no square is ever cut.
//
// ./tensor_cores          checks, then times 8192 x 8192 x 8192 beside cuBLAS
// ./tensor_cores --check  small awkward sizes only

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <mma.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#define CHECK(call)                                                                           \
    do {                                                                                      \
        cudaError_t status_ = (call);                                                         \
        if (status_ != cudaSuccess) {                                                         \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                     \
                    cudaGetErrorString(status_));                                             \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

#ifdef BF16  // the same product with factors in bf16: compare the machine code
using Factor = __nv_bfloat16;
#else
using Factor = __half;
#endif
namespace wmma = nvcuda::wmma;
using Left = wmma::fragment<wmma::matrix_a, 16, 16, 16, Factor, wmma::row_major>;
using Right = wmma::fragment<wmma::matrix_b, 16, 16, 16, Factor, wmma::row_major>;
using Sum = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

__host__ __device__ constexpr int padded(int length) { return (length + 15) / 16 * 16; }

// --8<-- [start:straight]
// One warp computes one square of C. It loads the factors directly from global memory.
__global__ void straight(int M, int N, int K, const Factor *A, const Factor *B, float *C) {
    const int warp = threadIdx.x / 32;
    const int row = blockIdx.y * 32 + warp / 2 * 16, col = blockIdx.x * 32 + warp % 2 * 16;
    if (row >= M || col >= N) return;  // the whole warp leaves, or none of it
    Left left;
    Right right;
    Sum sum;
    wmma::fill_fragment(sum, 0.0f);
    for (int k = 0; k < K; k += 16) {
        wmma::load_matrix_sync(left, A + row * padded(K) + k, padded(K));
        wmma::load_matrix_sync(right, B + k * padded(N) + col, padded(N));
        wmma::mma_sync(sum, left, right, sum);
    }
    wmma::store_matrix_sync(C + row * padded(N) + col, sum, padded(N), wmma::mem_row_major);
}
// --8<-- [end:straight]

// --8<-- [start:tiles]
// A block of 4 warps computes 128 x 128, and each warp computes 64 x 64, so it has 16 squares.
// As in rung 8 of sgemm.cu, the next tiles go through registers to a second pair of tiles.
constexpr int BM = 128, BN = 128, BK = 32, THREADS = 128;
using ATile = Factor[BM][BK + 8];  // 8 more (16 bytes), so that rows begin in other banks
using BTile = Factor[BK][BN + 8];
// --8<-- [end:tiles]

// Eight factors of a row in one 16-byte load, zeros outside.
__device__ uint4 load8(const Factor *matrix, int rows, int cols, int row, int col) {
    if (row >= padded(rows) || col >= padded(cols)) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4 *>(matrix + row * padded(cols) + col);
}

struct Fetched {
    uint4 a[4], b[4];

    __device__ void load(int M, int N, int K, const Factor *A, const Factor *B, int k0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = threadIdx.x + i * THREADS;
            a[i] = load8(A, M, K, blockIdx.y * BM + t / 4, k0 + t % 4 * 8);
            b[i] = load8(B, K, N, k0 + t / 16, blockIdx.x * BN + t % 16 * 8);
        }
    }

    __device__ void store(ATile &to_a, BTile &to_b) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = threadIdx.x + i * THREADS;
            *reinterpret_cast<uint4 *>(&to_a[t / 4][t % 4 * 8]) = a[i];
            *reinterpret_cast<uint4 *>(&to_b[t / 16][t % 16 * 8]) = b[i];
        }
    }
};

// --8<-- [start:tiled]
// --8<-- [start:multiply_tile]
__device__ void multiply(const ATile &a, const BTile &b, int y, int x, Sum (&sum)[4][4]) {
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
        Left left[4];
#pragma unroll
        for (int i = 0; i < 4; i++) wmma::load_matrix_sync(left[i], &a[y + 16 * i][k], BK + 8);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            Right right;
            wmma::load_matrix_sync(right, &b[k][x + 16 * j], BN + 8);
#pragma unroll
            for (int i = 0; i < 4; i++) wmma::mma_sync(sum[i][j], left[i], right, sum[i][j]);
        }
    }
}
// --8<-- [end:multiply_tile]

__global__ void __launch_bounds__(THREADS, 2)
    tiled(int M, int N, int K, const Factor *A, const Factor *B, float *C) {
    __shared__ __align__(32) ATile a[2];
    __shared__ __align__(32) BTile b[2];
    const int warp = threadIdx.x / 32, y = warp / 2 * 64, x = warp % 2 * 64;
    Sum sum[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) wmma::fill_fragment(sum[i][j], 0.0f);

    Fetched next;
    next.load(M, N, K, A, B, 0);
    next.store(a[0], b[0]);
    __syncthreads();
    int now = 0;
    for (int k0 = BK; k0 < K; k0 += BK) {
        next.load(M, N, K, A, B, k0);
        multiply(a[now], b[now], y, x, sum);
        next.store(a[1 - now], b[1 - now]);
        __syncthreads();
        now = 1 - now;
    }
    multiply(a[now], b[now], y, x, sum);
    // --8<-- [end:tiled]

#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = blockIdx.y * BM + y + 16 * i, col = blockIdx.x * BN + x + 16 * j;
            if (row < M && col < N)
                wmma::store_matrix_sync(C + row * padded(N) + col, sum[i][j], padded(N),
                                        wmma::mem_row_major);
        }
}

using Kernel = void (*)(int, int, int, const Factor *, const Factor *, float *);

struct Rung {
    const char *name;
    Kernel kernel;
    int tile, threads;
};

static const Rung LADDER[] = {{"straight", straight, 32, 128}, {"tiled", tiled, BM, THREADS}};

template <class T>
struct Matrix {  // on the host and on the device, padding included
    int rows, cols;
    std::vector<T> host;
    T *device = nullptr;

    Matrix(int rows, int cols, unsigned seed) : rows(rows), cols(cols) {
        host.assign(size_t(padded(rows)) * padded(cols), T(0.0f));
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols && seed; j++) {
                seed = seed * 1664525u + 1013904223u;
                host[size_t(i) * padded(cols) + j] = T(int(seed >> 8) / 8388608.0f - 1);
            }
        CHECK(cudaMalloc(&device, bytes()));
        CHECK(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice));
    }
    ~Matrix() { cudaFree(device); }
    Matrix(const Matrix &) = delete;
    size_t bytes() const { return host.size() * sizeof(T); }
    double at(int i, int j) const { return float(host[size_t(i) * padded(cols) + j]); }
};

using Input = Matrix<Factor>;
using Output = Matrix<float>;

static void launch(const Rung &rung, const Input &A, const Input &B, Output &C) {
    const dim3 grid((C.cols + rung.tile - 1) / rung.tile, (C.rows + rung.tile - 1) / rung.tile);
    const Kernel kernel = rung.kernel;
    kernel<<<grid, rung.threads>>>(C.rows, C.cols, A.cols, A.device, B.device, C.device);
    CHECK(cudaGetLastError());
}

// Largest error of C against float64 of the same inputs, as a share of K 2^-22 sum |a b|:
// the products are exact, and tensor cores add them with less care than IEEE's rounding.
static double worst_error(const Input &A, const Input &B, Output &C, int step) {
    CHECK(cudaMemcpy(C.host.data(), C.device, C.bytes(), cudaMemcpyDeviceToHost));
    double worst = 0;
    for (long e = 0; e < long(C.rows) * C.cols; e += step) {
        const int i = int(e / C.cols), j = int(e % C.cols);
        double exact = 0, size = 0;
        for (int k = 0; k < A.cols; k++) {
            const double product = A.at(i, k) * B.at(k, j);
            exact += product;
            size += std::fabs(product);
        }
        const double bound = A.cols * std::ldexp(1.0, -22) * size;
        const double error = std::fabs(C.at(i, j) - exact);
        if (!(error <= bound)) {
            fprintf(stderr, "wrong: C[%d][%d] of %d x %d x %d is %g, should be %g\n", i, j,
                    C.rows, C.cols, A.cols, C.at(i, j), exact);
            exit(1);
        }
        if (bound > 0) worst = std::max(worst, error / bound);
    }
    return worst;
}

static void check(bool small) {
    const std::vector<std::vector<int>> sizes =
        small ? std::vector<std::vector<int>>{{1, 1, 1}, {131, 3, 17}, {65, 130, 70}}
              : std::vector<std::vector<int>>{
                    {1, 1, 1}, {31, 33, 1000}, {33, 4097, 31}, {1000, 1000, 33}, {4097, 129, 17}};
    for (const Rung &rung : LADDER) {
        double worst = 0;
        for (const auto &size : sizes) {
            Input A(size[0], size[2], 1), B(size[2], size[1], 2);
            Output C(size[0], size[1], 0);
            CHECK(cudaMemset(C.device, 0xff, C.bytes()));  // NaN until it is written
            launch(rung, A, B, C);
            worst = std::max(worst, worst_error(A, B, C, 1));
        }
        printf("%-9s equal to float64 on %d sizes, error at most ≈%.3f of its bound\n", rung.name,
               int(sizes.size()), worst);
    }
}

// Milliseconds of one call: the median of eleven by events, after five calls to warm up.
template <class Call>
static double milliseconds(Call call) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int i = 0; i < 5; i++) call();
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

// cuBLAS, looked up at run time. Row-major C = A B is, counted in columns, C' = B' A'.
struct Cublas {
    using Create = int (*)(void **);
    using Gemm = int (*)(void *, int, int, int, int, int, const void *, const void *, int, int,
                         const void *, int, int, const void *, void *, int, int, int, int);
    void *handle = nullptr;
    Gemm gemm = nullptr;

    Cublas() {
        for (const char *name : {"libcublas.so", "libcublas.so.13", "libcublas.so.12"})
            if (void *library = dlopen(name, RTLD_NOW)) {
                auto create = reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2"));
                gemm = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
                if (!create || create(&handle) != 0) gemm = nullptr;
                return;
            }
    }
    void operator()(const Input &A, const Input &B, Output &C) const {
        // values of CUDA_R_16BF or CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
        constexpr int FACTOR = std::is_same_v<Factor, __half> ? 2 : 14;
        constexpr int FP32 = 0, SUMS_IN_FP32 = 68, DEFAULT = -1;
        const float one = 1, zero = 0;
        const int status =
            gemm(handle, 0, 0, C.cols, C.rows, A.cols, &one, B.device, FACTOR, padded(B.cols),
                 A.device, FACTOR, padded(A.cols), &zero, C.device, FP32, padded(C.cols),
                 SUMS_IN_FP32, DEFAULT);
        if (status != 0) {
            fprintf(stderr, "cublasGemmEx returned %d\n", status);
            exit(1);
        }
    }
};

static void measure(int n) {
    Input A(n, n, 1), B(n, n, 2);
    Output C(n, n, 0);
    const Cublas cublas;
    const double flop = 2.0 * n * n * n;
    double ceiling = 0;
    if (cublas.gemm) {
        const double ms = milliseconds([&] { cublas(A, B, C); });
        worst_error(A, B, C, 999983);
        ceiling = flop / ms / 1e9;
        printf("cuBLAS    ≈%.3f ms  ≈%.1f TFLOP/s\n", ms, ceiling);
    } else {
        printf("no libcublas.so on the library path: set LD_LIBRARY_PATH to see shares of it\n");
    }
    for (const Rung &rung : LADDER) {
        CHECK(cudaMemset(C.device, 0xff, C.bytes()));
        const double ms = milliseconds([&] { launch(rung, A, B, C); });
        worst_error(A, B, C, 999983);
        printf("%-9s ≈%.3f ms  ≈%.1f TFLOP/s", rung.name, ms, flop / ms / 1e9);
        if (ceiling > 0) printf("  ≈%.1f%% of cuBLAS", 100 * flop / ms / 1e9 / ceiling);
        printf("\n");
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "tensor_cores needs an NVIDIA GPU; without one: python cuda_on_cpu.py "
                        "tensor_cores.cu --check\n");
        return 1;
    }
    const bool small = argc > 1 && strcmp(argv[1], "--check") == 0;
    check(small);
    if (!small) measure(8192);
    return 0;
}
