"""Step 2: the step is one block's"""

STEP, HINT = 2, "step_of_loop"


def add_in_strides() -> str:
    """c = a + b for vectors of n floats, by a grid of any size."""
    return r"""
__global__ void add_in_strides(const float* a, const float* b, float* c, int n) {
  int all = blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) c[i] = a[i] + b[i];
}
"""
