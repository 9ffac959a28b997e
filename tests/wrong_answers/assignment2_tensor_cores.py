"""Wrong answers to assessment/assignment2_tensor_cores.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("assessment/assignment2_tensor_cores.py")

# step 1

wrong("round_cuts", step=1, hint="truncated",
      old=Body("to_tf32"),
      new="return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)")
wrong("round_eleven", step=1, hint="bits_left",
      old=Body("to_tf32"),
      new="return ((x.contiguous().view(torch.int32) + 0x800) & ~0xFFF).view(torch.float32)")
wrong("round_half_up", step=1, hint="ties",
      old=Body("to_tf32"),
      new="return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)")
wrong("round_in_place", step=1, hint="changes_x", old=Body("to_tf32"), new="""
    bits = x.view(torch.int32)
    bits += 0xFFF + (bits >> 13 & 1)
    bits &= ~0x1FFF
    return bits.view(torch.float32)
""")
wrong("round_converts", step=1, hint="not_viewed",
      old="bits.view(torch.float32)", new="bits.to(torch.float32)")
wrong("round_flat", step=1, hint="shape",
      old="bits.view(torch.float32)", new="bits.view(torch.float32).flatten()")
wrong("round_nothing", step=1, hint="no_return",
      old="return bits.view(torch.float32)", new="bits.view(torch.float32)")
wrong("round_to_bf16", step=1, hint="too_coarse",
      old=Body("to_tf32"), new="return x.bfloat16().float()")
wrong("round_to_fp16", step=1, hint="range",
      old=Body("to_tf32"), new="return x.half().float()")

# step 2

wrong("product_elsewhere", step=2, hint="no_mma",
      old=Body("matmul_3xtf32"), new="return a @ b")
wrong("product_four", step=2, hint="four_products",
      old="mma(a_small, b_large) + mma(a_large, b_small) + mma(a_large, b_large)",
      new="sum(mma(x, y) for x in (a_small, a_large) for y in (b_small, b_large))")
wrong("product_half", step=2, hint="half_split", old=Body("matmul_3xtf32"), new="""
    large = to_tf32(a)
    return mma(to_tf32(a - large), to_tf32(b)) + mma(large, to_tf32(b))
""")
wrong("product_one", step=2, hint="one_product",
      old=Body("matmul_3xtf32"), new="return mma(to_tf32(a), to_tf32(b))")
wrong("product_small_kept", step=2, hint="not_tf32",
      old="mma(a_small, b_large) + mma(a_large, b_small)",
      new="mma(a - a_large, b_large) + mma(a_large, b - b_large)")
wrong("product_without_large", step=2, hint="wrong_product",
      old="+ mma(a_large, b_large)", new="")

# step 3

wrong("conv_by_image", step=3, hint="calls", old=Body("conv2d"), new="""
    k, images = len(weight), []
    flat = to_tf32(weight.permute(0, 2, 3, 1).reshape(k, -1).T.contiguous())
    for image in x.split(1):
        rows, ho, wo = im2col(image, weight.shape[-1], stride, padding, dilation)
        images.append(mma(to_tf32(rows), flat).view(1, ho, wo, k))
    return torch.cat(images).permute(0, 3, 1, 2)
""")
wrong("conv_copies", step=3, hint="format",
      old="(0, 3, 1, 2)", new="(0, 3, 1, 2).contiguous()")
wrong("conv_copies_at_last", step=3, hint="copied", old="(0, 3, 1, 2)",
      new="(0, 3, 1, 2).contiguous().to(memory_format=torch.channels_last)")
wrong("conv_without_stride", step=3, hint="arguments",
      old="weight.shape[-1], stride, padding,", new="weight.shape[-1], 1, padding,")
wrong("conv_viewed", step=3, hint="format",
      old="(len(x), ho, wo, k).permute(0, 3, 1, 2)", new="(len(x), k, ho, wo)")
wrong("conv_weight_as_it_is", step=3, hint="weight_order",
      old="flat.T.contiguous", new="weight.reshape(k, -1).T.contiguous")
wrong("rows_channels_first", step=3, hint="order", old=Body("im2col"), new="""
    ho, wo = (
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for size in x.shape[2:]
    )
    rows = F.unfold(x, kernel, dilation, padding, stride).transpose(1, 2)
    return rows.reshape(-1, rows.shape[-1]), ho, wo
