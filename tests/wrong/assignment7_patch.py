"""Wrong answers to assessment/assignment7_patch.py."""

# fmt: off
from wrong import Body, Table

wrong = Table("assessment/assignment7_patch.py")

# step 1

wrong("samples_always_clips", step=1, hint="always_clips",
      old="([grid(4, 5), grid(7)], 100.0),", new="")
wrong("samples_dtypes", step=1, hint="dtypes",
      old="([grid(5).half(), grid(6), grid(7).bfloat16()], 0.5),", new="")
wrong("samples_empty", step=1, hint="empty",
      old="([grid(0), grid(3)], 0.5),", new="")
wrong("samples_infinite", step=1, hint="good_refused",
      old=Body("samples"), new='return [([torch.tensor([1.0, float("nan")])], 0.5)]')
wrong("samples_never_clips", step=1, hint="never_clips", edits=[
    ("([grid(4, 5), grid(7)], 0.5)", "([grid(4, 5), grid(7)], 500.0)"),
    ("([], 1.0),\n([grid(0), grid(3)], 0.5),\n([grid(4, 6).t(), grid(8)[::2]], 0.5),",
     "([], 1e6),\n([grid(0), grid(3)], 500.0),\n([grid(4, 6).t(), grid(8)[::2]], 500.0),"),
    ("([grid(5).half(), grid(6), grid(7).bfloat16()], 0.5)",
     "([grid(5).half(), grid(6), grid(7).bfloat16()], 500.0)"),
    ("([grid(64, by=400.0).half()], 1.0),\n([torch.zeros(5)], 1.0),",
     "([grid(64, by=400.0).half()], 1e6),\n([torch.zeros(5)], 1e6),")])
wrong("samples_none", step=1, hint="none",
      old="([], 1.0),", new="")
wrong("samples_overflow", step=1, hint="overflow", old="""
    ([grid(5).half(), grid(6), grid(7).bfloat16()], 0.5),
    ([grid(64, by=400.0).half()], 1.0),
""", new="([torch.ones(4).half(), grid(6)], 0.5),")
wrong("samples_shared", step=1, hint="shared", old=Body("samples"), new="""
    kept = globals().setdefault("KEPT", [torch.ones(4), torch.ones(3)])
    return [([kept[0]], 0.5), ([kept[1]], 9.0)]
""")
wrong("samples_strides", step=1, hint="strides",
      old="([grid(4, 6).t(), grid(8)[::2]], 0.5),", new="")
wrong("samples_zeros", step=1, hint="zeros",
      old="([torch.zeros(5)], 1.0),", new="")

# step 2

wrong("compare_blocks", step=2, hint="order",
      old="ratios = [time(old) / time(new) for _ in range(rounds)]",
      new="olds = [time(old) for _ in range(rounds)]\nratios = [o / time(new) for o in olds]")
wrong("compare_cold", step=2, hint="cold",
      old="old(), new()", new="rounds = 1")
wrong("compare_inverse", step=2, hint="ratio",
      old="time(old) / time(new)", new="1 / (time(old) / time(new))")
wrong("compare_mean", step=2, hint="outlier",
      old="statistics.median(ratios)", new="statistics.fmean(ratios)")
wrong("compare_no_vote", step=2, hint="noise",
      old="not agree or abs(ratio - 1) < 0.02", new="abs(ratio - 1) < 0.001")
wrong("compare_shy", step=2, hint="missed", old="""
    agree = max(sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)) >= 0.9 * rounds
    if not agree or abs(ratio - 1) < 0.02:
""", new="if 0.6 < ratio < 10:")
wrong("compare_small", step=2, hint="small",
      old="not agree or abs(ratio - 1) < 0.02", new="not agree")

# step 3

wrong("bisect_all", step=3, hint="too_many",
      old=Body("bisect"),
      new="return next(c for c in commits if min(measure(c) for _ in range(3)) > slower)")
wrong("bisect_neighbour", step=3, hint="wrong_commit",
      old="commits[slow]", new="commits[fast]")
wrong("bisect_once", step=3, hint="noisy_bisect",
      old="min(measure(commits[middle]) for _ in range(3))", new="measure(commits[middle])")

# step 4

wrong("patch_asks", step=4, hint="host", old=Body("fast_clip"), new="""
    if not gradients:
        return torch.zeros(())
    norm = torch.stack([g.float().norm() for g in gradients]).norm()
    if norm > limit:
        for g in gradients:
            g.mul_((limit / (norm + 1e-6)).to(g.dtype))
    return norm
""")
wrong("patch_copies", step=4, hint="copies", old=Body("fast_clip"), new="""
    if not gradients:
        return torch.zeros(())
    norm = torch.cat([g.reshape(-1).float() for g in gradients]).norm()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {g.dtype for g in gradients}:
        torch._foreach_mul_([g for g in gradients if g.dtype == dtype], scale.to(dtype))
    return norm
""")
wrong("patch_each", step=4, hint="launches",
      old=Body("fast_clip"), new="return slow_clip(gradients, limit)")
wrong("patch_new_list", step=4, hint="not_in_place",
      old="if not gradients:", new="if True:")
wrong("patch_one_dtype", step=4, hint="not_same", old=Body("fast_clip"), new="""
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm
""")
wrong("patch_returns_scale", step=4, hint="not_same",
      old="    torch._foreach_mul_(some, scale.to(dtype))\nreturn norm",
      new="    torch._foreach_mul_(some, scale.to(dtype))\nreturn scale")
