// C = A B' with Hopper's own instructions: TMA loads, mbarriers hand over, wgmma multiplies.
//
// A [M, K] and B [N, K] in bf16, as a linear layer has them, C [M, N] in fp32; M and N are
// multiples of 128, K of 64. Eight warps multiply, the ninth only asks for tiles. For sm_90a,
// which is Hopper (H100, H200) and nothing else.
//
// ./hopper          checks, then times 8192 x 8192 x 8192 beside cuBLAS
// ./hopper --check  checks only

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
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

using Factor = __nv_bfloat16;

// --8<-- [start:constants]
constexpr int BM = 128, BN = 128, BK = 64;  // a row of 64 factors is 128 bytes
constexpr int STAGES = 3, CONSUMERS = 8;    // 8 warps: two warpgroups, each with 64 rows of C
constexpr int THREADS = 32 * (CONSUMERS + 1), GROUP = 16;

struct Shared {
    alignas(1024) Factor a[STAGES][BM][BK];  // the pattern of the swizzle repeats every 1024 bytes
    alignas(1024) Factor b[STAGES][BN][BK];
    uint64_t full[STAGES], empty[STAGES];
};
constexpr int TILE_BYTES = (BM + BN) * BK * sizeof(Factor);
constexpr int SHARED_BYTES = sizeof(Shared) + 1024;  // 1024 more for the alignment
// --8<-- [end:constants]

// --8<-- [start:barriers]
__device__ uint32_t address(const void *shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// A phase ends when there were `count` arrivals and TMA has written all announced bytes.
__device__ void init(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count)
                 : "memory");
}

__device__ void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ void arrive_and_expect(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity is over. The phase before the first is odd and over.
__device__ void wait(uint64_t *barrier, int parity) {
    for (uint32_t over = 0; !over;)
        asm volatile(
            "{ .reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(over)
            : "r"(address(barrier)), "r"(parity)
            : "memory");
}

// One thread requests the box of `map` at (row, k). TMA reports its bytes to the barrier.
__device__ void load(void *to, const CUtensorMap *map, uint64_t *barrier, int row, int k) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(address(to)),
        "l"(map), "r"(address(barrier)), "r"(k), "r"(row)
        : "memory");
}
// --8<-- [end:barriers]

// --8<-- [start:wgmma]
// Describes a factor in units of 16 bytes: its address, and the 1024 bytes from eight rows to
// the next eight. Bit 62 means a swizzle over 128 bytes, so bits 16 to 29 are not used.
__device__ uint64_t descriptor(const Factor *tile) {
    return (address(tile) & 0x3ffff) >> 4 | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
           uint64_t(1) << 62;
}

// sum [64, 128] += a [64, 16] b [128, 16]', by the four warps of a warpgroup.
__device__ void wgmma(float (&sum)[64], uint64_t a, uint64_t b) {
#define EIGHT(i)                                                                              \
    "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]),     \
        "+f"(sum[i + 5]), "+f"(sum[i + 6]), "+f"(sum[i + 7])
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, 1, 1, 1, 0, 0;"  // add to sum, signs of a and b, both with k along the rows
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
        : "l"(a), "l"(b));
#undef EIGHT
}
// --8<-- [end:wgmma]

