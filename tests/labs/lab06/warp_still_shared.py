"""Step 4: the tree of step 3, down to one warp"""

STEP, HINT = 4, "still_shared"


def warp_sum() -> str:
    """The same sums as block_sum, by shuffles; blockDim.x is a multiple of 32, at most 1024."""
    return r"""
__device__ float sum_of_warp(float v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_down_sync(0xffffffff, v, d);
  return v;
}

__global__ void warp_sum(const float* x, float* sums, int n) {
  __shared__ float part[1024];
  int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  part[t] = i < n ? x[i] : 0;
  __syncthreads();
  for (int half = blockDim.x / 2; half >= 32; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  if (t < 32) {
    float v = sum_of_warp(part[t]);
    if (t == 0) sums[blockIdx.x] = v;
  }
}
"""
