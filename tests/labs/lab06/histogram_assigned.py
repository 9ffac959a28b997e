"""Step 6: counts are assigned"""

STEP, HINT = 6, "overwritten"


def histogram() -> str:
    """counts[v] += how many of the n numbers x are v; 0 <= v < bins <= 256."""
    return r"""
__global__ void histogram(const int* x, int* counts, int n, int bins) {
  __shared__ int mine[256];
  for (int b = threadIdx.x; b < bins; b += blockDim.x) mine[b] = 0;
  __syncthreads();
  int all = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
    atomicAdd(&mine[x[i]], 1);
  __syncthreads();
  for (int b = threadIdx.x; b < bins; b += blockDim.x) counts[b] = mine[b];
}
"""
