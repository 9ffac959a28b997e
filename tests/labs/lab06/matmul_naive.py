"""Step 8: no tiles"""

STEP, HINT = 8, "not_tiled"


def matmul() -> str:
    """c [m, n] = a [m, k] @ b [k, n]; blocks of 16 × 16 threads, one element of c for each."""
    return r"""
__global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  int row = 16 * blockIdx.y + threadIdx.y, column = 16 * blockIdx.x + threadIdx.x;
  if (row >= m || column >= n) return;
  float sum = 0;
  for (int j = 0; j < k; j++) sum += a[row * k + j] * b[j * n + column];
  c[row * n + column] = sum;
}
"""
