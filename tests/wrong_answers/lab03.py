"""Wrong answers to labs/lab03_fsdp.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab03_fsdp.py")

# step 1

wrong("bytes_one_moment", step=1, hint="bytes",
      old="8 * (shard if stage >= 1 else psi)", new="4 * (shard if stage >= 1 else psi)")
wrong("bytes_rounded_down", step=1, hint="round_up",
      old="shard = -(-psi // n)", new="shard = psi // n")
wrong("bytes_stage_off", step=1, hint="sharded",
      old="4 * (shard if stage >= 3 else psi),\n4 * (shard if stage >= 2 else psi),",
      new="4 * (shard if stage >= 2 else psi),\n4 * (shard if stage >= 1 else psi),")
wrong("stage_always", step=1, hint="none_fits",
      old="return None", new="return 3")
wrong("stage_largest", step=1, hint="smallest", old=Body("smallest_stage"), new="""
    for stage in reversed(range(4)):
        if sum(bytes_per_rank(psi, n, stage)) + room <= limit:
            return stage
    return None
""")
wrong("stage_no_room", step=1, hint="room",
      old="+ room <= limit", new="<= limit")

# step 2

wrong("layout_empty", step=2, hint="layout_values",
      old="windows.append(window.copy_(tensor))", new="")
wrong("layout_no_views", step=2, hint="layout_views",
      old="return flat, windows", new="return flat, list(tensors)")
wrong("layout_not_padded", step=2, hint="layout_length",
      old="-(-count // n) * n", new="count")
wrong("zero1_adam_of_all", step=2, hint="adam_whole",
      old="[self.shard]", new="parameters")
wrong("zero1_first_part", step=2, hint="shard_part", old="""
    self.shard = nn.Parameter(self.flat.chunk(self.n)[dist.get_rank()])
    self.adam = make_adam([self.shard])
""", new="""
    self.shard = nn.Parameter(self.flat.chunk(self.n)[0])
    self.adam = make_adam([self.shard])
""")
wrong("zero1_kept_to_itself", step=2, hint="not_passed_round",
      old="dist.all_gather(list(self.flat.chunk(self.n)), self.shard.detach())", new="")
wrong("zero1_not_divided", step=2, hint="mean",
      old="self.shard.grad /= self.n\nself.adam.step()", new="self.adam.step()")
wrong("zero1_own_gradient", step=2, hint="not_reduced", old="""
    self.shard.grad = torch.empty_like(self.shard)
    dist.reduce_scatter(self.shard.grad, list(self.gradient.chunk(self.n)))
    self.shard.grad /= self.n
""", new="self.shard.grad = self.gradient.chunk(self.n)[dist.get_rank()].clone()")
wrong("zero1_parts_reversed", step=2, hint="wrong_part",
      old="dist.reduce_scatter(self.shard.grad, list(self.gradient.chunk(self.n)))",
      new="dist.reduce_scatter(self.shard.grad, list(self.gradient.chunk(self.n))[::-1])")
wrong("zero1_shard_copied", step=2, hint="shard_memory", old="""
    self.shard = nn.Parameter(self.flat.chunk(self.n)[dist.get_rank()])
    self.adam = make_adam([self.shard])
""", new="""
    self.shard = nn.Parameter(self.flat.chunk(self.n)[dist.get_rank()].clone())
    self.adam = make_adam([self.shard])
""")
wrong("zero1_steps_twice", step=2, hint="other",
      old="self.shard.grad /= self.n\nself.adam.step()",
      new="self.shard.grad /= self.n\nself.adam.step()\nself.adam.step()")

# step 3

wrong("bucket_each", step=3, hint="each_parameter", old=Body("Bucket.ready"), new="""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
    flat, _ = lay_out(grads, self.n)
    self.shard.grad = torch.empty_like(self.shard)
    dist.reduce_scatter(self.shard.grad, list(flat.chunk(self.n)))
    self.shard.grad /= self.n
