"""Wrong answers to labs/lab06_cuda_basics.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab06_cuda_basics.py")

# step 1

wrong("add_guard_short", step=1, hint="guard",
      old="n) c[i] = a[", new="n - 1) c[i] = a[")
wrong("add_no_guard", step=1, hint="guard",
      old="if (i < n) c", new="c")
wrong("add_semicolon", step=1, hint="compile",
      old="int i = blockIdx.x * blockDim.x + threadIdx.x;\nif (i < n) c[i] = a[i] + b[i];",
      new="int i = blockIdx.x * blockDim.x + threadIdx.x\nif (i < n) c[i] = a[i] + b[i];")
wrong("add_signature", step=1, hint="signature",
      old="vector_add(const float* a, const float* b, float* c, int n",
      new="vector_add(const float* a, const float* b, float* c, int n, int m")
wrong("add_thread_only", step=1, hint="block_offset",
      old="int i = blockIdx.x * blockDim.x + threadIdx.x;\nif (i < n) c[i] = a[i] + b[i];",
      new="int i = threadIdx.x;\nif (i < n) c[i] = a[i] + b[i];")
wrong("blocks_floor", step=1, hint="blocks_down",
      old="(n + threads - 1)", new="n")
wrong("blocks_one_more", step=1, hint="blocks_more",
      old="(n + threads - 1) // threads", new="n // threads + 1")
wrong("add_all_by_one", step=1, hint="one_element",
      old="int i = blockIdx.x * blockDim.x + threadIdx.x;\nif (i < n) c[i] = a[i] + b[i];",
      new="""
    if (blockIdx.x == 0 && threadIdx.x == 0)
      for (int i = 0; i < n; i++) c[i] = a[i] + b[i];
""")
wrong("add_to_nothing", step=1, hint="reads_output",
      old="if (i < n) c[i] =", new="if (i < n) c[i] +=")
wrong("add_not_returned", step=1, hint="returns_none",
      old=Body("vector_add"), new="pass")
wrong("blocks_fraction", step=1, hint="whole_number",
      old="(n + threads - 1) // threads", new="n / threads")

# step 2

wrong("sectors_floats", step=2, hint="sectors_bytes",
      old="4 * lane * stride", new="lane * stride")
wrong("sectors_range", step=2, hint="sectors_between",
      old="len({4 * lane * stride // 32 for lane in range(32)})",
      new="4 * 31 * stride // 32 + 1")
wrong("sectors_unbounded", step=2, hint="sectors_few",
      old="len({4 * lane * stride // 32 for lane in range(32)})", new="4 * stride")
wrong("stride_endless", step=2, hint="kernel_endless",
      old="+= all) c[i]", new="+= 0) c[i]")
wrong("stride_of_block", step=2, hint="step_of_loop", old="""
    // >>> solution 2: a loop from this thread's number up to n in steps of all threads
    int all = gridDim.x * blockDim.x;
""", new="int all = blockDim.x;")
wrong("stride_once", step=2, hint="no_loop", old="""
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) c[i] = a[i] + b[i];
""", new="")
wrong("stride_own_pieces", step=2, hint="own_pieces", old="""
    int all = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) c[i] = a[i] + b[i];
""", new="""
    int all = gridDim.x * blockDim.x, piece = (n + all - 1) / all;
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * piece;
    for (int i = first; i < first + piece && i < n; i++) c[i] = a[i] + b[i];
""")
wrong("sectors_31_lanes", step=2, hint="sectors_lanes",
      old="for lane in range(32)}", new="for lane in range(31)}")
wrong("stride_one_thread", step=2, hint="idle_threads", old="""
    int all = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) c[i] = a[i] + b[i];
""", new="""
    if (threadIdx.x == 0)
      for (int i = blockIdx.x; i < n; i += gridDim.x) c[i] = a[i] + b[i];
""")

# step 3

wrong("tree_all_write", step=3, hint="one_writes",
      old="if (t == 0) sums[blockIdx.x] = part[0", new="sums[blockIdx.x] = part[t")
wrong("tree_barrier_for_some", step=3, hint="divergent_barrier",
      old="part[t] = i < n ? x[i] : 0;\n__syncthreads();", new="""
    part[t] = 0;
    if (i < n) {
      part[t] = x[i];
      __syncthreads();
    }
""")
wrong("tree_barrier_in_if", step=3, hint="divergent_barrier",
      old="if (t < half) part[t] += part[t + half];\n__syncthreads();", new="""
    if (t < half) {
      part[t] += part[t + half];
      __syncthreads();
    }
