"""Step 3: no barrier before the loop"""

STEP, HINT = 3, "tree_barrier"


def block_sum() -> str:
    """sums[block] = the sum of the blockDim.x elements of that block; blockDim.x is a power
    of two, at most 256."""
    return r"""
__global__ void block_sum(const float* x, float* sums, int n) {
  __shared__ float part[256];
  int t = threadIdx.x;
  int i = blockIdx.x * blockDim.x + t;
  part[t] = i < n ? x[i] : 0;
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  if (t == 0) sums[blockIdx.x] = part[0];
}
"""