""")
wrong("bucket_keeps", step=3, hint="not_freed",
      old="for p in self.parameters:\n    p.grad = None", new="")
wrong("bucket_once", step=3, hint="restart",
      old="    return\nself.missing = len(self.parameters)", new="    return")
wrong("zero2_gradients_stay", step=3, hint="shard_gradient_kept", old="""
        dist.all_gather(list(bucket.flat.chunk(bucket.n)), bucket.shard.detach())
    self.adam.zero_grad()
""", new="    dist.all_gather(list(bucket.flat.chunk(bucket.n)), bucket.shard.detach())")
wrong("zero2_late", step=3, hint="late",
      old="self.missing -= 1", new="")

# step 4

wrong("backward_keeps_gradient", step=4, hint="whole_gradient_kept",
      old="gradient, whole.grad = whole.grad, None", new="gradient= whole.grad")
wrong("backward_not_freed", step=4, hint="backward_free",
      old="self.free()\ngradient, whole.grad = whole.grad, None",
      new="gradient, whole.grad = whole.grad, None")
wrong("backward_not_gathered", step=4, hint="backward_gather",
      old=Body("Unit.after_forward"), new="self.free()")
wrong("forward_not_freed", step=4, hint="after_forward",
      old=Body("Unit.after_forward"),
      new="output.register_hook(lambda gradient: self.gather())")
wrong("forward_not_gathered", step=4, hint="before_forward", old="""
    def before_forward(self, module: nn.Module, inputs: tuple) -> None:
        # >>> solution 4: gather
        self.gather()
""", new="def before_forward(self, module: nn.Module, inputs: tuple) -> None:")
wrong("free_a_reference", step=4, hint="free",
      old=Body("Unit.free"), new="self.gathered = None")
wrong("gather_no_memory", step=4, hint="storage",
      old="self.whole.untyped_storage().resize_(self.whole.nbytes)", new="")
wrong("gather_reversed", step=4, hint="gathered",
      old=", self.shard.data", new="[::-1], self.shard.data")
wrong("hook_gives_zero", step=4, hint="hook_returns", old=Body("Unit.after_forward"), new="""
    def again(gradient):
        self.gather()
        return 0 * gradient

    self.free()
    output.register_hook(again)
""")
wrong("zero3_begins_each_step", step=4, hint="other",
      old="self.adam.step()  # no all-gather here, because the next gather sends the new values\n"
          "self.adam.zero_grad()",
      new="self.adam.step()\nfor state in self.adam.state.values():\n    state['step'].zero_()")

# step 5

wrong("shard_adam_first", step=5, hint="stale", edits=[
    ("for unit in model.units():",
     "adam = make_adam(list(model.parameters()))\nfor unit in model.units():"),
    ("fully_shard(model, mesh=mesh)\nreturn model, make_adam(list(model.parameters()))",
     "fully_shard(model, mesh=mesh)\nreturn model, adam")])
wrong("shard_linears", step=5, hint="too_fine",
      old="for unit in model.units():\n    fully_shard(unit, mesh=mesh)", new="""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
""")
wrong("shard_no_root", step=5, hint="no_root",
      old="fully_shard(model, mesh=mesh)", new="")
wrong("shard_nothing", step=5, hint="not_wrapped",
      old=Body("shard_model"), new="return model, make_adam(list(model.parameters()))")
wrong("shard_root_alone", step=5, hint="root_alone",
      old="for unit in model.units():\n    fully_shard(unit, mesh=mesh)", new="")
wrong("shard_stays_whole", step=5, hint="reshard",
      old="fully_shard(unit, mesh=mesh)",
      new="fully_shard(unit, mesh=mesh, reshard_after_forward=False)")

# step 6

wrong("accumulate_at_once", step=6, hint="one_forward",
      old="total += loss.detach()", new="return loss.detach()")
wrong("accumulate_last_loss", step=6, hint="loss_returned",
      old="    total += loss.detach()\nreturn total", new="return loss.detach()")
wrong("accumulate_no_sync", step=6, hint="no_sync", old="""
    total = torch.zeros((), device=inputs.device, dtype=inputs.dtype)
    for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
