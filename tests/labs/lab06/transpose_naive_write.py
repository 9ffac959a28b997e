"""Step 5: written by column"""

STEP, HINT = 5, "uncoalesced"


def transpose() -> str:
    """y [columns, rows] = x [rows, columns] transposed; blocks of 32 × 8 threads."""
    return r"""
__global__ void transpose(const float* x, float* y, int rows, int columns) {
  int column = 32 * blockIdx.x + threadIdx.x;
  for (int row = 32 * blockIdx.y + threadIdx.y; row < 32 * blockIdx.y + 32; row += 8)
    if (row < rows && column < columns) y[column * rows + row] = x[row * columns + column];
}
"""
