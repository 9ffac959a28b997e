"""Wrong answers to assessment/capstone.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("assessment/capstone.py")

# step 1

wrong("rows_interleaved", step=1, hint="rows_other", edits=[
    ("(config.batch,)", "(config.batch // config.dp * (1 + replica),)"),
    (".chunk(config.dp)[replica]", "[-(config.batch // config.dp) :]")])
wrong("rows_of_inputs", step=1, hint="rows_shape",
      old="config.sequence + 1", new="config.sequence")
wrong("rows_of_replica_0", step=1, hint="rows_same",
      old="positions.chunk(config.dp)[replica]", new="positions.chunk(config.dp)[0]")
wrong("rows_every_other", step=1, old=".chunk(config.dp)[replica]", new="[replica :: config.dp]")
wrong("rows_of_the_names", step=1, hint="rows_text", old="""
    ids = text(config.text)
    last = len(ids) - config.sequence - 1
""", new="""
    ids = text()
    last = len(ids) - config.sequence - 1
""")
wrong("rows_once", step=1, hint="rows_again",
      old="config = self.config\nids = text(config.text)",
      new="config = self.config\nself.generator.manual_seed(config.seed)\nids = text(config.text)")

# step 2

wrong("mesh_dp_outermost", step=2, hint="mesh_names", edits=[
    ("(config.pp, config.dp, config.tp)", "(config.dp, config.pp, config.tp)"),
    ('("pp", "dp", "tp")', '("dp", "pp", "tp")')])
wrong("mesh_tp_outermost", step=2, hint="mesh_order", old=Body("make_mesh"), new="""
    ranks = torch.arange(config.pp * config.dp * config.tp).view(config.tp, config.dp, -1)
    return DeviceMesh(device_type, ranks.permute(2, 1, 0), mesh_dim_names=("pp", "dp", "tp"))
""")

# step 3

wrong("cut_nothing", step=3, hint="tp_not_cut",
      old=Body("cut"), new="return module")
wrong("cut_out_gathered", step=3, hint="tp_layouts",
      old="(output_layouts=Shard(1))", new="()")
wrong("cut_without_norms", step=3, hint="tp_norms",
      old='plan |= {name: SequenceParallel() for name in ("norm1", "norm2")}', new="")
wrong("cut_over_the_mesh", step=3, hint="tp_mesh", old='mesh["tp"], plan', new="mesh, plan")
wrong("cut_returns_nothing", step=3, hint="returned",
      old='return parallelize_module(module, mesh["tp"], plan)',
      new='parallelize_module(module, mesh["tp"], plan)')

# step 4

wrong("shard_fp32", step=4, hint="param_dtype",
      old=Body("shard"), new='return fully_shard(module, mesh=mesh["dp"])')
wrong("shard_nothing", step=4, hint="not_sharded",
      old=Body("shard"), new="return module")
wrong("shard_over_all", step=4, hint="whole_mesh",
      old='mesh=mesh["dp"],', new="")
wrong("shard_reduce_bf16", step=4, hint="reduce_dtype",
      old="dtype, reduce_dtype=torch.float32", new="dtype")
wrong("shard_always_bf16", step=4, hint="param_dtype",
      old="param_dtype=config.dtype", new="param_dtype=torch.bfloat16")
wrong("shard_converts", step=4, hint="fp32_weights",
      old='fully_shard(module, mesh', new='fully_shard(module.to(config.dtype), mesh')
wrong("shard_keeps_whole", step=4, hint="not_freed",
      old="mp_policy=policy)", new="mp_policy=policy, reshard_after_forward=False)")

# step 5

wrong("accumulate_last_loss", step=5, hint="loss_value",
      old="total += loss.detach()", new="total = loss.detach()")
wrong("accumulate_over_dp", step=5, hint="over_dp",
      old="/ config.micro_batches", new="/ config.micro_batches / config.dp")
wrong("accumulate_zeroes", step=5, hint="rows_lost",
      old="loss.backward()", new="model.zero_grad()\nloss.backward()")
wrong("clip_always", step=5, hint="clip_grows",
      old=".clamp(max=1)", new="")
wrong("clip_copies", step=5, hint="norm_copies",
      old="2 / math.prod(n for where, n in sizes if where.is_replicate())", new="2")
wrong("clip_local", step=5, hint="norm_local",
      old="dist.all_reduce(square)", new="")
wrong("clip_norms", step=5, hint="norm_of_norms", old=Body("clip"), new="""
    shards = [p.grad.to_local() for p in model.parameters()]
    norm = torch.stack(torch._foreach_norm(shards)).norm()
    dist.all_reduce(norm)
    torch._foreach_mul_(shards, (config.clip / norm).clamp(max=1))
    return norm
