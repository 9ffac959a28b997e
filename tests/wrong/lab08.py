"""Wrong answers to labs/lab08_memory.py."""

# fmt: off
from wrong import Body, Table

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
wrong("measure_peak", step=1, hint="other",
      old="activations = memory.used - parameters", new="activations = memory.peak")

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
      old="(limit - fixed) // each", new="-(-(limit - fixed) // each)")

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

# step 7

wrong("choose_all", step=7, hint="nothing_fits",
      old="best and best[1]", new="best[1] if best else set(indices)")
wrong("choose_any", step=7, hint="does_not_fit",
      old="predicted_peak(units, chosen)",
      new="sum(u.kept if i in chosen else u.held for i, u in enumerate(units))")
wrong("choose_fewest", step=7, hint="too_dear",
      old="flops < best[0]", new="len(chosen) < len(best[1])")
wrong("choose_greedy", step=7, hint="too_dear", old=Body("choose"), new="""
    order = sorted(range(len(units)), key=lambda i: units[i].kept - units[i].held)
    for size in range(len(units) + 1):
        if predicted_peak(units, order[:size]) <= budget:
            return set(order[:size])
    return None
""")
wrong("peak_input_twice", step=7, hint="input_twice",
      old="before + unit.held", new="before + unit.held + unit.kept * (i in chosen)")
wrong("peak_nothing_freed", step=7, hint="freed_already", old=Body("predicted_peak"), new="""
    chosen, before, peak = set(chosen), 0, 0
    for i, unit in enumerate(units):
        before += unit.kept if i in chosen else unit.held
        if i in chosen:
            peak = max(peak, unit.held - unit.kept)
    return before + peak
""")
wrong("peak_of_kept", step=7, hint="computed_again",
      old="return peak", new="return before")

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
