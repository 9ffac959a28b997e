"""Wrong answers to labs/lab08_memory.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab08_memory.py")

# step 1

wrong("measure_after_backward", step=1, hint="after_backward",
      old="gradients = memory.used - parameters", new="""
    gradients = memory.used - parameters
    activations = memory.used - parameters - gradients
""")
wrong("measure_before_step", step=1, hint="moments_when",
      old="adam.step()\nstates = memory.used - parameters - gradients",
      new="states = memory.used - parameters - gradients\nadam.step()")
wrong("measure_sums", step=1, hint="differences",
      old="activations = memory.used - parameters", new="activations = memory.used")
wrong("predict_batch", step=1, hint="batch_counted",
      old="hidden + width", new="hidden + 2 * width")
wrong("predict_gelu_twice", step=1, hint="not_saved",
      old="norm + up + gelu + down", new="norm + up + 2 * gelu + down")
wrong("predict_mask_of_floats", step=1, hint="mask_bytes",
      old="mask = 4 * hidden", new="mask = 4 * 4 * hidden")
wrong("predict_no_biases", step=1, hint="biases",
      old="(2 * hidden + 2 * 4 * hidden * hidden + 4 * hidden + hidden)",
      new="2 * 4 * hidden * hidden")
wrong("predict_no_last_layer", step=1, hint="last_layer",
      old="saved += 4 * rows * (hidden + width)", new="")
wrong("predict_no_mask", step=1, hint="missing_part",
      old="mask = 4 * hidden", new="mask = 0")
wrong("predict_one_input", step=1, hint="missing_part",
      old="+ 2, hidden", new="+ 2, 0")
wrong("predict_one_moment", step=1, hint="states",
      old="4 * psi, 8", new="4 * psi, 4")
wrong("measure_peak", step=1, hint="peak_of_forward",
      old="activations = memory.used - parameters", new="activations = memory.peak")

wrong("measure_nothing", step=1, hint="returned",
      old="return Parts(parameters, gradients, states, activations)", new="pass")
wrong("measure_other_order", step=1, hint="parts_order",
      old="return Parts(parameters, gradients, states, activations)",
      new="return Parts(parameters, gradients, activations, states)")
wrong("measure_parameters_twice", step=1, hint="other",
      old="return Parts(parameters, gradients, states", new="return Parts(2 * parameters, gradients, states")
wrong("measure_without_gradients", step=1, hint="moments_when",
      old="states = memory.used - parameters - gradients",
      new="adam.zero_grad()\nstates = memory.used - parameters - gradients")
wrong("predict_elements", step=1, hint="other",
      old="(4 * (norm + up + gelu + down) + mask)", new="(norm + up + gelu + down + mask)")
wrong("predict_no_gelu", step=1, hint="missing_wide", old="up + gelu + down", new="up + gelu")
wrong("predict_no_last_input", step=1, hint="last_input",
      old="4 * rows * (hidden + width)", new="4 * rows * width")
wrong("predict_no_loss", step=1, hint="last_loss",
      old="4 * rows * (hidden + width)", new="4 * rows * hidden")
wrong("predict_no_statistics", step=1, hint="statistics",
      old="hidden + 2, hidden", new="hidden, hidden")
wrong("predict_nothing", step=1, hint="returned",
      old="return Parts(4 * psi, 4 * psi, 8 * psi, saved)", new="pass")
wrong("predict_one_block", step=1, hint="one_block",
      old="saved = blocks * rows", new="saved = rows")
wrong("predict_residual", step=1, hint="residual",
      old="up + gelu + down)", new="up + gelu + down + hidden)")
wrong("right_measure_outputs_kept", step=1,
      old="loss = mean_square(model(inputs), targets)\nactivations = memory.used - parameters",
      new="""
    outputs = model(inputs)
    loss = mean_square(outputs, targets)
    activations = memory.used - parameters
""")
wrong("right_measure_adam_late", step=1, old=Body("measure_parts"), new="""
    used = []
    model = build()
    used.append(memory.used)
    loss = mean_square(model(inputs), targets)
    used.append(memory.used)
    loss.backward()
    used.append(memory.used)
    adam = make_adam(model)
    adam.step()
    return Parts(used[0], used[2] - used[0], memory.used - used[2], used[1] - used[0])
""")
wrong("right_predict_by_model", step=1, old=Body("predict"), new="""
    model = Net(width, hidden, [Block(hidden) for _ in range(blocks)])
    psi = sum(p.numel() for p in model.parameters())
    block = 4 * (hidden + 2) + 4 * hidden + 2 * 4 * 4 * hidden + 4 * hidden
    saved = float(rows * (blocks * block + 4 * hidden + 4 * width))
    return 4 * psi, 4 * psi, 8 * psi, saved
""")
wrong("measure_by_formula", step=1, hint="formula", old=Body("measure_parts"), new="""
    model = build()
    psi = sum(p.numel() for p in model.parameters())
    before = memory.used
    loss = mean_square(model(inputs), targets)
    activations = memory.used - before
    return Parts(4 * psi, 4 * psi, 8 * psi, activations)
""")

# step 2

wrong("growth_no_warm_up", step=2, hint="warm_up",
      old="step()\nbefore = memory.used", new="before = memory.used")
wrong("growth_of_peak", step=2, hint="peak_read", edits=[
    ("before = memory.used", "before = memory.peak"),
    ("memory.used - before", "memory.peak - before")])
wrong("growth_sum", step=2, hint="not_divided",
      old="(memory.used - before) / times", new="memory.used - before")
wrong("log_before_twice", step=2, hint="log_values",
      old="adam.step()\nadam.zero_grad()\nwith torch.no_grad():", new="""
    with torch.no_grad():
        after = mean_square(model(inputs), targets)
    adam.step()
    adam.zero_grad()
    with torch.no_grad():
""")
wrong("log_first_graph", step=2, hint="graph_before",
      old="before.item()", new="before")
wrong("log_no_grad_all", step=2, hint="no_grad_all", old=Body("logged_step"), new="""
    with torch.no_grad():
        before = mean_square(model(inputs), targets)
    before.backward()
    adam.step()
    adam.zero_grad()
    with torch.no_grad():
        after = mean_square(model(inputs), targets)
    log.append((before.item(), after.item()))
