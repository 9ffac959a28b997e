// C = A B in fp32 by eight kernels: from one thread per element to double-buffered warp tiles.
//
// Matrices are row-major. Each row is padded with zeros to a multiple of four floats, so every row
// begins at a multiple of 16 bytes and no float4 crosses the end of a row. The ladder and the tile
// sizes of rungs 1 to 6 are from S. Boehm's worklog, "How to Optimize a CUDA Matmul Kernel".
//
// ./sgemm          checks, then times 4096 x 4096 x 4096 beside cuBLAS
// ./sgemm --check  small awkward sizes only

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// The number of floats from one row to the next.
__host__ __device__ constexpr int padded(int length) { return (length + 3) / 4 * 4; }

// --8<-- [start:naive]
// Rung 1. One thread computes one element. The lanes of a warp compute a column of C.
__global__ void naive(int M, int N, int K, const float *A, const float *B, float *C) {
    const int row = blockIdx.y * 32 + threadIdx.x;
    const int col = blockIdx.x * 32 + threadIdx.y;
    if (row >= M || col >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += A[row * padded(K) + k] * B[k * padded(N) + col];
    C[row * padded(N) + col] = sum;
}
// --8<-- [end:naive]

// --8<-- [start:coalesced]
// Rung 2. x and y are exchanged. The lanes of a warp compute a row of C.
__global__ void coalesced(int M, int N, int K, const float *A, const float *B, float *C) {
    const int row = blockIdx.y * 32 + threadIdx.y;
    const int col = blockIdx.x * 32 + threadIdx.x;
    if (row >= M || col >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += A[row * padded(K) + k] * B[k * padded(N) + col];
    C[row * padded(N) + col] = sum;
}
// --8<-- [end:coalesced]

// --8<-- [start:shared]
// Rung 3. A block copies 32 x 32 elements of A and of B to shared memory, where all its
// threads read them.
__global__ void shared(int M, int N, int K, const float *A, const float *B, float *C) {
    __shared__ float a[32][32], b[32][32];
    const int x = threadIdx.x, y = threadIdx.y;
    const int row = blockIdx.y * 32 + y, col = blockIdx.x * 32 + x;
    float sum = 0;
    for (int k0 = 0; k0 < K; k0 += 32) {
        a[y][x] = row < M && k0 + x < K ? A[row * padded(K) + k0 + x] : 0;
        b[y][x] = k0 + y < K && col < N ? B[(k0 + y) * padded(N) + col] : 0;
        __syncthreads();  // the tiles are complete
#pragma unroll
        for (int k = 0; k < 32; k++) sum += a[y][k] * b[k][x];
        __syncthreads();  // no thread reads them any more
    }
    if (row < M && col < N) C[row * padded(N) + col] = sum;
}
// --8<-- [end:shared]

// --8<-- [start:tile_1d]
// Rung 4. 512 threads compute 64 x 64 elements. Each thread computes a column of 8.
__global__ void tile_1d(int M, int N, int K, const float *A, const float *B, float *C) {
    constexpr int BM = 64, BN = 64, BK = 8, TM = 8;
    __shared__ float a[BM][BK], b[BK][BN];
    const int t = threadIdx.x, row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    const int y = t / BN * TM, x = t % BN;
    float sum[TM] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        const int ar = row0 + t / BK, ak = k0 + t % BK, bk = k0 + t / BN, bc = col0 + t % BN;
        a[t / BK][t % BK] = ar < M && ak < K ? A[ar * padded(K) + ak] : 0;
        b[t / BN][t % BN] = bk < K && bc < N ? B[bk * padded(N) + bc] : 0;
        __syncthreads();
        // --8<-- [start:tile_1d_loop]
#pragma unroll
        for (int k = 0; k < BK; k++) {
            const float right = b[k][x];
#pragma unroll
            for (int i = 0; i < TM; i++) sum[i] += a[y + i][k] * right;
        }
        // --8<-- [end:tile_1d_loop]
        __syncthreads();
    }
    for (int i = 0; i < TM; i++)
        if (row0 + y + i < M && col0 + x < N) C[(row0 + y + i) * padded(N) + col0 + x] = sum[i];
}
// --8<-- [end:tile_1d]

// --8<-- [start:tile_2d]
// Rung 5. 256 threads compute 128 x 128 elements. Each thread reads 16 values for 64 FMAs.
__global__ void __launch_bounds__(256, 2)
    tile_2d(int M, int N, int K, const float *A, const float *B, float *C) {
    constexpr int BM = 128, BN = 128, BK = 8, TM = 8, TN = 8, THREADS = 256;
    __shared__ float a[BM][BK], b[BK][BN];
    const int t = threadIdx.x, row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    const int y = t / (BN / TN) * TM, x = t % (BN / TN) * TN;
    float sum[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
#pragma unroll
        for (int part = 0; part < BM * BK / THREADS; part++) {  // four of each tile per thread
            const int i = part * THREADS + t;
            const int ar = row0 + i / BK, ak = k0 + i % BK, bk = k0 + i / BN, bc = col0 + i % BN;
            a[i / BK][i % BK] = ar < M && ak < K ? A[ar * padded(K) + ak] : 0;
            b[i / BN][i % BN] = bk < K && bc < N ? B[bk * padded(N) + bc] : 0;
        }
        __syncthreads();
        // --8<-- [start:tile_2d_loop]
#pragma unroll
        for (int k = 0; k < BK; k++) {
            float left[TM], right[TN];
#pragma unroll
            for (int i = 0; i < TM; i++) left[i] = a[y + i][k];
#pragma unroll
            for (int j = 0; j < TN; j++) right[j] = b[k][x + j];
#pragma unroll
            for (int i = 0; i < TM; i++)
#pragma unroll
                for (int j = 0; j < TN; j++) sum[i][j] += left[i] * right[j];
        }
        // --8<-- [end:tile_2d_loop]
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++)
            if (row0 + y + i < M && col0 + x + j < N)
                C[(row0 + y + i) * padded(N) + col0 + x + j] = sum[i][j];
}
// --8<-- [end:tile_2d]

// --8<-- [start:float4]
// Four floats of a row in one 16-byte load, zeros outside the matrix. `col` is a multiple of 4.
__device__ float4 load4(const float *matrix, int rows, int cols, int row, int col) {
    if (row >= rows || col >= cols) return make_float4(0, 0, 0, 0);
    return *reinterpret_cast<const float4 *>(matrix + row * padded(cols) + col);
}

__device__ float4 &as4(float &first) { return reinterpret_cast<float4 &>(first); }
// --8<-- [end:float4]

// --8<-- [start:vectorised]
// Rung 6. Loads and stores move 16 bytes. A's tile is stored transposed, so that the 8 values of
// a column, which a thread needs together, are neighbours.
__global__ void __launch_bounds__(256, 2)
    vectorised(int M, int N, int K, const float *A, const float *B, float *C) {
    constexpr int BM = 128, BN = 128, BK = 8, TM = 8, TN = 8;
    __shared__ __align__(16) float a[BK][BM], b[BK][BN];
    const int t = threadIdx.x, row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    const int y = t / (BN / TN) * TM, x = t % (BN / TN) * TN;
    const int ar = t / 2, ak = t % 2 * 4, bk = t / 32, bc = t % 32 * 4;
    float sum[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        // --8<-- [start:vectorised_step]
        const float4 from_a = load4(A, M, K, row0 + ar, k0 + ak);
        a[ak][ar] = from_a.x, a[ak + 1][ar] = from_a.y;
        a[ak + 2][ar] = from_a.z, a[ak + 3][ar] = from_a.w;
        as4(b[bk][bc]) = load4(B, K, N, k0 + bk, col0 + bc);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BK; k++) {
            __align__(16) float left[TM], right[TN];
#pragma unroll
            for (int i = 0; i < TM; i += 4) as4(left[i]) = as4(a[k][y + i]);
#pragma unroll
            for (int j = 0; j < TN; j += 4) as4(right[j]) = as4(b[k][x + j]);
        // --8<-- [end:vectorised_step]
#pragma unroll
            for (int i = 0; i < TM; i++)
#pragma unroll
                for (int j = 0; j < TN; j++) sum[i][j] += left[i] * right[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j += 4)  // a float4 that begins inside may end in the padding
            if (row0 + y + i < M && col0 + x + j < N)
                as4(C[(row0 + y + i) * padded(N) + col0 + x + j]) =
                    make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
}
// --8<-- [end:vectorised]

// --8<-- [start:lanes]
// A block of 8 warps computes 128 x 128 elements, and each warp computes 64 x 32 of them. A lane
// computes four squares of 4 x 4, which are 32 rows and 16 columns apart.
namespace tile {
constexpr int BM = 128, BN = 128, BK = 16, THREADS = 256;
using ATile = float[BK][BM + 4];  // 4 more, so that transposing stores use more banks
using BTile = float[BK][BN];

// --8<-- [start:place]
struct Place {  // where this lane's four squares begin
    int y, x;
    __device__ Place() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        // 2 x 4 warps of 8 x 4 lanes. Lanes 2i and 2i + 1 share their rows, and lanes i and i + 2
        // share their columns, so that a 16-byte load needs 2 passes instead of 4
        y = warp / 4 * 64 + (lane / 8 * 2 + lane / 2 % 2) * 4;
        x = warp % 4 * 32 + (lane / 4 % 2 * 2 + lane % 2) * 4;
    }
};
// --8<-- [end:place]

struct Fetched {  // what this thread copies of two tiles, in registers
    float4 a[2], b[2];

    __device__ void load(int M, int N, int K, const float *A, const float *B, int k0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = threadIdx.x + i * THREADS;
            a[i] = load4(A, M, K, blockIdx.y * BM + t / 4, k0 + t % 4 * 4);
            b[i] = load4(B, K, N, k0 + t / 32, blockIdx.x * BN + t % 32 * 4);
        }
    }

    __device__ void store(ATile &to_a, BTile &to_b) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = threadIdx.x + i * THREADS, row = t / 4, k = t % 4 * 4;
            to_a[k][row] = a[i].x, to_a[k + 1][row] = a[i].y;
            to_a[k + 2][row] = a[i].z, to_a[k + 3][row] = a[i].w;
            as4(to_b[t / 32][t % 32 * 4]) = b[i];
        }
    }
};

