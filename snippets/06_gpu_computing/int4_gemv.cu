// y = W x, weights in 4 bits, x in fp16: read a quarter of the bytes, rebuild in registers.
//
// A warp computes four rows. Each lane reads 16 bytes of a row, 32 weights, and multiplies them
// with 32 inputs that serve all four rows. A scale in fp16 serves 128 weights. The two ways to
// rebuild a weight differ in instructions, not in bytes, and a third kernel in when it asks for
// them. After Marlin (Frantar et al., 2024).
//
// ./int4_gemv          checks, then times 28672 x 8192, a matrix of Llama 3 70B
// ./int4_gemv --check  small awkward sizes only

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
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

constexpr int GROUP = 128, ROWS = 4, THREADS = 128;

// --8<-- [start:order]
// Where a word keeps weight k of 8: weights 2j and 2j + 1 lie 16 bits apart, in nibbles j, j + 4.
__host__ __device__ constexpr int shift_of(int k) { return 4 * (k / 2) + k % 2 * 16; }
// --8<-- [end:order]

// --8<-- [start:rebuild]
struct Converted {  // an integer, made a float by the unit that converts
    static __device__ float dot8(uint32_t word, const half2 *x) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 pair = __half22float2(x[j]);
            sum += float(int(word >> shift_of(2 * j) & 15) - 8) * pair.x;
            sum += float(int(word >> shift_of(2 * j + 1) & 15) - 8) * pair.y;
        }
        return sum;
    }
};

struct Composed {  // 0x6400 is 1024 in fp16; from there to 2048 numbers are 1 apart
    static __device__ float dot8(uint32_t word, const half2 *x) {
        half2 sum = __float2half2_rn(0);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t bits = (word >> 4 * j & 0x000f000fu) | 0x64006400u;  // 1024 + q, twice
            half2 pair = *reinterpret_cast<half2 *>(&bits);
            pair = __hsub2(pair, __float2half2_rn(1032));  // q - 8, exactly
            sum = __hfma2(pair, x[j], sum);
        }
        const float2 both = __half22float2(sum);
        return both.x + both.y;  // four products each in fp16, all that follows in fp32
    }
};
// --8<-- [end:rebuild]

// --8<-- [start:gemv]
// W is [rows, columns / 32] of 16 bytes, scale [rows, columns / 128]; columns % 128 == 0.
// EARLY: the weights and scales of a turn are asked for before its first product.
template <class Rebuild, bool EARLY = false>
__global__ void __launch_bounds__(THREADS)
    int4_gemv(int rows, int columns, const uint4 *W, const half *scale,
              const uint4 *x, float *y) {
    const int lane = threadIdx.x % 32;
    const int first = (blockIdx.x * THREADS + threadIdx.x) / 32 * ROWS;
    float sum[ROWS] = {};
    for (int turn = 0; turn < columns / 32; turn += 32) {
        const int c = min(turn + lane, columns / 32 - 1);
        uint4 packed[ROWS], inputs[4];
        half s[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {  // beyond the last row: the last again
            const size_t row = min(first + r, rows - 1);
            packed[r] = W[row * (columns / 32) + c];
            s[r] = scale[row * (columns / GROUP) + c / 4];
        }
        if (EARLY) __syncwarp();  // x is read behind it, and so nothing multiplied before it
#pragma unroll
        for (int i = 0; i < 4; i++) inputs[i] = x[4 * c + i];
        const half2 *xs = reinterpret_cast<const half2 *>(inputs);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const uint32_t words[] = {packed[r].x, packed[r].y, packed[r].z, packed[r].w};
            float part = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) part += Rebuild::dot8(words[i], xs + 4 * i);
            if (turn + lane < columns / 32) sum[r] += float(s[r]) * part;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        for (int step = 16; step > 0; step /= 2)
            sum[r] += __shfl_down_sync(~0u, sum[r], step);
        if (lane == 0 && first + r < rows) y[first + r] = sum[r];
    }
}
// --8<-- [end:gemv]

