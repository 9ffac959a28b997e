"""Step 2: no loop"""

STEP, HINT = 2, "no_loop"


def add_in_strides() -> str:
    """c = a + b for vectors of n floats, by a grid of any size."""
    return r"""
__global__ void add_in_strides(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
"""