""")
wrong("log_no_zero_grad", step=2, hint="zero_grad",
      old="adam.zero_grad()\nwith torch.no_grad():", new="with torch.no_grad():")
wrong("log_retained", step=2, hint="retained", old=Body("logged_step"), new="""
    before = mean_square(model(inputs), targets)
    before.backward(retain_graph=True)
    adam.step()
    adam.zero_grad()
    with torch.no_grad():
        after = mean_square(model(inputs), targets)
    log.append((before, after.item()))
""")
wrong("log_second_graph", step=2, hint="graph_after", old="""
    with torch.no_grad():
        after = mean_square(model(inputs), targets)
    log.append((before.item(), after.item()))
""", new="after = mean_square(model(inputs), targets)\nlog.append((before.item(), after))")

wrong("growth_nothing", step=2, hint="returned",
      old="return (memory.used - before) / times", new="pass")
wrong("log_extended", step=2, hint="log_values",
      old="log.append((before.item(), after.item()))",
      new="log.extend((before.item(), after.item()))")
wrong("log_without_dropout", step=2, hint="log_mode",
      old="with torch.no_grad():", new="model.eval()\nwith torch.no_grad():")
wrong("log_zeroed_first", step=2, hint="no_update", old=Body("logged_step"), new="""
    before = mean_square(model(inputs), targets)
    before.backward()
    adam.zero_grad()
    adam.step()
    with torch.no_grad():
        after = mean_square(model(inputs), targets)
    log.append((before.item(), after.item()))
""")
wrong("right_growth_by_list", step=2, old=Body("growth"), new="""
    used = []
    for _ in range(times + 1):
        step()
        used.append(memory.used)
    return (used[-1] - used[0]) / times
""")
wrong("right_log_detached", step=2,
      old="(before.item(), after.item())", new="[before.detach(), after.detach()]")
wrong("right_log_recorded_and_dropped", step=2, old="""
    with torch.no_grad():
        after = mean_square(model(inputs), targets)
""", new="after = mean_square(model(inputs), targets)")
wrong("growth_of_the_last_call", step=2, hint="few_calls", old="before = memory.used\nfor _ in range(times):\n    step()\nreturn (memory.used - before) / times", new="for _ in range(times):\n    before = memory.used\n    step()\nreturn memory.used - before")
wrong("growth_rounded_down", step=2, hint="rounded_down", old="/ times", new="// times")
wrong("log_strings", step=2, hint="log_values", old="(before.item(), after.item())", new="(str(before.item()), str(after.item()))")
wrong("log_leaves_eval", step=2, hint="log_mode", old="with torch.no_grad():\n    after = mean_square(model(inputs), targets)", new="with torch.no_grad():\n    after = mean_square(model(inputs), targets)\nmodel.eval()")

# step 3

wrong("evaluation_detach", step=3, hint="evaluation_graph",
      old="with torch.inference_mode():", new="if batches:")
wrong("evaluation_dropout", step=3, hint="dropout",
      old="training = model.training\nmodel.eval()", new="training = model.training")
wrong("evaluation_last_outputs", step=3, hint="outputs",
      old="torch.cat(outputs)", new="outputs[-1]")
wrong("evaluation_by_outputs", step=3, hint="other",
      old="return total / rows, torch.cat(outputs)",
      new="return total / outputs[-1].numel(), torch.cat(outputs)")
wrong("evaluation_mean_of_means", step=3, hint="mean_of_means", edits=[
    ("* len(inputs)", ""),
    ("rows += len(inputs)", "rows += 1")])
wrong("evaluation_records", step=3, hint="evaluation_graph",
      old="with torch.inference_mode():", new="if batches:")
wrong("evaluation_stays", step=3, hint="mode",
      old="model.train(training)", new="")
wrong("evaluation_trains", step=3, hint="mode",
      old="model.train(training)", new="model.train()")

wrong("evaluation_all_at_once", step=3, hint="all_at_once", old=Body("evaluate"), new="""
    training, pairs = model.training, list(batches)
    model.eval()
    with torch.inference_mode():
        outputs = model(torch.cat([inputs for inputs, _ in pairs]))
        loss = mean_square(outputs, torch.cat([targets for _, targets in pairs])).item()
    model.train(training)
    return loss, outputs
""")
wrong("evaluation_by_len", step=3, hint="batches_once",
      old="return total / rows,", new="return total / len(batches),")
wrong("evaluation_keeps_copies", step=3, hint="evaluation_memory",
      old="outputs.append(model(inputs))",
      new="outputs.append(model(inputs))\ncopies = torch.cat(outputs * 8)")
wrong("evaluation_list", step=3, hint="outputs", old="torch.cat(outputs)", new="outputs")
wrong("evaluation_loss_only", step=3, hint="pair",
      old="return total / rows, torch.cat(outputs)", new="return total / rows")
wrong("evaluation_nothing", step=3, hint="returned",
      old="return total / rows, torch.cat(outputs)", new="pass")
wrong("evaluation_stacked", step=3, hint="outputs", old="torch.cat(outputs)", new="torch.stack(outputs)")
wrong("evaluation_swapped", step=3, hint="outputs",
      old="return total / rows, torch.cat(outputs)", new="return torch.cat(outputs), total / rows")
wrong("evaluation_twice", step=3, hint="batches_once", old=Body("evaluate"), new="""
    training = model.training
    model.eval()
    with torch.inference_mode():
        outputs = torch.cat([model(inputs) for inputs, _ in batches])
        targets = torch.cat([targets for _, targets in batches])
    model.train(training)
    return mean_square(outputs, targets).item(), outputs
""")
wrong("right_evaluation_by_sums", step=3, old=Body("evaluate"), new="""
    training = model.training
    model.train(False)
    outputs, total, count = [], 0.0, 0
    with torch.no_grad():
        for inputs, targets in batches:
            outputs += [model(inputs)]
            total += (outputs[-1] - targets).square().sum().item()
            count += targets.numel()
    model.train(training)
    return total / count, torch.vstack(outputs)
""")
wrong("right_evaluation_at_the_end", step=3, old=Body("evaluate"), new="""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            pairs = [(model(inputs), targets) for inputs, targets in batches]
    finally:
        model.train(training)
    outputs, targets = map(torch.cat, zip(*pairs))
    return mean_square(outputs, targets), outputs
""")
wrong("evaluation_freezes", step=3, hint="frozen", old=Body("evaluate"), new="""
    training = model.training
    model.eval()
    for p in model.parameters():
        p.requires_grad = False
    total, rows, outputs = 0.0, 0, []
    for x, y in batches:
        outputs.append(model(x))
        total += mean_square(outputs[-1], y).item() * len(x)
        rows += len(x)
    model.train(training)
    return total / rows, torch.cat(outputs)
