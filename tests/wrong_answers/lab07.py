"""Wrong answers to labs/lab07_pytorch_gpu.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab07_pytorch_gpu.py")

# step 1

wrong("build_optimizer_first", step=1, hint="moved_late", edits=[
    ("model.to(device)", "optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)"),
    (", torch.optim.AdamW(model.parameters(), lr=RATE)", ".to(device), optimizer")])
wrong("build_stays", step=1, hint="not_moved",
      old="model.to(device)", new="")
wrong("device_built_for", step=1, hint="not_asked",
      old=Body("pick_device"), new="return torch.accelerator.current_accelerator()")
wrong("device_cuda", step=1, hint="named",
      old=Body("pick_device"),
      new='return torch.device("cuda" if torch.cuda.is_available() else "cpu")')
wrong("net_attributes", step=1, hint="attribute",
      old=Body("Net.store_moments"), new="self.mean, self.std = mean, std")
wrong("net_not_persistent", step=1, hint="not_saved",
      old='"mean", mean', new='"mean", mean, persistent=False')
wrong("net_parameters", step=1, hint="trained",
      old=Body("Net.store_moments"), new="self.mean, self.std = nn.Parameter(mean), nn.Parameter(std)")
wrong("places_moved", step=1, hint="made_and_moved",
      old=Body("Net.positions"), new="return torch.arange(x.shape[1]).to(x.device)")
wrong("places_on_cpu", step=1, hint="made_on_cpu",
      old=Body("Net.positions"), new="return torch.arange(x.shape[1])")
wrong("net_swaps_moments", step=1, hint="logits",
      old='self.register_buffer("mean", mean)\nself.register_buffer("std", std)',
      new='self.register_buffer("mean", std)\nself.register_buffer("std", mean)')
wrong("device_check_available", step=1, old=Body("pick_device"), new="""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
""")
wrong("device_is_a_string", step=1, hint="returned", old=Body("pick_device"), new="""
    if not torch.accelerator.is_available():
        return "cpu"
    return torch.accelerator.current_accelerator().type
""")
wrong("places_by_cumsum", step=1, old=Body("Net.positions"),
      new="return torch.ones(x.size(1), dtype=int, device=x.device).cumsum(0) - 1")
wrong("places_kept", step=1, hint="positions", old=Body("Net.positions"), new="""
    if not hasattr(self, "numbers"):
        self.numbers = torch.arange(x.shape[1], device=x.device)
    return self.numbers