""", new="""
    total = torch.zeros((), dtype=inputs.dtype)
    pairs = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
    for k, (x, y) in enumerate(pairs):
        model.set_requires_gradient_sync(k == len(pairs) - 1)
""")
wrong("accumulate_sum", step=6, hint="loss_share",
      old="mean_square(model(x), y) / micro_batches", new="mean_square(model(x), y) ")
wrong("clip_always", step=6, hint="grows",
      old="min(1.0, limit / (norm + 1e-6))", new="limit / (norm + 1e-6)")
wrong("clip_norms_added", step=6, hint="norm_of_norms",
      old="dist.all_reduce(square)\nnorm = square.sqrt().item()",
      new="norm = square.sqrt()\ndist.all_reduce(norm)\nnorm = norm.item()")
wrong("clip_not_in_place", step=6, hint="not_scaled",
      old="gradient *= scale", new="gradient = gradient * scale")
wrong("clip_own_norm", step=6, hint="norm_local",
      old="dist.all_reduce(square)", new="")

# step 7

wrong("load_by_all", step=7, hint="group",
      old="dcp.load(state, checkpoint_id=folder, process_group=group)",
      new="dcp.load(state, checkpoint_id=folder)")
wrong("load_moments_alone", step=7, hint="parameters_lost",
      old='{"model": parameters, "adam": moments, "step": 0}',
      new='{"adam": moments, "step": 0}')
wrong("load_step_before", step=7, hint="step_lost", edits=[
    ('state = {"model": parameters, "adam": moments, "step": 0}',
     'step = 0\nstate = {"model": parameters, "adam": moments, "step": step}'),
    ('return state["step"]', "return step")])
wrong("save_no_moments", step=7, hint="moments_lost",
      old='"adam": moments, "step": 0', new='"step": 0')
wrong("save_rank_0", step=7, hint="one_writer", old=Body("save"), new="""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    parameters, moments = get_state_dict(model, adam, options=options)
    state = {"model": parameters, "adam": moments, "step": step}
    dcp.save(state, checkpoint_id=folder, process_group=group)
""")

# step 8

wrong("meta_built_whole", step=8, hint="built_whole",
      old=Body("build_sharded"),
      new="torch.manual_seed(3)\nreturn shard_model(Net().to(device))")
wrong("meta_drawn_as_shards", step=8, hint="drawn_as_shards", old="""
    whole = nn.Linear(module.in_features, module.out_features)
    with torch.no_grad():
        for ours, drawn in zip(module.parameters(), whole.parameters(), strict=True):
            ours.to_local().copy_(my_rows(drawn, ours))
""", new="""
    bound = module.in_features**-0.5
    for parameter in module.parameters():
        nn.init.uniform_(parameter.to_local(), -bound, bound)
""")
wrong("meta_first_rows", step=8, hint="first_rows",
      old="ours.to_local().copy_(my_rows(drawn, ours))",
      new="shard = ours.to_local()\nshard.copy_(drawn[: len(shard)])")
wrong("meta_no_biases", step=8, hint="not_written",
      old="ours.to_local().copy_(my_rows(drawn, ours))",
      new="module.weight.to_local().copy_(my_rows(whole.weight, module.weight))")

# --- more right answers and mistakes ------------------------------------------------------

# step 1

wrong("bytes_not_returned", step=1, hint="bytes", old=Body("bytes_per_rank"), new="pass")
wrong("stage_room_twice", step=1, hint="room",
      old="+ room <= limit", new="+ 2 * room <= limit")

# step 2

wrong("layout_always_padded", step=2, hint="layout_length",
      old="-(-count // n) * n", new="(count // n + 1) * n")
wrong("layout_not_returned", step=2, hint="layout_returned",
      old="return flat, windows", new="return flat")
wrong("layout_of_float32", step=2, hint="layout_dtype",
      old="tensors[0].new_zeros(-(-count // n) * n)", new="torch.zeros(-(-count // n) * n)")
wrong("zero1_all_reduces", step=2, hint="all_reduced",
      old="dist.reduce_scatter(self.shard.grad, list(self.gradient.chunk(self.n)))", new="""
    dist.all_reduce(self.gradient)
    self.shard.grad.copy_(self.gradient.chunk(self.n)[dist.get_rank()])
