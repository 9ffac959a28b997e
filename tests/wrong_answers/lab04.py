"""Wrong answers to labs/lab04_mixed_precision.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab04_mixed_precision.py")

# step 1

wrong("numbers_bias", step=1, hint="bias",
      old="2 ** (exponent - 1) - 1", new="2 ** (exponent - 1)")
wrong("numbers_eps", step=1, hint="epsilon",
      old="2.0**-mantissa", new="2.0 ** (-mantissa - 1)")
wrong("numbers_ieee", step=1, hint="finite_max",
      old="if finite:", new="if False:")
wrong("numbers_nan", step=1, hint="nan_code",
      old="2**exponent - 1, 2**mantissa - 2", new="(2**exponent - 1, 2**mantissa - 1)")
wrong("numbers_normal", step=1, hint="normal_exponent",
      old="(1 - bias)", new="(-bias)")
wrong("numbers_power", step=1, hint="max_mantissa",
      old="2**exponent - 2, 2**mantissa - 1", new="(2**exponent - 2, 0)")
wrong("numbers_subnormal", step=1, hint="subnormal",
      old="1 - bias - mantissa", new="-bias - mantissa")
wrong("numbers_top", step=1, hint="infinity_code",
      old="2**exponent - 2, 2**mantissa - 1", new="(2**exponent - 1, 2**mantissa - 1)")
wrong("numbers_tuple", step=1, hint="dict_kind", old=Body("format_numbers"), new="""
    bias = 2 ** (exponent - 1) - 1
    if finite:
        top, fraction = (2**exponent - 1, 2**mantissa - 2)
    else:
        top, fraction = (2**exponent - 2, 2**mantissa - 1)
    return tuple(
        {
            "max": 2.0 ** (top - bias) * (1 + fraction / 2**mantissa),
            "smallest_normal": 2.0 ** (1 - bias),
            "smallest_subnormal": 2.0 ** (1 - bias - mantissa),
            "eps": 2.0 ** (-mantissa),
        }.values()
    )
