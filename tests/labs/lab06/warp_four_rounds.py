"""Step 4: the shuffles begin at 8"""

STEP, HINT = 4, "shuffle_rounds"


def warp_sum() -> str:
    """The same sums as block_sum, by shuffles; blockDim.x is a multiple of 32, at most 1024."""
    return r"""
__device__ float sum_of_warp(float v) {
  for (int d = 8; d > 0; d /= 2) v += __shfl_down_sync(0xffffffff, v, d);
  return v;
}

__global__ void warp_sum(const float* x, float* sums, int n) {
  __shared__ float part[32];  // one number for each warp
  int t = threadIdx.x, lane = t % 32, warp = t / 32;
  int i = blockIdx.x * blockDim.x + t;
  float v = sum_of_warp(i < n ? x[i] : 0);
  if (lane == 0) part[warp] = v;
  __syncthreads();
  if (warp == 0) {
    v = sum_of_warp(lane < blockDim.x / 32 ? part[lane] : 0);
    if (lane == 0) sums[blockIdx.x] = v;
  }
}
"""