""")
wrong("build_adam", step=1, hint="adamw",
      old="return model, torch.optim.AdamW(", new="return model, torch.optim.Adam(")
wrong("build_without_rate", step=1, hint="adamw",
      old="return model, torch.optim.AdamW(model.parameters(), lr=RATE)",
      new="return model, torch.optim.AdamW(model.parameters())")

# step 2

wrong("sender_blocking", step=2, hint="blocking",
      old="self.device, non_blocking=True", new="self.device")
wrong("sender_marks_early", step=2, hint="mark_early", edits=[
    ("self.buffers[slot].copy_(batch)", """
        self.events[slot] = torch.Event(self.device)
        self.events[slot].record()
        self.buffers[slot].copy_(batch)
    """),
    ("self.events[slot] = torch.Event(self.device)\nself.events[slot].record()", "")])
wrong("sender_never_waits", step=2, hint="overwritten",
      old="self.events[slot].record()", new="")
wrong("sender_pins_each", step=2, hint="pins_each",
      old=Body("Sender.send"),
      new="self.count += 1\nreturn batch.pin_memory().to(self.device, non_blocking=True)")
wrong("sender_synchronizes", step=2, hint="waits_for_all",
      old="self.events[slot].synchronize", new="torch.accelerator.synchronize")
wrong("sender_waits_for_itself", step=2, hint="waits_for_newest",
      old="self.events[slot] = torch.Event(self.device)\nself.events[slot].record()",
      new="event = torch.Event(self.device)\nevent.record()\nevent.synchronize()")
wrong("sender_always_float", step=2, hint="buffer_kind",
      old="torch.empty_like(like)", new="torch.empty(like.shape)")
wrong("sender_for_three_slots", step=2, hint="one_buffer",
      old="for _ in range(slots)", new="for _ in range(3)")
wrong("sender_sends_the_batch", step=2, hint="pageable",
      old="there = self.buffers[slot].to", new="there = batch.to")
wrong("sender_uses_the_first", step=2, hint="one_buffer", edits=[
    ("self.buffers[slot].copy_", "self.buffers[0].copy_"),
    ("there = self.buffers[slot]", "there = self.buffers[0]")])
wrong("sender_none", step=2, hint="returned",
      old="self.events[slot].record()\nreturn there", new="self.events[slot].record()")

# step 3

wrong("loader_always_persistent", step=3, hint="zero_workers",
      old="workers > 0", new="True")
wrong("loader_new_workers", step=3, hint="workers_end",
      old="persistent_workers=workers > 0,", new="")
wrong("loader_no_workers", step=3, hint="reads_itself",
      old="num_workers=workers,\npersistent_workers=workers > 0,", new="")
wrong("loader_pageable", step=3, hint="loader_pageable",
      old='pin_memory=device.type != "cpu",', new="")
wrong("loader_pins_for_cpu", step=3, hint="pinned_for_cpu",
      old='device.type != "cpu"', new="True")
wrong("loader_repeats", step=3, hint="order",
      old="    sampler=order(data),\n    num_workers=workers,",
      new="    sampler=list(order(data)),\n    num_workers=workers,")
wrong("loader_drops_the_last", step=3, hint="batches",
      old="pin_memory=device.type", new="drop_last=True, pin_memory=device.type")
wrong("loader_two_workers", step=3, hint="workers",
      old="num_workers=workers,\npersistent_workers=workers > 0,",
      new="num_workers=2,\npersistent_workers=True,")
wrong("loader_one_worker_less", step=3, hint="workers",
      old="num_workers=workers,\npersistent_workers=workers > 0,",
      new="num_workers=max(0, workers - 1),\npersistent_workers=workers > 1,")

# step 4

wrong("prefetch_behind", step=4, hint="not_ahead", old="""
        following = start(batch)
        if upcoming is not None:
            yield hand_over(*upcoming)
        upcoming = following
    if upcoming is not None:
        yield hand_over(*upcoming)
""", new="    yield hand_over(*start(batch))")
wrong("prefetch_blocking", step=4, hint="prefetch_blocking",
      old="tensor.to(device, non_blocking=True)", new="tensor.to(device)")
wrong("prefetch_everything", step=4, hint="all_at_once", old="""
    upcoming = None
    for batch in source:
        following = start(batch)
        if upcoming is not None:
            yield hand_over(*upcoming)
        upcoming = following
    if upcoming is not None:
""", new="for upcoming in [start(batch) for batch in source]:")
wrong("prefetch_host_waits", step=4, hint="host_waits",
      old="compute.wait_event(arrival)", new="arrival.synchronize()")
wrong("prefetch_loses_the_last", step=4, hint="batch_lost",
      old="    upcoming = following\nif upcoming is not None:\n    yield hand_over(*upcoming)",
      new="    upcoming = following")
wrong("prefetch_mark_in_compute", step=4, hint="mark_elsewhere",
      old="arrival.record(copies)", new="arrival.record(compute)")
wrong("prefetch_next_of_nothing", step=4, hint="empty_source",
      old="upcoming = None\nfor batch in source:",
      new="batches = iter(source)\nupcoming = start(next(batches))\nfor batch in batches:")
wrong("prefetch_no_wait", step=4, hint="not_waited",
      old="compute.wait_event(arrival)", new="")
wrong("prefetch_same_stream", step=4, hint="same_stream",
      old="torch.Stream(device=device)", new="torch.accelerator.current_stream(device)")
wrong("prefetch_unrecorded", step=4, hint="unrecorded",
      old="for tensor in there:\n    tensor.record_stream(compute)", new="")
wrong("prefetch_copies_one", step=4, hint="on_host",
      old="[tensor.to(device, non_blocking=True) for tensor in batch]",
      new="[batch[0].to(device, non_blocking=True), batch[1]]")
wrong("prefetch_gives_none", step=4, hint="empty_source",
      old="    upcoming = following\nif upcoming is not None:\n    yield hand_over(*upcoming)",
      new="    upcoming = following\nyield hand_over(*upcoming) if upcoming else None")
wrong("prefetch_hands_over_the_next", step=4, hint="other_batch",
      old="        yield hand_over(*upcoming)\n    upcoming = following",
      new="        yield hand_over(*following)\n    upcoming = following")
wrong("prefetch_reads_all", step=4, hint="reads_all",
      old="upcoming = None\nfor batch in source:",
      new="upcoming = None\nfor batch in list(source):")
wrong("prefetch_stays_in_copies", step=4, hint="stream_left", old="""
    if upcoming is not None:
        yield hand_over(*upcoming)
    upcoming = following