""")
wrong("spacing_frexp", step=1, hint="spacing_power",
      old="math.frexp(x)[1] - 1", new="math.frexp(x)[1]")
wrong("spacing_log2", step=1, hint="spacing_sign",
      old="math.frexp(x)[1] - 1", new="math.floor(math.log2(x))")
wrong("spacing_shrinks", step=1, hint="spacing_subnormal",
      old=Body("spacing"), new="power = math.frexp(x)[1] - 1\nreturn 2.0 ** (power - mantissa)")
wrong("spacing_times_eps", step=1, hint="spacing_relative", edits=[
    ("power = math.frexp(x)[1] - 1", ""),
    ("2.0 ** (max(power, smallest) - mantissa)", "max(x, 2.0**smallest) * 2.0 ** (-mantissa)")])
wrong("numbers_not_returned", step=1, hint="returns_none",
      old=Body("format_numbers"), new="bias = 2 ** (exponent - 1) - 1")
wrong("spacing_of_fp16", step=1, hint="spacing_format",
      old="smallest = 2 - 2 ** (exponent - 1)", new="smallest = -14")

# step 2

wrong("bf16_bits", step=2, hint="bf16_kind",
      old="upper.to(torch.int16).view(torch.bfloat16)", new="upper.to(torch.int16)")
wrong("bf16_cut", step=2, hint="truncated",
      old="odd = (bits >> 16) & 1\nupper = (bits + 0x7FFF + odd) >> 16",
      new="upper = bits >> 16")
wrong("bf16_half_up", step=2, hint="ties_up",
      old="odd = (bits >> 16) & 1\nupper = (bits + 0x7FFF + odd) >> 16",
      new="upper = bits + 0x8000 >> 16")
wrong("bf16_in_place", step=2, hint="rounding_in_place",
      old="upper = (bits + 0x7FFF + odd) >> 16", new="bits += 0x7FFF + odd\nupper = bits >> 16")
wrong("bf16_no_nan", step=2, hint="nan_lost",
      old="upper = torch.where(x.isnan(), 0x7FC0, upper)", new="")
wrong("bf16_wrong_bit", step=2, hint="ties_odd",
      old="(bits + 0x7FFF + odd)", new="bits + 0x8000 - odd")
wrong("bf16_infinity_is_nan", step=2, hint="infinity",
      old="x.isnan(), 0x7FC0", new="~x.isfinite(), 0x7FC0")
wrong("bf16_copied", step=2, hint="rounding_cast", old=Body("to_bf16"),
      new="return torch.empty_like(x, dtype=torch.bfloat16).copy_(x)")
wrong("bf16_value", step=2, hint="bf16_value",
      old="upper.to(torch.int16).view(torch.bfloat16)", new="upper.to(torch.bfloat16)")
wrong("bf16_flat", step=2, hint="bf16_kind",
      old="upper.to(torch.int16).view(torch.bfloat16)",
      new="torch.tensor(upper.flatten().tolist()).short().view(torch.bfloat16)")
wrong("bf16_flushes", step=2, hint="zero_exponent",
      old="x.isnan(), 0x7FC0, upper)",
      new="x.isnan(), 0x7FC0, upper).where(x.abs() >= 2**-126, 0)")
wrong("bf16_half_and_odd", step=2, hint="carry_early",
      old="(bits + 0x7FFF + odd)", new="(bits + 0x8000 + odd)")

# step 3

wrong("scale_exact", step=3, hint="scale_power",
      old="2.0 ** (math.frexp(65504 / largest.item())[1] - 1)", new="65504 / largest.item()")
wrong("scale_no_abs", step=3, hint="scale_sign",
      old="gradients.abs().max", new="gradients.max")
wrong("scale_of_half", step=3, hint="scale_small",
      old="(65504 / largest.item())[1] - 1", new="(65504 / largest.item())[1] - 2")
wrong("scale_of_own", step=3, hint="scale_own",
      old="dist.all_reduce(largest, op=dist.ReduceOp.MAX)", new="")
wrong("scale_rounded_up", step=3, hint="scale_up",
      old="(65504 / largest.item())[1] - 1", new="(65504 / largest.item())[1]")
wrong("share_in_percent", step=3, hint="share_percent",
      old="(lost.sum() / alive.sum())", new="100 * (lost.sum() / alive.sum())")
wrong("share_of_all", step=3, hint="share_alive",
      old="alive.sum()", new="alive.numel()")
wrong("share_scaled_after", step=3, hint="share_late",
      old="(gradients * scale).half()", new="(gradients.half() * scale)")
wrong("share_subnormals", step=3, hint="share_subnormal",
      old="half() == 0", new="half().abs() < 2.0**-14")
wrong("scale_changes_gradients", step=3, hint="argument_changed",
      old="gradients.abs().max", new="gradients.abs_().max")
wrong("scale_is_sum", step=3, hint="scale_sum",
      old="(largest, op=dist.ReduceOp.MAX)", new="(largest)")
wrong("scale_of_none", step=3, hint="reduce_none",
      old="dist.all_reduce(largest,", new="largest = dist.all_reduce(largest,")
wrong("scale_of_power", step=3, hint="scale_limit",
      old="math.frexp(65504 / largest.item())[1] - 1",
      new="15 - math.floor(math.log2(largest.item()))")
wrong("scale_strictly_below", step=3, hint="scale_limit",
      old="65504 / largest", new="65503 / largest")
wrong("scale_by_int", step=3, hint="scale_below_one",
      old="math.frexp(65504 / largest.item())[1] - 1",
      new="int(math.log2(65504 / largest.item()))")
wrong("share_below_smallest", step=3, hint="share_limit",
      old="(gradients * scale).half() == 0", new="(gradients * scale).abs() < 2**-24")
wrong("share_that_stays", step=3, hint="share_left",
      old="(lost.sum() / alive.sum())", new="(1 - lost.sum() / alive.sum())")

# step 4

wrong("scaled_step_clips_first", step=4, hint="clip_before",
      old="scaler.unscale_(optimizer)\nnn.utils.clip_grad_norm_(parameters, limit)",
      new="nn.utils.clip_grad_norm_(parameters, limit)\nscaler.unscale_(optimizer)")
wrong("scaled_step_keeps", step=4, hint="not_zeroed",
      old="scaler.update()\noptimizer.zero_grad()", new="scaler.update()")
wrong("scaled_step_no_clip", step=4, hint="clip_missing",
      old="nn.utils.clip_grad_norm_(parameters, limit)", new="")
wrong("scaled_step_no_update", step=4, hint="update_missing",
      old="scaler.update()\noptimizer.zero_grad()", new="optimizer.zero_grad()")
wrong("scaled_step_own", step=4, hint="own_step",
      old="scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()",
      new="optimizer.step()\nscaler.update()\noptimizer.zero_grad()")
wrong("scaled_step_plain", step=4, hint="loss_not_scaled",
      old="scaler.scale(loss).backward", new="loss.backward")
wrong("step_always", step=4, hint="not_skipped",
      old="if not self.overflow:\n    optimizer.step()", new="optimizer.step()")
wrong("step_never", step=4, hint="never_steps",
      old="not self.overflow", new="self.overflow is None")
wrong("step_trusts", step=4, hint="step_unscales",
      old="if self.overflow is None:\n    self.unscale_(optimizer)", new="")
wrong("step_unscales_again", step=4, hint="unscaled_twice",
      old="if self.overflow is None:\n    self.unscale_(optimizer)",
      new="self.unscale_(optimizer)")
wrong("unscale_copy", step=4, hint="not_divided",
      old="gradient.mul_(1 / self.value)", new="gradient= gradient / self.value")
wrong("unscale_isinf", step=4, hint="nan_missed",
      old="not gradient.isfinite().all()", new="gradient.isinf().any()")
wrong("unscale_last_only", step=4, hint="one_gradient",
      old="if not gradient.isfinite().all():\n    flag.fill_(1)",
      new="flag.fill_(not gradient.isfinite().all())")
wrong("unscale_no_verdict", step=4, hint="flag_missing",
      old="self.overflow = bool(flag.item())", new="self.found = bool(flag.item())")
wrong("unscale_own_flag", step=4, hint="flag_own",
      old="dist.all_reduce(flag, op=dist.ReduceOp.MAX)", new="")
wrong("update_counts_on", step=4, hint="count_kept",
      old="self.value / 2, 0", new="(self.value / 2, self.good_steps)")
wrong("update_late", step=4, hint="growth",
      old="good_steps == self", new="good_steps > self")
wrong("update_no_backoff", step=4, hint="backoff",
      old="self.value / 2, 0", new="(self.value, 0)")
wrong("update_remembers", step=4, hint="verdict_kept",
      old="self.overflow = None", new="pass")
wrong("scaled_step_updates_first", step=4, hint="update_first",
      old="scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()",
      new="scaler.update()\nscaler.step(optimizer)\noptimizer.zero_grad()")
wrong("unscale_positive", step=4, hint="nan_missed",
      old="not gradient.isfinite().all()", new="(~(gradient < torch.inf)).any()")
wrong("scaled_step_clips_always", step=4, hint="clip_always",
      old="nn.utils.clip_grad_norm_(parameters, limit)", new="""
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    torch._foreach_mul_([p.grad for p in parameters], limit / norm)
""")
wrong("scaled_step_clips_values", step=4, hint="clip_value",
      old="nn.utils.clip_grad_norm_(p", new="nn.utils.clip_grad_value_(p")
wrong("scaled_step_limit", step=4, hint="clip_limit",
      old="(parameters, limit)", new="(parameters, CLIP)")
wrong("scaled_step_looks_inside", step=4, hint="torch_scaler",
      old="scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()", new="""
    if not scaler.overflow:
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""")
wrong("scaled_step_zeroes_first", step=4, hint="no_gradient",
      old="scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()",
      new="optimizer.zero_grad()\nscaler.step(optimizer)\nscaler.update()")
wrong("step_updates", step=4, hint="step_updates",
      old="if not self.overflow:\n    optimizer.step()",
      new="if not self.overflow:\n    optimizer.step()\nself.update()")
wrong("unscale_first_group", step=4, hint="all_groups",
      old="for gradient in gradients_of(optimizer):",
      new="for gradient in [p.grad for p in optimizer.param_groups[0]['params']]:")
wrong("unscale_flags_added", step=4, hint="flag_sum", edits=[
    ("(flag, op=dist.ReduceOp.MAX)", "(flag)"), ("bool(flag.item())", "flag.item() == 1")])
wrong("unscale_no_gradients", step=4, hint="no_gradients",
      old="flag = torch.zeros((), device=self.device)", new="""
    flag = torch.zeros((), device=self.device)
    if not gradients_of(optimizer):
        self.overflow = False
        return