// --8<-- [start:multiply]
__device__ void multiply(ATile &a, BTile &b, Place at, float (&sum)[8][8]) {
#pragma unroll
    for (int k = 0; k < BK; k++) {
        __align__(16) float left[8], right[8];
        as4(left[0]) = as4(a[k][at.y]), as4(left[4]) = as4(a[k][at.y + 32]);
        as4(right[0]) = as4(b[k][at.x]), as4(right[4]) = as4(b[k][at.x + 16]);
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) sum[i][j] += left[i] * right[j];
    }
}
// --8<-- [end:multiply]
// --8<-- [end:lanes]

__device__ void write(int M, int N, float *C, Place at, const float (&sum)[8][8]) {
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            const int row = blockIdx.y * BM + at.y + i % 4 + i / 4 * 32;
            const int col = blockIdx.x * BN + at.x + j / 4 * 16;
            if (row < M && col < N)
                as4(C[row * padded(N) + col]) =
                    make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
        }
}
}  // namespace tile

// --8<-- [start:warp_tile]
// Rung 7. Load, barrier, multiply, barrier.
__global__ void __launch_bounds__(tile::THREADS, 2)
    warp_tile(int M, int N, int K, const float *A, const float *B, float *C) {
    __shared__ __align__(16) tile::ATile a;
    __shared__ __align__(16) tile::BTile b;
    const tile::Place at;
    tile::Fetched next;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += tile::BK) {
        next.load(M, N, K, A, B, k0);
        next.store(a, b);
        __syncthreads();
        tile::multiply(a, b, at, sum);
        __syncthreads();
    }
    tile::write(M, N, C, at, sum);
}
// --8<-- [end:warp_tile]