""", new="""
    with copies:
        if upcoming is not None:
            yield hand_over(*upcoming)
    upcoming = following
""")
wrong("prefetch_waits_for_the_stream", step=4, hint="waits_for_both",
      old="compute.wait_event(arrival)", new="compute.wait_stream(copies)")

# step 5

wrong("epoch_accumulates", step=5, hint="accumulated",
      old="optimizer.zero_grad()\nlogits = model(x)", new="logits = model(x)")
wrong("epoch_counts_all", step=5, hint="all_counted", old=Body("train_epoch"), new="""
    sums = torch.zeros(3, device=next(model.parameters()).device)
    samples = 0
    for x, y in source:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
        loss.backward()
        optimizer.step()
        known = (y >= 0).sum()
        samples = samples + len(y)
        right = (logits.argmax(1) == y).sum()
        sums += torch.stack([loss.detach() * known, right, known])
    total, right, _ = sums.tolist()
    return total / samples, right / samples
""")
wrong("epoch_keeps_graphs", step=5, hint="graph_kept", edits=[
    ("sums = None", "sums = torch.zeros(3, device=next(model.parameters()).device)"),
    ("""
            new = torch.stack([loss.detach() * known, right.float(), known.float()])
            sums = new if sums is None else sums + new
        total, right, count = sums.tolist()
        if total != total:
            raise RuntimeError("the loss is not a number")
    """, """
            sums = sums + torch.stack([loss * known, right, known])
        total, right, count = sums.detach().tolist()
    """)])
wrong("epoch_mask", step=5, hint="mask",
      old="loss = F.cross_entropy(logits, y, ignore_index=-1)\nloss.backward()",
      new="loss = F.cross_entropy(logits[y >= 0], y[y >= 0])\nloss.backward()")
wrong("epoch_mean_of_means", step=5, hint="mean_of_means", edits=[
    ("sums = None",
     "sums = torch.zeros(3, device=next(model.parameters()).device)\nbatches = 0"),
    ("new = torch.stack([loss.detach() * known, right.float(), known.float()])",
     "sums += torch.stack([loss.detach(), right, known])"),
    ("sums = new if sums is None else sums + new", "batches = batches + 1"),
    ("""
        if total != total:
            raise RuntimeError("the loss is not a number")
        return total / count, right / count
    """, "return total / batches, right / count")])
wrong("epoch_no_step", step=5, hint="not_trained", old="""
    loss = F.cross_entropy(logits, y, ignore_index=-1)
    loss.backward()
    optimizer.step()
""", new="loss = F.cross_entropy(logits, y, ignore_index=-1)\nloss.backward()")
wrong("epoch_asks_for_the_first", step=5, hint="asks_each_step",
      old="sums = new if sums is None else sums + new",
      new="if sums is None:\n    print(loss.item())\nsums = new if sums is None else sums + new")
wrong("epoch_asks_for_three", step=5, old=Body("train_epoch"), new="""
    total, right, count = torch.zeros(3, device=next(model.parameters()).device).unbind()
    for x, y in source:
        optimizer.zero_grad()
        logits, known = model(x), (y >= 0).sum()
        loss = F.cross_entropy(logits, y, ignore_index=-1, reduction="sum")
        (loss / known).backward()
        optimizer.step()
        total, count = total + loss.detach(), count + known
        right = right + (logits.argmax(1) == y).sum()
    return total.item() / count.item(), right.item() / count.item()
""")
wrong("epoch_in_percent", step=5, hint="accuracy",
      old="    raise RuntimeError(\"the loss is not a number\")\nreturn total / count, right / count",
      new="    raise RuntimeError(\"the loss is not a number\")\nreturn total / count, 100 * right / count")
wrong("epoch_learns_no_label", step=5, hint="unlabelled",
      old="loss = F.cross_entropy(logits, y, ignore_index=-1)\nloss.backward()",
      new="loss = F.cross_entropy(logits, y)\nloss.backward()")

# step 6

wrong("mixed_asks", step=6, hint="asks_in_step",
      old="known, right,", new="known.item(), right,")
wrong("mixed_backward_inside", step=6, hint="backward_inside", old=Body("mixed_step"), new="""
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
        loss.backward()
    optimizer.step()
    known = (y >= 0).sum()
    right = (logits.argmax(1) == y).sum()
    sums += torch.stack([loss.detach() * known, right, known])