""")
wrong("zero1_divided_twice", step=2, hint="mean",
      old="self.shard.grad /= self.n\nself.adam.step()",
      new="self.shard.grad /= self.n**2\nself.adam.step()")
wrong("zero1_gather_not_awaited", step=2, hint="not_passed_round",
      old="dist.all_gather(list(self.flat.chunk(self.n)), self.shard.detach())",
      new="dist.all_gather(list(self.flat.chunk(self.n)), self.shard.detach(), async_op=True)")
wrong("zero1_input_is_no_list", step=2, hint="chunk_list",
      old="dist.reduce_scatter(self.shard.grad, list(self.gradient.chunk(self.n)))",
      new="dist.reduce_scatter(self.shard.grad, self.gradient)")
wrong("zero1_without_adam", step=2, hint="not_updated",
      old="self.shard.grad /= self.n\nself.adam.step()", new="self.shard.grad /= self.n")

# step 3

wrong("bucket_all_reduces", step=3, hint="all_reduced", old="""
    self.shard.grad = torch.empty_like(self.shard)
    dist.reduce_scatter(self.shard.grad, list(flat.chunk(self.n)))
""", new="""
    dist.all_reduce(flat)
    self.shard.grad = flat.chunk(self.n)[dist.get_rank()].clone()
""")
wrong("bucket_freed_first", step=3, hint="freed_early", old="""
    flat, _ = lay_out([p.grad for p in self.parameters], self.n)
    for p in self.parameters:
        p.grad = None
""", new="""
    for p in self.parameters:
        p.grad = None
    flat, _ = lay_out([p.grad for p in self.parameters], self.n)
""")
wrong("bucket_reversed", step=3, hint="gradient_order",
      old="[p.grad for p in self.parameters]", new="[p.grad for p in self.parameters[::-1]]")
wrong("zero2_zeroed_first", step=3, hint="not_updated", old="""
    self.adam.step()
    for bucket in self.buckets:
""", new="""
    self.adam.zero_grad()
    self.adam.step()
    for bucket in self.buckets:
""")

# step 4

wrong("backward_all_reduces", step=4, hint="all_reduced",
      old="dist.reduce_scatter(self.shard.grad, list(gradient.chunk(self.n)))", new="""
    dist.all_reduce(gradient)
    self.shard.grad.copy_(gradient.chunk(self.n)[dist.get_rank()])
""")
wrong("free_replaces", step=4, hint="free",
      old=Body("Unit.free"), new="self.whole = self.whole.detach().clone()")
wrong("gather_into_a_graph", step=4, hint="no_graph",
      old="self.whole.data.chunk(self.n)", new="self.whole.chunk(self.n)")
wrong("gather_shares_the_version", step=4, hint="no_graph",
      old="self.whole.data.chunk(self.n)", new="self.whole.detach().chunk(self.n)")
wrong("hook_without_argument", step=4, hint="hook_call",
      old="lambda gradient: self.gather()", new="self.gather")
wrong("hook_returns_whole", step=4, hint="hook_returns",
      old="lambda gradient: self.gather()", new="lambda gradient: (self.gather(), self.whole)[1]")

# step 5

wrong("shard_bf16", step=5, hint="precision", old="fully_shard(unit, mesh=mesh)", new="""
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(unit, mesh=mesh, mp_policy=policy)
""")
wrong("shard_model_alone", step=5, hint="two_results",
      old="fully_shard(model, mesh=mesh)\nreturn model, make_adam(list(model.parameters()))",
      new="return fully_shard(model, mesh=mesh)")
wrong("shard_no_mesh", step=5, hint="no_mesh",
      old="fully_shard(unit, mesh=mesh)", new="fully_shard(unit)")
wrong("shard_other_adam", step=5, hint="make_adam",
      old="fully_shard(model, mesh=mesh)\nreturn model, make_adam(list(model.parameters()))",
      new="fully_shard(model, mesh=mesh)\nreturn model, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)")
wrong("shard_root_first", step=5, hint="root_alone",
      old="for unit in model.units():\n    fully_shard(unit, mesh=mesh)\nfully_shard(model, mesh=mesh)",
      new="fully_shard(model, mesh=mesh)\nfor unit in model.units():\n    fully_shard(unit, mesh=mesh)")
wrong("shard_units_together", step=5, hint="root_alone",
      old="for unit in model.units():\n    fully_shard(unit, mesh=mesh)",
      new="fully_shard(model.units(), mesh=mesh)")

# step 6

wrong("accumulate_averages", step=6, hint="fsdp_averages",
      old="mean_square(model(x), y) / micro_batches",
      new="mean_square(model(x), y) / micro_batches / dist.get_world_size()")
wrong("accumulate_backward_at_the_end", step=6, hint="one_backward", old="""
        loss.backward()
        total += loss.detach()
    return total