// The same with weights in fp16, [rows, columns / 8] of 16 bytes: what 4 bits compete with.
__global__ void __launch_bounds__(THREADS)
    fp16_gemv(int rows, int columns, const uint4 *__restrict__ W, const uint4 *__restrict__ x,
              float *__restrict__ y) {
    const int lane = threadIdx.x % 32;
    const int first = (blockIdx.x * THREADS + threadIdx.x) / 32 * ROWS;
    float sum[ROWS] = {};
    for (int c = lane; c < columns / 8; c += 32) {
        uint4 weights[ROWS], inputs = x[c];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            weights[r] = W[size_t(min(first + r, rows - 1)) * (columns / 8) + c];
        const half2 *xs = reinterpret_cast<const half2 *>(&inputs);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const half2 *ws = reinterpret_cast<const half2 *>(&weights[r]);
            half2 part = __float2half2_rn(0);
#pragma unroll
            for (int j = 0; j < 4; j++) part = __hfma2(ws[j], xs[j], part);
            const float2 both = __half22float2(part);
            sum[r] += both.x + both.y;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        for (int step = 16; step > 0; step /= 2)
            sum[r] += __shfl_down_sync(~0u, sum[r], step);
        if (lane == 0 && first + r < rows) y[first + r] = sum[r];
    }
}

const char *names[] = {"fp16", "int4, converted", "int4, composed", "int4, early"};