""")
wrong("mixed_converts", step=6, hint="converted", old="""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
""", new="""
    model.bfloat16()
    logits = model(x.bfloat16())
    loss = F.cross_entropy(logits.float(), y, ignore_index=-1)
""")
wrong("mixed_for_the_cpu", step=6, hint="no_autocast",
      old="x.device.type", new='"cpu"')
wrong("mixed_loss_outside", step=6, hint="loss_outside",
      old="    loss = F.cross_entropy(logits, y, ignore_index=-1)\nloss.backward()",
      new="loss = F.cross_entropy(logits, y, ignore_index=-1)\nloss.backward()")
wrong("mixed_means", step=6, hint="mean_of_means",
      old="[loss.detach() * known, right, known]", new="[loss.detach() , right, known]")
wrong("mixed_new_sums", step=6, hint="not_in_place",
      old="sums += torch", new="sums = sums + torch")
wrong("sums_in_bf16", step=6, hint="sums_dtype",
      old="zeros(3, device=device)", new="zeros(3, device=device, dtype=torch.bfloat16)")
wrong("sums_are_any", step=6, hint="sums_start", old="zeros(3, device=device)",
      new="empty(3, device=device)")
wrong("sums_in_fp64", step=6, old="zeros(3, device=device)",
      new="zeros(3, device=device, dtype=torch.float64)")
wrong("mixed_keeps_graphs", step=6, hint="graph_kept",
      old="[loss.detach() * known, right, known]", new="[loss * known, right, known]")
wrong("mixed_loss_from_fp32", step=6,
      old="    loss = F.cross_entropy(logits, y, ignore_index=-1)\nloss.backward()",
      new="loss = F.cross_entropy(logits.float(), y, ignore_index=-1)\nloss.backward()")
wrong("mixed_no_step", step=6, hint="not_trained", old="""
        loss = F.cross_entropy(logits, y, ignore_index=-1)
    loss.backward()
    optimizer.step()
""", new="    loss = F.cross_entropy(logits, y, ignore_index=-1)\nloss.backward()")
wrong("mixed_swaps_sums", step=6, hint="sums_order",
      old="[loss.detach() * known, right, known]", new="[loss.detach() * known, known, right]")

# step 7

wrong("optimizer_float_rate", step=7, hint="rate_is_a_number",
      old=Body("fast_optimizer"),
      new="return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True, capturable=True)")
wrong("optimizer_not_capturable", step=7, hint="not_capturable",
      old=", capturable=True", new="")
wrong("optimizer_unfused", step=7, hint="not_fused",
      old="True, capturable", new="False, capturable")
wrong("rate_replaced", step=7, hint="rate_replaced",
      old=".fill_(value)", new='= torch.tensor(value, device=group["lr"].device)')
wrong("replay_borrows", step=7, hint="borrowed",
      old="x.clone(), y.clone()", new="x, y")
wrong("replay_captures_each", step=7, hint="captures_each",
      old="if self.graph is None:", new="if True:")
wrong("replay_loses_one", step=7, hint="not_replayed", old=Body("Replayed.__call__"), new="""
    if self.warm > 0:
        self.warm -= 1
        self.step(x, y)
        return
    if self.graph is None:
        self.x, self.y = x.clone(), y.clone()
        self.graph, capture = new_graph(x.device)
        with capture(self.graph):
            self.step(self.x, self.y)
        return
    self.x.copy_(x)
    self.y.copy_(y)
    self.graph.replay()