""")
wrong("evaluation_turns_grad_off", step=3, hint="grad_left_off", old="with torch.inference_mode():", new="torch.set_grad_enabled(False)\nif True:")
wrong("evaluation_restores_the_top", step=3, hint="mode", old="model.train(training)", new="model.training = training")
wrong("evaluation_sum", step=3, hint="loss_sum", old="total / rows", new="total")
wrong("evaluation_last_loss", step=3, hint="last_batch", old="total += mean", new="total = mean")

# step 4

wrong("backward_hook_of_tensor", step=4, hint="hook_kind",
      old="p.register_post_accumulate_grad_hook", new="p.register_hook")
wrong("backward_hook_too_early", step=4, hint="hook_kind",
      old="p.register_post_accumulate_grad_hook(self.ready)",
      new="p.register_hook(lambda gradient, p=p: self.ready(p))")
wrong("backward_last_hook", step=4, hint="no_hook", old=Body("AdamInBackward.__init__"), new="""
    self.states = {
        p: {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0}
        for p in model.parameters()
    }
    for p in model.parameters():
        last = p
    last.register_post_accumulate_grad_hook(self.ready)
""")
wrong("backward_no_hook", step=4, hint="no_hook",
      old="for p in model.parameters():\n    p.register_post_accumulate_grad_hook(self.ready)",
      new="")
wrong("backward_t_stays", step=4, hint="count_t",
      old='state["t"] += 1\nupdate(p, p.grad, state["m"], state["v"], state["t"])',
      new='update(p, p.grad, state["m"], state["v"], state["t"] + 1)')
wrong("backward_zeros", step=4, hint="grad_kept",
      old="p.grad = None", new="p.grad.zero_()")
wrong("update_epsilon_before", step=4, hint="epsilon",
      old="v.sqrt().div_(math.sqrt(1 - BETA2**t)).add_(EPSILON)",
      new="v.sqrt().add_(EPSILON).div_(math.sqrt(1 - BETA2**t))")
wrong("update_epsilon_below", step=4, hint="epsilon",
      old="v.sqrt().div_(math.sqrt(1 - BETA2**t)).add_(EPSILON)",
      new="(v / (1 - BETA2**t)).add_(EPSILON).sqrt_()")
wrong("update_new_names", step=4, hint="in_place",
      old="m.lerp_(g, 1 - BETA1)\nv.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)",
      new="m = BETA1 * m + (1 - BETA1) * g\nv = BETA2 * v + (1 - BETA2) * g * g")
wrong("update_temporaries", step=4, hint="temporaries",
      old="p.addcdiv_(m, denominator, value=-ETA / (1 - BETA1**t))",
      new="p -= ETA * (m / (1 - BETA1**t)) / denominator")
wrong("update_uncorrected", step=4, hint="bias_correction", edits=[
    ("v.sqrt().div_(math.sqrt(1 - BETA2**t)).add_", "v.sqrt().add_"),
    ("-ETA / (1 - BETA1**t)", "-ETA")])

wrong("backward_calls_hook", step=4, hint="hook_called",
      old="(self.ready)", new="(self.ready(p))")
wrong("backward_count_not_stored", step=4, hint="count_t",
      old='state["t"] += 1\nupdate(p, p.grad, state["m"], state["v"], state["t"])',
      new='update(p, p.grad, state["m"], state["v"], state["t"] + 1)')
wrong("backward_count_late", step=4, hint="count_t",
      old='state["t"] += 1\nupdate(p, p.grad, state["m"], state["v"], state["t"])',
      new='update(p, p.grad, state["m"], state["v"], state["t"])\nstate["t"] += 1')
wrong("backward_name_deleted", step=4, hint="grad_kept", old="p.grad = None", new="del p")
wrong("update_corrected_as_first", step=4, hint="bias_correction", edits=[
    ("math.sqrt(1 - BETA2**t)", "math.sqrt(1 - BETA2)"), ("(1 - BETA1**t)", "(1 - BETA1)")])
wrong("update_moment_of_gradient", step=4, hint="moments",
      old="addcmul_(g, g, value", new="add_(g, alpha")
wrong("update_uphill", step=4, hint="wrong_sign", old="value=-ETA / (1", new="value=ETA / (1")
wrong("right_backward_by_lambda", step=4, old="(self.ready)", new="(lambda q: self.ready(q))")
wrong("right_update_by_division", step=4, old=Body("update"), new="""
    m.mul_(BETA1).add_(g, alpha=1 - BETA1)
    v.lerp_(g * g, 1 - BETA2)
    root = v / (1 - BETA2**t)
    root.sqrt_()
    root += EPSILON
    p.addcdiv_(m, root.mul_(1 - BETA1**t), value=-ETA)
""")
wrong("update_with_old_moments", step=4, hint="old_moments", old=Body("update"), new="""
    denominator = v.sqrt().div_(math.sqrt(1 - BETA2**t)).add_(EPSILON)
    p.addcdiv_(m, denominator, value=-ETA / (1 - BETA1**t))
    m.lerp_(g, 1 - BETA1)
    v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
