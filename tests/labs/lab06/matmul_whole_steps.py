"""Step 8: the rest of k is left out"""

STEP, HINT = 8, "last_tile"


def matmul() -> str:
    """c [m, n] = a [m, k] @ b [k, n]; blocks of 16 × 16 threads, one element of c for each."""
    return r"""
__global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float a_tile[16][16], b_tile[16][16];
  int row = 16 * blockIdx.y + threadIdx.y, column = 16 * blockIdx.x + threadIdx.x;
  float sum = 0;
  for (int k0 = 0; k0 + 16 <= k; k0 += 16) {
    int ka = k0 + threadIdx.x, kb = k0 + threadIdx.y;
    a_tile[threadIdx.y][threadIdx.x] = row < m && ka < k ? a[row * k + ka] : 0;
    b_tile[threadIdx.y][threadIdx.x] = kb < k && column < n ? b[kb * n + column] : 0;
    __syncthreads();
    for (int j = 0; j < 16; j++) sum += a_tile[threadIdx.y][j] * b_tile[j][threadIdx.x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = sum;
}
"""
