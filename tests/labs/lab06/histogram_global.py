"""Step 6: an atomic in global memory for each element"""

STEP, HINT = 6, "global_atomics"


def histogram() -> str:
    """counts[v] += how many of the n numbers x are v; 0 <= v < bins <= 256."""
    return r"""
__global__ void histogram(const int* x, int* counts, int n, int bins) {
  int all = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
    atomicAdd(&counts[x[i]], 1);
}
"""