// --8<-- [start:double_buffered]
// Rung 8. There are two pairs of tiles. While one is multiplied, the next one is loaded.
__global__ void __launch_bounds__(tile::THREADS, 2)
    double_buffered(int M, int N, int K, const float *A, const float *B, float *C) {
    __shared__ __align__(16) tile::ATile a[2];
    __shared__ __align__(16) tile::BTile b[2];
    const tile::Place at;
    tile::Fetched next;
    float sum[8][8] = {};
    // --8<-- [start:ahead_loop]
    next.load(M, N, K, A, B, 0);
    next.store(a[0], b[0]);
    __syncthreads();
    int now = 0;
    for (int k0 = tile::BK; k0 < K; k0 += tile::BK) {
        next.load(M, N, K, A, B, k0);        // asked for here ...
        __syncwarp();                         // ... or the compiler moves it down ...
        tile::multiply(a[now], b[now], at, sum);
        next.store(a[1 - now], b[1 - now]);   // ... and waited for here
        __syncthreads();
        now = 1 - now;
    }
    // --8<-- [end:ahead_loop]
    tile::multiply(a[now], b[now], at, sum);
    tile::write(M, N, C, at, sum);
}
// --8<-- [end:double_buffered]

struct Rung {
    int number;
    const char *name;
    int tile;
    dim3 block;
};