""")
wrong("unscale_norm", step=4, hint="flag_finite",
      old="not gradient.isfinite().all()", new="not gradient.norm().isfinite()")
wrong("update_whole_numbers", step=4, hint="backoff",
      old="self.value / 2, 0", new="(self.value // 2, 0)")

# step 5

wrong("dtypes_cat", step=5, hint="widest",
      old='"cat": wide,', new='"cat": low,')
wrong("dtypes_double", step=5, hint="float64",
      old='"double": torch.float64,', new='"double": low,')
wrong("dtypes_island", step=5, hint="island",
      old='"island": wide,', new='"island": low,')
wrong("dtypes_mse", step=5, hint="loss_list",
      old='"loss": wide,', new='"loss": low,')
wrong("dtypes_norm", step=5, hint="norm_fp32",
      old='"norm": wide,', new='"norm": low,')
wrong("dtypes_scaled", step=5, hint="no_list",
      old='"scaled": low,', new='"scaled": wide,')
wrong("dtypes_scores", step=5, hint="matmul_low",
      old='"scores": low,', new='"scores": wide,')
wrong("dtypes_softmax", step=5, hint="softmax_kind",
      old='low if kind == "cpu" else wide', new="wide")
wrong("loss_default_type", step=5, hint="low_ignored", old=Body("loss_under_autocast"), new="""
    region = contextlib.nullcontext() if low is None else torch.autocast(rows.device.type)
    with region:
        output = model(rows)
    return mean_loss(output.float(), rows)
