"""Wrong answers to labs/lab05_deepspeed.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab05_deepspeed.py")

# step 1

wrong("config_batch_of_a_rank", step=1, hint="batch_global",
      old='"train_batch_size": batch,', new='"train_batch_size": batch // ranks,')
wrong("config_bucket_in_bytes", step=1, hint="bucket", old=Body("make_config"), new="""
    accumulation, rest = divmod(batch, micro * ranks)
    if rest or accumulation == 0:
        raise ValueError("it does not divide")
    layer = WIDTH * WIDTH
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 4 * layer,
            "stage3_prefetch_bucket_size": layer,
            "stage3_param_persistence_threshold": 0,
        },
    }
""")
wrong("config_float", step=1, hint="whole_numbers",
      old=": accumulation", new=": batch / (micro * ranks)")
wrong("config_json", step=1, hint="config_kind", old=Body("make_config"), new="""
    accumulation, rest = divmod(batch, micro * ranks)
    if rest or accumulation == 0:
        raise ValueError("it does not divide")
    layer = WIDTH * WIDTH
    return str(
        {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": CLIP,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": layer,
                "stage3_prefetch_bucket_size": layer,
                "stage3_param_persistence_threshold": 0,
            },
        }
    )
""")
wrong("config_micro_of_all", step=1, hint="micro_batch",
      old='"train_micro_batch_size_per_gpu": micro,',
      new='"train_micro_batch_size_per_gpu": micro * ranks,')
wrong("config_misspelt", step=1, hint="unknown_key",
      old='"gradient_clipping"', new='"gradient_cliping"')
wrong("config_no_clipping", step=1, hint="clip_missing",
      old='"gradient_clipping": CLIP,', new="")
wrong("config_overlap", step=1, hint="unknown_zero_key", old=Body("make_config"), new="""
    accumulation, rest = divmod(batch, micro * ranks)
    if rest or accumulation == 0:
        raise ValueError("it does not divide")
    layer = WIDTH * WIDTH
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage,
            "overlap_com": True,
            "reduce_bucket_size": layer,
            "stage3_prefetch_bucket_size": layer,
            "stage3_param_persistence_threshold": 0,
        },
    }
""")
wrong("config_persistent", step=1, hint="persistence",
      old='"stage3_param_persistence_threshold": 0,', new="")
wrong("config_rounds", step=1, hint="not_divisible", old="""
    accumulation, rest = divmod(batch, micro * ranks)
    if rest or accumulation == 0:
        raise ValueError(f"{batch} rows cannot be cut for {ranks} ranks of {micro} rows each")
""", new="accumulation = max(1, batch // (micro * ranks))\nlayer = WIDTH * WIDTH")
wrong("config_stage_on_top", step=1, hint="zero_block",
      old='"stage": stage,', new="")
wrong("config_too_small", step=1, hint="not_divisible", old="""
    accumulation, rest = divmod(batch, micro * ranks)
    if rest or accumulation == 0:
        raise ValueError(f"{batch} rows cannot be cut for {ranks} ranks of {micro} rows each")
""", new="""
    accumulation = batch // (micro * ranks)
    if batch % (micro * accumulation if accumulation else 1):
        raise ValueError("it does not divide")
    layer = WIDTH * WIDTH
