"""Step 6: shared memory is taken as zero"""

STEP, HINT = 6, "not_zeroed"


def histogram() -> str:
    """counts[v] += how many of the n numbers x are v; 0 <= v < bins <= 256."""
    return r"""
__global__ void histogram(const int* x, int* counts, int n, int bins) {
  __shared__ int mine[256];
  __syncthreads();
  int all = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
    atomicAdd(&mine[x[i]], 1);
  __syncthreads();
  for (int b = threadIdx.x; b < bins; b += blockDim.x) atomicAdd(&counts[b], mine[b]);
}
"""
