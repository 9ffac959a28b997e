"""Step 1: no guard"""

STEP, HINT = 1, "guard"


def vector_add() -> str:
    """c = a + b for vectors of n floats, one thread for each element."""
    return r"""
__global__ void vector_add(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  c[i] = a[i] + b[i];
}
"""
