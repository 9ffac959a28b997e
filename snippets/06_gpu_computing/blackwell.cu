// C = A B' with Blackwell's own instructions. It is compiled, but no GPU has run it yet.
//
// A [M, K] and B [N, K] in bf16, as a linear layer has them, C [M, N] in fp32; M and N are
// multiples of 256, K of 64. A cluster of two blocks computes 256 x 256 elements: each block has
// 128 rows, and both need the same 256 rows of B. In each block, one warp requests tiles from
// TMA, one warp starts the products (tcgen05.mma), and four warps store the sums. For sm_100a
// (B200). blackwell_barriers.py models the order of events.
//
// ./blackwell          checks, then times 8192 x 8192 x 8192 beside cuBLAS
// ./blackwell --check  checks only

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
constexpr int BM = 128, BN = 256, BK = 64;  // a row of 64 factors is 128 bytes
constexpr int STAGES = 4, BLOCKS = 2;       // the two blocks of a cluster
constexpr uint16_t BOTH = 0b11;             // a bit for each block of the cluster
constexpr int STORERS = 4, PRODUCER = 4, MULTIPLIER = 5;  // warps 0 to 3, warp 4, warp 5
constexpr int THREADS = 32 * (STORERS + 2), GROUP = 8;
constexpr int COLUMNS = 2 * BN;  // of tensor memory: two tiles of sums, all that an SM has

struct Shared {
    alignas(1024) Factor a[STAGES][BM][BK];  // the pattern of the swizzle repeats every 1024 bytes
    alignas(1024) Factor b[STAGES][BN][BK];
    uint64_t full[STAGES], empty[STAGES], sums_full[2], sums_empty[2];
    uint32_t sums;  // where the columns of tensor memory begin
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

// The same for both blocks of the cluster: TMA writes the box to the same place in each block,
// and reports its bytes to the barrier in the same place of each block.
__device__ void load_for_both(void *to, const CUtensorMap *map, uint64_t *barrier, int row, int k) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(address(to)),
        "l"(map), "r"(address(barrier)), "r"(k), "r"(row), "h"(BOTH)
        : "memory");
}

// All threads of both blocks wait for each other.
__device__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ int rank_in_cluster() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// True for one lane of a warp.
__device__ bool elect() {
    uint32_t chosen;
    asm volatile("{ .reg .pred p;\n"
                 "elect.sync _|p, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(chosen));
    return chosen;
}
// --8<-- [end:barriers]

// --8<-- [start:descriptors]
// Describes a factor in units of 16 bytes: its address, and the 1024 bytes from eight rows to
// the next eight. Bits 46 to 48 are always 1. A 2 in bits 61 to 63 means a swizzle of 128 bytes.
__device__ uint64_t descriptor(const Factor *tile) {
    return (address(tile) & 0x3ffff) >> 4 | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
           uint64_t(1) << 46 | uint64_t(2) << 61;
}

// Describes the product: sums in fp32 (1), A and B in bf16 (1, 1), N / 8 and M / 16. The bits
// that are 0 mean dense, not negated, and both factors with k along the rows.
constexpr uint32_t PRODUCT = 1 << 4 | 1 << 7 | 1 << 10 | (BN >> 3) << 17 | (BM >> 4) << 24;
// --8<-- [end:descriptors]

// --8<-- [start:tcgen05]
// sums [128, 256] = a [128, 16] b [256, 16]' (+ sums), started by one thread.
__device__ void multiply(uint32_t sums, uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.u32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(sums),
        "l"(a), "l"(b), "r"(PRODUCT), "r"(uint32_t(add))
        : "memory");
}

// When all products that this thread has started are complete, the tensor cores arrive once at
// the barrier.
__device__ void commit(uint64_t *barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::
                     "r"(address(barrier))
                 : "memory");
}

// The same for the barriers in this place of both blocks.
__device__ void commit_to_both(uint64_t *barrier) {
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
        " [%0], %1;" ::"r"(address(barrier)),
        "h"(BOTH)
        : "memory");
}

// A warp takes 32 columns of its 32 lanes of tensor memory: each thread gets 32 sums of a row.
__device__ void take(uint32_t from, float (&sum)[32]) {
#define EIGHT(i)                                                                              \
    "=f"(sum[i]), "=f"(sum[i + 1]), "=f"(sum[i + 2]), "=f"(sum[i + 3]), "=f"(sum[i + 4]),     \
        "=f"(sum[i + 5]), "=f"(sum[i + 6]), "=f"(sum[i + 7])
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x32.b32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
        : "r"(from)
        : "memory");
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#undef EIGHT
}

// tcgen05 instructions are asynchronous: these fences order them with waits and arrivals.
__device__ void before_arrive() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ void after_wait() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
// --8<-- [end:tcgen05]

// Where a tile of a cluster begins. Groups of GROUP rows of tiles, for more hits in L2.
struct Place {
    int row, column;
    __device__ Place(int tile, int M, int N) {
        const int in_group = GROUP * (N / BN), first = tile / in_group * GROUP;
        const int height = min(M / (BLOCKS * BM) - first, GROUP), in = tile % in_group;
        row = (first + in % height) * BLOCKS * BM, column = in / height * BN;
    }
};