""")
wrong("rows_alone", step=3, hint="three",
      old="kernel * kernel * c), ho, wo", new="kernel * kernel * c)")
wrong("rows_columns_first", step=3, hint="pixels",
      old="permute(0, 2, 3, 1))", new="permute(0, 3, 2, 1))")
wrong("rows_of_three", step=3, hint="kernel", old="kernel * kernel * c)", new="9 * c)")
wrong("rows_not_dilated", step=3, hint="dilation", old=Body("im2col"), new="""
    n, _, h, w = x.shape
    reach = dilation * (kernel - 1) + 1
    ho, wo = ((size + 2 * padding - reach) // stride + 1 for size in (h, w))
    x = F.pad(x, [padding] * 4)
    places = [
        x[:, :, i : i + stride * ho : stride, j : j + stride * wo : stride][:, :, :ho, :wo]
        for i in range(kernel)
        for j in range(kernel)
    ]
    rows = torch.stack([place.permute(0, 2, 3, 1) for place in places], 3)
    return rows.reshape(n * ho * wo, -1), ho, wo
""")
wrong("rows_rounded", step=3, hint="rows", old=Body("im2col"), new="""
    n, c, h, w = x.shape
    cols = to_tf32(F.unfold(x, kernel, dilation, padding, stride))
    ho = (h + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    wo = (w + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    return (
        cols.view(n, c, kernel**2, ho * wo).permute(0, 3, 2, 1).reshape(n * ho * wo, -1),
        ho,
        wo,
    )
""")
wrong("rows_too_many", step=3, hint="size", old=Body("im2col"), new="""
    n, c, h, w = x.shape
    ho, wo = ((size + 2 * padding) // stride for size in (h, w))
    return torch.zeros(n * ho * wo, kernel * kernel * c), ho, wo
""")

# step 4

wrong("tile_by_fit", step=4, hint="share",
      old="tile.share * m", new="m")
wrong("tile_edges", step=4, hint="edge",
      old="-(-n // tile.n)", new="max(n / tile.n, 1)")
wrong("tile_percent", step=4, hint="full",
      old="return tile.share *", new="return 100 * tile.share *")
wrong("tile_rate_first", step=4, hint="pair",
      old="return best, rate(best)", new="return rate(best), best")
wrong("tile_sides", step=4, hint="sides", old="-(-m // tile.m) * -(-n // tile.n)",
      new="-(-m // tile.n) * -(-n // tile.m)")
wrong("tile_waves_cut", step=4, hint="waves",
      old="-(-count // sms)", new="max(count / sms, 1)")

# step 5

wrong("choice_any_order", step=5, hint="nondeterministic", old="""
    for algorithm in candidates:
        if algorithm.workspace > self.limit:
            continue
        if self.deterministic and not algorithm.deterministic:
            continue
""", new="for algorithm in [a for a in candidates if a.workspace <= self.limit]:")
wrong("choice_any_workspace", step=5, hint="workspace", old="""
    if algorithm.workspace > self.limit:
        continue
    if self.deterministic and not algorithm.deterministic:
        continue
""", new="")
wrong("choice_by_shape", step=5, hint="key",
      old="x.dtype, channels_last, weight.shape, self.deterministic", new="weight.shape")
wrong("choice_by_size", step=5, hint="key", old="(x.shape, x.dtype,", new="(x.numel(), x.dtype,")
wrong("choice_cleared", step=5, hint="again",
      old="key = (x.shape, x.dtype, channels_last, weight.shape, self.deterministic)", new="""
    key = (x.shape, x.dtype, channels_last, weight.shape)
    if getattr(self, "flag", None) != self.deterministic:
        self.chosen.clear()
    self.flag = self.deterministic
""")
wrong("choice_cold", step=5, hint="runs", old="algorithm.run()  # loads its kernel", new="")
wrong("choice_from_none", step=5, hint="none_permitted",
      old="best, best_time = None", new="best, best_time = candidates[0]")
wrong("choice_limit", step=5, hint="workspace",
      old="algorithm.workspace > self.limit", new="algorithm.workspace >= self.limit")
wrong("choice_each_time", step=5, hint="again",
      old="self.chosen[key] = best", new="")
wrong("choice_mean", step=5, hint="slow_run", old=Body("Chooser.choose"), new="""
    best, best_time = None, float("inf")
    for algorithm in [a for a in candidates if a.workspace <= self.limit]:
        if self.deterministic and not algorithm.deterministic:
            continue
        algorithm.run()
        start = self.clock()
        for _ in range(3):
            algorithm.run()
        if (time := self.clock() - start) < best_time:
            best, best_time = algorithm, time
    return best
""")
wrong("choice_median", step=5, hint="slow_run", edits=[
    ("for _ in range(3):", "times = []\nfor _ in range(3):"),
    ("if (time := self.clock() - start) < best_time:", """
    times.append(self.clock() - start)
    if len(times) == 3 and (time := sorted(times)[1]) < best_time:
    """)])
wrong("choice_name", step=5, hint="no_algorithm",
      old="best, best_time = algorithm, time", new="best, best_time = algorithm.name, time")
wrong("choice_real_clock", step=5, hint="clock", edits=[
    ("import sys", "import sys\nimport time as real"),
    ("start = self.clock()", "start = real.perf_counter()"),
    ("self.clock() - start", "real.perf_counter() - start")])
wrong("choice_runs_all", step=5, hint="workspace", edits=[
    ("if algorithm.workspace > self.limit:", """
    algorithm.run()
    if algorithm.workspace > self.limit:
    """), ("algorithm.run()  # loads its kernel", "")])
wrong("choice_slowest", step=5, hint="slower",
      edits=[("< best_time", "> best_time"), ('float("inf")', "0.0")])