static const Rung LADDER[] = {
    {1, "naive", 32, dim3(32, 32)},
    {2, "coalesced", 32, dim3(32, 32)},
    {3, "shared", 32, dim3(32, 32)},
    {4, "tile_1d", 64, dim3(512)},
    {5, "tile_2d", 128, dim3(256)},
    {6, "vectorised", 128, dim3(256)},
    {7, "warp_tile", 128, dim3(256)},
    {8, "double_buffered", 128, dim3(256)},
};

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
    float at(int i, int j) const { return host[size_t(i) * padded(cols) + j]; }
};

static void launch(const Rung &rung, const Matrix &A, const Matrix &B, Matrix &C) {
    const dim3 grid((C.cols + rung.tile - 1) / rung.tile, (C.rows + rung.tile - 1) / rung.tile);
    const int M = C.rows, N = C.cols, K = A.cols;
    const float *a = A.device, *b = B.device;
    float *c = C.device;
    switch (rung.number) {  // by name, for the messages of cuda_on_cpu.py
        case 1: naive<<<grid, rung.block>>>(M, N, K, a, b, c); break;
        case 2: coalesced<<<grid, rung.block>>>(M, N, K, a, b, c); break;
        case 3: shared<<<grid, rung.block>>>(M, N, K, a, b, c); break;
        case 4: tile_1d<<<grid, rung.block>>>(M, N, K, a, b, c); break;
        case 5: tile_2d<<<grid, rung.block>>>(M, N, K, a, b, c); break;
        case 6: vectorised<<<grid, rung.block>>>(M, N, K, a, b, c); break;
        case 7: warp_tile<<<grid, rung.block>>>(M, N, K, a, b, c); break;
        case 8: double_buffered<<<grid, rung.block>>>(M, N, K, a, b, c); break;
    }
    CHECK(cudaGetLastError());
}

// --8<-- [start:bound]
// Jeannerod and Rump prove this bound for rounded products. It is also true for FMAs, which do
// not round the products. The proof is by induction. Let u = 2^-24. Let s be the computed sum
// before step k, and S the sum of all |a b| before it. Assume that the error of s is at most
// (k - 1) u S. Step k adds the product p and rounds. The rounding error is at most |p|, because
// the number s is |p| away from s + p, and rounding chooses the nearest number. The rounding
// error is also at most u |s + p|.
// If |p| <= u S, the error after step k is at most (k - 1) u S + |p| <= k u S.
// If |p| > u S, then |s| <= S + (k - 1) u S < S + (k - 1) |p|. The rounding error is therefore
// less than u (S + |p|) + (k - 1) u |p|, and the error after step k is less than k u (S + |p|).
// --8<-- [end:bound]

// Largest error of C against float64, as a share of the bound K 2^-24 sum |a b|; `step` thins out.
static double worst_error(const Matrix &A, const Matrix &B, Matrix &C, int step) {
    CHECK(cudaMemcpy(C.host.data(), C.device, C.bytes(), cudaMemcpyDeviceToHost));
    double worst = 0;
    for (long e = 0; e < long(C.rows) * C.cols; e += step) {
        const int i = int(e / C.cols), j = int(e % C.cols);
        double exact = 0, size = 0;
        for (int k = 0; k < A.cols; k++) {
            const double product = double(A.at(i, k)) * B.at(k, j);
            exact += product;
            size += std::fabs(product);
        }
        const double error = std::fabs(C.at(i, j) - exact);
        if (!(error <= A.cols * std::ldexp(1.0, -24) * size)) {
            fprintf(stderr, "wrong: C[%d][%d] of %d x %d x %d is %g, should be %g\n", i, j,
                    C.rows, C.cols, A.cols, C.at(i, j), exact);
            exit(1);
        }
        if (size > 0) worst = std::max(worst, error / (A.cols * std::ldexp(1.0, -24) * size));
    }
    return worst;
}

