// Transposes a matrix in three ways: directly, through a tile in shared memory, and padded.
//
// ./transpose          runs the checks, then compares 8192 x 8192 with a plain copy
// ./transpose --check  runs only the checks, with sizes that are no multiple of a tile

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
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

constexpr int TILE = 32, ROWS = 8;  // a block of 32 x 8 threads moves a tile of 32 x 32

// --8<-- [start:naive]
// A warp reads along a row and writes down a column. It stores 128 bytes in 32 sectors.
__global__ void naive(const float *__restrict__ in, float *__restrict__ out, int rows,
                      int cols) {
    int col = blockIdx.x * TILE + threadIdx.x;
#pragma unroll
    for (int k = 0; k < TILE; k += ROWS) {
        int row = blockIdx.y * TILE + threadIdx.y + k;
        if (row < rows && col < cols) out[(size_t)col * rows + row] = in[(size_t)row * cols + col];
    }
}
// --8<-- [end:naive]

// --8<-- [start:tiled]
// Lanes read and write along rows of both matrices. The tile is transposed in shared memory.
template <int PAD>
__global__ void tiled(const float *in, float *out, int rows, int cols) {
    __shared__ float tile[TILE][TILE + PAD];
    int col = blockIdx.x * TILE + threadIdx.x;
#pragma unroll
    for (int k = 0; k < TILE; k += ROWS) {
        int row = blockIdx.y * TILE + threadIdx.y + k;
        if (row < rows && col < cols)
            tile[threadIdx.y + k][threadIdx.x] = in[(size_t)row * cols + col];
    }
    __syncthreads();  // a warp reads what all eight warps wrote
    int out_col = blockIdx.y * TILE + threadIdx.x;  // blockIdx is swapped, threadIdx is not
#pragma unroll
    for (int k = 0; k < TILE; k += ROWS) {
        int out_row = blockIdx.x * TILE + threadIdx.y + k;
        if (out_row < cols && out_col < rows)  // a warp reads a column of the tile
            out[(size_t)out_row * rows + out_col] = tile[threadIdx.x][threadIdx.y + k];
    }
}
// --8<-- [end:tiled]

const char *names[] = {"naive", "tiled", "padded"};

void run(int which, const float *in, float *out, int rows, int cols) {
    dim3 block(TILE, ROWS), grid((cols + TILE - 1) / TILE, (rows + TILE - 1) / TILE);
    if (which == 0) naive<<<grid, block>>>(in, out, rows, cols);
    if (which == 1) tiled<0><<<grid, block>>>(in, out, rows, cols);
    if (which == 2) tiled<1><<<grid, block>>>(in, out, rows, cols);
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

// --8<-- [start:conflicts]
// Returns how many words a warp needs from the same bank when it reads a column of the tile.
int worst_bank(int pitch) {
    int wanted[32] = {}, worst = 0;
    for (int lane = 0; lane < 32; lane++) worst = std::max(worst, ++wanted[lane * pitch % 32]);
    return worst;
}
// --8<-- [end:conflicts]

void check() {
    const int shapes[][2] = {{1, 1}, {31, 33}, {33, 31}, {1, 1000}, {100, 65}};
    for (int which = 0; which < 3; which++) {
        for (auto [rows, cols] : shapes) {
            int n = rows * cols;
            std::vector<float> in(n);
            for (int i = 0; i < n; i++) in[i] = i;
            float *from = to_device(in), *to;
            CHECK(cudaMalloc(&to, n * sizeof(float)));
            run(which, from, to, rows, cols);
            std::vector<float> out = to_host(to, n);
            for (int row = 0; row < rows; row++)
                for (int col = 0; col < cols; col++)
                    require(out[col * rows + row] == in[row * cols + col], names[which], n);
            CHECK(cudaFree(from));
            CHECK(cudaFree(to));
        }
        printf("%-6s exact on 1x1, 31x33, 33x31, 1x1000, 100x65\n", names[which]);
    }
    for (int pitch : {32, 33, 34, 36}) {
        require(worst_bank(pitch) == std::gcd(pitch, 32), "worst_bank", pitch);
        printf("rows of %d floats: a column read wants %d of one bank\n", pitch, worst_bank(pitch));
    }
}

void measure() {
    const int side = 8192;
    const size_t bytes = sizeof(float) * side * side;
    double ceiling = copy_rate(bytes);
    float *from, *to;
    CHECK(cudaMalloc(&from, bytes));
    CHECK(cudaMalloc(&to, bytes));
    CHECK(cudaMemset(from, 0, bytes));
    printf("a copy moves ≈%.0f GB/s\n", ceiling);
    for (int which = 0; which < 3; which++) {
        float ms = milliseconds([&] { run(which, from, to, side, side); });
        double rate = 2e-6 * bytes / ms;
        printf("%-6s ≈%.0f GB/s, ≈%.0f%% of the copy\n", names[which], rate, 100 * rate / ceiling);
    }
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "transpose needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py transpose.cu --check does without\n");
        return 1;
    }
    check();
    if (argc < 2 || strcmp(argv[1], "--check") != 0) measure();
    return 0;
}