// --8<-- [start:kernel]
__global__ void __launch_bounds__(THREADS, 2)
    product(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
            int M, int N, int K, float *C) {
    extern __shared__ unsigned char raw[];
    Shared &s = *reinterpret_cast<Shared *>(raw + (1024 - address(raw) % 1024) % 1024);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // groups of GROUP rows of tiles, for more hits in L2, as in triton_matmul.py
    const int in_group = GROUP * (N / BN), first = blockIdx.x / in_group * GROUP;
    const int height = min(M / BM - first, GROUP), in = blockIdx.x % in_group;
    const int row = (first + in % height) * BM, column = in / height * BN;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            init(&s.full[stage], 1);           // the producer arrives once and announces bytes
            init(&s.empty[stage], CONSUMERS);  // one lane of each consumer arrives
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // TMA sees them, too
    }
    __syncthreads();

    // --8<-- [start:producer]
    if (warp == CONSUMERS) {  // the producer
        if (lane == 0)
            for (int i = 0; i < K / BK; i++) {
                const int stage = i % STAGES, turn = i / STAGES;
                wait(&s.empty[stage], turn % 2 ^ 1);  // does not wait in turn 0
                arrive_and_expect(&s.full[stage], TILE_BYTES);
                load(s.a[stage], &a_map, &s.full[stage], row, i * BK);
                load(s.b[stage], &b_map, &s.full[stage], column, i * BK);
            }
        return;
    }
    // --8<-- [end:producer]

    // --8<-- [start:consumers]
    const int half = warp / 4 * 64;  // the rows of this warpgroup
    float sum[64] = {};
    for (int i = 0; i < K / BK; i++) {
        const int stage = i % STAGES, turn = i / STAGES;
        wait(&s.full[stage], turn % 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < BK; k += 16)
            wgmma(sum, descriptor(&s.a[stage][half][k]), descriptor(&s.b[stage][0][k]));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) arrive(&s.empty[stage]);  // only now, because wgmma reads until it ends
    }
    // --8<-- [end:consumers]

    // in two rows, a lane has two neighbouring sums of every eight columns
    float *to = C + size_t(row + half + warp % 4 * 16 + lane / 4) * N + column + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
        *reinterpret_cast<float2 *>(to + 8 * j) = {sum[4 * j], sum[4 * j + 1]};
        *reinterpret_cast<float2 *>(to + 8 * j + 8 * size_t(N)) = {sum[4 * j + 2], sum[4 * j + 3]};
    }
}
// --8<-- [end:kernel]

// --8<-- [start:map]
// Describes a matrix [rows, K] for TMA: its boxes of 128 rows and 64 factors, and their layout.
static CUtensorMap map_of(Factor *matrix, int rows, int K) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static Encode encode = [] {
        void *found = nullptr;  // a function of the driver, so no -lcuda is needed
        cudaDriverEntryPointQueryResult result;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                               cudaEnableDefault, &result));
        if (result != cudaDriverEntryPointSuccess) {
            fprintf(stderr, "this driver, older than CUDA 12, has no cuTensorMapEncodeTiled\n");
            exit(1);
        }
        return reinterpret_cast<Encode>(found);
    }();
    const cuuint64_t sizes[] = {cuuint64_t(K), cuuint64_t(rows)};  // the contiguous one first
    const cuuint64_t strides[] = {K * sizeof(Factor)};             // in bytes, without that one
    const cuuint32_t box[] = {BK, BM}, steps[] = {1, 1};
    static_assert(BM == BN, "one box for both");
    CUtensorMap map;
    const CUresult status =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, matrix, sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        fprintf(stderr, "cuTensorMapEncodeTiled returned %d\n", int(status));
        exit(1);
    }
    return map;
}
// --8<-- [end:map]

// Of every `step`-th element the error against fp64, as a share of K 2^-22 sum |a b|: the factors'
// products are exact, and tensor cores add them with less care than IEEE's rounding.
__global__ void errors(int M, int N, int K, const Factor *A, const Factor *B, const float *C,
                       long step, float *error) {
    const long n = blockIdx.x * long(blockDim.x) + threadIdx.x, e = n * step;
    if (e >= long(M) * N) return;
    double exact = 0, size = 0;
    for (int k = 0; k < K; k++) {
        const double term = double(float(A[e / N * K + k])) * double(float(B[e % N * K + k]));
        exact += term;
        size += fabs(term);
    }
    error[n] = float(fabs(C[e] - exact) / (K * 0x1p-22 * size));
}

__global__ void fill(Factor *matrix, long n, unsigned seed) {
    const long i = blockIdx.x * long(blockDim.x) + threadIdx.x;
    unsigned x = unsigned(i) * 2654435761u ^ seed;
    x = (x ^ x >> 15) * 2246822519u;
    x ^= x >> 13;
    if (i < n) matrix[i] = Factor(int(x >> 8) / 8388608.0f - 1);
}

struct Problem {
    int M, N, K;
    Factor *A, *B;
    float *C;

