// A kernel walks a linked list that the host has built in unified memory, and no pointer changes.
//
// ./unified          checks the lists, then times a kernel on pages that the host has written
// ./unified --check  checks the lists only

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

// --8<-- [start:list]
struct Node {
    int value;
    Node *next;  // the same address on the host and on the device
};

// Each thread walks its own list and doubles the values.
__global__ void double_lists(Node **heads, int lists) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= lists) return;
    for (Node *node = heads[i]; node != nullptr; node = node->next) node->value *= 2;
}

// The host builds lists of length 1, 2, 3, … in memory that both sides can access.
void check(int lists) {
    Node **heads, *nodes;
    int total = lists * (lists + 1) / 2, used = 0;
    CHECK(cudaMallocManaged(&heads, lists * sizeof(Node *)));
    CHECK(cudaMallocManaged(&nodes, total * sizeof(Node)));
    for (int i = 0; i < lists; i++) {
        heads[i] = nullptr;
        for (int k = 0; k <= i; k++) {
            nodes[used].value = used;
            nodes[used].next = heads[i];
            heads[i] = &nodes[used++];
        }
    }
    double_lists<<<(lists + 31) / 32, 32>>>(heads, lists);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());  // only now may the host read the values
    for (int k = 0; k < total; k++)
        if (nodes[k].value != 2 * k) {
            fprintf(stderr, "node %d holds %d\n", k, nodes[k].value);
            exit(1);
        }
    printf("%2d lists, %3d nodes: every value doubled, no copy written\n", lists, total);
    CHECK(cudaFree(nodes));
    CHECK(cudaFree(heads));
}
// --8<-- [end:list]

__global__ void scale(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}

float milliseconds(float *x, int n) {
    cudaEvent_t start, stop;
    float ms;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    CHECK(cudaEventRecord(start));
    scale<<<(n + 255) / 256, 256>>>(x, n);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(stop));
    CHECK(cudaEventSynchronize(stop));
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
    return ms;
}

int main(int argc, char **argv) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "unified needs an NVIDIA GPU, and this machine has none\n");
        return 1;
    }
    for (int lists : {1, 31, 33}) check(lists);
    if (argc > 1 && strcmp(argv[1], "--check") == 0) return 0;

    const int n = 1 << 26;
    float *managed, *device;
    CHECK(cudaMallocManaged(&managed, n * sizeof(float)));
    CHECK(cudaMalloc(&device, n * sizeof(float)));
    CHECK(cudaMemset(device, 0, n * sizeof(float)));
    for (int i = 0; i < n; i++) managed[i] = 1;  // the pages are the host's now
    milliseconds(device, n);                     // warm-up
    float ceiling = milliseconds(device, n), first = milliseconds(managed, n);
    float second = milliseconds(managed, n);
    printf("256 MiB in place: device memory ≈%.2f ms, managed, first touch ≈%.2f ms, "
           "second ≈%.2f ms\n", ceiling, first, second);
    CHECK(cudaFree(managed));
    CHECK(cudaFree(device));
}