""")
wrong("update_correction_outside_the_root", step=4, hint="root", old="math.sqrt(1 - BETA2**t)", new="(1 - BETA2**t)")
wrong("update_without_rate", step=4, hint="rate", old="value=-ETA / (1", new="value=-1 / (1")
wrong("update_changes_the_gradient", step=4, hint="gradient_changed", old="m.lerp_(g, 1 - BETA1)\nv.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)", new="m.lerp_(g, 1 - BETA1)\nv.mul_(BETA2).add_(g.square_(), alpha=1 - BETA2)")
wrong("backward_binds_late", step=4, hint="gradient_none", old="p.register_post_accumulate_grad_hook(self.ready)", new="p.register_post_accumulate_grad_hook(lambda _: self.ready(p))")
wrong("backward_keeps_gradients", step=4, hint="grad_kept", old="p.grad = None", new="state.setdefault('history', []).append(p.grad)\np.grad = None")
wrong("update_without_epsilon", step=4, hint="epsilon", old=".add_(EPSILON)", new="")

# step 5

wrong("pieces_all_rows", step=5, hint="padding_counted",
      old="0.0, keep.sum()", new="0.0, len(keep)")
wrong("pieces_backward_late", step=5, hint="backward_late",
      old="    loss.backward()\n    total += loss.item()\nreturn total",
      new="    total = total + loss\ntotal.backward()\nreturn total.item()")
wrong("pieces_last_loss", step=5, hint="loss_returned",
      old="total += loss.item()", new="total = loss.item()")
wrong("pieces_means", step=5, hint="means_added", edits=[
    ("counted = 0.0, keep.sum()", "pieces = 0.0, len(keep.split(rows))"),
    ("() / counted", "() / k.sum() / pieces")])
wrong("pieces_nan", step=5, hint="padding_alone",
      old="(square_of_rows(model(x), y) * k)", new="square_of_rows(model(x), y)[k].mean() * k")
wrong("pieces_no_keep", step=5, hint="keep_ignored",
      old="(square_of_rows(model(x), y) * k)", new="square_of_rows(model(x), y)")
wrong("pieces_of_batch", step=5, hint="rows_at_once",
      old="zip(inputs.split(rows), targets.split(rows), keep.split(rows), strict=True)",
      new="zip(inputs.chunk(2), targets.chunk(2), keep.chunk(2), strict=True)")
wrong("pieces_sums", step=5, hint="share",
      old="() / counted", new="()")
wrong("pieces_zeroed", step=5, hint="zeroed",
      old="loss.backward()\ntotal += loss.item()",
      new="model.zero_grad()\nloss.backward()\ntotal += loss.item()")
wrong("rows_negative", step=5, hint="rows_none",
      old='if rows < 1:\n    raise OutOfMemory("not one row fits")', new="")
wrong("rows_of_limit", step=5, hint="rows_fixed",
      old="(limit - fixed)", new="limit")
wrong("rows_rounded_up", step=5, hint="rows_round",
      old="(limit - fixed) // per_row", new="-(-(limit - fixed) // per_row)")

wrong("pieces_cumulative", step=5, hint="added_twice",
      old="    loss.backward()\n    total += loss.item()\nreturn total",
      new="    total = total + loss\n    total.backward(retain_graph=True)\nreturn total.item()")
wrong("pieces_cumulative_freed", step=5, hint="added_twice",
      old="    loss.backward()\n    total += loss.item()\nreturn total",
      new="    total = total + loss\n    total.backward()\nreturn total.item()")
wrong("pieces_last_dropped", step=5, hint="rows_lost",
      old="zip(inputs.split(rows), targets.split(rows), keep.split(rows), strict=True)",
      new="list(zip(*(each.split(rows) for each in (inputs, targets, keep))))[:-1]")
wrong("pieces_no_backward", step=5, hint="no_backward",
      old="loss.backward()\ntotal += loss.item()", new="total += loss.item()")
wrong("pieces_nothing", step=5, hint="loss_returned",
      old="    total += loss.item()\nreturn total", new="    total += loss.item()")
wrong("pieces_retained", step=5, hint="backward_late",
      old="loss.backward()\ntotal += loss.item()",
      new="loss.backward(retain_graph=True)\ntotal += loss.item()")
wrong("pieces_retained_in_sum", step=5, hint="backward_late",
      old="    loss.backward()\n    total += loss.item()\nreturn total",
      new="    loss.backward(retain_graph=True)\n    total = total + loss\nreturn total.item()")
wrong("pieces_retained_once", step=5, hint="backward_late",
      old="    loss.backward()\n    total += loss.item()\nreturn total",
      new="    total = total + loss\ntotal.backward(retain_graph=True)\nreturn total.item()")
wrong("rows_float", step=5, hint="rows_round", old="(limit - fixed) // per_row",
      new="(limit - fixed) / per_row")
wrong("rows_other_error", step=5, hint="rows_none",
      old='OutOfMemory("not one row fits")', new='ValueError("not one row fits")')
wrong("rows_zero", step=5, hint="rows_none",
      old='raise OutOfMemory("not one row fits")', new="return 0")
wrong("right_pieces_by_slices", step=5, old=Body("accumulate"), new="""
    total, counted = 0.0, int(keep.sum())
    for start in range(0, len(inputs), rows):
        part = slice(start, start + rows)
        losses = square_of_rows(model(inputs[part]), targets[part])
        loss = losses[keep[part]].sum() / counted
        loss.backward()
        total += float(loss)
    return total
""")
wrong("right_pieces_of_kept_rows", step=5, old=Body("accumulate"), new="""
    inputs, targets = inputs[keep], targets[keep]
    total = torch.zeros(())
    for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
        loss = square_of_rows(model(x), y).sum() / len(inputs)
        loss.backward()
        total += loss.detach()
    return total
""")
wrong("right_pieces_by_gradient", step=5, old=Body("accumulate"), new="""
    total, share = 0.0, keep / keep.sum()
    for x, y, part in zip(inputs.split(rows), targets.split(rows), share.split(rows)):
        losses = square_of_rows(model(x), y)
        losses.backward(part)
        total += (losses.detach() @ part).item()
    return total
""")
wrong("right_rows_by_int", step=5, old=Body("rows_that_fit"), new="""
    if fixed + per_row > limit:
        raise OutOfMemory
    return int((limit - fixed) / per_row)
""")
wrong("pieces_by_chunk", step=5, hint="rows_at_once", old="inputs.split(rows), targets.split(rows), keep.split(rows)", new="inputs.chunk(rows), targets.chunk(rows), keep.chunk(rows)")
wrong("pieces_loss_with_graph", step=5, hint="loss_returned", old="total += loss.item()", new="total = total + loss")
wrong("rows_not_returned", step=5, hint="returned", old="return rows\n# <<< solution", new="# <<< solution")
wrong("rows_error_of_torch", step=5, hint="rows_none", old='raise OutOfMemory("not one row fits")', new='raise torch.OutOfMemoryError("no")')
wrong("pieces_by_rows", step=5, hint="share", old=".sum() / counted", new=".sum() / rows")

# step 6

wrong("checkpoint_attribute", step=6, hint="save_for_backward",
      old="ctx.save_for_backward(x)", new="ctx.save_for_backward(x)\nctx.x = x")
wrong("checkpoint_no_enable_grad", step=6, hint="enable_grad",
      old="with torch.enable_grad():\n    output = ctx.block(x)", new="output = ctx.block(x)")
wrong("checkpoint_no_input_gradient", step=6, hint="input_gradient",
      old="None, x.grad", new="None, None")
wrong("checkpoint_not_cut", step=6, hint="cut_off",
      old="ctx.saved_tensors[0].detach().requires_grad_()", new="ctx.saved_tensors[0]")
wrong("checkpoint_one_result", step=6, hint="returns",
      old="None, x.grad", new="x.grad")
wrong("checkpoint_other_mask", step=6, hint="mask_again",
      old="set_random_state(ctx.state, x.device)", new="")
wrong("checkpoint_records", step=6, hint="recorded",
      old="ctx.save_for_backward(x)\nreturn block(x)", new="""
    ctx.save_for_backward(x)
    with torch.enable_grad():
        ctx.output = block(x.detach().requires_grad_())
    return ctx.output.detach()
