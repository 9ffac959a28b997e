"""Step 5: each thread moves one element"""

STEP, HINT = 5, "four_rows"


def transpose() -> str:
    """y [columns, rows] = x [rows, columns] transposed; blocks of 32 × 8 threads."""
    return r"""
__global__ void transpose(const float* x, float* y, int rows, int columns) {
  __shared__ float tile[32][33];
  int row = 32 * blockIdx.y, column = 32 * blockIdx.x + threadIdx.x;
  for (int k = threadIdx.y; k < 8; k += 8)
    if (row + k < rows && column < columns)
      tile[k][threadIdx.x] = x[(row + k) * columns + column];
  __syncthreads();
  row = 32 * blockIdx.x, column = 32 * blockIdx.y + threadIdx.x;
  for (int k = threadIdx.y; k < 8; k += 8)
    if (row + k < columns && column < rows)
      y[(row + k) * rows + column] = tile[threadIdx.x][k];
}
"""
