"""Step 1: the block is forgotten"""

STEP, HINT = 1, "block_offset"


def vector_add() -> str:
    """c = a + b for vectors of n floats, one thread for each element."""
    return r"""
__global__ void vector_add(const float* a, const float* b, float* c, int n) {
  int i = threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
"""