""")
wrong("checkpoint_state_late", step=6, hint="mask_again",
      old=Body("Checkpoint.forward"), new="""
    ctx.block = block
    ctx.save_for_backward(x)
    output = block(x)
    ctx.state = random_state(x.device)
    return output
""")
wrong("checkpoint_state_left", step=6, hint="put_back",
      old="set_random_state(now, x.device)", new="")
wrong("checkpoint_sum", step=6, hint="ones",
      old="output.backward(gradient)\nreturn None, x.grad",
      new="output.backward(torch.ones_like(output))\nreturn None, x.grad")
wrong("torch_no_state", step=6, hint="torch_mask",
      old="use_reentrant=False", new="use_reentrant=False, preserve_rng_state=False")
wrong("torch_not_called", step=6, hint="torch_plain",
      old=Body("checkpoint_by_torch"), new="return block(x)")
wrong("torch_reentrant", step=6, hint="reentrant",
      old="use_reentrant=False", new="use_reentrant=True")

wrong("checkpoint_forward_nothing", step=6, hint="returned",
      old="ctx.save_for_backward(x)\nreturn block(x)", new="ctx.save_for_backward(x)\nblock(x)")
wrong("checkpoint_input_only", step=6, hint="parameters_missed",
      old="output.backward(gradient)\nreturn None, x.grad",
      new="return None, torch.autograd.grad(output, x, gradient)[0]")
wrong("checkpoint_swapped", step=6, hint="returns",
      old="return None, x.grad", new="return x.grad, None")
wrong("torch_called_on_output", step=6, hint="torch_plain",
      old="checkpoint(block, x, use", new="checkpoint(block(x), use")
wrong("torch_nothing", step=6, hint="returned",
      old="return checkpoint(block", new="checkpoint(block")
wrong("right_checkpoint_by_fork", step=6, old=Body("Checkpoint.backward"), new="""
    (x,) = ctx.saved_tensors
    x = x.detach().requires_grad_()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.set_rng_state(ctx.state)
        output = ctx.block(x)
    torch.autograd.backward(output, gradient)
    return None, x.grad
""")
wrong("right_checkpoint_by_grad", step=6,
      old="output.backward(gradient)\nreturn None, x.grad", new="""
    parameters = list(ctx.block.parameters())
    first, *rest = torch.autograd.grad(output, [x, *parameters], gradient)
    for parameter, each in zip(parameters, rest, strict=True):
        parameter.grad = each if parameter.grad is None else parameter.grad + each
    return None, first
""")
wrong("right_checkpoint_copies", step=6,
      old="ctx.saved_tensors[0].detach().requires_grad_()",
      new="ctx.saved_tensors[0].clone().requires_grad_()")
wrong("checkpoint_saves_twice", step=6, hint="kept_twice", old="ctx.save_for_backward(x)", new="ctx.save_for_backward(x, x.clone())")
wrong("checkpoint_zeroes", step=6, hint="parameters_missed", old="output.backward(gradient)\nreturn None, x.grad", new="ctx.block.zero_grad()\noutput.backward(gradient)\nreturn None, x.grad")
wrong("checkpoint_without_gradient", step=6, hint="ones", old="output.backward(gradient)\nreturn None, x.grad", new="output.backward()\nreturn None, x.grad")

# step 7

wrong("choose_all", step=7, hint="nothing_fits",
      old="best and best[1]", new="best[1] if best else set(indices)")
wrong("choose_any", step=7, hint="does_not_fit",
      old="predicted_peak(units, chosen)",
      new="sum(u.input if i in chosen else u.saved for i, u in enumerate(units))")
wrong("choose_fewest", step=7, hint="too_dear",
      old="flops < best[0]", new="len(chosen) < len(best[1])")
wrong("choose_greedy", step=7, hint="too_dear", old=Body("choose"), new="""
    order = sorted(range(len(units)), key=lambda i: units[i].input - units[i].saved)
    for size in range(len(units) + 1):
        if predicted_peak(units, order[:size]) <= budget:
            return set(order[:size])
    return None
""")
wrong("peak_input_twice", step=7, hint="input_twice",
      old="before + unit.saved", new="before + unit.saved + unit.input * (i in chosen)")
wrong("peak_nothing_freed", step=7, hint="freed_already", old=Body("predicted_peak"), new="""
    chosen, before, peak = set(chosen), 0, 0
    for i, unit in enumerate(units):
        before += unit.input if i in chosen else unit.saved
        if i in chosen:
            peak = max(peak, unit.saved - unit.input)
    return before + peak
""")
wrong("peak_of_kept", step=7, hint="computed_again",
      old="return peak", new="return before")

wrong("choose_below", step=7, hint="exact_fit",
      old="predicted_peak(units, chosen) <= budget", new="predicted_peak(units, chosen) < budget")
wrong("choose_empty_is_none", step=7, hint="empty_set",
      old="return best and best[1]", new="return best[1] if best and best[1] else None")
wrong("choose_mask", step=7, hint="choose_kind",
      old="return best and best[1]", new="return best and [i in best[1] for i in indices]")
wrong("choose_not_none_of_them", step=7, hint="empty_set",
      old="range(len(units) + 1)", new="range(1, len(units) + 1)")
wrong("choose_pair", step=7, hint="choose_kind",
      old="return best and best[1]", new="return best")
wrong("peak_nothing", step=7, hint="returned", old="return peak", new="pass")
wrong("peak_of_last_unit", step=7, hint="not_largest",
      old="peak = max(peak, before + unit.saved)", new="peak = before + unit.saved")
wrong("peak_of_what_is_kept", step=7, hint="computed_again",
      old="before + unit.saved)", new="before + (unit.input if i in chosen else unit.saved))")
wrong("right_choose_by_bits", step=7, old=Body("choose"), new="""
    n = len(units)
    subsets = [{i for i in range(n) if bits >> i & 1} for bits in range(1 << n)]
    fitting = [subset for subset in subsets if predicted_peak(units, subset) <= budget]
    return min(fitting, key=lambda subset: sum(units[i].flops for i in subset), default=None)