""")
wrong("loss_in_region", step=5, hint="loss_inside", old=Body("loss_under_autocast"), new="""
    region = contextlib.nullcontext() if low is None else torch.autocast(rows.device.type, low)
    with region:
        output = model(rows)
        return mean_loss(output.float(), rows)
""")
wrong("loss_no_region", step=5, hint="forward_outside",
      old="with region:\n    output = model(rows)",
      new="with region:\n    pass\noutput = model(rows)")
wrong("loss_of_low", step=5, hint="loss_low",
      old="output.float()", new="output")
wrong("product_bare", step=5, hint="no_custom_bwd", old="""
    @custom_bwd(device_type=kind)
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
""", new="def backward(ctx, gradient):\n    x, weight = ctx.saved_tensors")
wrong("product_cast", step=5, hint="product_fp32",
      old="@staticmethod\n@custom_fwd(device_type=kind)",
      new="@staticmethod\n@custom_fwd(device_type=kind, cast_inputs=torch.float32)")
wrong("product_halved", step=5, hint="product_gradient",
      old="gradient @ weight, gradient.mT @ x", new="(gradient @ weight, gradient.mT @ x / 2)")
wrong("squares_low", step=5, hint="squares_range",
      old="@custom_fwd(device_type=kind, cast_inputs=torch.float32)\ndef forward(ctx, x):",
      new="@custom_fwd(device_type=kind)\ndef forward(ctx, x):")
wrong("squares_no_two", step=5, hint="squares_gradient",
      old="2 * gradient", new="gradient")
wrong("dtypes_missing", step=5, hint="dict_kind",
      old='"island": wide,', new="")
wrong("loss_of_swapped", step=5, hint="loss_value",
      old="mean_loss(output.float(), rows)", new="mean_loss(rows, output.float())")
wrong("loss_item", step=5, hint="loss_graph",
      old="mean_loss(output.float(), rows)", new="mean_loss(output.float(), rows).item()")
wrong("product_apply", step=5, hint="function_kind",
      old="return Product", new="return Product.apply")
wrong("product_decorator_bare", step=5, hint="device_type", old="""
    @custom_bwd(device_type=kind)
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
""", new="@custom_bwd\ndef backward(ctx, gradient):\n    x, weight = ctx.saved_tensors")
wrong("product_gradients_swapped", step=5, hint="product_gradient",
      old="gradient @ weight, gradient.mT @ x", new="(gradient.mT @ x, gradient @ weight)")
wrong("product_in_half", step=5, hint="product_cast",
      old="x @ weight.mT", new="x.half() @ weight.half().mT")
wrong("product_no_ctx", step=5, hint="function_ctx",
      old="def forward(ctx, x, weight):", new="def forward(x, weight):")
wrong("product_not_transposed", step=5, hint="product_forward",
      old="x @ weight.mT", new="x @ weight")
wrong("squares_mean", step=5, hint="squares_sum",
      old="x.square().sum()", new="x.square().mean()")

# step 6

wrong("bytes_fp32_gradients", step=6, hint="bytes_16",
      old='"gradients": size,', new='"gradients": 4,')
wrong("bytes_low_moments", step=6, hint="bytes_moments",
      old='4 if recipe == "bf16" else 8', new='8 if recipe == "fp32" else 4')
wrong("bytes_no_copy", step=6, hint="bytes_master",
      old='4 if recipe == "master" else 0', new="0")
wrong("master_keeps_gradient", step=6, hint="gradient_kept",
      old="master.grad = None", new="")
wrong("master_low", step=6, hint="master_fp32",
      old="parameter.detach().float().clone", new="parameter.detach().clone")
wrong("master_low_gradient", step=6, hint="gradient_type",
      old="parameter.grad.float()", new="parameter.grad")
wrong("master_no_gradient", step=6, hint="gradient_missing",
      old="master.grad = parameter.grad.float()",
      new="parameter.grad = parameter.grad.float().to(parameter.dtype)")
wrong("master_no_leaf", step=6, hint="master_leaf",
      old="parameter.detach().float().clone", new="parameter.float")
wrong("master_not_back", step=6, hint="not_copied_back",
      old="parameter.copy_(master)\nmaster.grad = None", new="master.grad = None")
wrong("master_unused", step=6, hint="inner_wrong",
      old="master, lr", new="parameters, lr")
wrong("master_adamw", step=6, hint="inner_wrong",
      old="torch.optim.Adam(self.master", new="torch.optim.AdamW(self.master")
wrong("master_no_rate", step=6, hint="inner_wrong",
      old="torch.optim.Adam(self.master, lr=lr)", new="torch.optim.Adam(self.master)")
wrong("master_of_generator", step=6, hint="iterable_once",
      old="clone() for parameter in self.parameters", new="clone() for parameter in parameters")
wrong("master_as_data", step=6, hint="parameter_type",
      old="parameter.copy_(master)\nmaster.grad = None",
      new="parameter.data = master.data\nmaster.grad = None")
wrong("master_clears_gradients", step=6, hint="gradient_gone",
      old="master.grad = None", new="master.grad = parameter.grad = None")
wrong("master_starts_from_parameters", step=6, hint="master_overwritten",
      old="master.grad = parameter.grad.float()",
      new="master.copy_(parameter)\nmaster.grad = parameter.grad.float()")
wrong("right_master_parameter_list", step=6,
      old="[parameter.detach().float().clone() for parameter in self.parameters]",
      new="nn.ParameterList(p.detach().float() for p in self.parameters)")

# step 7

wrong("average_all", step=7, hint="none_gradient",
      old="if parameter.grad is not None:", new="if parameter.requires_grad:")
wrong("average_late", step=7, hint="divided_late", edits=[
    ("(parameter.grad / dist.get_world_size())", "parameter.grad"),
    ("copy_(sent)", "copy_(sent / dist.get_world_size())")])
wrong("average_lost", step=7, hint="not_written",
      old="parameter.grad.copy_(sent)", new="")
wrong("average_retyped", step=7, hint="own_type",
      old="parameter.grad.copy_(sent)",
      new="parameter.grad = None\nparameter.grad_dtype = None\nparameter.grad = sent")
wrong("average_sum", step=7, hint="average_divisor",
      old="(parameter.grad / dist.get_world_size())", new="parameter.grad")
wrong("error_against_fp32", step=7, hint="error_fp32",
      old="own.double", new="own.clone")
wrong("error_against_own", step=7, hint="error_own",
      old="dist.all_reduce(true)", new="")
wrong("sent_once", step=7, hint="sent_twice",
      old="2 * (ranks - 1)", new="(ranks - 1)")
wrong("average_cast_first", step=7, hint="divided_late",
      old="(parameter.grad / dist.get_world_size()).to(wire)",
      new="parameter.grad.to(wire) / dist.get_world_size()")
wrong("average_in_two_loops", step=7, hint="iterable_once",
      old=Body("average_gradients"), new="""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
    for parameter in parameters:
        if parameter.grad is not None:
            sent = parameter.grad.to(wire)
            dist.all_reduce(sent)
            parameter.grad.copy_(sent)
