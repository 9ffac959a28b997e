"""Wrong answers to assessment/assignment7_patch.py."""

# fmt: off
from wrong_answers import Body, Table

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
wrong("samples_none", step=1, hint="none_given",
      old="([], 1.0),", new="")
wrong("samples_shared", step=1, hint="shared", old=Body("samples"), new="""
    kept = globals().setdefault("KEPT", [torch.ones(4), torch.ones(3)])
    return [([kept[0]], 0.5), ([kept[1]], 9.0)]
""")
wrong("samples_strides", step=1, hint="strides",
      old="([grid(4, 6).t(), grid(8)[::2]], 0.5),", new="")
wrong("samples_zeros", step=1, hint="zeros",
      old="([torch.zeros(5)], 1.0),", new="")
wrong("samples_fp16_small", step=1, hint="overflow",
      old="by=400.0", new="by=4.0")
wrong("samples_limit_alone", step=1, hint="form",
      old="([torch.zeros(5)], 1.0),", new="[torch.zeros(5)],")
wrong("samples_nothing", step=1, hint="none",
      old=Body("samples"), new="samples = [([torch.ones(5)], 1.0)]")
wrong("samples_random", step=1, hint="random",
      old="torch.linspace(-by, by, count)", new="torch.randn(count)")
wrong("samples_repeated", step=1, hint="slow_fails",
      old="([torch.zeros(5)], 1.0),", new="([torch.zeros(1).expand(5)], 1.0),")

# step 2

wrong("compare_blocks", step=2, hint="order",
      old="ratios = [time(old) / time(new) for _ in range(rounds)]",
      new="olds = [time(old) for _ in range(rounds)]\nratios = [o / time(new) for o in olds]")
wrong("compare_by_median", step=2, hint="by_round",
      old="ratios = [time(old) / time(new) for _ in range(rounds)]", new="""
    times = [(time(old), time(new)) for _ in range(rounds)]
    ratios = [statistics.median(o for o, _ in times) / n for _, n in times]
""")
wrong("compare_cold", step=2, hint="cold",
      old="old(), new()", new="old()")
wrong("compare_inverse", step=2, hint="ratio",
      old="time(old) / time(new)", new="1 / (time(old) / time(new))")
wrong("compare_mean", step=2, hint="outlier",
      old="statistics.median(ratios)", new="statistics.fmean(ratios)")
wrong("compare_ratio_one", step=2, hint="ratio",
      old='return "same", ratio', new='return "same", 1.0')
wrong("compare_shy", step=2, hint="missed", old="""
    agree = max(sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)) >= 0.9 * rounds
    if not agree or abs(ratio - 1) < 0.02:
""", new="if 0.6 < ratio < 10:")
wrong("compare_small", step=2, hint="small",
      old="not agree or abs(ratio - 1) < 0.02", new="not agree")
wrong("compare_eight_of_ten", step=2, hint="noise",
      old="0.9 * rounds", new="0.8 * rounds")
wrong("compare_large", step=2, hint="missed",
      old="abs(ratio - 1) < 0.02", new="abs(ratio - 1) < 0.1")
wrong("compare_more_than_nine", step=2, hint="agreement",
      old=">= 0.9 * rounds", new="> 0.9 * rounds")
wrong("compare_other_words", step=2, hint="words",
      old='("faster" if ratio > 1 else "slower")', new='("slower" if ratio > 1 else "faster")')
wrong("compare_lower_half", step=2, hint="outlier",
      old="statistics.median(ratios)", new="statistics.median(sorted(ratios)[: -(-rounds // 2)])")
wrong("compare_thirty", step=2, hint="rounds",
      old="for _ in range(rounds)]", new="for _ in range(30)]")
wrong("compare_word_alone", step=2, hint="pair",
      old='return ("faster" if ratio > 1 else "slower"), ratio',
      new='return "faster" if ratio > 1 else "slower"')

# step 3

wrong("bisect_all", step=3, hint="too_many",
      old=Body("bisect"),
      new="return next(c for c in commits if min(measure(c) for _ in range(3)) > slower)")
wrong("bisect_neighbour", step=3, hint="wrong_commit",
      old="commits[slow]", new="commits[fast]")
wrong("bisect_once", step=3, hint="noisy_bisect",
      old="min(measure(commits[middle]) for _ in range(3))", new="measure(commits[middle])")
wrong("bisect_constant", step=3, hint="wrong_commit",
      old="> slower", new="> 1.25")
wrong("bisect_five", step=3, hint="too_often",
      old="for _ in range(3)) > slower", new="for _ in range(5)) > slower")
wrong("bisect_index", step=3, hint="not_a_commit",
      old="return commits[slow]", new="return slow")
wrong("bisect_median", step=3, hint="noisy_bisect",
      old="min(measure(commits[middle]) for _ in range(3))",
      new="statistics.median(measure(commits[middle]) for _ in range(3))")
wrong("bisect_removes", step=3, hint="commits",
      old="return commits[slow]", new="found = commits[slow]\ndel commits[slow:]\nreturn found")
wrong("bisect_skips_one", step=3, hint="wrong_commit",
      old="fast, slow = 0, len(commits) - 1", new="fast, slow = 1, len(commits) - 1")

# step 4

wrong("patch_each", step=4, hint="launches",
      old=Body("fast_clip"), new="return slow_clip(gradients, limit)")
wrong("patch_one_dtype", step=4, hint="not_same", old=Body("fast_clip"), new="""
    if not gradients:
        return torch.zeros(())
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm
""")
wrong("patch_returns_scale", step=4, hint="not_same",
      old="    torch._foreach_mul_(some, scale.to(dtype))\nreturn norm",
      new="    torch._foreach_mul_(some, scale.to(dtype))\nreturn scale")
wrong("patch_eleven_launches", step=4,
      old="norm = torch.linalg.vector_norm(torch.stack(norms))",
      new="norm = torch.stack(norms).square().sum().sqrt()")
wrong("patch_float", step=4, hint="norm",
      old="    torch._foreach_mul_(some, scale.to(dtype))\nreturn norm",
      new="    torch._foreach_mul_(some, scale.to(dtype))\nreturn norm.double()")
wrong("patch_floats", step=4, hint="launches", old="torch._foreach_norm(some, 2, torch.float32)",
      new="torch._foreach_norm([each.float() for each in some])")
wrong("patch_list_of_the_caller", step=4, hint="not_in_place", old="""
    for dtype, some in by_dtype.items():
        torch._foreach_mul_(some, scale.to(dtype))
""", new="gradients[:] = torch._foreach_mul(gradients, scale)")
wrong("patch_needs_gradients", step=4, hint="no_gradients",
      old="if not gradients:", new="if gradients is None:")
wrong("patch_squares", step=4, hint="copies", old="norms = [", new="""
    _ = [torch._foreach_mul(some, some) for some in by_dtype.values()]
    norms = [
""")
wrong("patch_thirteen_launches", step=4, hint="many_launches",
      old="scale = (limit / (norm + 1e-6)).clamp(max=1.0)",
      new="scale = (limit / (norm + 1e-6)).clamp(max=1.0).abs().abs().abs().abs().abs()")
wrong("patch_waits", step=4, hint="host",
      old="scale = (limit / (norm + 1e-6))",
      new="scale = (limit / (torch.tensor(norm.tolist()) + 1e-6))")