""")
wrong("replay_never", step=7, hint="not_captured",
      old=Body("Replayed.__call__"), new="self.step(x, y)")
wrong("replay_no_warm_up", step=7, hint="no_warm_up",
      old="self.step(x, y)", new="")
wrong("replay_stale", step=7, hint="stale_input",
      old="self.x.copy_(x)\nself.y.copy_(y)", new="self.x, self.y = x, y")
wrong("optimizer_another_rate", step=7, hint="adamw",
      old="torch.tensor(RATE, device=device)", new="torch.tensor(1e-3, device=device)")
wrong("rate_added", step=7, hint="rate_value", old=".fill_(value)", new=".add_(value)")
wrong("rate_of_one_group", step=7, hint="rate_groups",
      old='for group in optimizer.param_groups:\n    group["lr"].fill_(value)',
      new='optimizer.param_groups[0]["lr"].fill_(value)')
wrong("replay_after_two", step=7, hint="warm_count",
      old="self.step, self.warm, self.graph = step, warm, None",
      new="self.step, self.warm, self.graph = step, 2, None")
wrong("replay_warms_once_more", step=7, hint="warm_count",
      old="self.warm > 0", new="self.warm >= 0")

# step 8

wrong("measure_cold", step=8, hint="warm_up_measured",
      old="for _ in range(warm):\n    work()", new="")
wrong("measure_launches", step=8, hint="not_synchronized",
      old="work()\ntorch.accelerator.synchronize()", new="work()")
wrong("measure_own_clock", step=8, hint="own_clock",
      old="clock() - begin", new="time.perf_counter() - begin")
wrong("measure_queue", step=8, hint="queued_before",
      old="torch.accelerator.synchronize()\nbegin = clock()", new="begin = clock()")
wrong("record_all", step=8, hint="warm_recorded",
      old="warmup=warm, active=count,", new="warmup=0, active=warm + count,")
wrong("record_no_shapes", step=8, hint="no_shapes",
      old=", record_shapes=True", new="")
wrong("record_no_schedule", step=8, hint="no_schedule",
      old="activities=activities, schedule=plan", new="activities=activities")
wrong("record_nowhere", step=8, hint="no_trace",
      old="profiler.export_chrome_trace(str(path))", new="")
wrong("record_without_warm", step=8, hint="step_count",
      old="range(warm + count)", new="range(count)")
wrong("trace_total", step=8, hint="total_time",
      old='own[around[-1][0]] -= event["dur"]', new="pass")
wrong("trace_all_ancestors", step=8, hint="grandchildren",
      old='if around:\n    own[around[-1][0]] -= event["dur"]',
      new='for key_around, _ in around:\n    own[key_around] -= event["dur"]')
wrong("trace_one_thread", step=8, hint="threads",
      old='open_in.setdefault(event["tid"], [])', new='open_in.setdefault("all", [])')
wrong("trace_by_name", step=8, hint="by_name",
      old='json.dumps(event["args"].get("Input Dims", []))', new='"[]"')
wrong("trace_unsorted", step=8, hint="row_order",
      old="own.most_common()", new="own.items()")
wrong("hot_calls_of_all_steps", step=8, hint="hot_calls",
      old="[POINTS, CHANNELS]], BATCH", new="[POINTS, CHANNELS]], 2 * BATCH")
wrong("hot_optimizer", step=8, hint="hot_name",
      old='return "aten::mm",', new='return "aten::addmm",')
wrong("hot_product_of_the_model", step=8, hint="hot_shapes",
      old="[[POINTS, POINTS], [POINTS, CHANNELS]]", new="[[BATCH, CLASSES], [CLASSES, WIDTH]]")
wrong("hot_wrapper", step=8, hint="wrapper",
      old='return "aten::mm",', new='return "aten::matmul",')
wrong("measure_least", step=8, hint="not_median",
      old="statistics.median(times)", new="min(times)")
wrong("measure_milliseconds", step=8, hint="seconds",
      old="statistics.median(times)", new="1e3 * statistics.median(times)")
wrong("measure_three_first", step=8, hint="calls_of_work",
      old="for _ in range(warm):\n    work()", new="for _ in range(3):\n    work()")
wrong("record_to_a_path", step=8, hint="no_trace", old="str(path)", new="path")
wrong("record_two_first", step=8, hint="warm_recorded", old="warmup=warm", new="warmup=2")
wrong("trace_adjacent", step=8, hint="adjacent",
      old='around[-1][1] <= event["ts"]', new='around[-1][1] < event["ts"]')
wrong("trace_shorter_first", step=8, hint="ties",
      old='(event["ts"], -event["dur"])', new='event["ts"]')
wrong("trace_of_two_steps", step=8, hint="all_steps",
      old='steps = sum(name.startswith("ProfilerStep") for name in {e.get("name", "") for e in events})',
      new="steps = 2")

# more right answers

wrong("right_device_by_count", step=1, old=Body("pick_device"), new="""
    if torch.accelerator.device_count() == 0:
        return torch.device("cpu")
    return torch.accelerator.current_accelerator()