""")
wrong("average_fills_none", step=7, hint="none_gradient",
      old="if parameter.grad is not None:", new="""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if True:
""")
wrong("average_functional_fp32", step=7, hint="wire_type",
      old=Body("average_gradients"), new="""
    import torch.distributed._functional_collectives as functional

    for parameter in parameters:
        if parameter.grad is not None:
            mean = parameter.grad / dist.get_world_size()
            parameter.grad.copy_(functional.all_reduce(mean, "sum", dist.group.WORLD))
""")
wrong("average_is_none", step=7, hint="reduce_none",
      old="dist.all_reduce(sent)", new="sent = dist.all_reduce(sent)")
wrong("average_not_awaited", step=7, hint="not_reduced",
      old="dist.all_reduce(sent)", new="dist.all_reduce(sent, async_op=True)")
wrong("average_in_fp32_gradients", step=7, hint="own_type",
      old="parameter.grad.copy_(sent)", new="parameter.grad = sent.float()")
wrong("error_changes_own", step=7, hint="argument_changed",
      old="true = own.double() / dist.get_world_size()\ndist.all_reduce(true)",
      new="dist.all_reduce(own)\ntrue = own.double() / dist.get_world_size()")
wrong("error_largest", step=7, hint="error_ratio",
      old="(mean.double() - true).norm() / true.norm()",
      new="((mean.double() - true) / true).abs().max()")
wrong("sent_all", step=7, hint="sent_parts",
      old="2 * (ranks - 1) / ranks", new="2")
wrong("sent_in_this_group", step=7, hint="sent_world",
      old="(ranks - 1) / ranks * numbers",
      new="(dist.get_world_size() - 1) / dist.get_world_size() * numbers")
wrong("sent_two_bytes", step=7, hint="sent_size",
      old="* wire.itemsize", new="* 2")

# step 8

wrong("train_clip_imported_first", step=8, hint="clip_before", edits=[
    ("from torch.amp import custom_bwd, custom_fwd",
     "from torch.amp import custom_bwd, custom_fwd\nfrom torch.nn.utils import clip_grad_norm_"),
    ("if scaler is not None:\n    scaler.unscale_(optimizer)\n"
     "nn.utils.clip_grad_norm_(model.parameters(), CLIP)\nif scaler is None:",
     "clip_grad_norm_(model.parameters(), CLIP)\nif scaler is not None:\n"
     "    scaler.unscale_(optimizer)\nif scaler is None:")])
wrong("held_bias_casts", step=8, hint="held_casts",
      old="size * MATRICES", new="size * PSI")
wrong("held_low_gradients", step=8, hint="held_fp32",
      old='"gradients": wide * PSI,', new='"gradients": size * PSI,')
wrong("held_low_norm", step=8, hint="held_norm",
      old="unit * wide", new="unit * size")
wrong("held_wide_products", step=8, hint="held_products",
      old="* unit * size + 4", new="* unit * wide + 4")
wrong("train_alone", step=8, hint="not_averaged",
      old="average_gradients(model.parameters(), torch.float32)", new="")
wrong("train_average_low", step=8, hint="average_low",
      old="(), torch.float32", new="(), low or torch.float32")
wrong("train_clip_local", step=8, hint="clip_local", edits=[
    ("average_gradients(model.parameters(), torch.float32)", """
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        average_gradients(model.parameters(), torch.float32)
    """),
    ("nn.utils.clip_grad_norm_(model.parameters(), CLIP)\nif scaler is None:",
     "if scaler is None:")])
wrong("train_unscale_early", step=8, hint="unscale_early", edits=[
    ("average_gradients(model.parameters(), torch.float32)", ""),
    ("if scaler is not None:\n    scaler.unscale_(optimizer)", """
        if scaler is not None:
            scaler.unscale_(optimizer)
        average_gradients(model.parameters(), torch.float32)
    """)])
wrong("train_zeroes", step=8, hint="gradients_gone",
      old="return mean.item()", new="optimizer.zero_grad()\nreturn mean.item()")
wrong("held_by_one_block", step=8, hint="held_layers",
      old="LAYERS * block", new="block")
wrong("held_by_all_rows", step=8, hint="held_rows",
      old="unit = rows * WIDTH", new="rows = BATCH // dist.get_world_size()\nunit = rows * WIDTH")
wrong("right_train_own_loops", step=8, edits=[
    ("average_gradients(model.parameters(), torch.float32)", """
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    """),
    ("    scaler.unscale_(optimizer)\nnn.utils.clip_grad_norm_(model.parameters(), CLIP)", """
        scaler.unscale_(optimizer)
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, total)
    """)])
wrong("train_averages_one", step=8, hint="gradients_differ",
      old="average_gradients(model.parameters(), torch.float32)",
      new="average_gradients(list(model.parameters())[-1:], torch.float32)")
wrong("train_clips_lower", step=8, hint="clip_limit",
      old="    scaler.unscale_(optimizer)\nnn.utils.clip_grad_norm_(model.parameters(), CLIP)",
      new="    scaler.unscale_(optimizer)\nnn.utils.clip_grad_norm_(model.parameters(), 0.1)")
wrong("train_loss_sum", step=8, hint="loss_own",
      old="loss.detach() / dist.get_world_size()", new="loss.detach()")
wrong("train_backward_twice", step=8, hint="gradients_differ",
      old="(loss if scaler is None else scaler.scale(loss)).backward()", new="""
    loss.backward(retain_graph=True)
    (loss if scaler is None else scaler.scale(loss)).backward()
""")