""")
wrong("right_choose_list", step=7,
      old="return best and best[1]", new="return None if best is None else sorted(best[1])")
wrong("right_peak_by_sums", step=7, old=Body("predicted_peak"), new="""
    chosen = frozenset(chosen)
    left = [unit.input if i in chosen else unit.saved for i, unit in enumerate(units)]
    return max(sum(left[:i]) + unit.saved for i, unit in enumerate(units))
""")
wrong("peak_of_all_held", step=7, hint="left_behind", old="before += unit.input if i in chosen else unit.saved", new="before += unit.saved")
wrong("choose_from_one", step=7, hint="choose_kind", old="best = flops, set(chosen)", new="best = flops, {i + 1 for i in chosen}")
wrong("choose_fails", step=7, hint="nothing_fits", old="return best and best[1]", new="return best[1]")

# step 8

wrong("account_free_requests", step=8, hint="stale_request",
      old='for b in blocks if b["state"] != "inactive"),', new="for b in blocks),")
wrong("account_no_pending", step=8, hint="pending",
      old='b["state"] != "inactive"', new='b["state"] == "active_allocated"')
wrong("account_pending_allocated", step=8, hint="pending",
      old='allocated=sum(b["size"] for b in blocks if b["state"] == "active_allocated")',
      new='allocated=sum(b["size"] for b in blocks if b["state"] != "inactive")')
wrong("account_pending_free", step=8, hint="pending",
      old='(b["size"] for b in blocks if b["state"] == "inactive")',
      new='(b["size"] for b in blocks if b["state"] != "active_allocated")')
wrong("account_allocated_as_asked", step=8, hint="rounded",
      old='allocated=sum(b["size"]', new='allocated=sum(b["requested_size"]')
wrong("account_reserved_in_use", step=8, hint="reserved",
      old='segment["total_size"]', new='segment["active_size"]')
wrong("account_all_free", step=8, hint="largest_sum",
      old='max((b["size"] for b in blocks if b["state"] == "inactive"), default=0)',
      new='sum(b["size"] for b in blocks if b["state"] == "inactive")')
wrong("account_nothing_free", step=8, hint="nothing_free",
      old='max((b["size"] for b in blocks if b["state"] == "inactive"), default=0)',
      new='max(b["size"] for b in blocks if b["state"] == "inactive")')
wrong("account_by_docstring", step=8, hint="pending",
      old='b["state"] != "inactive"',
      new='b["state"] in ("active_allocated", "active_awaiting_free")')
wrong("peak_at_request", step=8, hint="free_requested",
      old='"free_completed" and', new='"free_requested" and')
wrong("peak_both_frees", step=8, hint="free_requested",
      old='entry["action"] == "free_completed" and', new='"free" in entry["action"] and')
wrong("peak_every_free", step=8, hint="unknown_free", old=Body("at_peak"), new="""
    living, used, peak = {}, 0, Peak(0, [], "")
    for entry in history:
        if entry["action"] == "alloc":
            living[entry["addr"]] = entry
            used += entry["size"]
            if used > peak.size:
                held = Counter(maker(each) for each in living.values())
                peak = Peak(used, held.most_common(), maker(entry))
        elif entry["action"] == "free_completed":
            used -= entry["size"]
            living.pop(entry["addr"], None)
    return peak
""")
wrong("peak_pops_unknown", step=8, hint="unknown_free",
      old=' and entry["addr"] in living:', new=":")
wrong("peak_of_segments", step=8, hint="other_actions",
      old='if entry["action"] == "alloc":', new='if not entry["action"].startswith("free"):')
wrong("peak_nothing_goes", step=8, hint="held_ever",
      old='"free_completed" and', new='"free" and')
wrong("peak_held_at_end", step=8, hint="held_late", old=Body("at_peak"), new="""
    living, used, peak, last = {}, 0, 0, ""
    for entry in history:
        if entry["action"] == "alloc":
            living[entry["addr"]] = entry
            used += entry["size"]
            if used > peak:
                peak, last = used, maker(entry)
        elif entry["action"] == "free_completed" and entry["addr"] in living:
            used -= living.pop(entry["addr"])["size"]
    held = Counter()
    for each in living.values():
        held[maker(each)] += each["size"]
    return Peak(peak, held.most_common(), last)
""")
wrong("peak_by_name", step=8, hint="held_order",
      old="held.most_common()", new="sorted(held.items())")
wrong("peak_not_added_up", step=8, hint="held_order",
      old="held.most_common()", new='[(maker(e), e["size"]) for e in living.values()]')
wrong("peak_of_the_largest", step=8, hint="last_maker",
      old="most_common(), maker(entry))", new="most_common(), held.most_common()[-1][0])")
wrong("profile_no_memory", step=8, hint="no_memory",
      old=", profile_memory=True", new="")
wrong("profile_nowhere", step=8, hint="no_trace",
      old="profiler.export_chrome_trace(str(path))", new="")
wrong("profile_outside", step=8, hint="run_outside", old=Body("profile_memory"), new="""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        pass
    profiler.export_chrome_trace(str(path))
""")
wrong("profile_twice", step=8, hint="run_outside", old=Body("profile_memory"), new="""
    run()  # to warm up
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(path))
""")
wrong("order_kept_twice", step=8, hint="events_lost",
      old="trace, key", new="(e for e in trace if e.size), key")
wrong("order_large_first", step=8, hint="order_kept",
      old="event.name in freed", new="(event.name in freed, -event.size)")
wrong("order_short_first", step=8, hint="not_first",
      old="event.name in freed", new="event.name not in freed")
wrong("account_nothing", step=8, hint="returned", old=Body("account"), new="blocks = []")
wrong("account_other_order", step=8, hint="account_order", old=Body("account"), new="""
    segments = list(segments)
    blocks = [block for segment in segments for block in segment["blocks"]]
    return (
        sum(segment["total_size"] for segment in segments),
        sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
        sum(b["requested_size"] for b in blocks if b["state"] != "inactive"),
        max((b["size"] for b in blocks if b["state"] == "inactive"), default=0),
    )
