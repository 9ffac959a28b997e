// Lanes of one warp exchange values through shared memory: a shuffle does not order the accesses.
//
// ./one_warp nothing|shuffle|syncwarp   what comes between the stores and the loads
//
// Only `syncwarp` is correct. The other two often give the right result on a GPU, because a warp
// usually runs in step. The emulator refuses them, because CUDA promises no order for them.

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(call)                                                                      \
    do {                                                                                 \
        cudaError_t status_ = (call);                                                    \
        if (status_ != cudaSuccess) {                                                    \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                \
                    cudaGetErrorString(status_));                                        \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

enum { NOTHING, SHUFFLE, SYNCWARP };
const char *names[] = {"nothing", "shuffle", "syncwarp"};

// --8<-- [start:exchange]
__global__ void exchange(float *x, int how) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    if (how == SHUFFLE) __shfl_sync(0xffffffff, 0, 0);  // waits for the lanes, orders no memory
    if (how == SYNCWARP) __syncwarp();                  // waits for the lanes and orders memory
    x[threadIdx.x] = tile[threadIdx.x ^ 1];
}
// --8<-- [end:exchange]

int main(int argc, char **argv) {
    int devices = 0, how = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "one_warp needs an NVIDIA GPU; "
                        "python cuda_on_cpu.py one_warp.cu syncwarp does without\n");
        return 1;
    }
    while (how < 3 && (argc < 2 || strcmp(argv[1], names[how]) != 0)) how++;
    if (how == 3) return fprintf(stderr, "name one of: nothing, shuffle, syncwarp\n"), 1;
    float host[32], *x;
    for (int i = 0; i < 32; i++) host[i] = i;
    CHECK(cudaMalloc(&x, sizeof host));
    CHECK(cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice));
    exchange<<<1, 32>>>(x, how);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(host, x, sizeof host, cudaMemcpyDeviceToHost));
    int wrong = 0;
    for (int i = 0; i < 32; i++) wrong += host[i] != (i % 2 ? i - 1 : i + 1);
    printf("%s: %d of 32 values wrong\n", names[how], wrong);
    return wrong != 0;
}