// `values`, copied to the device.
template <class T>
T *to_device(const std::vector<T> &values) {
    T *device;
    CHECK(cudaMalloc(&device, values.size() * sizeof(T)));
    CHECK(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

uint32_t random_bits() {
    static uint64_t state = 1;
    return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 32);
}

half random_half() { return half(float(int(random_bits() >> 8) - (1 << 23)) / (1 << 23)); }

struct Layer {  // on the host, and the same on the device
    int rows, columns;
    std::vector<uint32_t> packed;
    std::vector<half> scale, x, wide;  // wide: the weights in fp16
    uint32_t *d_packed;
    half *d_scale, *d_x, *d_wide;
    float *d_y;

    Layer(int rows, int columns) : rows(rows), columns(columns) {
        packed.resize(size_t(rows) * columns / 8);
        scale.resize(size_t(rows) * columns / GROUP);
        x.resize(columns);
        wide.resize(size_t(rows) * columns);
        for (auto &word : packed) word = random_bits();
        for (auto &s : scale) s = half(0.01f + 0.01f * std::fabs(float(random_half())));
        for (auto &value : x) value = random_half();
        for (size_t i = 0; i < wide.size(); i++) wide[i] = half(float(weight(i)));
        d_packed = to_device(packed), d_scale = to_device(scale);
        d_x = to_device(x), d_wide = to_device(wide);
        CHECK(cudaMalloc(&d_y, rows * sizeof(float)));
    }
    ~Layer() {
        CHECK(cudaFree(d_packed));
        CHECK(cudaFree(d_scale));
        CHECK(cudaFree(d_x));
        CHECK(cudaFree(d_wide));
        CHECK(cudaFree(d_y));
    }
    Layer(const Layer &) = delete;
    double weight(size_t i) const {  // columns are a multiple of 128: no word, no group is cut
        return (int(packed[i / 8] >> shift_of(i % 8) & 15) - 8) * double(float(scale[i / GROUP]));
    }
    size_t bytes(int which) const {
        return which == 0 ? 2 * wide.size() : 4 * packed.size() + 2 * scale.size();
    }
};

void run(int which, Layer &layer) {
    const int rows = layer.rows, columns = layer.columns;
    const int blocks = (rows + ROWS * THREADS / 32 - 1) / (ROWS * THREADS / 32);
    const auto *wide = reinterpret_cast<const uint4 *>(layer.d_wide);
    const auto *packed = reinterpret_cast<const uint4 *>(layer.d_packed);
    const auto *x = reinterpret_cast<const uint4 *>(layer.d_x);
    const half *scale = layer.d_scale;
    float *y = layer.d_y;
    if (which == 0) fp16_gemv<<<blocks, THREADS>>>(rows, columns, wide, x, y);
    if (which == 1) int4_gemv<Converted><<<blocks, THREADS>>>(rows, columns, packed, scale, x, y);
    if (which == 2) int4_gemv<Composed><<<blocks, THREADS>>>(rows, columns, packed, scale, x, y);
    if (which == 3)
        int4_gemv<Composed, true><<<blocks, THREADS>>>(rows, columns, packed, scale, x, y);
    CHECK(cudaGetLastError());
}

// Largest error against float64 of the same weights, as a share of its bound, on every `step`-th
// row. A rounding to fp16 is 2^-11: one for a wide weight, four for sums of four products.
double worst_error(int which, const Layer &layer, int step = 1) {
    std::vector<float> y(layer.rows);
    CHECK(cudaMemcpy(y.data(), layer.d_y, y.size() * sizeof(float), cudaMemcpyDeviceToHost));
    const int roundings = which == 0 ? 5 : which == 1 ? 0 : 4;
    double worst = 0;
    for (int row = 0; row < layer.rows; row += step) {
        double exact = 0, size = 0;
        for (int k = 0; k < layer.columns; k++) {
            const size_t at = size_t(row) * layer.columns + k;
            const double product = layer.weight(at) * float(layer.x[k]);
            exact += product;
            size += std::fabs(product);
        }
        const double bound = size * (roundings * std::ldexp(1.0, -11) +
                                     layer.columns * std::ldexp(1.0, -24));
        if (!(std::fabs(y[row] - exact) <= bound)) {
            fprintf(stderr, "%s is wrong: row %d of %d x %d is %g, should be %g\n", names[which],
                    row, layer.rows, layer.columns, y[row], exact);
            exit(1);
        }
        worst = std::max(worst, std::fabs(y[row] - exact) / bound);
    }
    return worst;
}

void check() {
    printf("an H200, 4800 GB/s: bytes of a weight, instructions in that time, 28672 x 8192\n");
    for (int which = 0; which < 4; which++) {
        double worst = 0;
        size_t bytes = 0, weights = 0;
        for (const auto &size : std::vector<std::vector<int>>{{1, 128}, {3, 1152}, {21, 2176}}) {
            Layer layer(size[0], size[1]);
            CHECK(cudaMemset(layer.d_y, 0xff, layer.rows * sizeof(float)));  // NaN
            run(which, layer);
            worst = std::max(worst, worst_error(which, layer));
            bytes += layer.bytes(which), weights += layer.wide.size();
        }
        // --8<-- [start:budget]
        const double H200 = 4800e9, SMS = 132, CLOCK = 1.98e9;  // bytes per second, and hertz
        const double each = double(bytes) / weights;            // bytes a weight
        const double least = 28672 * 8192.0 * each / H200;
        // an SM issues for 4 warps of 32 lanes a clock: so many instructions have time meanwhile
        const double budget = 4 * 32 * CLOCK * SMS * each / H200;
        // --8<-- [end:budget]
        printf("%-15s error ≈%.3f of its bound; %.4f bytes, %4.1f instructions, %.3f ms\n",
               names[which], worst, each, budget, 1e3 * least);
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
    Layer layer(28672, 8192);
    float wide = 0;
    for (int which = 0; which < 4; which++) {
        const float ms = milliseconds([&] { run(which, layer); });
        worst_error(which, layer, 997);
        if (which == 0) wide = ms;
        printf("%-15s  ≈%.3f ms, ≈%.0f GB/s, ≈%.2f times as fast as fp16, by bytes %.2f\n",
               names[which], ms, 1e-6 * layer.bytes(which) / ms, wide / ms,
               double(layer.bytes(0)) / layer.bytes(which));
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "int4_gemv needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py int4_gemv.cu --check does without\n");
        return 1;
    }
    check();
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure();
    return 0;
}
