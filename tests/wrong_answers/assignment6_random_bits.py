"""Wrong answers to assessment/assignment6_random_bits.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("assessment/assignment6_random_bits.py")

# step 1

wrong("philox_constant_key", step=1, hint="key",
      old="k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK", new="pass")
wrong("philox_early_key", step=1, hint="key", edits=[
    ("for _ in range(10):",
     "for _ in range(10):\n    k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK"),
    ("k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK", "")])
wrong("philox_long_key", step=1, hint="key",
      old="(k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK", new="k0 + WEYL[0], k1 + WEYL[1]")
wrong("philox_order", step=1, hint="words",
      old="a, b, c, d = hi1 ^ b ^ k0, lo1, hi0 ^ d ^ k1, lo0",
      new="a, b, c, d = hi1 ^ b ^ k0, lo0, hi0 ^ d ^ k1, lo1")
wrong("philox_seven", step=1, hint="rounds",
      old="for _ in range(10):", new="for _ in range(7):")
wrong("philox_floats", step=1, hint="dimensions",
      old="torch.stack([a, b, c, d], -1)", new="torch.stack([a, b, c, d], -1).double()")
wrong("philox_halves", step=1, hint="halves", edits=[
    ("hi0, lo0 = multiply", "lo0, hi0 = multiply"), ("hi1, lo1 = multiply", "lo1, hi1 = multiply")])
wrong("philox_in_place", step=1, hint="in_place",
      old="a, b, c, d = hi1 ^ b ^ k0, lo1, hi0 ^ d ^ k1, lo0",
      new="b ^= hi1 ^ k0\nd ^= hi0 ^ k1\na, b, c, d = b, lo1, d, lo0")
wrong("philox_multipliers", step=1, hint="multipliers", edits=[
    ("multiply(MULTIPLIERS[0], a)", "multiply(MULTIPLIERS[1], a)"),
    ("multiply(MULTIPLIERS[1], c)", "multiply(MULTIPLIERS[0], c)")])
wrong("philox_two_dimensions", step=1, hint="dimensions",
      old="a, b, c, d = counter.unbind(-1)", new="a, b, c, d = (counter[:, i] for i in range(4))")
wrong("philox_xor_key", step=1, hint="key",
      old="(k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK", new="k0 ^ WEYL[0], k1 ^ WEYL[1]")

# step 2

wrong("uniform_all_bits", step=2, hint="range", old=Body("uniform"), new="""
    q = torch.arange(first // 4, (first + n + 3) // 4)
    z = torch.zeros_like(q)
    words = philox(
        torch.stack([q & MASK, q >> 32, z + (offset & MASK), z + (offset >> 32)], -1),
        (seed & MASK, seed >> 32),
    ).flatten()
    b = first % 4
    return words[b : b + n].float() / 2**32
""")
wrong("uniform_begins", step=2, hint="position",
      old="first - first // 4 * 4", new="0")
wrong("uniform_low", step=2, hint="low_bits",
      old="words[begin : begin + n] >> 8", new="words[begin : begin + n] & 0xFFFFFF")
wrong("uniform_low_counter", step=2, hint="counter", old=Body("uniform"), new="""
    q = torch.arange(first // 4, (first + n + 3) // 4)
    z = torch.zeros_like(q)
    words = philox(
        torch.stack([q, z, z + (offset & MASK), z + (offset >> 32)], -1),
        (seed & MASK, seed >> 32),
    ).flatten()
    b = first % 4
    return (words[b : b + n] >> 8).float() / 2**24
""")
wrong("uniform_other_counter", step=2, hint="counter",
      old="[quarters & MASK, quarters >> 32, zero + (offset & MASK), zero + (offset >> 32)]",
      new="[zero + (offset & MASK), zero + (offset >> 32), quarters & MASK, quarters >> 32]")
wrong("uniform_short_offset", step=2, hint="offset",
      old="zero + (offset >> 32)", new="zero")
wrong("uniform_short_seed", step=2, hint="seed",
      old="seed >> 32", new="0")
wrong("uniform_signed", step=2, hint="range",
      old="(words[begin : begin + n] >> 8).float() / 2**24",
      new="words[begin : begin + n].to(torch.int32).float() / 2**31")
wrong("uniform_double", step=2, hint="dtype",
      old="(words[begin : begin + n] >> 8).float()", new="(words[begin : begin + n] >> 8).double()")
wrong("uniform_nothing", step=2, hint="none",
      old="return (words[begin : begin + n] >> 8)", new="words = (words[begin : begin + n] >> 8)")
wrong("uniform_not_cut", step=2, hint="length",
      old="words[begin : begin + n]", new="words[begin:]")

# step 3

wrong("dropout_from_fours", step=3, hint="first", edits=[
    ("offset, first, x.numel()", "offset, first // 4 * 4, x.numel()"),
    ("offset, first, grad.numel()", "offset, first // 4 * 4, grad.numel()")])
wrong("dropout_keeps_p", step=3, hint="share",
      old="kept = uniform(seed, offset, first, x.numel()).view_as(x) >= p",
      new="return x * (uniform(seed, offset, first, x.numel()).view_as(x) < p) / (1 - p)")
wrong("dropout_next_offset", step=3, hint="other_mask",
      old="offset, first, grad", new="offset + 1, first, grad")
wrong("dropout_not_scaled", step=3, hint="not_scaled",
      old="kept = uniform(seed, offset, first, x.numel()).view_as(x) >= p",
      new="return x * (uniform(seed, offset, first, x.numel()).view_as(x) >= p)")
wrong("dropout_seed_later", step=3, hint="mask",
      old="ctx.drawn_by = p, seed", new="seed += 1\nctx.drawn_by = p, seed")
wrong("dropout_stores", step=3, hint="stored",
      old="return x * kept / (1 - p)",
      new="ctx.save_for_backward(kept)\nctx.p = p\nreturn x * kept / (1 - p)")
wrong("dropout_few_numbers", step=3, edits=[
    ("ctx.drawn_by = p, seed, offset, first",
     "ctx.p = p\nctx.save_for_backward(torch.tensor([seed, offset, first]))"),
    ("p, seed, offset, first = ctx.drawn_by",
     "p, (seed, offset, first) = ctx.p, ctx.saved_tensors[0].tolist()")])
wrong("dropout_greater", step=3, hint="share", edits=[
    ("x.numel()).view_as(x) >= p", "x.numel()).view_as(x) > p"),
    ("grad.numel()).view_as(grad) >= p", "grad.numel()).view_as(grad) > p")])
wrong("dropout_in_place", step=3, hint="in_place",
      old="return x * kept / (1 - p)", new="return x.mul_(kept) / (1 - p)")
wrong("dropout_list", step=3, hint="stored", edits=[
    ("return x * kept / (1 - p)", "ctx.mask = kept.tolist()\nreturn x * kept / (1 - p)"),
    ("kept = uniform(seed, offset, first, grad.numel()).view_as(grad) >= p",
     "kept = torch.tensor(ctx.mask)")])
wrong("dropout_one_gradient", step=3, hint="grad_count",
      old="return grad * kept / (1 - p), None, None, None, None", new="return grad * kept / (1 - p)")
wrong("dropout_state", step=3, hint="state", edits=[
    ("ctx.drawn_by = p", "Dropout.drawn_by = p"), ("= ctx.drawn_by", "= Dropout.drawn_by")])
wrong("dropout_view", step=3, hint="strided",
      old="return x * kept / (1 - p)", new="return (x.view(-1) * kept.view(-1) / (1 - p)).view(x.shape)")

# step 4

wrong("chance_ceil", step=4, hint="biased",
      old=Body("round_by_chance"),
      new="return (x + uniform(seed, offset, 0, x.numel()).view_as(x)).ceil()")
wrong("chance_nearest", step=4, hint="same_way",
      old=Body("round_by_chance"), new="return x.round()")
wrong("chance_of_a_sum", step=4, hint="moves_integers",
      old=Body("round_by_chance"),
      new="return (x + uniform(seed, offset, 0, x.numel()).view_as(x)).floor()")
wrong("chance_at_most", step=4, hint="moves_integers",
      old=".view_as(x) < x - low", new=".view_as(x) <= x - low")
wrong("chance_fractions", step=4, hint="fractions",
      old="return low +", new="return x +")
wrong("chance_integers", step=4, hint="like_x",
      old="low = x.floor()  #", new="low = x.floor().int()  #")
wrong("chance_of_torch", step=4, hint="draws",
      old="uniform(seed, offset, 0, x.numel()).view_as(x)", new="torch.rand(x.shape)")
wrong("chance_sum", step=4, hint="draws",
      old="uniform(seed, offset, 0", new="uniform(seed + offset, 0, 0")

# step 5

wrong("linear_one_scale", step=5, hint="scales",
      old="out = sums.float() * row_scale * self.scale.t()",
      new="return sums.float() * row_scale + self.bias")
wrong("linear_wraps", step=5, hint="int8_sums",
      old="rows.int() @ self.weight.int().t()", new="(rows @ self.weight.t()).float()")
wrong("rows_128", step=5, hint="wraps", edits=[
    ("x.abs().amax(1, keepdim=True) / 127", "x.abs().amax(1, keepdim=True) / 128"),
    ("clamp(-127, 127)", "to(torch.int16)")])
wrong("rows_half", step=5, hint="unused",
      old="x.abs().amax(1, keepdim=True) / 127", new="x.abs().amax(1, keepdim=True) / 64")
wrong("rows_one_scale", step=5, hint="one_scale",
      old="x.abs().amax(1, keepdim=True) / 127", new="(x.abs().max() / 127).expand(len(x), 1)")
wrong("linear_always_bias", step=5, hint="no_bias",
      old="return out if self.bias is None else out + self.bias", new="return out + self.bias")
wrong("linear_broadcast", step=5, hint="dequantized",
      old="rows.int() @ self.weight.int().t()",
      new="(rows.float()[:, None] * self.weight.float()).sum(-1)")
wrong("linear_forgets_bias", step=5, hint="bias",
      old="return out if self.bias is None else out + self.bias", new="return out")
wrong("linear_mean_scale", step=5, hint="scales",
      old="self.scale.t()", new="self.scale.mean()")
wrong("linear_old_scale", step=5, hint="state",
      old="sums.float() * row_scale",
      new="sums.float() * self.__dict__.setdefault(len(x), row_scale)")
wrong("rows_cut", step=5, hint="nearest",
      old="(x / scale).round()", new="(x / scale).trunc()")
wrong("rows_floats", step=5, hint="codes",
      old=".to(torch.int8), scale", new=", scale")
wrong("rows_only_codes", step=5, hint="pair",
      old=".to(torch.int8), scale", new=".to(torch.int8)")
wrong("rows_small_scale", step=5, hint="zero_row",
      old="torch.where(scale == 0, 1.0, scale)", new="scale.clamp(1e-12)")