// --8<-- [start:kernel]
__global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    product(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
            int M, int N, int K, float *C) {
    extern __shared__ unsigned char raw[];
    Shared &s = *reinterpret_cast<Shared *>(raw + (1024 - address(raw) % 1024) % 1024);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, me = rank_in_cluster();
    const int steps = K / BK, tiles = M / (BLOCKS * BM) * (N / BN);
    const int first_tile = blockIdx.x / BLOCKS, clusters = gridDim.x / BLOCKS;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            init(&s.full[stage], 1);        // the producer of this block arrives
            init(&s.empty[stage], BLOCKS);  // the products of both blocks arrive
        }
        for (int half = 0; half < 2; half++) {
            init(&s.sums_full[half], 1);         // the products of this block arrive
            init(&s.sums_empty[half], STORERS);  // one lane of each storing warp arrives
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // TMA sees them, too
    }
    if (warp == MULTIPLIER) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                         address(&s.sums)),
                     "r"(COLUMNS)
                     : "memory");
        before_arrive();
    }
    cluster_sync();  // no block signals a barrier of the other block before it exists
    after_wait();
    const uint32_t sums = s.sums;

    // --8<-- [start:producer]
    if (warp == PRODUCER && elect()) {
        int i = 0;  // counts the stages that were filled, over all tiles
        for (int tile = first_tile; tile < tiles; tile += clusters) {
            const Place at(tile, M, N);
            for (int k = 0; k < steps; k++, i++) {
                const int stage = i % STAGES, turn = i / STAGES;
                wait(&s.empty[stage], turn % 2 ^ 1);  // both blocks have multiplied it
                arrive_and_expect(&s.full[stage], TILE_BYTES);
                load(s.a[stage], &a_map, &s.full[stage], at.row + me * BM, k * BK);
                load_for_both(s.b[stage][me * BN / 2], &b_map, &s.full[stage],
                              at.column + me * BN / 2, k * BK);  // half of the 256 rows of B
            }
        }
        for (int last = i + STAGES; i < last; i++)  // until all signals to this block arrived
            wait(&s.empty[i % STAGES], i / STAGES % 2 ^ 1);
    }
    // --8<-- [end:producer]

    // --8<-- [start:multiplier]
    if (warp == MULTIPLIER && elect()) {
        int i = 0, t = 0;
        for (int tile = first_tile; tile < tiles; tile += clusters, t++) {
            const int half = t % 2;
            wait(&s.sums_empty[half], t / 2 % 2 ^ 1);  // the storing warps have taken them
            after_wait();
            for (int k = 0; k < steps; k++, i++) {
                const int stage = i % STAGES, turn = i / STAGES;
                wait(&s.full[stage], turn % 2);
                after_wait();
#pragma unroll
                for (int j = 0; j < BK; j += 16)
                    multiply(sums + half * BN, descriptor(&s.a[stage][0][j]),
                             descriptor(&s.b[stage][0][j]), k > 0 || j > 0);
                commit_to_both(&s.empty[stage]);  // arrives when the products have ended
            }
            commit(&s.sums_full[half]);
        }
    }
    // --8<-- [end:multiplier]

    // --8<-- [start:storers]
    if (warp < STORERS) {
        int t = 0;
        for (int tile = first_tile; tile < tiles; tile += clusters, t++) {
            const Place at(tile, M, N);
            const int half = t % 2;
            wait(&s.sums_full[half], t / 2 % 2);
            after_wait();
            float *to = C + size_t(at.row + me * BM + threadIdx.x) * N + at.column;
#pragma unroll 1  // otherwise a thread has up to 96 sums at a time
            for (int column = 0; column < BN; column += 32) {
                float sum[32];
                take(sums + half * BN + column + (warp * 32 << 16), sum);
                if (column + 32 == BN) {  // all sums are in registers
                    before_arrive();
                    __syncwarp();
                    if (lane == 0) arrive(&s.sums_empty[half]);
                }
#pragma unroll
                for (int j = 0; j < 32; j += 4)
                    *reinterpret_cast<float4 *>(to + column + j) = {sum[j], sum[j + 1], sum[j + 2],
                                                                    sum[j + 3]};
            }
        }
    }
    // --8<-- [end:storers]

    __syncwarp();
    before_arrive();
    __syncthreads();  // no warp needs tensor memory any more
    after_wait();
    if (warp == MULTIPLIER)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(sums),
                     "r"(COLUMNS));
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
    static_assert(BN == BLOCKS * BM, "one box for A and for half of B");
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
        int sms;
        CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
        const int clusters = std::min(sms / BLOCKS, M / (BLOCKS * BM) * (N / BN));
        product<<<clusters * BLOCKS, THREADS, SHARED_BYTES>>>(map_of(A, M, K), map_of(B, N, K), M,
                                                              N, K, C);
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
        cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 10 ||
        device.minor != 0) {
        fprintf(stderr, "blackwell needs a B200: it is compiled for sm_100a alone\n");
        return 1;
    }
    // 1, 2, 4 and 5 steps of k; enough steps for every parity; more tiles than clusters
    const int sizes[][3] = {{256, 256, 64},  {256, 512, 128},  {512, 256, 256},
                            {768, 512, 320}, {512, 768, 1088}, {4864, 4096, 192}};
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