""")
wrong("right_net_by_buffers", step=1, old=Body("Net.store_moments"),
      new="self.mean = nn.Buffer(mean)\nself.std = nn.Buffer(std)")
wrong("right_positions_in_context", step=1, old=Body("Net.positions"),
      new="with x.device:\n    return torch.arange(x.shape[1])")
wrong("right_build_fused", step=1,
      old="return model, torch.optim.AdamW(model.parameters(), lr=RATE)",
      new="return model, torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.999), fused=True)")
wrong("right_sender_by_deque", step=2, edits=[
    (Body("Sender.__init__"), """
        self.device = device
        self.ring = collections.deque(
            (torch.empty_like(like).pin_memory(), torch.Event(device)) for _ in range(slots))
    """),
    (Body("Sender.send"), """
        buffer, event = self.ring.popleft()
        event.synchronize()
        buffer.copy_(batch)
        there = torch.empty_like(batch, device=self.device)
        there.copy_(buffer, non_blocking=True)
        event.record()
        self.ring.append((buffer, event))
        return there
    """)])
wrong("right_sender_in_own_stream", step=2, edits=[
    ("self.events = [None] * slots",
     "self.events = [None] * slots\nself.stream = torch.Stream(device=device)"),
    ("""
        there = self.buffers[slot].to(self.device, non_blocking=True)
        self.events[slot] = torch.Event(self.device)
        self.events[slot].record()
    """, """
        with self.stream:
            there = self.buffers[slot].to(self.device, non_blocking=True)
            self.events[slot] = self.stream.record_event()
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(self.events[slot])
        there.record_stream(current)
    """)])
wrong("right_loader_by_batch_sampler", step=3, old=Body("make_loader"), new="""
    from torch.utils.data import BatchSampler
    return DataLoader(
        data, batch_sampler=BatchSampler(order(data), BATCH, drop_last=False),
        num_workers=workers, persistent_workers=bool(workers), pin_memory=device.type != "cpu")
""")
wrong("right_prefetch_waits_first", step=4, edits=[
    ("compute.wait_event(arrival)", "compute.wait_stream(copies)"),
    ("""
        following = start(batch)
        if upcoming is not None:
            yield hand_over(*upcoming)
        upcoming = following
    """, """
        ready = upcoming and hand_over(*upcoming)
        upcoming = start(batch)
        if ready:
            yield ready
    """)])
wrong("right_prefetch_sets_the_stream", step=4, old="""
    arrival = torch.Event(device)
    with copies:
        there = [tensor.to(device, non_blocking=True) for tensor in batch]
        arrival.record(copies)
    return there, arrival
""", new="""
    torch.accelerator.set_stream(copies)
    there = [tensor.to(device, non_blocking=True) for tensor in batch]
    arrival = torch.Event(device)
    arrival.record()
    torch.accelerator.set_stream(compute)
    return there, arrival
""")
wrong("right_epoch_by_lists", step=5, old=Body("train_epoch"), new="""
    losses, rights, counts = [], [], []
    for x, y in source:
        optimizer.zero_grad()
        logits = model(x)
        known = y >= 0
        each = F.cross_entropy(logits, y.clamp(min=0), reduction="none") * known
        (each.sum() / known.sum()).backward()
        optimizer.step()
        losses.append(each.detach().sum())
        rights.append(((logits.argmax(dim=-1) == y) & known).sum())
        counts.append(known.sum())
    count = torch.stack(counts).sum()
    return (torch.stack(losses).sum() / count).item(), (torch.stack(rights).sum() / count).item()
""")
wrong("right_replay_captures_after_warm_up", step=7, old=Body("Replayed.__call__"), new="""
    if self.graph is not None:
        for mine, given in zip(self.inputs, (x, y)):
            mine.copy_(given)
        self.graph.replay()
        return
    self.step(x, y)
    self.warm -= 1
    if self.warm == 0:
        self.inputs = [x.clone(), y.clone()]
        self.graph, capture = new_graph(x.device)
        with capture(self.graph):
            self.step(*self.inputs)