""", new="""
        total = total + loss
    total.backward()
    return total.detach()
""")
wrong("accumulate_no_sync_of_units", step=6, hint="no_sync",
      old="loss = mean_square(model(x), y) / micro_batches", new="""
    last = len(y) and torch.equal(y, targets.chunk(micro_batches)[-1])
    for unit in model.units():
        unit.set_requires_gradient_sync(last)
    loss = mean_square(model(x), y) / micro_batches
""")
wrong("accumulate_two", step=6, hint="one_forward",
      old="zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)",
      new="zip(inputs.chunk(2), targets.chunk(2), strict=True)")
wrong("accumulate_zeroes", step=6, hint="gradient_lost",
      old="loss = mean_square(model(x), y) / micro_batches",
      new="model.zero_grad()\nloss = mean_square(model(x), y) / micro_batches")
wrong("clip_first_tensor", step=6, hint="norm_tensors",
      old="sum(gradient.square().sum() for gradient in gradients)",
      new="gradients[0].square().sum()")
wrong("clip_no_root", step=6, hint="norm_square",
      old="square.sqrt().item()", new="square.item()")
wrong("clip_returns_nothing", step=6, hint="norm_returned",
      old="    gradient *= scale\nreturn norm", new="    gradient *= scale")

# step 7

wrong("load_another_key", step=7, hint="key_lost",
      old='"adam": moments, "step": step}', new='"adam": moments, "steps": step}')
wrong("load_not_set", step=7, hint="not_set",
      old="set_state_dict(model, adam, model_state_dict=parameters, optim_state_dict=moments)",
      new="")
wrong("save_by_all", step=7, hint="group",
      old="state = {\"model\": parameters, \"adam\": moments, \"step\": step}\ndcp.save(state, checkpoint_id=folder, process_group=group)",
      new="dcp.save({\"model\": parameters, \"adam\": moments, \"step\": step}, checkpoint_id=folder)")
wrong("save_on_rank_0", step=7, hint="one_writer",
      old="state = {\"model\": parameters, \"adam\": moments, \"step\": step}\ndcp.save(state, checkpoint_id=folder, process_group=group)", new="""
    state = {"model": parameters, "adam": moments, "step": step}
    if dist.get_rank() == 0:
        dcp.save(state, checkpoint_id=folder, process_group=group)
""")

# step 8

wrong("meta_distribute_tensor", step=8,
      old="ours.to_local().copy_(my_rows(drawn, ours))", new="""
    rows = torch.distributed.tensor.distribute_tensor(
        drawn.detach(), ours.device_mesh, ours.placements
    )
    ours.copy_(rows)
""")
wrong("meta_moved", step=8, hint="meta_copy",
      old="model.to_empty(device=device)", new="model.to(device)")
wrong("meta_never_allocated", step=8, hint="on_meta",
      old="model.to_empty(device=device)", new="")
wrong("meta_other_adam", step=8, hint="meta_adam",
      old="model.to_empty(device=device)",
      new="model.to_empty(device=device)\nadam = make_adam([nn.Parameter(torch.empty(1))])")
