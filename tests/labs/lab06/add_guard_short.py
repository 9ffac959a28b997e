"""Step 1: the last element is left out"""

STEP, HINT = 1, "guard"


def vector_add() -> str:
    """c = a + b for vectors of n floats, one thread for each element."""
    return r"""
__global__ void vector_add(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n - 1) c[i] = a[i] + b[i];
}
"""
