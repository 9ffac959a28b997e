"""Step 1: another parameter"""

STEP, HINT = 1, "signature"


def vector_add() -> str:
    """c = a + b for vectors of n floats, one thread for each element."""
    return r"""
__global__ void vector_add(const float* a, const float* b, float* c, int n, int m) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
"""