""")
wrong("peak_counts_tensors", step=8, hint="held_order",
      old='held[maker(each)] += each["size"]', new="held[maker(each)] += 1")
wrong("peak_not_returned", step=8, hint="returned", old="return highest", new="pass")
wrong("peak_of_dict", step=8, hint="peak_kind", old="held.most_common()", new="held")
wrong("peak_size_only", step=8, hint="peak_kind", old="return highest", new="return highest.size")
wrong("profile_path_as_it_is", step=8, hint="no_trace",
      old="export_chrome_trace(str(path))", new="export_chrome_trace(path)")
wrong("profile_written_inside", step=8, hint="no_trace",
      old="    run()\nprofiler.export_chrome_trace(str(path))",
      new="    run()\n    profiler.export_chrome_trace(str(path))")
wrong("order_by_name", step=8, hint="order_kept",
      old="event.name in freed", new="(event.name in freed, event.name)")
wrong("order_not_returned", step=8, hint="returned",
      old="return sorted(trace, key", new="sorted(trace, key")
wrong("order_of_dict", step=8, hint="order_kept",
      old="return sorted(trace, key=lambda event: event.name in freed)", new="""
    kept = {event for event in trace if event.name not in freed}
    return sorted(kept, key=str) + [event for event in trace if event.name in freed]
""")
wrong("right_account_by_loop", step=8, old=Body("account"), new="""
    requested = allocated = reserved = largest = 0
    for segment in segments:
        for block in segment["blocks"]:
            reserved += block["size"]
            if block["state"].startswith("active"):
                requested += block["requested_size"]
            if block["state"] == "active_allocated":
                allocated += block["size"]
            elif block["state"] == "inactive":
                largest = max(largest, block["size"])
    return requested, allocated, reserved, largest
""")
wrong("right_order_by_lists", step=8,
      old="return sorted(trace, key=lambda event: event.name in freed)", new="""
    kept = [event for event in trace if event.name not in freed]
    return tuple(kept + [event for event in trace if event.name in freed])