""")
wrong("tree_no_first_barrier", step=3, hint="tree_barrier",
      old="part[t] = i < n ? x[i] : 0;\n__syncthreads();", new="part[t] = i < n ? x[i] : 0;")
wrong("tree_one_barrier", step=3, hint="tree_barrier",
      old="if (t < half) part[t] += part[t + half];\n__syncthreads();",
      new="if (t < half) part[t] += part[t + half];")
wrong("tree_one_place", step=3, hint="sum_place",
      old="[blockIdx.x] = part", new="[0] = part")
wrong("tree_returns_early", step=3, hint="zero_fill",
      old="part[t] = i < n ? x[i] : 0;", new="if (i >= n) return;\npart[t] = x[i];")
wrong("tree_stops_early", step=3, hint="rounds",
      old="0; half /= 2", new="1; half /= 2")
wrong("tree_first_block", step=3, hint="block_offset",
      old="part[t] = i < n ? x[i] : 0;", new="part[t] = t < n ? x[t] : 0;")
wrong("tree_half_is_all", step=3, hint="tree_index",
      old="half = blockDim.x / 2; half > 0; half", new="half = blockDim.x; half > 0; half")
wrong("tree_of_one_thread", step=3, hint="serial_sum",
      old="""
    part[t] = i < n ? x[i] : 0;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
      if (t < half) part[t] += part[t + half];
      __syncthreads();
    }
    if (t == 0) sums[blockIdx.x] = part[0];
""", new="""
    if (t == 0) {
      float sum = 0;
      for (int j = i; j < i + blockDim.x && j < n; j++) sum += x[j];
      sums[blockIdx.x] = sum;
    }
