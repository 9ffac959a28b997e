"""Step 1: a correlation"""

STEP, HINT = 1, "flipped"


def source() -> str:
    return r"""
extern "C" void causal(const double* x, const double* w, double* y, long rows, long n, long k) {
  for (long r = 0; r < rows; r++)
    for (long t = 0; t < n; t++) {
      double sum = 0;
      for (long j = 0; j < k && t + j < n; j++) sum += w[j] * x[r * n + t + j];
      y[r * n + t] = sum;
    }
}
"""
