"""Wrong answers to assessment/assignment2_tensor_cores.py."""

# fmt: off
from wrong import Body, Table

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
wrong("round_to_bf16", step=1, hint="too_coarse", old=Body("to_tf32"), new="""
    unit, near = 2.0**-10, (x.abs() - 1).abs() < 2.0**-9
    exact = x.sign() * (1 + ((x.abs() - 1) / unit).round() * unit)
    return torch.where(near, exact, x.bfloat16().float())
""")

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
      old="count = -(-m // tile.m) * -(-n // tile.n)\nwaves = -(-count // sms)",
      new="waves = max(m / tile.m * n / tile.n / sms, 1)")
wrong("tile_part_of_a_wave", step=4, hint="waves",
      old="waves * sms", new="count")

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
wrong("choice_cold", step=5, hint="cold",
      old="start = self.clock()\nalgorithm.run()", new="start = self.clock()")
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