""")
wrong("right_peak_in_two_passes", step=8, old=Body("at_peak"), new="""
    history, sums, sizes = list(history), [0], {}
    for entry in history:
        change = 0
        if entry["action"] == "alloc":
            change = sizes[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            change = -sizes.pop(entry["addr"], 0)
        sums.append(sums[-1] + change)
    top = sums.index(max(sums))
    living, held = {}, {}
    for entry in history[:top]:
        if entry["action"] == "alloc":
            living[entry["addr"]] = entry
        elif entry["action"] == "free_completed":
            living.pop(entry["addr"], None)
    for entry in living.values():
        held[maker(entry)] = held.get(maker(entry), 0) + entry["size"]
    pairs = sorted(held.items(), key=lambda pair: pair[1], reverse=True)
    return sums[top], pairs, maker(history[top - 1])
""")
wrong("right_profile_by_start", step=8, old=Body("profile_memory"), new="""
    profiler = torch.profiler.profile(profile_memory=True, record_shapes=True)
    profiler.start()
    run()
    profiler.stop()
    profiler.export_chrome_trace(str(path))
""")
wrong("peak_keeps_the_freed", step=8, hint="held_freed", old='used -= living.pop(entry["addr"])["size"]', new='used -= living[entry["addr"]]["size"]')

# more answers to steps 1 to 8

wrong("predict_mask_of_the_input", step=1, hint="other", old="mask = 4 * hidden", new="mask = hidden")
wrong("evaluation_rounds", step=3, hint="loss_rounded", old="return total / rows,", new="return round(total / rows, 4),")

# more mistakes in all steps

wrong("predict_mask_of_bits", step=1, hint="mask_bytes", old="mask = 4 * hidden", new="mask = hidden // 2")
wrong("predict_loss_of_hidden", step=1, hint="last_loss",
      old="4 * rows * (hidden + width)", new="4 * rows * (hidden + hidden)")
wrong("predict_one_statistic", step=1, hint="statistics", old="hidden + 2, hidden", new="hidden + 1, hidden")
wrong("measure_activations_off_gradients", step=1, hint="gradients_when",
      old="gradients = memory.used - parameters", new="gradients = memory.used - parameters - activations")
wrong("measure_peak_of_forward", step=1, hint="peak_of_forward",
      old="activations = memory.used - parameters", new="activations = memory.peak - parameters")
wrong("growth_one_call_short", step=2, hint="few_calls",
      old="for _ in range(times):\n    step()", new="for _ in range(times - 1):\n    step()")
wrong("update_keeps_corrected_m", step=4, hint="moments_corrected",
      old="p.addcdiv_(m, denominator, value=-ETA / (1 - BETA1**t))",
      new="p.addcdiv_(m.div_(1 - BETA1**t), denominator, value=-ETA)")
wrong("hooks_of_linear_layers", step=4, hint="no_hook",
      old="for p in model.parameters():\n    p.register_post_accumulate_grad_hook(self.ready)", new="""
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.weight.register_post_accumulate_grad_hook(self.ready)
            part.bias.register_post_accumulate_grad_hook(self.ready)
""")
wrong("rows_with_fixed_each", step=5, hint="rows_fixed",
      old="(limit - fixed) // per_row", new="limit // (fixed + per_row)")
wrong("stopped_at_padding", step=5, hint="stopped_early", old="loss = (square_of_rows(model(x), y) * k)", new="""
    if not k.any():
        break
    loss = (square_of_rows(model(x), y) * k)
""")
wrong("keep_not_cut", step=5, hint="pieces_differ",
      old="keep.split(rows), strict=True", new="itertools.repeat(keep[:rows])")
wrong("forward_seeds", step=6, hint="forward_seeded",
      old="ctx.save_for_backward(x)\nreturn block(x)", new="""
    ctx.save_for_backward(x)
    torch.manual_seed(0)
    ctx.state = random_state(x.device)
    return block(x)
""")
wrong("peak_without_own_input", step=7, hint="input_twice",
      old="before + unit.saved)", new="before + unit.saved - unit.input)")
wrong("peak_of_an_iterator", step=7, hint="chosen_once",
      old="chosen, before, peak = set(chosen), 0, 0", new="before, peak = 0, 0")
wrong("largest_requested", step=8, hint="largest_asked",
      old='max((b["size"] for', new='max((b["requested_size"] for')
wrong("held_as_it_came", step=8, hint="held_order",
      old="held.most_common()", new="list(held.items())")
wrong("held_overwritten", step=8, hint="held_order",
      old="held[maker(each)] += each", new="held[maker(each)] = each")
wrong("last_is_the_largest_maker", step=8, hint="last_maker",
      old="held.most_common(), maker(entry)", new="held.most_common(), held.most_common(1)[0][0]")
wrong("order_by_operator", step=8, hint="not_first", old=Body("long_lived_first"), new="""
    freed = {event.name.split()[0] for event in trace if event.size == 0}
    return sorted(trace, key=lambda event: event.name.split()[0] in freed)
""")

# mistakes whose hints are easily confused, and a changed argument

wrong("update_corrects_v_alone", step=4, hint="bias_correction", old="value=-ETA / (1 - BETA1**t)", new="value=-ETA")
wrong("update_corrects_m_alone", step=4, hint="bias_correction",
      old="v.sqrt().div_(math.sqrt(1 - BETA2**t)).add_", new="v.sqrt().add_")
wrong("update_counts_from_zero", step=4, hint="bias_correction", edits=[
    ("math.sqrt(1 - BETA2**t)", "math.sqrt(1 - BETA2 ** (t - 1))"), ("(1 - BETA1**t)", "(1 - BETA1 ** (t - 1))")])
wrong("rows_one_refused", step=5, hint="rows_exact", old="if rows < 1:", new="if rows <= 1:")
wrong("pieces_divided_again", step=5, hint="divided_again",
      old="loss.backward()\ntotal += loss.item()", new="(loss / len(inputs.split(rows))).backward()\ntotal += loss.item()")
wrong("account_free_of_a_segment", step=8, hint="largest_sum",
      old='max((b["size"] for b in blocks if b["state"] == "inactive"), default=0)',
      new='max(sum(b["size"] for b in s["blocks"] if b["state"] == "inactive") for s in segments)')
wrong("held_by_first_frames", step=8, hint="held_order",
      old='held[maker(each)] += each["size"]', new='held[each["frames"][0]["name"]] += each["size"]')
wrong("order_sorts_the_given_list", step=8, hint="trace_changed",
      old="return sorted(trace, key=lambda event: event.name in freed)",
      new="trace.sort(key=lambda event: event.name in freed)\nreturn trace")

# more right answers, and mistakes whose hints are easily confused

wrong("right_predict_on_meta", step=1, old=Body("predict"), new="""
    with torch.device("meta"):
        net = Net(width, hidden, [Block(hidden) for _ in range(blocks)])
    size = sum(p.nbytes for p in net.parameters())
    return Parts(size, size, 2 * size, rows * (blocks * (44 * hidden + 8) + 4 * (hidden + width)))
""")
wrong("right_log_under_inference_mode", step=2, old=Body("logged_step"), new="""
    adam.zero_grad()
    loss = mean_square(model(inputs), targets)
    first = loss.item()
    loss.backward()
    adam.step()
    adam.zero_grad(set_to_none=True)
    with torch.inference_mode():
        second = mean_square(model(inputs), targets)
    log.append((first, second.item()))
""")
wrong("right_evaluation_turns_grad_on_again", step=3, old=Body("evaluate"), new="""
    before, training = torch.is_grad_enabled(), model.training
    model.eval()
    torch.set_grad_enabled(False)
    total, rows, outputs = 0.0, 0, []
    for inputs, targets in batches:
        outputs.append(model(inputs))
        total += mean_square(outputs[-1], targets).item() * len(inputs)
        rows += len(inputs)
    torch.set_grad_enabled(before)
    model.train(training)
    return total / rows, torch.cat(outputs)
""")
wrong("right_update_by_reciprocal", step=4, old=Body("update"), new="""
    v.lerp_(g.square(), 1 - BETA2)
    m.lerp_(g, 1 - BETA1)
    step = (v / (1 - BETA2**t)).sqrt_().add_(EPSILON).reciprocal_().mul_(m)
    p.add_(step, alpha=-ETA / (1 - BETA1**t))
""")
wrong("right_pieces_divided_at_the_end", step=5, old=Body("accumulate"), new="""
    total = 0.0
    for x, y, k in zip(inputs.split(rows), targets.split(rows), keep.split(rows)):
        loss = (square_of_rows(model(x), y) * k).sum()
        loss.backward()
        total += loss.item()
    for p in model.parameters():
        p.grad /= keep.sum()
    return total / keep.sum().item()
""")
wrong("right_checkpoint_saves_the_state", step=6, edits=[
    (Body("Checkpoint.forward"), """
        ctx.block = block
        ctx.save_for_backward(x, random_state(x.device))
        return block(x)
    """),
    ("x = ctx.saved_tensors[0].detach().requires_grad_()",
     "x, ctx.state = ctx.saved_tensors\nx = x.detach().requires_grad_()")])
wrong("right_peak_backwards", step=7, old=Body("predicted_peak"), new="""
    again = set(chosen)
    stored = sum(u.input if i in again else u.saved for i, u in enumerate(units))
    peak = 0
    for i, unit in reversed(list(enumerate(units))):
        stored -= unit.input if i in again else unit.saved
        peak = max(peak, stored + unit.saved)
    return peak
""")
wrong("growth_of_all_that_is_used", step=2, hint="not_subtracted",
      old="(memory.used - before) / times", new="memory.used / times")
wrong("update_by_the_gradient", step=4, hint="gradient_used", old="p.addcdiv_(m,", new="p.addcdiv_(g,")
wrong("pieces_mean_of_all_rows", step=5, hint="means_added",
      old="loss = (square_of_rows(model(x), y) * k).sum() / counted",
      new="loss = (square_of_rows(model(x), y) * k).mean()")
wrong("pieces_of_padding", step=5, hint="keep_ignored",
      old="(square_of_rows(model(x), y) * k)", new="(square_of_rows(model(x), y) * ~k)")
wrong("pieces_return_in_the_loop", step=5, hint="first_only",
      old="    total += loss.item()\nreturn total", new="    total += loss.item()\n    return total")
wrong("checkpoint_gives_the_gradient_back", step=6, hint="input_gradient",
      old="return None, x.grad", new="return None, gradient")
wrong("checkpoint_input_needs_no_gradient", step=6, hint="input_gradient",
      old="ctx.saved_tensors[0].detach().requires_grad_()", new="ctx.saved_tensors[0].clone()")
wrong("checkpoint_in_the_class", step=6, hint="class_state", edits=[
    ("ctx.block, ctx.state = block, random_state(x.device)",
     "Checkpoint.block, Checkpoint.state = block, random_state(x.device)"),
    ("set_random_state(ctx.state, x.device)", "set_random_state(Checkpoint.state, x.device)"),
    ("output = ctx.block(x)", "output = Checkpoint.block(x)")])
wrong("choose_most_expensive", step=7, hint="too_dear", old="flops < best[0]", new="flops > best[0]")
wrong("choose_raises", step=7, hint="nothing_fits", old="return best and best[1]",
      new="if best is None:\n    raise OutOfMemory('nothing fits')\nreturn best[1]")