static void check(bool small) {
    const std::vector<std::vector<int>> sizes =
        small ? std::vector<std::vector<int>>{{1, 1, 1}, {131, 3, 17}, {65, 130, 33}}
              : std::vector<std::vector<int>>{
                    {1, 1, 1}, {31, 33, 1000}, {33, 4097, 31}, {1000, 1000, 33}, {4097, 129, 17}};
    for (const Rung &rung : LADDER) {
        double worst = 0;
        for (const auto &size : sizes) {
            Matrix A(size[0], size[2], 1), B(size[2], size[1], 2), C(size[0], size[1], 0);
            CHECK(cudaMemset(C.device, 0xff, C.bytes()));  // NaN until it is written
            launch(rung, A, B, C);
            worst = std::max(worst, worst_error(A, B, C, 1));
        }
        printf("%-15s equal to float64 on %d sizes, error at most ≈%.2f of its bound\n",
               rung.name, int(sizes.size()), worst);
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

// cuBLAS, looked up at run time: this file compiles and checks itself without it.
struct Cublas {
    using Create = int (*)(void **);
    using Sgemm = int (*)(void *, int, int, int, int, int, const float *, const float *, int,
                          const float *, int, const float *, float *, int);
    void *handle = nullptr;
    Sgemm sgemm = nullptr;

    Cublas() {
        for (const char *name : {"libcublas.so", "libcublas.so.13", "libcublas.so.12"})
            if (void *library = dlopen(name, RTLD_NOW)) {
                auto create = reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2"));
                sgemm = reinterpret_cast<Sgemm>(dlsym(library, "cublasSgemm_v2"));
                if (!create || create(&handle) != 0) sgemm = nullptr;
                return;
            }
    }
    // Row-major C = A B is, to a library that counts in columns, C' = B' A'.
    void operator()(const Matrix &A, const Matrix &B, Matrix &C) const {
        const float one = 1, zero = 0;
        const int status = sgemm(handle, 0, 0, C.cols, C.rows, A.cols, &one, B.device,
                                 padded(B.cols), A.device, padded(A.cols), &zero, C.device,
                                 padded(C.cols));
        if (status != 0) {
            fprintf(stderr, "cublasSgemm returned %d\n", status);
            exit(1);
        }
    }
};

static void measure(int n) {
    Matrix A(n, n, 1), B(n, n, 2), C(n, n, 0);
    const Cublas cublas;
    const double flop = 2.0 * n * n * n;
    double ceiling = 0;
    if (cublas.sgemm) {
        const double ms = milliseconds([&] { cublas(A, B, C); });
        worst_error(A, B, C, 99991);
        ceiling = flop / ms / 1e9;
        printf("cuBLAS          ≈%.3f ms  ≈%.2f TFLOP/s\n", ms, ceiling);
    } else {
        printf("no libcublas.so on the library path: set LD_LIBRARY_PATH to see shares of it\n");
    }
    for (const Rung &rung : LADDER) {
        CHECK(cudaMemset(C.device, 0xff, C.bytes()));
        const double ms = milliseconds([&] { launch(rung, A, B, C); });
        worst_error(A, B, C, 99991);
        printf("%-15s ≈%.3f ms  ≈%.2f TFLOP/s", rung.name, ms, flop / ms / 1e9);
        if (ceiling > 0) printf("  ≈%.1f%% of cuBLAS", 100 * flop / ms / 1e9 / ceiling);
        printf("\n");
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "sgemm needs an NVIDIA GPU; without one: python cuda_on_cpu.py sgemm.cu "
                        "--check\n");
        return 1;
    }
    const bool small = argc > 1 && strcmp(argv[1], "--check") == 0;
    check(small);
    if (!small) measure(4096);
    return 0;
}