""")
wrong("config_without_ranks", step=1, hint="ranks_forgotten",
      old=": accumulation", new=": batch // micro")
wrong("config_other_stage", step=1, hint="other", old='"stage": stage', new='"stage": stage or 1')

# step 2

wrong("engine_no_optimizer", step=2, hint="optimizer_missing",
      old="optimizer=optimizer, config", new="config")
wrong("engine_tuple", step=2, hint="engine_first",
      old="engine, *_ =", new="return")
wrong("loop_bypasses", step=2, hint="bypassed",
      old="loss = mean_loss(engine(x), x)", new="loss = mean_loss(engine.module(x), x)")
wrong("loop_divides", step=2, hint="divided",
      old="engine.backward(loss)\nengine.step()",
      new="engine.backward(loss / engine.gradient_accumulation_steps())\nengine.step()")
wrong("loop_drops_rows", step=2, hint="rows_lost", old="""
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    total = torch.zeros((), device=rows.device)
""", new="""
    ranks = dist.get_world_size()
    mine = rows[: len(rows) // 2].chunk(ranks)[dist.get_rank()]
    total = torch.zeros((), device=rows.device)
""")
wrong("loop_last_loss", step=2, hint="loss_last",
      old="+= loss.detach() / engine.gradient_accumulation_steps", new="= loss.detach")
wrong("loop_loss_of_ranks_added", step=2, hint="loss_sum", old="""
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
""", new="""
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
    return total.item()
""")
wrong("loop_loss_of_this_rank", step=2, hint="loss_local", old="""
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
""", new="""
        total += loss.detach() / engine.gradient_accumulation_steps()
    return total.item()
""")
wrong("loop_one_forward", step=2, hint="micro_size",
      old="mine.split(engine.train_micro_batch_size_per_gpu())", new="[mine]")
wrong("loop_plain_backward", step=2, hint="plain_backward",
      old="engine.backward(loss)\nengine.step()", new="loss.backward()\nengine.step()")
wrong("loop_same_rows", step=2, hint="rows_same", old="""
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    total = torch.zeros((), device=rows.device)
""", new="""
    ranks = dist.get_world_size()
    mine = rows.chunk(ranks)[0]
    total = torch.zeros((), device=rows.device)
""")
wrong("loop_steps_at_the_end", step=2, hint="step_each",
      old="engine.backward(loss)\nengine.step()", new="engine.backward(loss)")
wrong("loop_zeroes", step=2, hint="own_work",
      old="loss = mean_loss(engine(x), x)",
      new="loss = mean_loss(engine(x), x)\nengine.zero_grad()")

# step 3

wrong("held_copy_in_stage_0", step=3, hint="master_stage0",
      old="4 / ranks if stage >= 1 else 0.0", new="4 / ranks if stage >= 1 else 4")
wrong("held_gradients_at_1", step=3, hint="gradients_stage",
      old="4 / ranks if stage >= 2 else 4.0", new="4 / ranks if stage >= 1 else 4")
wrong("held_no_copy", step=3, hint="master_forgotten",
      old="4 / ranks if stage >= 1 else 0.0", new="0")
wrong("held_one_moment", step=3, hint="moments_two", old="""
    "master": 4 / ranks if stage >= 1 else 0.0,
    "moments": 8 / ranks if stage >= 1 else 8.0,
""", new="""
    "master": 4 / ranks if stage >= 1 else 0.0,
    "moments": 4 / ranks if stage >= 1 else 4,
""")
wrong("held_parameters_at_2", step=3, hint="parameters_stage",
      old="4 / ranks if stage == 3 else 4.0", new="4 / ranks if stage >= 2 else 4")
wrong("held_sum", step=3, hint="kinds", old=Body("bytes_held"), new="""
    return sum(
        {
            "parameters": 4 / ranks if stage == 3 else 4,
            "gradients": 4 / ranks if stage >= 2 else 4,
            "master": 4 / ranks if stage >= 1 else 0,
            "moments": 8 / ranks if stage >= 1 else 8,
        }.values()
    )
""")
wrong("held_whole_copy", step=3, hint="optimizer_stage",
      old="4 / ranks if stage >= 1 else 0.0", new="4 if stage >= 1 else 0")

# step 4

wrong("bf16_alone", step=4, hint="config_lost",
      old="new = config |", new="new =")
wrong("bf16_flag", step=4, hint="bf16_block",
      old='{"enabled": True}', new="True")
wrong("bf16_in_place", step=4, hint="config_changed",
      old='new = config | {"bf16": {"enabled": True}}',
      new='new = config\nnew["bf16"] = {"enabled": True}')
wrong("bf16_sum_on_top", step=4, hint="sum_key",
      old='new["data_types"] = {"grad_accum_dtype": "fp32"}',
      new='new["grad_accum_dtype"] = "fp32"')
wrong("held_bf16_bf16_moments", step=4, hint="fp32_states", old="""
    "master": 4 / ranks if stage >= 1 else 4.0,
    "moments": 8 / ranks if stage >= 1 else 8.0,
""", new="""
    "master": 4 / ranks if stage >= 1 else 4.0,
    "moments": 4 / ranks if stage >= 1 else 4,
""")
wrong("held_bf16_fp32_gradients", step=4, hint="bf16_two",
      old="4 if fp32_sum else 2", new="4")
wrong("held_bf16_no_master_in_stage_0", step=4, hint="bf16_master",
      old="4 / ranks if stage >= 1 else 4.0", new="4 / ranks if stage >= 1 else 0")
wrong("held_bf16_sum_and_gradient", step=4, hint="fp32_sum",
      old="gradients = 4 if fp32_sum else 2", new="gradients = 6 if fp32_sum else 2")

# step 5

wrong("paper_in_place", step=5, hint="config_changed", old="""
    zero = config["zero_optimization"] | {
        "use_multi_rank_bucket_allreduce": False,
""", new="""
    zero = config["zero_optimization"]
    zero |= {
        "use_multi_rank_bucket_allreduce": False,
""")
wrong("paper_no_reduce_scatter", step=5, hint="paper_scatter",
      old='"use_multi_rank_bucket_allreduce": False,', new='"reduce_scatter": False,')
wrong("paper_reuse_only", step=5, hint="paper_release",
      old='"stage3_max_reuse_distance": 0,', new="")
wrong("paper_still_all_reduces", step=5, hint="paper_reduce",
      old='"use_multi_rank_bucket_allreduce": False,', new="")
wrong("sent_all_reduce_once", step=5, hint="all_reduce_twice",
      old='2 * once if kind == "all-reduce" else once', new="once")
wrong("sent_everything", step=5, hint="fraction",
      old='2 * once if kind == "all-reduce" else once',
      new='2 * size if kind == "all-reduce" else size if once else 0')
wrong("sent_gather_twice", step=5, hint="sent_once",
      old='2 * once if kind == "all-reduce" else once', new="2 * once")

# step 6

wrong("offload_compiled_adam", step=6, hint="force_cpu_adam",
      old=', "zero_force_ds_cpu_optimizer": False', new="")
wrong("offload_force_inside", step=6, hint="force_cpu_adam", old=Body("offloaded"), new="""
    block = {"device": "cpu", "pin_memory": device.type != "cpu"}
    zero = config["zero_optimization"] | {
        "offload_optimizer": block,
        "zero_force_ds_cpu_optimizer": False,
    }
    return config | {"zero_optimization": zero}
""")
wrong("offload_on_top", step=6, hint="offload_block", old=Body("offloaded"), new="""
    block = {"device": "cpu", "pin_memory": device.type != "cpu"}
    return config | {"offload_optimizer": block, "zero_force_ds_cpu_optimizer": False}
""")
wrong("offload_parameters", step=6, hint="offload_what", old="""
    "offload_optimizer": {"device": "cpu", "pin_memory": torch.device(device).type != "cpu"}
""", new="")
wrong("offload_pinned", step=6, hint="pinned", old=Body("offloaded"), new="""
    block = {"device": "cpu", "pin_memory": True}
    zero = config["zero_optimization"] | {"offload_optimizer": block}
    return config | {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
""")

# step 7

wrong("fsdp_averages_again", step=7, hint="fsdp_averaged",
      old="loss.backward()\ntotal += loss.detach()",
      new="(loss / dist.get_world_size()).backward()\ntotal += loss.detach()")
wrong("fsdp_keeps_gradients", step=7, hint="fsdp_zero",
      old="optimizer.zero_grad()\ndist.all_reduce(total)", new="dist.all_reduce(total)")
wrong("fsdp_not_clipped", step=7, hint="fsdp_clip",
      old="    total += loss.detach()\nnn.utils.clip_grad_norm_(model.parameters(), CLIP)",
      new="    total += loss.detach()")
wrong("fsdp_not_divided", step=7, hint="fsdp_divided",
      old="mean_loss(model(x), x) / len(mine)", new="mean_loss(model(x), x)")
wrong("fsdp_steps_each", step=7, hint="fsdp_steps",
      old="loss.backward()\ntotal += loss.detach()",
      new="loss.backward()\ntotal += loss.detach()\noptimizer.step()")
wrong("shard_layers", step=7, hint="no_root",
      old="fully_shard(model, mesh=mesh)", new="")
wrong("shard_whole", step=7, hint="units",
      old=Body("shard"), new="fully_shard(model)\nreturn model")
wrong("fsdp_scales_up", step=7, hint="fsdp_clip",
      old="nn.utils.clip_grad_norm_(model.parameters(), CLIP)\noptimizer.step()\noptimizer.zero_grad()\ndist.all_reduce(total)",
      new="""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
    for p in model.parameters():
        p.grad *= CLIP / norm
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
""")

# step 8

wrong("resume_path", step=8, hint="resume_step",
      old='state["step"]', new="path")
wrong("resume_silent", step=8, hint="silent_restart",
      old=Body("resume"),
      new='_, state = engine.load_checkpoint(folder)\nreturn state.get("step", 0)')
wrong("resume_weights_only", step=8, hint="resume_states",
      old="path, state = engine.load_checkpoint(folder)",
      new="path, state = engine.load_checkpoint(folder, load_optimizer_states=False)")
wrong("save_no_step", step=8, hint="save_step",
      old=Body("save"), new="engine.save_checkpoint(folder)")
wrong("save_rank_0", step=8, hint="save_everybody",
      old='engine.save_checkpoint(folder, client_state={"step": step})', new="")
wrong("universal_on_top", step=8, hint="universal_key",
      old=Body("universal"), new='return config | {"load_universal": True}')
wrong("whole_first_file", step=8, hint="whole_weights", old=Body("whole_weights"), new="""
    tag = Path(folder, "latest").read_text()
    file = next(Path(folder, tag).glob("*rank_0*model_states.pt"))
    return torch.load(file, weights_only=False)["module"]
""")
wrong("save_elsewhere", step=8, hint="other",
      old=Body("save"),
      new='engine.save_checkpoint(f"{folder}-{step}", client_state={"step": step})')
wrong("whole_in_bf16", step=8, hint="whole_weights",
      old="with quietly():\n    return get_fp32_state_dict_from_zero_checkpoint(folder)", new="""
    with quietly():
        whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    return {name: tensor.bfloat16() for name, tensor in whole.items()}
""")

# --- more right answers and mistakes ------------------------------------------------------

# step 1

wrong("config_asserts", step=1, hint="not_divisible", old="""
    if rest or accumulation == 0:
        raise ValueError(f"{batch} rows cannot be cut for {ranks} ranks of {micro} rows each")
""", new="assert not rest and accumulation")
wrong("config_batch_alone", step=1, hint="batch_keys",
      old='"train_micro_batch_size_per_gpu": micro,\n"gradient_accumulation_steps": accumulation,',
      new="")
wrong("config_one_step_refused", step=1, hint="divisible",
      old="if rest or accumulation == 0:", new="if rest or accumulation < 2:")
wrong("config_shared", step=1, hint="shared", edits=[
    ("def make_config(", """
        SHARED = {
            "reduce_bucket_size": WIDTH * WIDTH,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "stage3_param_persistence_threshold": 0,
        }


        def make_config(
    """),
    ('return {\n    "train_batch_size": batch,',
     'SHARED["stage"] = stage\nreturn {\n    "train_batch_size": batch,'),
    ("""
    "zero_optimization": {
        "stage": stage,
        "reduce_bucket_size": WIDTH * WIDTH,
        "stage3_prefetch_bucket_size": WIDTH * WIDTH,
        "stage3_param_persistence_threshold": 0,
    },
""", """
    "zero_optimization": SHARED,
""")])
wrong("config_two_sizes", step=1,
      old='"gradient_accumulation_steps": accumulation,', new="")

# step 2

wrong("engine_not_returned", step=2, hint="engine_first", old="""
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
""", new="deepspeed.initialize(model=model, optimizer=optimizer, config=config)")
wrong("engine_other_model", step=2, hint="optimizer_other", old="""
    optimizer = build_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
""", new="""
    optimizer = build_optimizer(build_model(device))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
""")
wrong("engine_other_optimizer", step=2, hint="optimizer_other", old="""
    optimizer = build_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
""", new="""
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
""")
wrong("loop_calls_forward", step=2,
      old="loss = mean_loss(engine(x), x)", new="loss = mean_loss(engine.forward(x), x)")
wrong("loop_clips", step=2, hint="own_work",
      old="engine.backward(loss)\nengine.step()", new="""
    engine.backward(loss)
    nn.utils.clip_grad_norm_(engine.module.parameters(), CLIP)
    engine.step()
""")
wrong("loop_max_of_losses", step=2, hint="loss_other",
      old="loss.detach() / engine", new="loss.detach() ** 2 / engine")
wrong("loop_no_backward", step=2, hint="step_each",
      old="engine.backward(loss)\nengine.step()", new="engine.step()")
wrong("loop_reduces_to_one", step=2, hint="loss_local", old="""
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
""", new="""
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.reduce(total, dst=0)
""")
wrong("loop_returns_nothing", step=2, hint="loss_kind", old="""
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
""", new="""
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
""")

# step 3

wrong("held_in_all", step=3, hint="kinds",
      old="4 / ranks if stage == 3 else 4.0", new="(4 / ranks if stage == 3 else 4.0) * PSI")
wrong("held_moments_and_master", step=3, hint="moments_two", old="""
    "master": 4 / ranks if stage >= 1 else 0.0,
    "moments": 8 / ranks if stage >= 1 else 8.0,
""", new="""
    "master": 4 / ranks if stage >= 1 else 0.0,
    "moments": 12 / ranks if stage >= 1 else 8.0,
""")

# step 4

wrong("held_bf16_sum_whole", step=4, hint="gradients_stage",
      old="gradients / ranks if stage >= 2 else float(gradients)",
      new="gradients / ranks if stage >= 2 and not fp32_sum else float(gradients)")

# step 5

wrong("paper_not_in_stage_1", step=5, hint="paper_reduce",
      old='"use_multi_rank_bucket_allreduce": False,',
      new='"use_multi_rank_bucket_allreduce": config["zero_optimization"]["stage"] == 1,')

# step 6

wrong("offload_parameters_too", step=6, hint="offload_what", old=Body("offloaded"), new="""
    block = {"device": "cpu", "pin_memory": device.type != "cpu"}
    moved = {"offload_optimizer": block, "offload_param": {"device": "cpu"}}
    zero = config["zero_optimization"] | moved
    return config | {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
""")
wrong("offload_to_the_device", step=6, hint="offload_what", old=Body("offloaded"), new="""
    block = {"device": device.type, "pin_memory": device.type != "cpu"}
    zero = config["zero_optimization"] | {"offload_optimizer": block}
    return config | {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
""")

# step 7

wrong("fsdp_all_rows", step=7, hint="rows_same",
      old="rows.chunk(dist.get_world_size())[dist.get_rank()].split(micro)",
      new="rows.split(micro)")
wrong("fsdp_at_once", step=7, hint="micro_size",
      old="[dist.get_rank()].split(micro)", new="[dist.get_rank()].split(len(rows))")
wrong("fsdp_backward_at_the_end", step=7, hint="fsdp_backward", old="""
    for x in mine:
        loss = mean_loss(model(x), x) / len(mine)
        loss.backward()
        total += loss.detach()
""", new="""
    for x in mine:
        total = total + mean_loss(model(x), x) / len(mine)
    total.backward()
    total = total.detach()
""")
wrong("fsdp_divides_by_rows", step=7, hint="fsdp_divided",
      old="mean_loss(model(x), x) / len(mine)", new="mean_loss(model(x), x) / micro")
wrong("fsdp_last_loss", step=7, hint="loss_last",
      old="loss.backward()\ntotal += loss.detach()", new="loss.backward()\ntotal = loss.detach()")
wrong("fsdp_zeroes_between", step=7, hint="fsdp_gradient",
      old="loss.backward()\ntotal += loss.detach()",
      new="optimizer.zero_grad()\nloss.backward()\ntotal += loss.detach()")
wrong("shard_kept", step=7, hint="reshard",
      old="fully_shard(layer, mesh=mesh)",
      new="fully_shard(layer, mesh=mesh, reshard_after_forward=False)")
wrong("shard_nothing_returned", step=7, hint="shard_returned",
      old="fully_shard(model, mesh=mesh)\nreturn model", new="fully_shard(model, mesh=mesh)")
wrong("shard_root_first", step=7, hint="units",
      old="for layer in model.layers:\n    fully_shard(layer, mesh=mesh)\nfully_shard(model, mesh=mesh)",
      new="fully_shard(model, mesh=mesh)\nfor layer in model.layers:\n    fully_shard(layer, mesh=mesh)")
wrong("shard_together", step=7, hint="units",
      old="for layer in model.layers:\n    fully_shard(layer, mesh=mesh)",
      new="fully_shard(list(model.layers), mesh=mesh)")

# step 8

wrong("resume_if_a_folder", step=8, hint="silent_restart",
      old="if path is None:", new="if not Path(folder).exists():")
wrong("resume_loads_nothing", step=8, hint="resume_weights",
      old="path, state = engine.load_checkpoint(folder)", new='path, state = folder, {"step": 7}')
wrong("save_another_name", step=8, edits=[
    ('client_state={"step": step}', 'client_state={"next_batch": step}'),
    ('state["step"]', 'state["next_batch"]')])
wrong("save_not_the_latest", step=8, hint="not_found",
      old='client_state={"step": step}', new='client_state={"step": step}, save_latest=False')
