"""Step 2: the loop variable stays"""

STEP, HINT = 2, "kernel_endless"


def add_in_strides() -> str:
    """c = a + b for vectors of n floats, by a grid of any size."""
    return r"""
__global__ void add_in_strides(const float* a, const float* b, float* c, int n) {
  int all = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 0) c[i] = a[i] + b[i];
}
"""
