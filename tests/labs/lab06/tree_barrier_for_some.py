"""Step 3: the barrier stands within if (i < n)"""

STEP, HINT = 3, "divergent_barrier"


def block_sum() -> str:
    """sums[block] = the sum of the blockDim.x elements of that block; blockDim.x is a power
    of two, at most 256."""
    return r"""
__global__ void block_sum(const float* x, float* sums, int n) {
  __shared__ float part[256];
  int t = threadIdx.x;
  int i = blockIdx.x * blockDim.x + t;
  part[t] = 0;
  if (i < n) {
    part[t] = x[i];
    __syncthreads();
  }
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  if (t == 0) sums[blockIdx.x] = part[0];
}
"""