""")
wrong("clip_nothing", step=5, hint="not_clipped",
      old="torch._foreach_mul_(shards, (config.clip / (norm + 1e-6)).clamp(max=1))", new="")
wrong("accumulate_by_micro", step=5, hint="not_divided",
      old="/ config.micro_batches", new="/ config.micro")
wrong("accumulate_one_backward", step=5, hint="live", old=Body("accumulate"), new="""
    total = 0.0
    for part in rows.split(config.micro):
        total += loss_of(model(part[:, :-1]), part[:, 1:]) / config.micro_batches
    total.backward()
    return total.detach()
""")
wrong("clip_of_each_stage", step=5, hint="norm_stage", old=Body("clip"), new="""
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
""")
wrong("clip_without_root", step=5, hint="norm", old="square.sqrt()", new="square")

# step 6

wrong("schedule_gpipe", step=6, hint="gpipe",
      old="return Schedule1F1B(stage, config.micro_batches, loss_fn=loss_of)", new="""
    from torch.distributed.pipelining import ScheduleGPipe

    return ScheduleGPipe(stage, config.micro_batches, loss_fn=loss_of)
""")
wrong("schedule_no_group", step=6, hint="pp_group",
      old="device, group=group", new="device")
wrong("schedule_rank", step=6, hint="pp_stage",
      old='group = mesh["pp"].get_local_rank', new="group = dist.get_rank")
wrong("schedule_unscaled", step=6, hint="pp_scale",
      old="loss_fn=loss_of", new="loss_fn=loss_of, scale_grads=False")
wrong("stage_round_robin", step=6, hint="stage_layers",
      old=Body("layers_of_stage"), new="return range(stage, config.layers, config.pp)")
wrong("schedule_without_loss", step=6, hint="pp_loss", old=", loss_fn=loss_of", new="")
wrong("stage_of_two", step=6, hint="stage_layers",
      old="each = config.layers // config.pp", new="each = 2")

# step 7

wrong("budget_all_kept", step=7, hint="kept",
      old="1 if config.recompute else 24 + 4 * config.tp", new="60")
wrong("budget_no_block", step=7, hint="too_small",
      old='{"logits": logits}', new='{"block": 0, "logits": logits // 2}')
wrong("budget_nothing_whole", step=7, hint="gathered",
      old='{"logits": logits}', new='{"logits": logits, "gathered": 0, "block": 0}')
wrong("budget_state_12", step=7, hint="state",
      old="state = 16 *", new="state = 12 *")
wrong("budget_total", step=7, hint="budget_keys",
      old='parts | {"logits": logits}', new="sum(parts.values()) + logits")
wrong("budget_wide", step=7, hint="too_large",
      old="working = 2 *", new="working = 8 *")
wrong("budget_one_live", step=7, hint="kept",
      old="min(config.micro_batches, config.pp - stage) if config.pp > 1 else 1", new="1")
wrong("budget_logits_everywhere", step=7, hint="logits", old="v * 4 * last", new="v * 4")

# step 8

wrong("complete_by_name", step=8, hint="steps_sorted",
      old="sorted(int(name[5:]) for name in names if name[5:].isdecimal())",
      new="[int(name[5:]) for name in sorted(names) if name[5:].isdecimal()]")
wrong("complete_counts_all", step=8, hint="half_counted",
      old="(int(name[5:]) for name in names if name[5:].isdecimal())",
      new='({int(name[5:].partition(".")[0]) for name in names})')
wrong("save_by_copy", step=8, hint="left_over",
      old="unfinished.rename(finished)", new="shutil.copytree(unfinished, finished)")
wrong("save_by_torch", step=8, hint="no_dcp",
      old="dcp.save(state, checkpoint_id=unfinished)", new="""
    unfinished.mkdir(parents=True, exist_ok=True)
    torch.save(state, unfinished / f"rank-{dist.get_rank()}.pt")
    dist.barrier()