""")
wrong("tree_place_of_thread", step=3, hint="sum_place",
      old="[blockIdx.x] = part[0", new="[i] = part[0")

# step 4

wrong("warp_all_of_part", step=4, hint="warps_unwritten",
      old="lane < blockDim.x / 32 ? part[lane] : 0);", new="part[lane]);")
wrong("warp_four_rounds", step=4, hint="shuffle_rounds",
      old="for (int d = 16; d > 0; d /= 2) v += __shfl_down_sync(0xffffffff, v, d);\nreturn v;",
      new="for (int d = 8; d > 0; d /= 2) v += __shfl_down_sync(0xffffffff, v, d);\nreturn v;")
wrong("warp_lanes_stay_away", step=4, hint="lanes_missing",
      old="float v = sum_of_warp(i < n ? x[i] : 0);",
      new="float v = 0;\nif (i < n) v = sum_of_warp(x[i]);")
wrong("warp_no_barrier", step=4, hint="warps_barrier",
      old="__syncthreads();\nif (warp == 0) {", new="if (warp == 0) {")
wrong("warp_one_warp", step=4, hint="one_warp",
      old="v = sum_of_warp(lane < blockDim.x / 32 ? part[lane] : 0);", new="")
wrong("warp_still_shared", step=4, hint="still_shared", old="""
    __shared__ float part[32];  // one number for each warp
    int t = threadIdx.x, lane = t % 32, warp = t / 32;
    // >>> solution 4: sum_of_warp, one number for each warp into part, and the sum of these
    int i = blockIdx.x * blockDim.x + t;
    float v = sum_of_warp(i < n ? x[i] : 0);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    if (warp == 0) {
      v = sum_of_warp(lane < blockDim.x / 32 ? part[lane] : 0);
      if (lane == 0) sums[blockIdx.x] = v;
""", new="""
    __shared__ float part[1024];
    int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    part[t] = i < n ? x[i] : 0;
    __syncthreads();
    for (int half = blockDim.x / 2; half >= 32; half /= 2) {
      if (t < half) part[t] += part[t + half];
      __syncthreads();
    }
    if (t < 32) {
      float v = sum_of_warp(part[t]);
      if (t == 0) sums[blockIdx.x] = v;
""")
wrong("warp_every_lane_writes", step=4, hint="warp_place",
      old="if (lane == 0) part[warp", new="part[warp")
wrong("warp_leaves_early", step=4, hint="lanes_missing",
      old="float v = sum_of_warp(i < n ? x[i] : 0);",
      new="if (i >= n) return;\nfloat v = sum_of_warp(x[i]);")
wrong("warp_one_place", step=4, hint="sum_place",
      old="if (lane == 0) sums[blockIdx.x", new="if (lane == 0) sums[0")
wrong("warp_returns_nothing", step=4, hint="returns_none",
      old="return v;", new="")

# step 5

wrong("transpose_block_stays", step=5, hint="block_not_swapped",
      old="x, column = 32 * blockIdx.y", new="y, column = 32 * blockIdx.x")
wrong("transpose_naive_write", step=5, hint="uncoalesced", old="""
    __shared__ float tile[32][33];
    int row = 32 * blockIdx.y, column = 32 * blockIdx.x + threadIdx.x;
    for (int k = threadIdx.y; k < 32; k += 8)
      if (row + k < rows && column < columns)
        tile[k][threadIdx.x] = x[(row + k) * columns + column];
    __syncthreads();
    row = 32 * blockIdx.x, column = 32 * blockIdx.y + threadIdx.x;
    for (int k = threadIdx.y; k < 32; k += 8)
      if (row + k < columns && column < rows)
        y[(row + k) * rows + column] = tile[threadIdx.x][k];
""", new="""
    int column = 32 * blockIdx.x + threadIdx.x;
    for (int row = 32 * blockIdx.y + threadIdx.y; row < 32 * blockIdx.y + 32; row += 8)
      if (row < rows && column < columns) y[column * rows + row] = x[row * columns + column];
""")
wrong("transpose_no_barrier", step=5, hint="tile_barrier",
      old="    tile[k][threadIdx.x] = x[(row + k) * columns + column];\n__syncthreads();",
      new="    tile[k][threadIdx.x] = x[(row + k) * columns + column];")
wrong("transpose_one_row", step=5, hint="four_rows", old="""
    for (int k = threadIdx.y; k < 32; k += 8)
      if (row + k < rows && column < columns)
""", new="for (int k = threadIdx.y; k < 8; k += 8)\n  if (row + k < rows && column < columns)")
wrong("transpose_same_guard", step=5, hint="edge",
      old="columns && column < rows", new="rows && column < columns")
wrong("transpose_padded_by_two", step=5, hint="banks",
      old="tile[32][33];", new="tile[32][34];")
wrong("transpose_row_length", step=5, hint="edge",
      old="x[(row + k) * columns + column]", new="x[(row + k) * rows + column]")
wrong("transpose_small_tile", step=5, hint="tile_size",
      old="tile[32][33];", new="tile[16][33];")
wrong("transpose_tile_stays", step=5, hint="tile_not_turned",
      old="= tile[threadIdx.x][k]", new="= tile[k][threadIdx.x]")

# step 6

wrong("histogram_assigned", step=6, hint="overwritten",
      old="atomicAdd(&counts[b], mine[b]);", new="counts[b] = mine[b];")
wrong("histogram_global", step=6, hint="global_atomics",
      old="mine[x[i]], 1", new="counts[x[i]], 1")
wrong("histogram_no_barrier", step=6, hint="histogram_barrier",
      old="__syncthreads();\nint all = gridDim.x * blockDim.x;",
      new="int all = gridDim.x * blockDim.x;")
wrong("histogram_not_zeroed", step=6, hint="not_zeroed",
      old="for (int b = threadIdx.x; b < bins; b += blockDim.x) mine[b] = 0;", new="")
wrong("histogram_one_bin_each", step=6, hint="bins_left",
      old="for (int b = threadIdx.x; b < bins; b += blockDim.x) atomicAdd(&counts[b], mine[b",
      new="if (threadIdx.x < bins) atomicAdd(&counts[threadIdx.x], mine[threadIdx.x")
wrong("histogram_adds_all", step=6, hint="counts_more",
      old="for (int b = threadIdx.x; b < bins; b += blockDim.x) atomicAdd(&counts",
      new="for (int b = 0; b < bins; b++) atomicAdd(&counts")
wrong("histogram_barrier_in_loop", step=6, hint="divergent_barrier",
      old="""
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
      atomicAdd(&mine[x[i]], 1);
    __syncthreads();
""", new="""
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
      atomicAdd(&mine[x[i]], 1);
      __syncthreads();
    }
""")
wrong("histogram_old_count", step=6, hint="not_atomic",
      old="atomicAdd(&mine[x[i]], 1);", new="""
    {
      int old = mine[x[i]];
      mine[x[i]] = old + 1;
    }
""")
wrong("histogram_one_block_adds", step=6, hint="counts_less",
      old="atomicAdd(&counts[b], mine[b]);",
      new="if (blockIdx.x == 0) atomicAdd(&counts[b], mine[b]);")

# step 7

wrong("softmax_block_is_columns", step=7, hint="power_of_two",
      old="block = triton.next_power_of_2(columns)", new="block = columns")
wrong("softmax_load_unmasked", step=7, hint="load_mask",
      old='i, mask=inside, other=-float("inf")', new="i")
wrong("softmax_no_maximum", step=7, hint="no_maximum",
      old="- tl.max(x, axis=0)", new="")
wrong("softmax_not_divided", step=7, hint="not_divided",
      old="e / tl.sum(e, axis=0)", new="e")
wrong("softmax_one_program_less", step=7, hint="programs",
      old="softmax_kernel[(rows,)]", new="softmax_kernel[(max(rows - 1, 1),)]")
wrong("softmax_store_unmasked", step=7, hint="store_mask",
      old="(e, axis=0), mask=inside", new="(e, axis=0)")
wrong("softmax_stride_is_columns", step=7, hint="row_stride",
      old="x.stride(0), y.stride(0)", new="columns, columns")
wrong("softmax_zeros", step=7, hint="mask_other",
      old='-float("inf")', new="0.0")
wrong("softmax_block_of_100", step=7, hint="block_small",
      old="block = triton.next_power_of_2(columns)", new="block = 128")
wrong("softmax_by_torch", step=7, hint="programs",
      old=Body("softmax"), new="y.copy_(x.softmax(1))")
wrong("softmax_first_row", step=7, hint="rows_left",
      old="row = tl.program_id(0)", new="row = tl.program_id(1)")
wrong("softmax_grid_number", step=7, hint="grid_kind",
      old="softmax_kernel[(rows,)]", new="softmax_kernel[rows]")
wrong("softmax_of_2", step=7, hint="softmax_formula",
      old="tl.exp(x -", new="tl.exp2(x -")
wrong("softmax_other_way", step=7, hint="x_changed",
      old="(x, y, x.stride(0)", new="(y, x, x.stride(0)")

# step 8

wrong("matmul_naive", step=8, hint="not_tiled", edits=[
    ("__shared__ float a_tile[16][16], b_tile[16][16];", ""),
    ("float sum = 0;", "if (row >= m || column >= n) return;\nfloat sum = 0;"),
    ("""
        for (int k0 = 0; k0 < k; k0 += 16) {
          int ka = k0 + threadIdx.x, kb = k0 + threadIdx.y;
          a_tile[threadIdx.y][threadIdx.x] = row < m && ka < k ? a[row * k + ka] : 0;
          b_tile[threadIdx.y][threadIdx.x] = kb < k && column < n ? b[kb * n + column] : 0;
          __syncthreads();
          for (int j = 0; j < 16; j++) sum += a_tile[threadIdx.y][j] * b_tile[j][threadIdx.x];
          __syncthreads();
        }
        if (row < m && column < n) c[row * n + column] = sum;
    """, """
        for (int j = 0; j < k; j++) sum += a[row * k + j] * b[j * n + column];
        c[row * n + column] = sum;
    """)])
wrong("matmul_no_guard", step=8, hint="outside",
      old="&& column < n ?", new="?")
wrong("matmul_one_barrier", step=8, hint="product_barriers",
      old="  __syncthreads();\n}\nif (row < m && column < n) c[row * n + column] = sum;",
      new="}\nif (row < m && column < n) c[row * n + column] = sum;")
wrong("matmul_returns_early", step=8, hint="tile_loads",
      old="float sum = 0;", new="float sum = 0;\nif (row >= m || column >= n) return;")
wrong("right_matmul_barrier_first", step=8, edits=[
    ("""
        for (int k0 = 0; k0 < k; k0 += 16) {
          int ka = k0 + threadIdx.x, kb = k0 + threadIdx.y;
    """, """
        for (int t = 0; t < k; t += 16) {
          if (t > 0) __syncthreads();
          int ka = t + threadIdx.x, kb = t + threadIdx.y;
    """),
    ("  __syncthreads();\n}\nif (row < m && column < n) c[row * n + column] = sum;",
     "}\nif (row < m && column < n) c[row * n + column] = sum;")])
wrong("matmul_whole_steps", step=8, hint="last_tile",
      old="; k0 < k; k0", new="; k0 + 16 <= k; k0")
wrong("matmul_b_by_row", step=8, hint="tile_indices",
      old="b_tile[j][threadIdx.x];", new="b_tile[threadIdx.x][j];")
wrong("matmul_loop_over_k", step=8, hint="tile_size",
      old="j < 16; j++", new="j < k; j++")
wrong("matmul_row_length", step=8, hint="row_lengths",
      old="a[row * k + ka]", new="a[row * m + ka]")
wrong("matmul_store_everything", step=8, hint="store_guard",
      old="if (row < m && column < n) c[row", new="c[row")
wrong("matmul_store_each_step", step=8, hint="store_once",
      old="  __syncthreads();\n}\nif (row < m && column < n) c[row * n + column] = sum;",
      new="""
      __syncthreads();
      if (row < m && column < n) c[row * n + column] = sum;
    }
""")
wrong("matmul_sum_in_loop", step=8, hint="sum_kept",
      old="int ka = k0 + threadIdx.x, kb", new="sum = 0;\nint ka = k0 + threadIdx.x, kb")
