"""Step 6: ++ in shared memory"""

STEP, HINT = 6, "not_atomic"


def histogram() -> str:
    """counts[v] += how many of the n numbers x are v; 0 <= v < bins <= 256."""
    return r"""
__global__ void histogram(const int* x, int* counts, int n, int bins) {
  __shared__ int mine[256];
  for (int b = threadIdx.x; b < bins; b += blockDim.x) mine[b] = 0;
  __syncthreads();
  int all = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
    mine[x[i]]++;
  __syncthreads();
  for (int b = threadIdx.x; b < bins; b += blockDim.x) atomicAdd(&counts[b], mine[b]);
}
"""