    Problem(int M, int N, int K) : M(M), N(N), K(K) {
        CHECK(cudaMalloc(&A, size_t(M) * K * sizeof(Factor)));
        CHECK(cudaMalloc(&B, size_t(N) * K * sizeof(Factor)));
        CHECK(cudaMalloc(&C, size_t(M) * N * sizeof(float)));
        fill<<<(long(M) * K + 255) / 256, 256>>>(A, long(M) * K, 1);
        fill<<<(long(N) * K + 255) / 256, 256>>>(B, long(N) * K, 2);
        CHECK(cudaGetLastError());
        forget();
    }
    ~Problem() {
        cudaFree(A);
        cudaFree(B);
        cudaFree(C);
    }
    Problem(const Problem &) = delete;

    void forget() { CHECK(cudaMemset(C, 0xff, size_t(M) * N * sizeof(float))); }  // NaN

    void multiply() const {
        CHECK(cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   SHARED_BYTES));
        product<<<(M / BM) * (N / BN), THREADS, SHARED_BYTES>>>(map_of(A, M, K), map_of(B, N, K),
                                                                M, N, K, C);
        CHECK(cudaGetLastError());
    }

    float worst(long step) const {
        const long count = (long(M) * N + step - 1) / step;
        float *error;
        CHECK(cudaMalloc(&error, count * sizeof(float)));
        errors<<<(count + 127) / 128, 128>>>(M, N, K, A, B, C, step, error);
        std::vector<float> host(count);
        CHECK(cudaMemcpy(host.data(), error, count * sizeof(float), cudaMemcpyDeviceToHost));
        CHECK(cudaFree(error));
        for (long n = 0; n < count; n++)
            if (!(host[n] <= 1)) {
                fprintf(stderr, "wrong: C[%ld][%ld] of %d x %d x %d\n", n * step / N,
                        n * step % N, M, N, K);
                exit(1);
            }
        return *std::max_element(host.begin(), host.end());
    }
};

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

// cuBLAS, looked up at run time. Row-major C = A B' is, counted in columns, C' = B A'.
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
    void operator()(const Problem &p) const {
        // values of CUBLAS_OP_T, CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
        constexpr int TRANSPOSED = 1, BF16 = 14, FP32 = 0, SUMS_IN_FP32 = 68, DEFAULT = -1;
        const float one = 1, zero = 0;
        const int status = gemm(handle, TRANSPOSED, 0, p.N, p.M, p.K, &one, p.B, BF16, p.K, p.A,
                                BF16, p.K, &zero, p.C, FP32, p.N, SUMS_IN_FP32, DEFAULT);
        if (status != 0) {
            fprintf(stderr, "cublasGemmEx returned %d\n", status);
            exit(1);
        }
    }
};

static void measure(int n) {
    Problem problem(n, n, n);
    const Cublas cublas;
    const double flop = 2.0 * n * n * n;
    double ceiling = 0;
    if (cublas.gemm) {
        const double ms = milliseconds([&] { cublas(problem); });
        problem.worst(99991);
        ceiling = flop / ms / 1e9;
        printf("cuBLAS    ≈%.3f ms  ≈%.1f TFLOP/s\n", ms, ceiling);
        problem.forget();
    } else {
        printf("no libcublas.so on the library path: set LD_LIBRARY_PATH to see a share of it\n");
    }
    const double ms = milliseconds([&] { problem.multiply(); });
    problem.worst(99991);
    printf("product   ≈%.3f ms  ≈%.1f TFLOP/s", ms, flop / ms / 1e9);
    if (ceiling > 0) printf("  ≈%.1f%% of cuBLAS", 100 * flop / ms / 1e9 / ceiling);
    printf("\n");
}

int main(int argc, char **argv) {
    int devices = 0;
    cudaDeviceProp device;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
        cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9) {
        fprintf(stderr, "hopper needs an H100 or H200: it is compiled for sm_90a alone\n");
        return 1;
    }
    // 1, 2, 3 and 4 tiles along k, then enough for every parity; 18 rows of tiles: two groups
    const int sizes[][3] = {{128, 128, 64},  {128, 256, 128},  {256, 128, 192},
                            {384, 256, 256}, {256, 384, 1088}, {2304, 256, 64}};
    float worst = 0;
    for (const auto &size : sizes) {
        Problem problem(size[0], size[1], size[2]);
        problem.multiply();
        worst = std::max(worst, problem.worst(1));
    }
    printf("equal to float64 on %d sizes, error at most ≈%.3f of its bound\n",
           int(sizeof sizes / sizeof *sizes), worst);
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure(8192);
    return 0;
}