""")
wrong("save_clears_first", step=8, hint="overwritten",
      old="dcp.save(state, checkpoint_id=unfinished)", new="""
    if dist.get_rank() == 0:
        for old in complete(config):
            shutil.rmtree(root / f"step-{old}")
    dcp.save(state, checkpoint_id=unfinished)
""")
wrong("save_without_name", step=8, hint="none_complete",
      old="unfinished.rename(finished)", new="")
wrong("save_by_all_ranks", step=8, hint="one_rank",
      old="""
        if dist.get_rank() == 0:
            shutil.rmtree(finished, ignore_errors=True)  # of a life that was resumed before it
      """, new="""
        if True:
            shutil.rmtree(finished, ignore_errors=True)
      """)
wrong("save_keeps_two", step=8, hint="not_dropped", old="[: -config.keep]", new="[:-2]")
wrong("save_without_barrier", step=8, hint="none_complete",
      old="dist.barrier()  # nobody goes on before", new="pass  # nobody goes on before")
wrong("save_with_a_mark", step=8, edits=[(Body("save"), """
    root, step = Path(config.folder), int(state["step"])
    folder = root / f"step-{step}"
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        (folder / "complete").touch()
        for old in complete(config)[: -config.keep]:
            shutil.rmtree(root / f"step-{old}")
    dist.barrier()
"""), (Body("complete"), """
    marks = Path(config.folder).glob("step-*/complete")
    return sorted(int(mark.parent.name[5:]) for mark in marks)
""")])

# step 9

wrong("load_no_stream", step=9, hint="resume_stream",
      old='stream.generator.set_state(state["stream"])', new="")
wrong("load_oldest", step=9, hint="resume_model",
      old="max(complete(config), default=0)", new="min(complete(config), default=0)")
wrong("load_parameters", step=9, hint="resume_moments", edits=[
    ("state = training_state(model, optimizer, stream, 0)",
     'state = training_state(model, optimizer, stream, 0)\nmoments = state.pop("optimizer")'),
    ('state["optimizer"]', "moments")])
wrong("load_step_0", step=9, hint="resume_step",
      old='return int(state["step"])', new="return 0")
wrong("load_needs_one", step=9, hint="resume_none",
      old="max(complete(config), default=0)", new="max(complete(config))")

# step 10

wrong("train_fresh_stream", step=10, hint="after_kill",
      old="stream = Stream(config)\nstep = load(config, model, optimizer, stream)",
      new="step = load(config, model, optimizer, Stream(config))\nstream = Stream(config)")
wrong("train_from_0", step=10, hint="lost_steps",
      old="load(config, model, optimizer, stream)", new="0")
wrong("train_new_folder", step=10, hint="not_recovered",
      old="mesh = make_mesh(config, device.type)", new="""
    if dist.get_rank() == 0:
        Path(config.folder).mkdir()
    mesh = make_mesh(config, device.type)
""")
wrong("train_rate_before", step=10, hint="not_truth",
      old="rate(config, step)", new="rate(config, step - 1)")
wrong("train_silent", step=10, hint="untold",
      old='say(f"{line}  ≈{speed:,.0f} tokens/s  MFU ≈{mfu:.1%}")',
      new='print(f"{line}  ≈{speed:,.0f} tokens/s  MFU ≈{mfu:.1%}")')
wrong("train_thrice", step=10, hint="slow", old="if schedule is None:", new="""
    if schedule is None:
        for _ in ("loss", "norm"):
            accumulate(config, model, rows)
            optimizer.zero_grad()
""")
