"""Wrong answers to assessment/challenge_kernel.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("assessment/challenge_kernel.py")

# step 1

wrong("cut_off", step=1, hint="codes",
      old="(signed char)(scale > 0 ? (int)rintf(a / scale) : 0)",
      new="(signed char)(scale > 0 ? a / scale : 0)")
wrong("largest_with_its_sign", step=1, hint="codes",
      old="fmaxf(fabsf(v[k].x), fabsf(v[k].y))", new="fmaxf(v[k].x, v[k].y)")
wrong("room_for_less", step=1, hint="codes", old="SHARE = 4", new="SHARE = 3")
wrong("no_barrier", step=1, hint="fault", old="""
  __syncthreads();
  most = part[t % 8];
""", new="""
  most = part[t % 8];
""")
wrong("no_semicolon", step=1, hint="compile", old="v[SHARE];", new="v[SHARE]")

# step 2

wrong("own_piece", step=2, hint="far", old="return k * 256 + t;", new="return 4 * t + k;")
wrong("read_again", step=2, hint="twice", old="(i < fours) out", new="(i < fours) v[k] = row[i], out")
wrong("one_number_each", step=2, hint="narrow", old=Body("fast"), new='''
return r"""
__global__ void fast(const float* x, signed char* q, float* scales, int columns) {
  __shared__ float part[8];
  int t = threadIdx.x;
  float v[16], most = 0;
  for (int k = 0; k < 16; k++) {
    v[k] = k * 256 < columns ? x[blockIdx.x * columns + k * 256 + t] : 0;
    most = fmaxf(most, fabsf(v[k]));
  }
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, d));
  if (t % 32 == 0) part[t / 32] = most;
  __syncthreads();
  for (int w = 0; w < 8; w++) most = fmaxf(most, part[w]);
  if (t == 0) scales[blockIdx.x] = most / 127;
  for (int k = 0; k < 16; k++)
    if (k * 256 < columns)
      q[blockIdx.x * columns + k * 256 + t] = most > 0 ? (int)rintf(v[k] * 127 / most) : 0;
}
"""
''')
wrong("warps_by_loop", step=2, hint="banks", old="""
  most = part[t % 8];
  for (int d = 4; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, d));
""", new="""
  for (int w = 0; w < 8; w++) most = fmaxf(most, part[w]);
""")
wrong("tree", step=2, hint="banks", edits=[
    ("  __shared__ float part[8];", "  __shared__ float part[256];"),
    ("""
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, d));
  if (t % 32 == 0) part[t / 32] = most;
  __syncthreads();
  most = part[t % 8];
  for (int d = 4; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, d));
""", """
  part[t] = most;
  __syncthreads();
  for (int s = 128; s > 0; s /= 2) {
    if (t < s) part[t] = fmaxf(part[t], part[t + s]);
    __syncthreads();
  }
  most = part[0];
""")])

wrong("one_code_each", step=2, hint="stores",
      old="out[i] = {code(v[k].x), code(v[k].y), code(v[k].z), code(v[k].w)};", new="""
{
      signed char* at = (signed char*)(out + i);
      at[0] = code(v[k].x), at[1] = code(v[k].y), at[2] = code(v[k].z), at[3] = code(v[k].w);
    }
""")

# step 3

wrong("any_length", step=3, hint="local", edits=[
    ("constexpr int SHARE = 4", "int SHARE = columns / 1024"), ("v[SHARE]", "v[4]")])
wrong("room_for_more", step=3, hint="registers", old="SHARE = 4", new="SHARE = 16")