""")
wrong("right_record_when_ready", step=8, old=Body("record"), new="""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    profiler = profile(
        activities=activities, record_shapes=True,
        schedule=schedule(wait=warm, warmup=0, active=count, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(os.fspath(path)))
    profiler.start()
    for _ in range(warm + count):
        step()
        profiler.step()
    profiler.stop()
""")
wrong("right_hot_spot_measured", step=8, old=Body("hot_spot"), new="""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        record(slow_step(torch.device("cpu")), path)
        row = read_trace(path)[0]
    return row.name, row.shapes, row.calls
""")

# mistakes that are easily overlooked, or whose hints are easily confused

wrong("build_without_decay", step=1, hint="adamw",
      old="return model, torch.optim.AdamW(model.parameters(), lr=RATE)",
      new="return model, torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0)")
wrong("optimizer_without_decay", step=7, hint="adamw",
      old="lr=rate, fused=True", new="lr=rate, weight_decay=0.0, fused=True")
wrong("sender_copies_before_it_fills", step=2, hint="copied_before_filled", old="""
    self.buffers[slot].copy_(batch)
    there = self.buffers[slot].to(self.device, non_blocking=True)
""", new="""
    there = self.buffers[slot].to(self.device, non_blocking=True)
    self.buffers[slot].copy_(batch)
""")
wrong("sender_event_of_cuda", step=2, hint="cuda_only",
      old="self.events[slot] = torch.Event(self.device)", new="self.events[slot] = torch.cuda.Event()")
wrong("prefetch_stream_of_cuda", step=4, hint="cuda_only",
      old="torch.Stream(device=device)", new="torch.cuda.Stream()")
wrong("prefetch_waits_after_yield", step=4, hint="not_waited", edits=[
    ("compute.wait_event(arrival)", "pass"),
    ("    yield hand_over(*upcoming)\nupcoming = following",
     "    yield hand_over(*upcoming)\n    compute.wait_event(upcoming[1])\nupcoming = following")])
wrong("epoch_means_by_counts", step=5, hint="mean_of_means",
      old="[loss.detach() * known, right.float()", new="[loss.detach(), right.float()")
wrong("epoch_of_sums", step=5, hint="summed", edits=[
    ("loss = F.cross_entropy(logits, y, ignore_index=-1)\nloss.backward()",
     'loss = F.cross_entropy(logits, y, ignore_index=-1, reduction="sum")\nloss.backward()'),
    ("loss.detach() * known, right.float()", "loss.detach(), right.float()")])
wrong("epoch_last_loss", step=5, hint="last_loss",
      old='    raise RuntimeError("the loss is not a number")\nreturn total / count, right / count',
      new='    raise RuntimeError("the loss is not a number")\nreturn loss.item(), right / count')
wrong("epoch_sums_of_integers", step=5, hint="sums_dtype", edits=[
    ("sums = None", "sums = torch.zeros(3, device=next(model.parameters()).device, dtype=torch.long)"),
    ("sums = new if sums is None else sums + new", "sums += new")])
wrong("epoch_synchronizes", step=5, hint="asks_each_step",
      old="sums = new if sums is None else sums + new",
      new="sums = new if sums is None else sums + new\ntorch.accelerator.synchronize()")
wrong("mixed_means_by_sizes", step=6, hint="mean_of_means",
      old="[loss.detach() * known, right, known]", new="[loss.detach() * len(y), right, known]")
wrong("mixed_fraction_of_right_answers", step=6, hint="right_answers",
      old="[loss.detach() * known, right, known]", new="[loss.detach() * known, right / known, known]")
wrong("replay_warms_once_less", step=7, hint="warm_count",
      old="self.warm > 0", new="self.warm > 1")
wrong("replay_loses_the_graph", step=7, hint="graph_lost",
      old="self.graph, capture = new_graph(x.device)\nwith capture(self.graph):",
      new="graph, capture = new_graph(x.device)\nwith capture(graph):")
wrong("measure_adds_up", step=8, hint="not_median",
      old="statistics.median(times)", new="sum(times)")
wrong("measure_synchronizes_cuda", step=8, hint="cuda_only",
      old="torch.accelerator.synchronize()\nbegin = clock()", new="torch.cuda.synchronize()\nbegin = clock()")
wrong("trace_in_milliseconds", step=8, hint="microseconds",
      old="time / steps)", new="time / steps / 1000)")
wrong("trace_closes_one", step=8, hint="one_closed",
      old='while around and around[-1][1] <= event["ts"]:',
      new='if around and around[-1][1] <= event["ts"]:')
wrong("replay_borrows_labels", step=7, hint="borrowed",
      old="x.clone(), y.clone()", new="x.clone(), y")
