"""Step 1: all rows read the first"""

STEP, HINT = 1, "first_rows"


def source() -> str:
    return r"""
extern "C" void causal(const double* x, const double* w, double* y, long rows, long n, long k) {
  for (long r = 0; r < rows; r++)
    for (long t = 0; t < n; t++) {
      double sum = 0;
      for (long j = 0; j < k && j <= t; j++) sum += w[j] * x[t - j];
      y[r * n + t] = sum;
    }
}
"""
