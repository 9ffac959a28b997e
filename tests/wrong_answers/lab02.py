"""Wrong answers to labs/lab02_ddp.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab02_ddp.py")

# step 1

wrong("start_cpu_always", step=1, hint="no_accelerator",
      old=Body("init_distributed"), new='dist.init_process_group("gloo")\nreturn torch.device("cpu")')
wrong("start_nccl", step=1, hint="no_gpu", old=Body("init_distributed"), new="""
    dist.init_process_group("nccl")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
""")
wrong("start_no_device", step=1, hint="not_a_device",
      old=Body("init_distributed"), new='dist.init_process_group("gloo")\nreturn "cpu"')
wrong("start_nothing", step=1, hint="not_joined",
      old=Body("init_distributed"), new='return torch.device("cpu")')
wrong("start_rank_for_local_rank", step=1, hint="device_index", edits=[
    ('local_rank, local_world = int(os.environ["LOCAL_RANK"])',
     'rank, local_world = int(os.environ["RANK"])'),
    ("""
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    """, "device = torch.device(torch.accelerator.current_accelerator().type, rank)")])
wrong("start_shares_a_device", step=1, hint="shared_device",
      old="() and torch.accelerator.device_count() >= local_world", new="()")

wrong("start_returns_nothing", step=1, hint="start_none", old="return device\n# <<< solution", new="# <<< solution")
wrong("right_start_device_mesh", step=1, old=Body("init_distributed"), new="""
    kind = "cpu"
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        kind = torch.accelerator.current_accelerator().type
    dist.init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ["LOCAL_RANK"]))
""")
wrong("right_start_imported_device_mesh", step=1, old=Body("init_distributed"), new="""
    from torch.distributed.device_mesh import init_device_mesh

    here = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    init_device_mesh("cuda" if here else "cpu", mesh_shape=(int(os.environ["WORLD_SIZE"]),))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if here else torch.device("cpu")
""")
wrong("right_start_explicit", step=1, old=Body("init_distributed"), new="""
    local, local_world = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    few = torch.cuda.device_count() < local_world
    device = torch.device("cpu" if few else f"cuda:{local}")
    if not few:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if few else "nccl", init_method="env://", rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return device
""")
wrong("start_one_gpu", step=1, hint="device_index", old="current_accelerator().type, local_rank)", new="current_accelerator().type)")
wrong("start_off_by_one", step=1, hint="no_accelerator", old="device_count() >= local_world", new="device_count() > local_world")
wrong("start_rank_modulo_devices", step=1, hint="device_index", edits=[
  ("device = torch.device(torch.accelerator.current_accelerator().type, local_rank)\ntorch.accelerator.set_device_index(local_rank)",
   "local_rank = int(os.environ['RANK']) % torch.accelerator.device_count()\ndevice = torch.device(torch.accelerator.current_accelerator().type, local_rank)\ntorch.accelerator.set_device_index(local_rank)")])
wrong("start_passes_local_ranks", step=1, hint="not_joined", old='    dist.init_process_group("gloo")\nreturn device', new='    dist.init_process_group("gloo", rank=local_rank, world_size=local_world)\nreturn device')
wrong("start_gloo_on_gpus", step=1, hint="gloo_on_gpu", old='torch.accelerator.set_device_index(local_rank)\ndist.init_process_group(device_id=device)', new='torch.accelerator.set_device_index(local_rank)\ndist.init_process_group("gloo")')
wrong("start_nccl_on_the_cpu", step=1, hint="no_gpu", old=Body("init_distributed"), new="""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.device_count() >= local_world:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
""")

# step 2

wrong("shard_drops_the_rest", step=2, hint="dropped",
      old="order[rank::world]", new="order[: length // world * world][rank::world]")
wrong("shard_ignores_epoch", step=2, hint="epoch_ignored",
      old="generator = torch.Generator().manual_seed(epoch)",
      new="generator = torch.Generator().manual_seed(0)")
wrong("shard_overlaps", step=2, hint="overlap", old=Body("shard"), new="""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    share = -(-length // world)
    return order[rank : rank + share]
""")
wrong("shard_invents_indices", step=2, hint="no_such_index",
      old="order += [order[i % length] for i in range(missing)]", new="order += range(length, length + missing)")
wrong("shard_own_seed", step=2, hint="overlap",
      old="generator = torch.Generator().manual_seed(epoch)",
      new="generator = torch.Generator().manual_seed(epoch + rank)")
wrong("shard_same_for_all", step=2, hint="same_shard",
      old="order[rank::world]", new="order[0::world]")
wrong("shard_tensor", step=2, hint="not_a_list", old=Body("shard"), new="""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch))
    return torch.cat([order, order[: -length % world]])[rank::world]
""")
wrong("shard_uneven", step=2, hint="uneven",
      old="order += [order[i % length] for i in range(missing)]", new="")
wrong("shard_unseeded", step=2, hint="unseeded", old=Body("shard"), new="""
    torch.seed()
    order = torch.randperm(length).tolist()
    order += order[: -length % world]
    return order[rank::world]
""")

wrong("shard_padded_once", step=2, hint="short_padding",
      old="order += [order[i % length] for i in range(missing)]", new="order += order[:missing]")
wrong("shard_padded_with_minus_one", step=2, hint="no_such_index",
      old="order += [order[i % length] for i in range(missing)]", new="order += [-1] * missing")
wrong("shard_always_pads", step=2, hint="padding_too_long",
      old="missing = math.ceil(length / world) * world - length", new="missing = world - length % world")
wrong("shard_fixed", step=2, hint="fixed_shards", old=Body("shard"), new="""
    order = [i % length for i in range(math.ceil(length / world) * world)][rank::world]
    generator = torch.Generator().manual_seed(epoch)
    return [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
""")
wrong("shard_nothing", step=2, hint="not_a_list", old="return order[rank::world]", new="order[rank::world]")
wrong("shard_of_tensors", step=2, hint="not_a_list", old="return order[rank::world]",
      new="return [torch.tensor(i) for i in order[rank::world]]")
wrong("shard_floats", step=2, hint="not_a_list", old="return order[rank::world]",
      new="return [float(i) for i in order[rank::world]]")
wrong("shard_floor", step=2, hint="dropped", old=Body("shard"), new="""
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(length, generator=generator).tolist()
    share = max(1, length // world)
    order = order * world
    return order[rank * share : (rank + 1) * share]
""")
wrong("shard_from_one", step=2, hint="no_such_index",
      old="order = torch.randperm(length, generator=generator).tolist()", new="order = (1 + torch.randperm(length, generator=generator)).tolist()")
wrong("shard_starts_at_next_rank", step=2, hint="uneven", old="return order[rank::world]", new="return order[rank + 1 :: world]")
wrong("right_shard_by_sampler", step=2, old=Body("shard"), new="""
    sampler = DistributedSampler(range(length), world, rank, shuffle=True, seed=0)
    sampler.set_epoch(epoch)
    return list(sampler)
""")
wrong("right_shard_in_blocks", step=2, old=Body("shard"), new="""
    import random

    order = list(range(length))
    random.Random(epoch).shuffle(order)
    share = -(-length // world)
    while len(order) < share * world:
        order.append(order[len(order) - length])
    return order[rank * share : (rank + 1) * share]
""")
wrong("right_shard_with_tensors", step=2, old=Body("shard"), new="""
    torch.manual_seed(epoch + 7)
    order = torch.randperm(length)
    order = order.repeat(world)[: math.ceil(length / world) * world]
    return order.view(-1, world)[:, rank].tolist()
""")
wrong("right_shard_with_itertools", step=2, old=Body("shard"), new="""
    import itertools

    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    endless = itertools.cycle(order)
    return list(itertools.islice(endless, rank, world * (1 + (length - 1) // world), world))
""")

wrong("shard_two_orders", step=2, hint="epoch_ignored",
      old="generator = torch.Generator().manual_seed(epoch)",
      new="generator = torch.Generator().manual_seed(epoch % 2)")
wrong("shard_global_state", step=2, hint="unseeded", old=Body("shard"), new="""
    order = torch.randperm(length).tolist()
    order += [order[i % length] for i in range(-length % world)]
    return order[rank::world]
""")
wrong("shard_generator_survives", step=2, hint="not_repeated", old=Body("shard"), new="""
    import random
    if not hasattr(shard, "random"):
        shard.random = random.Random(0)
    order = list(range(length))
    shard.random.shuffle(order)
    order += [order[i % length] for i in range(-length % world)]
    return order[rank::world]
""")
wrong("shard_by_chunk", step=2, hint="uneven", old=Body("shard"), new="""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch))
    return order.chunk(world)[rank].tolist()
""")

# step 3

wrong("broadcast_copies", step=3, hint="not_broadcast",
      old="detach(), src", new="clone(), src")
wrong("broadcast_last_rank", step=3, hint="other_source",
      old=".detach(), src=0", new=", src=dist.get_world_size() - 1")
wrong("broadcast_no_buffers", step=3, hint="buffers", old=Body("broadcast_state"), new="""
    for parameter in module.parameters():
        dist.broadcast(parameter.detach(), src=0)
""")
wrong("broadcast_no_frozen", step=3, hint="frozen", old=Body("broadcast_state"), new="""
    for parameter in module.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.detach(), src=0)
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
""")
wrong("broadcast_nothing", step=3, hint="not_broadcast",
      old=Body("broadcast_state"),
      new="for tensor in module.state_dict().values():\n    tensor.clone()")
wrong("broadcast_only_rank_0", step=3, hint="some_ranks", old=Body("broadcast_state"), new="""
    if dist.get_rank() == 0:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
""")
wrong("broadcast_own_source", step=3, hint="own_source",
      old=".detach(), src=0", new=", src=dist.get_rank()")

wrong("right_broadcast_state_dict", step=3, old=Body("broadcast_state"), new="""
    for name, tensor in sorted(module.state_dict().items()):
        dist.broadcast(tensor, 0)
""")
wrong("right_broadcast_flat", step=3, old=Body("broadcast_state"), new="""
    tensors = [*module.parameters(), *module.buffers()]
    flat = torch.cat([t.detach().double().flatten() for t in tensors])
    dist.broadcast(flat, src=0)
    with torch.no_grad():
        for t, piece in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(piece.view_as(t))
""")
wrong("right_broadcast_objects", step=3, old=Body("broadcast_state"), new="""
    state = [module.state_dict()]
    dist.broadcast_object_list(state, src=0)
    module.load_state_dict(state[0])
""")
wrong("right_broadcast_async", step=3, old=Body("broadcast_state"), new="""
    with torch.no_grad():
        works = [dist.broadcast(t, src=0, async_op=True) for t in (*module.buffers(), *module.parameters())]
        for work in works:
            work.wait()
""")
wrong("right_broadcast_zeroed_sum", step=3, old=Body("broadcast_state"), new="""
    with torch.no_grad():
        for t in module.state_dict().values():
            if dist.get_rank():
                t.zero_()
            dist.all_reduce(t)
""")
wrong("right_broadcast_coalesced", step=3, old=Body("broadcast_state"), new="""
    dist._broadcast_coalesced(dist.group.WORLD, list(module.state_dict().values()), 2**20, 0)
""")
wrong("broadcast_averages", step=3, hint="other_source", old=Body("broadcast_state"), new="""
    with torch.no_grad():
        for t in module.state_dict().values():
            dist.all_reduce(t)
            t.copy_(t / dist.get_world_size())
""")
wrong("broadcast_rebinds", step=3, hint="buffers", old=Body("broadcast_state"), new="""
    for tensor in module.parameters():
        dist.broadcast(tensor.detach(), src=0)
    for tensor in module.buffers():
        copy = tensor.clone()
        dist.broadcast(copy, src=0)
        tensor = copy
""")
wrong("broadcast_no_parameters", step=3, hint="parameters", old="[*module.parameters(), *module.buffers()]", new="module.buffers()")
wrong("broadcast_floats_only", step=3, hint="buffers", old="dist.broadcast(tensor.detach(), src=0)", new="if tensor.is_floating_point():\n    dist.broadcast(tensor.detach(), src=0)")

wrong("broadcast_uses_none", step=3, hint="broadcast_none", old=Body("broadcast_state"), new="""
    for name, tensor in module.state_dict().items():
        received = dist.broadcast(tensor, src=0)
        tensor.copy_(received.clone())
""")
wrong("broadcast_not_waited", step=3, hint="broadcast_not_waited", old="dist.broadcast(tensor.detach(), src=0)", new="dist.broadcast(tensor.detach(), src=0, async_op=True)")
wrong("broadcast_of_gradients", step=3, hint="broadcast_none", old="dist.broadcast(tensor.detach(), src=0)", new="dist.broadcast(tensor.grad, src=0)")

# step 4

wrong("average_divided_twice", step=4, hint="divided_twice",
      old="if parameter.grad is not None:",
      new="if parameter.grad is not None:\n    parameter.grad /= dist.get_world_size()")
wrong("average_none_gradient", step=4, hint="none_gradient", old="""
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
""", new="parameter.grad /= dist.get_world_size()\ndist.all_reduce(parameter.grad)")
wrong("average_not_divided", step=4, hint="not_divided",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.all_reduce(parameter.grad)")
wrong("average_not_waited", step=4, hint="not_waited",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, None, True)")
wrong("average_nothing", step=4, hint="not_reduced",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="parameter.grad *= 1")
wrong("average_only_rank_0", step=4, hint="some_ranks",
      old="grad is not None", new="grad is not None and dist.get_rank() == 0")
wrong("average_reduces_a_copy", step=4, hint="copy_reduced",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="copy = parameter.grad.clone()\ndist.all_reduce(copy)\ncopy /= dist.get_world_size()")
wrong("right_average_polled", step=4, old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    work = dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, None, True)
    while not work.is_completed():
        pass
    parameter.grad /= dist.get_world_size()
""")
wrong("average_weights_only", step=4, hint="subset",
      old="grad is not None", new="grad is not None and parameter.dim() > 1")

wrong("average_skips_zeros", step=4, hint="some_ranks",
      old="grad is not None", new="grad is not None and parameter.grad.abs().sum() > 0")
wrong("average_without_skipping", step=4, hint="none_gradient",
      old="if parameter.grad is not None:", new="if True:")
wrong("average_assigns_none", step=4, hint="returns_none",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="parameter.grad = dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()")
wrong("average_assigns_none_last", step=4, hint="returns_none",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="parameter.grad /= dist.get_world_size()\nparameter.grad = dist.all_reduce(parameter.grad)")
wrong("average_divides_none", step=4, hint="returns_none",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="parameter.grad = dist.all_reduce(parameter.grad) / dist.get_world_size()")
wrong("average_reduces_a_clone", step=4, hint="copy_reduced",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.all_reduce(parameter.grad.clone())\nparameter.grad /= dist.get_world_size()")
wrong("average_by_reduce", step=4, hint="one_rank_only",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.reduce(parameter.grad, dst=0)\nparameter.grad /= dist.get_world_size()")
wrong("average_maximum", step=4, hint="other_operation",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)\nparameter.grad /= dist.get_world_size()")
wrong("average_of_a_list", step=4, hint="not_a_tensor", old=Body("average_gradients"), new="""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    dist.all_reduce(gradients)
    for gradient in gradients:
        gradient /= dist.get_world_size()
""")
wrong("average_reduces_the_parameters", step=4, hint="copy_reduced", old=Body("average_gradients"), new="""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.detach())
            parameter.grad /= dist.get_world_size()
""")
wrong("average_by_fixed_world", step=4, hint="divided_by_other",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="dist.all_reduce(parameter.grad)\nparameter.grad /= 2")
wrong("average_rebinds", step=4, hint="copy_reduced", old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    gradient = parameter.grad / dist.get_world_size()
    dist.all_reduce(gradient)
""")
wrong("average_until_none", step=4, hint="not_reduced", old="if parameter.grad is not None:", new="if parameter.grad is None:\n    break\nelse:")
wrong("right_average_functional", step=4, old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    from torch.distributed import _functional_collectives as funcol

    parameter.grad = funcol.all_reduce(parameter.grad, "sum", dist.group.WORLD) / dist.get_world_size()
""")
wrong("right_average_by_group", step=4, old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    dist.group.WORLD.allreduce([parameter.grad]).wait()
    parameter.grad.div_(dist.get_world_size())
""")
wrong("average_by_group_not_waited", step=4, hint="not_waited", old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    parameter.grad.div_(dist.get_world_size())
    dist.group.WORLD.allreduce(parameter.grad)
""")
wrong("right_average_coalesced", step=4, old=Body("average_gradients"), new="""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    dist.all_reduce_coalesced(gradients)
    torch._foreach_div_(gradients, dist.get_world_size())
""")
wrong("right_average_flat", step=4, old=Body("average_gradients"), new="""
    trained = [p for p in module.parameters() if p.requires_grad]
    flat = nn.utils.parameters_to_vector([p.grad for p in trained])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for p, piece in zip(trained, flat.split([p.numel() for p in trained])):
        p.grad = piece.view_as(p)
""")
wrong("right_average_gathered", step=4, old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    found = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(found, parameter.grad)
    parameter.grad = torch.stack(found).mean(0)
""")
wrong("right_average_reduce_and_broadcast", step=4, old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    dist.reduce(parameter.grad, dst=0)
    parameter.grad /= dist.get_world_size()
    dist.broadcast(parameter.grad, src=0)
""")
wrong("right_average_autograd_function", step=4, old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    total = torch.distributed.nn.functional.all_reduce(parameter.grad)
    parameter.grad.copy_(total / dist.get_world_size())
""")
wrong("right_average_all_then_wait", step=4, old=Body("average_gradients"), new="""
    gradients = [p.grad for p in reversed(list(module.parameters())) if p.requires_grad]
    for gradient in gradients:
        gradient.mul_(1 / dist.get_world_size())
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    for work in works:
        work.wait()
""")
wrong("average_broadcasts", step=4, hint="broadcast_gradients", old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="dist.broadcast(parameter.grad, src=0)")
wrong("average_of_old_gradients", step=4, hint="stale_gradients", old=Body("average_gradients"), new="""
    if not hasattr(average_gradients, "grads"):
        average_gradients.grads = [p.grad for p in module.parameters() if p.grad is not None]
    for g in average_gradients.grads:
        dist.all_reduce(g)
        g /= dist.get_world_size()
""")

# step 5

wrong("hooks_all_in_finish", step=5, hint="not_early", edits=[
    ("(parameter, dist.all_reduce(parameter.grad, async_op=True))", "parameter"),
    ("for parameter, work in self.started:\n    work.wait()",
     "for parameter in self.started:\n    dist.all_reduce(parameter.grad)")])
wrong("hooks_divide_in_flight", step=5, hint="touched",
      old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
      new="""
    self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
    parameter.grad /= dist.get_world_size()
""")
wrong("hooks_first_step_only", step=5, hint="first_step_only", edits=[
    (Body("HookDDP.start"), """
        if len(self.started) < len([p for p in self.module.parameters() if p.requires_grad]):
            self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
    """),
    (Body("HookDDP.finish"), """
        for parameter, work in self.started:
            if not getattr(work, "seen", False):
                work.seen = True
                work.wait()
                parameter.grad /= dist.get_world_size()
    """)])
wrong("hooks_never_forgotten", step=5, hint="not_forgotten",
      old="self.started.clear()", new="")
wrong("hooks_not_divided", step=5, hint="not_divided",
      old=Body("HookDDP.finish"),
      new="for _, work in self.started:\n    work.wait()\nself.started.clear()")
wrong("hooks_not_waited", step=5, hint="not_waited",
      old=Body("HookDDP.finish"),
      new="for parameter, _ in self.started:\n    parameter.grad.mul_(1)\nself.started.clear()")
wrong("hooks_on_frozen", step=5, hint="frozen_hook",
      old="if parameter.requires_grad:", new="if True:")
wrong("hooks_on_weights_only", step=5, hint="subset", old=Body("HookDDP.start"), new="""
    if parameter.dim() > 1:
        self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
""")
wrong("hooks_synchronous", step=5, hint="synchronous",
      old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
      new="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()")
wrong("hooks_without_broadcast", step=5, hint="no_initial_broadcast",
      old="self.started: list[tuple[nn.Parameter, dist.Work]] = []\nbroadcast_state(module)",
      new="self.started = []")
wrong("hooks_wait_for_biases", step=5, hint="synchronous",
      old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
      new="""
    started = dist.all_reduce(parameter.grad, async_op=parameter.dim() > 1)
    if started is None:
        parameter.grad /= dist.get_world_size()
    else:
        self.started.append((parameter, started))
""")
wrong("right_hooks_by_futures", step=5, old="work.wait()\nparameter.grad /= dist.get_world_size()",
      new="work.get_future().wait()\nparameter.grad /= dist.get_world_size()")

wrong("hooks_on_gradients", step=5, hint="hook_kind",
      old="parameter.register_post_accumulate_grad_hook(self.start)", new="parameter.register_hook(self.start)")
wrong("hooks_on_gradients_with_parameter", step=5, hint="hook_kind",
      old="parameter.register_post_accumulate_grad_hook(self.start)",
      new="parameter.register_hook(lambda gradient, p=parameter: self.start(p))")
wrong("hooks_synchronous_work", step=5, hint="returns_none",
      old="dist.all_reduce(parameter.grad, async_op=True)))", new="dist.all_reduce(parameter.grad)))")
wrong("hooks_list_is_none", step=5, hint="list_is_none",
      old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
      new="self.started = self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))")
wrong("hooks_list_set_to_none", step=5, hint="list_is_none", old="self.started.clear()", new="self.started = None")
wrong("hooks_reduce_a_clone", step=5, hint="copy_reduced",
      old="dist.all_reduce(parameter.grad, async_op=True)))", new="dist.all_reduce(parameter.grad.clone(), async_op=True)))")
wrong("hooks_reduce_to_rank_0", step=5, hint="one_rank_only",
      old="dist.all_reduce(parameter.grad, async_op=True)))", new="dist.reduce(parameter.grad, 0, async_op=True)))")
wrong("hooks_assign_a_work", step=5, hint="work_as_gradient",
      old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
      new="parameter.grad = dist.all_reduce(parameter.grad, async_op=True)")
wrong("hooks_call_the_hook", step=5, hint="hook_called",
      old="parameter.register_post_accumulate_grad_hook(self.start)", new="parameter.register_post_accumulate_grad_hook(self.start(parameter))")
wrong("hooks_skip_zeros", step=5, hint="some_ranks",
      old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
      new="if parameter.grad.any():\n    self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))")
wrong("hooks_wait_for_the_last", step=5, hint="not_waited", old=Body("HookDDP.finish"), new="""
    self.started[-1][1].wait()
    for parameter, _ in self.started:
        parameter.grad /= dist.get_world_size()
    self.started.clear()
""")
wrong("hooks_missing", step=5, hint="not_reduced", old="parameter.register_post_accumulate_grad_hook(self.start)", new="pass")
wrong("hooks_finish_nothing", step=5, hint="not_waited", old=Body("HookDDP.finish"), new="pass")
wrong("right_hooks_functional", step=5, edits=[
    (Body("HookDDP.start"), """
        from torch.distributed import _functional_collectives as funcol

        self.started.append((parameter, funcol.all_reduce(parameter.grad, "sum", dist.group.WORLD)))
    """),
    (Body("HookDDP.finish"), """
        for parameter, total in self.started:
            parameter.grad = total / dist.get_world_size()
        self.started = []
    """)])
wrong("right_hooks_functional_waited", step=5, edits=[
    (Body("HookDDP.start"), """
        import torch.distributed._functional_collectives as funcol

        self.started.append((parameter, funcol.all_reduce(parameter.grad / dist.get_world_size(), "sum", list(range(dist.get_world_size())))))
    """),
    (Body("HookDDP.finish"), """
        while self.started:
            parameter, total = self.started.pop()
            parameter.grad.copy_(total.wait())
    """)])
wrong("right_hooks_by_group", step=5, old="dist.all_reduce(parameter.grad, async_op=True)))",
      new="dist.group.WORLD.allreduce(parameter.grad)))")
wrong("right_hooks_by_group_with_options", step=5, old="dist.all_reduce(parameter.grad, async_op=True)))",
      new="dist.distributed_c10d._get_default_group().allreduce([parameter.grad], dist.AllreduceOptions())))")
wrong("right_hooks_divide_first", step=5, edits=[
    ("self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
     "parameter.grad.div_(dist.get_world_size())\nself.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))"),
    (Body("HookDDP.finish"), "while self.started:\n    self.started.pop()[1].wait()")])
wrong("right_hooks_in_a_dict", step=5, edits=[
    ("self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
     "self.works = getattr(self, 'works', {})\nself.works[parameter] = dist.all_reduce(parameter.grad, async_op=True)"),
    (Body("HookDDP.finish"), """
        for work in self.works.values():
            work.wait()
        torch._foreach_div_([p.grad for p in self.works], dist.get_world_size())
        self.works = {}
    """)])
wrong("right_hooks_by_accumulators", step=5, old="parameter.register_post_accumulate_grad_hook(self.start)", new="""
    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_, p=parameter: self.start(p))
    self.accumulators = [*getattr(self, "accumulators", []), accumulator]
""")
wrong("right_hooks_lambda", step=5, old="parameter.register_post_accumulate_grad_hook(self.start)",
      new="parameter.register_post_accumulate_grad_hook(lambda p: self.start(p))")
wrong("right_hooks_of_scattered_parts", step=5, edits=[
    (Body("HookDDP.start"), """
        world = dist.get_world_size()
        flat = parameter.grad.flatten()
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % world)])
        part = padded.new_empty(padded.numel() // world)
        self.started.append((parameter, padded, part, dist.reduce_scatter_tensor(part, padded, async_op=True)))
    """),
    (Body("HookDDP.finish"), """
        for parameter, padded, part, work in self.started:
            work.wait()
            dist.all_gather_into_tensor(padded, part / dist.get_world_size())
            parameter.grad.copy_(padded[: parameter.numel()].view_as(parameter))
        self.started.clear()
    """)])

wrong("hooks_below_the_api", step=5, hint="not_seen", edits=[
    (Body("HookDDP.start"), """
        total = torch.ops._c10d_functional.all_reduce(parameter.grad, "sum", dist.group.WORLD.group_name)
        self.started.append((parameter, total))
    """),
    (Body("HookDDP.finish"), """
        for parameter, total in self.started:
            parameter.grad = torch.ops._c10d_functional.wait_tensor(total) / dist.get_world_size()
        self.started.clear()
    """)])

wrong("hooks_of_the_module", step=5, hint="hook_too_early", old="""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self.start)
""", new="""
    module.register_full_backward_hook(
        lambda *_: [self.start(p) for p in module.parameters() if p.requires_grad]
    )
""")
wrong("hooks_divide_a_frozen_gradient", step=5, hint="none_gradient", old=Body("HookDDP.finish"), new="""
    for _, work in self.started:
        work.wait()
    for parameter in self.module.parameters():
        parameter.grad /= dist.get_world_size()
    self.started.clear()
""")
wrong("right_hooks_on_clones_of_gradients", step=5, edits=[
    ("parameter.register_post_accumulate_grad_hook(self.start)",
     "parameter.register_hook(lambda gradient, p=parameter: self.start_with(p, gradient.clone()))"),
    ("def start(self, parameter: nn.Parameter) -> None:", """
        def start_with(self, parameter, gradient):
            work = dist.all_reduce(gradient, async_op=True)
            self.started.append((parameter, gradient, work))

        def start(self, parameter: nn.Parameter) -> None:
    """),
    (Body("HookDDP.finish"), """
        for parameter, gradient, work in self.started:
            work.wait()
            parameter.grad = gradient / dist.get_world_size()
        self.started.clear()
    """)])
wrong("hooks_wait_at_once", step=5, hint="synchronous", edits=[("self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))", "work = dist.all_reduce(parameter.grad, async_op=True)\nwork.wait()\nparameter.grad /= dist.get_world_size()"), (Body("HookDDP.finish"), "self.started.clear()")])
wrong("hooks_wait_for_a_future", step=5, hint="synchronous", old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))", new="work = dist.all_reduce(parameter.grad, async_op=True)\nwork.get_future().wait()\nself.started.append((parameter, work))")
wrong("hooks_bind_late", step=5, hint="other_parameter", old="parameter.register_post_accumulate_grad_hook(self.start)", new="parameter.register_post_accumulate_grad_hook(lambda _: self.start(parameter))")
wrong("hooks_in_forward", step=5, hint="more_each_step", edits=[("parameter.register_post_accumulate_grad_hook(self.start)", "pass"),
 (Body("HookDDP.forward"), """
    for p in self.module.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(self.start)
    return self.module(*inputs)
""")])
wrong("right_hooks_coalesced", step=5, old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))", new="self.started.append((parameter, dist.all_reduce_coalesced([parameter.grad], async_op=True)))")
wrong("right_hooks_divide_in_futures", step=5, edits=[("self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))", """
    world = dist.get_world_size()
    future = dist.all_reduce(parameter.grad, async_op=True).get_future()
    self.started.append((parameter, future.then(lambda f: f.value()[0].div_(world))))
"""), (Body("HookDDP.finish"), "torch.futures.wait_all([f for _, f in self.started])\nself.started.clear()")])
wrong("right_hooks_finish_in_a_callback", step=5, old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))", new="""
    if not self.started:
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
    self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
""")

# step 6

wrong("buckets_copied_out", step=6, hint="not_views", edits=[
    (Body("BucketDDP.keep_in_bucket"),
     "self.bucket_of[parameter].views[parameter].copy_(parameter.grad)"),
    (Body("BucketDDP.finish"), """
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat /= dist.get_world_size()
            for parameter, view in bucket.views.items():
                parameter.grad.copy_(view)
        self.begin()
    """)])
wrong("buckets_count_numbers", step=6, hint="bucket_size", edits=[
    ("if not groups or parameter.nbytes > room:",
     "size = parameter.numel()\nif not groups or size > room:"),
    ("room -= parameter.nbytes", "room -= size")])
wrong("buckets_divided_twice", step=6, hint="divided_twice",
      old="bucket.flat /= dist.get_world_size()", new="""
    bucket.flat /= dist.get_world_size()
    for parameter in bucket.views:
        parameter.grad /= dist.get_world_size()
""")
wrong("buckets_front_first", step=6, hint="fill_order",
      old="reversed(parameters)", new="parameters")
wrong("buckets_no_views", step=6, hint="not_views",
      old="piece.view_as(p)", new="piece.view_as(p).clone()")
wrong("buckets_not_kept", step=6, hint="copy_reduced",
      old=Body("BucketDDP.keep_in_bucket"), new="pass")
wrong("buckets_not_waited", step=6, hint="not_waited",
      old=Body("BucketDDP.finish"), new="self.begin()")
wrong("buckets_one_at_a_time", step=6, hint="one_launch", old="""
    while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting:
        bucket = self.buckets[self.launched]
""", new="bucket = self.buckets[self.launched]\nif not bucket.waiting:")
wrong("buckets_reallocated", step=6, hint="reallocated",
      old=Body("BucketDDP.keep_in_bucket"), new="""
    if not hasattr(parameter, "was_kept"):
        view = self.bucket_of[parameter].views[parameter]
        view.copy_(parameter.grad)
        parameter.grad, parameter.was_kept = view, True
""")
wrong("buckets_when_ready", step=6, hint="launch_order",
      old=Body("BucketDDP.launch_in_order"), new="""
    bucket = self.bucket_of[parameter]
    bucket.waiting.discard(parameter)
    if not bucket.waiting:
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        self.launched += 1
""")

wrong("buckets_refuse_an_exact_fit", step=6, hint="exact_fit",
      old="if not groups or parameter.nbytes > room:", new="if not groups or parameter.nbytes >= room:")
wrong("buckets_begin_with_an_empty_one", step=6, hint="bucket_empty",
      edits=[("groups: list[list[nn.Parameter]] = []\nroom = 0", "groups: list[list[nn.Parameter]] = [[]]\nroom = bucket_bytes"),
             ("flat = torch.zeros(sum(sizes), dtype=group[0].dtype, device=group[0].device)", "flat = torch.zeros(sum(sizes))")])
wrong("buckets_forget_the_last", step=6, hint="bucket_lost", old="for group in groups:", new="for group in groups[:-1]:")
wrong("buckets_not_returned", step=6, hint="bucket_list", old="return buckets", new="pass")
wrong("buckets_closed_after_the_limit", step=6, hint="bucket_size", old="if not groups or parameter.nbytes > room:", new="if not groups or room <= 0:")
wrong("buckets_not_begun", step=6, hint="not_begun",
      old="    bucket.flat /= dist.get_world_size()\nself.begin()", new="    bucket.flat /= dist.get_world_size()")
wrong("buckets_not_begun_and_removed", step=6, hint="not_begun", edits=[
    ("    bucket.flat /= dist.get_world_size()\nself.begin()", "    bucket.flat /= dist.get_world_size()"),
    (".waiting.discard(parameter)", ".waiting.remove(parameter)")])
wrong("buckets_reduce_a_clone", step=6, hint="copy_reduced", old="dist.all_reduce(bucket.flat, async_op=True)", new="dist.all_reduce(bucket.flat.clone(), async_op=True)")
wrong("buckets_synchronous", step=6, hint="returns_none", old="dist.all_reduce(bucket.flat, async_op=True)", new="dist.all_reduce(bucket.flat)")
wrong("buckets_reduce_to_rank_0", step=6, hint="one_rank_only", old="dist.all_reduce(bucket.flat, async_op=True)", new="dist.reduce(bucket.flat, 0, async_op=True)")
wrong("buckets_of_other_gradients", step=6, hint="copy_reduced", old="parameter.grad = view", new="pass")
wrong("buckets_not_divided", step=6, hint="not_divided", old="    bucket.flat /= dist.get_world_size()\nself.begin()", new="    pass\nself.begin()")
wrong("buckets_counted_twice", step=6, hint="endless", old="self.launched += 1", new="pass")
wrong("buckets_view_without_copy", step=6, hint="zero_gradients", old="view.copy_(parameter.grad)", new="pass")
wrong("buckets_view_added", step=6, hint="old_values", old="view.copy_(parameter.grad)", new="view.add_(parameter.grad)")
wrong("right_buckets_functional", step=6, edits=[
    ("bucket.work = dist.all_reduce(bucket.flat, async_op=True)", """
        from torch.distributed import _functional_collectives as funcol

        bucket.work = funcol.all_reduce(bucket.flat, "sum", dist.group.WORLD)
    """),
    ("bucket.work.wait()\nbucket.flat /= dist.get_world_size()", "bucket.flat.copy_(bucket.work / dist.get_world_size())")])
wrong("right_buckets_by_group", step=6, old="dist.all_reduce(bucket.flat, async_op=True)", new="dist.group.WORLD.allreduce([bucket.flat])")
wrong("right_buckets_by_offsets", step=6, old=Body("make_buckets"), new="""
    def close(group):
        flat = torch.zeros(sum(p.numel() for p in group), dtype=group[0].dtype, device=group[0].device)
        views, offset = {}, 0
        for p in group:
            views[p] = flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        return Bucket(flat=flat, views=views)

    buckets, group, size = [], [], 0
    for p in parameters[::-1]:
        n = p.numel() * p.element_size()
        if group and size + n > bucket_bytes:
            buckets.append(close(group))
            group, size = [], 0
        group.append(p)
        size += n
    if group:
        buckets.append(close(group))
    return buckets
""")
wrong("right_buckets_as_strided", step=6, old="{p: piece.view_as(p) for p, piece in pieces}", new="{p: torch.as_strided(flat, p.shape, p.stride(), piece.storage_offset()) for p, piece in pieces}")
wrong("right_buckets_launch_recursive", step=6, old=Body("BucketDDP.launch_in_order"), new="""
    self.bucket_of[parameter].waiting -= {parameter}
    for bucket in self.buckets[self.launched :]:
        if bucket.waiting:
            break
        bucket.work = dist.all_reduce(bucket.flat, op=dist.ReduceOp.SUM, async_op=True)
        self.launched += 1
""")
wrong("right_buckets_identity", step=6, old=Body("BucketDDP.keep_in_bucket"), new="""
    view = self.bucket_of[parameter].views[parameter]
    if parameter.grad is not view:
        view.copy_(parameter.grad)
        parameter.grad = view
""")
wrong("right_buckets_divide_first", step=6, edits=[
    ("bucket.work = dist.all_reduce(bucket.flat, async_op=True)", "bucket.flat /= dist.get_world_size()\nbucket.work = dist.all_reduce(bucket.flat, async_op=True)"),
    ("    bucket.flat /= dist.get_world_size()\nself.begin()", "    pass\nself.begin()")])

wrong("buckets_keep_the_room", step=6, hint="bucket_size", old="    room = bucket_bytes", new="    room += bucket_bytes")
wrong("buckets_begin_too_early", step=6, hint="work_lost", old=Body("BucketDDP.finish"), new="""
    self.begin()
    for bucket in self.buckets:
        bucket.work.wait()
        bucket.flat /= dist.get_world_size()
""")
wrong("buckets_after_the_last", step=6, hint="no_bound",
      old="while self.launched < len(self.buckets) and not self.buckets", new="while not self.buckets")
wrong("buckets_always_wait", step=6, hint="not_noted",
      old="self.bucket_of[parameter].waiting.discard(parameter)", new="pass")
wrong("right_buckets_compared", step=6, old=Body("BucketDDP.launch_in_order"), new="""
    self.bucket_of[parameter].waiting.discard(parameter)
    ready = [bucket for bucket in self.buckets if not bucket.waiting]
    for bucket in self.buckets[self.launched :]:
        if bucket not in ready:
            return
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        self.launched = self.launched + 1
""")
wrong("buckets_wait_at_launch", step=6, hint="synchronous", old="bucket.work = dist.all_reduce(bucket.flat, async_op=True)", new="bucket.work = dist.all_reduce(bucket.flat, async_op=True)" + "\nbucket.work.wait()")
wrong("buckets_compare_numbers", step=6, hint="same_numbers", old="parameter.grad.data_ptr() != view.data_ptr()", new="not torch.equal(parameter.grad, view)")
wrong("buckets_overlap", step=6, hint="views_overlap", old=Body("make_buckets"), new="""
    groups, room = [], 0
    for p in reversed(parameters):
        if not groups or p.nbytes > room:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(p)
        room -= p.nbytes
    buckets = []
    for group in groups:
        flat = torch.zeros(sum(p.numel() for p in group))
        buckets.append(Bucket(flat, {p: flat[: p.numel()].view_as(p) for p in group}))
    return buckets
""")
wrong("buckets_divided_for_each_view", step=6, hint="divided_twice", old="bucket.work.wait()\nbucket.flat /= dist.get_world_size()", new="bucket.work.wait()\nfor p in bucket.views:\n    bucket.flat /= dist.get_world_size()")

# step 7

wrong("accumulate_all_silent", step=7, hint="not_reenabled", old=Body("accumulate"), new="""
    with ddp.no_sync():
        for micro_batch in micro_batches:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("accumulate_always_sends", step=7, hint="no_sync_unused", old=Body("accumulate"), new="""
    for micro_batch in micro_batches:
        (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
        ddp.finish()
""")
wrong("accumulate_divided_by_ranks", step=7, hint="loss_wrong", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            (loss_of(ddp, micro_batch) / dist.get_world_size()).backward()
    (loss_of(ddp, last) / dist.get_world_size()).backward()
    ddp.finish()
""")
wrong("accumulate_last_only", step=7, hint="micro_batch_lost", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch)
    (loss_of(ddp, last) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("accumulate_not_divided", step=7, hint="loss_not_divided", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch).backward()
    loss_of(ddp, last).backward()
    ddp.finish()
""")
wrong("no_sync_sends", step=7, hint="no_sync_sends",
      old="if self.sync:", new="if True:")
wrong("no_sync_stays", step=7, hint="not_reenabled",
      old=Body("AccumulatingDDP.no_sync"), new="self.sync = False\nyield")
wrong("no_sync_without_finally", step=7, hint="not_restored",
      old=Body("AccumulatingDDP.no_sync"), new="""
        before, self.sync = self.sync, False
        yield
        self.sync = before
""")

wrong("no_sync_ends_the_outer", step=7, hint="nested",
      old="            self.sync = before", new="            self.sync = True")

wrong("accumulate_one_backward", step=7, hint="one_backward", old=Body("accumulate"), new="""
    total = sum(loss_of(ddp, each) for each in micro_batches) / len(micro_batches)
    total.backward()
    ddp.finish()
""")
wrong("accumulate_all_forwards_first", step=7, hint="one_backward", old=Body("accumulate"), new="""
    *silent, last = [loss_of(ddp, each) / len(micro_batches) for each in micro_batches]
    with ddp.no_sync():
        for loss in silent:
            loss.backward()
    last.backward()
    ddp.finish()
""")
wrong("accumulate_keeps_only_when_syncing", step=7, hint="silent_not_kept",
      old=Body("AccumulatingDDP.on_gradient"), new="""
    if self.sync:
        self.keep_in_bucket(parameter)
        self.launch_in_order(parameter)
""")
wrong("accumulate_not_finished", step=7, hint="not_finished",
      old="(loss_of(ddp, last) / len(micro_batches)).backward()\nddp.finish()", new="(loss_of(ddp, last) / len(micro_batches)).backward()")
wrong("accumulate_not_finished_and_removed", step=7, hint="not_finished", edits=[
    ("(loss_of(ddp, last) / len(micro_batches)).backward()\nddp.finish()", "(loss_of(ddp, last) / len(micro_batches)).backward()"),
    (".waiting.discard(parameter)", ".waiting.remove(parameter)")])
wrong("accumulate_without_no_sync", step=7, hint="no_sync_unused", old=Body("accumulate"), new="""
    for each in micro_batches:
        (loss_of(ddp, each) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("accumulate_without_no_sync_and_removed", step=7, hint="no_sync_unused", edits=[
    (Body("accumulate"), """
        for each in micro_batches:
            (loss_of(ddp, each) / len(micro_batches)).backward()
        ddp.finish()
    """),
    (".waiting.discard(parameter)", ".waiting.remove(parameter)")])
wrong("accumulate_finishes_in_no_sync", step=7, hint="not_reenabled", old=Body("accumulate"), new="""
    with ddp.no_sync():
        for each in micro_batches[:-1]:
            (loss_of(ddp, each) / len(micro_batches)).backward()
        (loss_of(ddp, micro_batches[-1]) / len(micro_batches)).backward()
        ddp.finish()
""")
wrong("accumulate_zeroes_gradients", step=7, hint="micro_batch_lost", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            ddp.zero_grad()
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("accumulate_divides_by_silent", step=7, hint="loss_wrong", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            (loss_of(ddp, micro_batch) / len(silent)).backward()
    (loss_of(ddp, last) / len(silent)).backward()
    ddp.finish()
""")
wrong("accumulate_divides_only_the_last", step=7, hint="micro_batch_lost", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch).backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("accumulate_last_twice", step=7, hint="micro_batch_lost", old=Body("accumulate"), new="""
    with ddp.no_sync():
        for micro_batch in micro_batches:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    (loss_of(ddp, micro_batches[-1]) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("no_sync_without_yield", step=7, hint="no_yield", old=Body("AccumulatingDDP.no_sync"), new="self.sync = False")
wrong("no_sync_yields_twice", step=7, hint="no_yield", old=Body("AccumulatingDDP.no_sync"), new="""
    before, self.sync = self.sync, False
    yield
    self.sync = before
    yield
""")
wrong("no_sync_inverted", step=7, hint="no_sync_sends", old="before, self.sync = self.sync, False", new="before, self.sync = self.sync, True")
wrong("right_accumulate_by_index", step=7, old=Body("accumulate"), new="""
    from contextlib import nullcontext

    count = len(micro_batches)
    for i, each in enumerate(micro_batches):
        with ddp.no_sync() if i < count - 1 else nullcontext():
            loss = loss_of(ddp, each).div(count)
            loss.backward()
    ddp.finish()
""")
wrong("right_accumulate_by_gradient", step=7, old=Body("accumulate"), new="""
    share = torch.tensor(1 / len(micro_batches))
    for each in micro_batches[:-1]:
        loss = loss_of(ddp, each)
        with ddp.no_sync():
            loss.backward(gradient=share)
    loss_of(ddp, micro_batches[-1]).backward(share)
    ddp.finish()
""")
wrong("right_accumulate_with_a_stack", step=7, old=Body("accumulate"), new="""
    from contextlib import ExitStack

    with ExitStack() as stack:
        stack.enter_context(ddp.no_sync())
        for number, each in enumerate(micro_batches, start=1):
            if number == len(micro_batches):
                stack.close()
            torch.autograd.backward(loss_of(ddp, each) * (1 / len(micro_batches)))
    ddp.finish()
""")
wrong("right_no_sync_counts", step=7, edits=[
    (Body("AccumulatingDDP.on_gradient"), """
        self.keep_in_bucket(parameter)
        if getattr(self, "depth", 0) == 0:
            self.launch_in_order(parameter)
    """),
    (Body("AccumulatingDDP.no_sync"), """
        self.depth = getattr(self, "depth", 0) + 1
        try:
            yield
        finally:
            self.depth -= 1
    """)])

wrong("accumulate_finishes_twice", step=7, hint="finished_twice", old="(loss_of(ddp, last) / len(micro_batches)).backward()\nddp.finish()",
      new="(loss_of(ddp, last) / len(micro_batches)).backward()\nddp.finish()\nddp.finish()")
wrong("accumulate_never_launches", step=7, hint="not_reenabled",
      old=Body("AccumulatingDDP.on_gradient"), new="self.keep_in_bucket(parameter)")
wrong("accumulate_without_with", step=7, hint="no_sync_unused", old="*silent, last = micro_batches\nwith ddp.no_sync():\n    for micro_batch in silent:\n        (loss_of(ddp, micro_batch) / len(micro_batches)).backward()\n(loss_of(ddp, last) / len(micro_batches)).backward()\nddp.finish()", new="""
    *silent, last = micro_batches
    ddp.no_sync()
    for micro_batch in silent:
        (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("right_accumulate_divides_buckets", step=7, old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for each in silent:
            loss_of(ddp, each).backward()
    loss_of(ddp, last).backward()
    ddp.finish()
    for bucket in ddp.buckets:
        bucket.flat /= len(micro_batches)
""")
wrong("no_sync_of_the_class", step=7, hint="shared_sync", old=Body("AccumulatingDDP.no_sync"), new="""
    before, AccumulatingDDP.sync = AccumulatingDDP.sync, False
    try:
        yield
    finally:
        AccumulatingDDP.sync = before
""")
wrong("accumulate_discards_when_silent", step=7, hint="launched_early", old=Body("AccumulatingDDP.on_gradient"), new="""
    self.keep_in_bucket(parameter)
    if not self.sync:
        self.bucket_of[parameter].waiting.discard(parameter)
    else:
        self.launch_in_order(parameter)
""")
wrong("no_sync_swallows", step=7, hint="swallowed", old=Body("AccumulatingDDP.no_sync"), new="""
    before, self.sync = self.sync, False
    try:
        yield
    except Exception:
        pass
    self.sync = before
""")
wrong("accumulate_retains_graphs", step=7, hint="retained", old=Body("accumulate"), new="""
    losses = []
    *silent, last = micro_batches
    with ddp.no_sync():
        for each in silent:
            loss = loss_of(ddp, each) / len(micro_batches)
            loss.backward(retain_graph=True)
            losses.append(loss)
    (loss_of(ddp, last) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("no_sync_inverts", step=7, hint="nested", old=Body("AccumulatingDDP.no_sync"), new="""
    self.sync = not self.sync
    try:
        yield
    finally:
        self.sync = not self.sync
""")
wrong("accumulate_launches_first", step=7, hint="kept_late", old=Body("AccumulatingDDP.on_gradient"), new="""
    if self.sync:
        self.launch_in_order(parameter)
    self.keep_in_bucket(parameter)
""")

# step 8

wrong("torch_all_silent", step=8, hint="all_silent",
      old=Body("accumulate_with_torch"), new="""
    with ddp.no_sync():
        for micro_batch in micro_batches:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
""")
wrong("torch_always_sends", step=8, hint="forward_outside",
      old=Body("accumulate_with_torch"), new="""
    for micro_batch in micro_batches:
        (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
""")
wrong("torch_forward_outside", step=8, hint="forward_outside",
      old=Body("accumulate_with_torch"), new="""
    *silent, last = micro_batches
    for micro_batch in silent:
        loss = loss_of(ddp, micro_batch) / len(micro_batches)
        with ddp.no_sync():
            loss.backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
""")
wrong("torch_no_bucket_view", step=8, hint="not_bucket_view",
      old=Body("wrap"), new="return DistributedDataParallel(module)")
wrong("torch_not_divided", step=8, hint="loss_not_divided",
      old=Body("accumulate_with_torch"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch).backward()
    loss_of(ddp, last).backward()
""")
wrong("torch_not_wrapped", step=8, hint="not_torch",
      old=Body("wrap"), new="return module")
wrong("torch_one_backward", step=8, hint="one_backward", old=Body("accumulate_with_torch"), new="""
    total = 0
    for each in micro_batches[:-1]:
        with ddp.no_sync():
            total = total + loss_of(ddp, each)
    ((total + loss_of(ddp, micro_batches[-1])) / len(micro_batches)).backward()
""")
wrong("torch_finishes", step=8, hint="finish_of_torch",
      old="(loss_of(ddp, last) / len(micro_batches)).backward()\n# <<< solution",
      new="(loss_of(ddp, last) / len(micro_batches)).backward()\nddp.finish()\n# <<< solution")
wrong("torch_wrap_returns_nothing", step=8, hint="not_torch", old="return DistributedDataParallel(", new="DistributedDataParallel(")
wrong("torch_last_only", step=8, hint="micro_batch_lost", old=Body("accumulate_with_torch"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch)
    (loss_of(ddp, last) / len(micro_batches)).backward()
""")
wrong("torch_divided_by_ranks_too", step=8, hint="loss_wrong", old=Body("accumulate_with_torch"), new="""
    *silent, last = micro_batches
    scale = len(micro_batches) * dist.get_world_size()
    with ddp.no_sync():
        for micro_batch in silent:
            (loss_of(ddp, micro_batch) / scale).backward()
    (loss_of(ddp, last) / scale).backward()
""")
wrong("torch_calls_the_module", step=8, hint="bypassed", old=Body("accumulate_with_torch"), new="""
    for micro_batch in micro_batches:
        (loss_of(ddp.module, micro_batch) / len(micro_batches)).backward()
""")
wrong("right_torch_default_buckets", step=8, old=Body("wrap"), new="return DistributedDataParallel(module, gradient_as_bucket_view=True)")
wrong("right_torch_by_index", step=8, old=Body("accumulate_with_torch"), new="""
    from contextlib import nullcontext

    for i, each in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with nullcontext() if last else ddp.no_sync():
            loss_of(ddp, each).mul(1 / len(micro_batches)).backward()
""")
wrong("right_torch_sets_the_flag", step=8, old=Body("accumulate_with_torch"), new="""
    for i, each in enumerate(micro_batches, start=1):
        ddp.require_backward_grad_sync = i == len(micro_batches)
        (loss_of(ddp, each) / len(micro_batches)).backward()
""")
wrong("torch_device_on_the_cpu", step=8, hint="device_ids", old="device_ids=None if device.type == \"cpu\" else [device.index],", new="device_ids=[device.index],")
wrong("torch_averages_again", step=8, hint="averaged_again", old=Body("accumulate_with_torch"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for each in silent:
            (loss_of(ddp, each) / len(micro_batches)).backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
    average_gradients(ddp.module)
""")

# more answers to steps 1 to 8

wrong("start_sets_the_rank", step=1, hint="device_index", old="torch.accelerator.set_device_index(local_rank)",
      new="torch.accelerator.set_device_index(int(os.environ['RANK']))")
wrong("shard_rotates", step=2, hint="not_shuffled", old="order = torch.randperm(length, generator=generator).tolist()", new="""
    start = int(torch.randint(length, (1,), generator=generator))
    order = [(start + i) % length for i in range(length)]
""")
wrong("right_average_by_messages", step=4, old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    n, r = dist.get_world_size(), dist.get_rank()
    every = [parameter.grad.clone() for _ in range(n)]
    ops = [dist.P2POp(dist.isend, every[r], i) for i in range(n) if i != r]
    ops += [dist.P2POp(dist.irecv, every[i], i) for i in range(n) if i != r]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    parameter.grad = sum(every) / n
""")
wrong("buckets_kept_before_the_first_launch", step=6, hint="not_views",
      old="if parameter.grad.data_ptr() != view.data_ptr():", new="if self.launched == 0:")
wrong("buckets_launch_all_at_the_end", step=6, hint="launched_late", old=Body("BucketDDP.launch_in_order"), new="""
    self.bucket_of[parameter].waiting.discard(parameter)
    if any(bucket.waiting for bucket in self.buckets):
        return
    for bucket in self.buckets:
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        self.launched += 1
""")
wrong("torch_sends_no_model", step=8, hint="not_sent_by_torch", old="    gradient_as_bucket_view=True,\n)", new="    gradient_as_bucket_view=True,\n    init_sync=False,\n)")

# more mistakes in all steps

wrong("hash_of_a_text", step=2, hint="unseeded",
      old="manual_seed(epoch)", new='manual_seed(hash(f"epoch {epoch}") % 2**31)')
wrong("broadcast_children", step=3, hint="own_tensors", old=Body("broadcast_state"), new="""
    for child in module.children():
        for tensor in [*child.parameters(), *child.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
""")
wrong("pieces_by_tensor_split", step=6, hint="piece_sizes",
      old="zip(group, flat.split(sizes), strict=True)", new="zip(group, flat.tensor_split(sizes))")
wrong("flat_by_cat", step=6, hint="flat_graph",
      old="torch.zeros(sum(sizes), dtype=group[0].dtype, device=group[0].device)",
      new="torch.cat([p.flatten() for p in group])")
wrong("launched_again", step=6, hint="launched_again", old=Body("BucketDDP.launch_in_order"), new="""
    self.bucket_of[parameter].waiting.discard(parameter)
    for bucket in self.buckets:
        if bucket.waiting:
            break
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        self.launched += 1
""")
wrong("silent_hook_begins", step=7, hint="no_sync_sends",
      old=Body("AccumulatingDDP.on_gradient"), new="""
    super().on_gradient(parameter)
    if not self.sync:
        self.begin()
""")
wrong("last_by_comparison", step=7, hint="which_is_last", old=Body("accumulate"), new="""
    for micro_batch in micro_batches:
        if micro_batch == micro_batches[-1]:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
        else:
            with ddp.no_sync():
                (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("finish_after_each", step=7, hint="finished_early", old=Body("accumulate"), new="""
    for i, micro_batch in enumerate(micro_batches):
        with torch.enable_grad() if i == len(micro_batches) - 1 else ddp.no_sync():
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
        ddp.finish()
""")
wrong("device_always_first", step=8, hint="device_of_rank",
      old="[device.index]", new="[0]")

# side effects, other machines and other dtypes

wrong("start_returns_text_on_gpus", step=1, hint="not_a_device",
      old="    dist.init_process_group(\"gloo\")\nreturn device", new="    dist.init_process_group(\"gloo\")\nreturn device if device.type == 'cpu' else str(device)")
wrong("start_device_id_of_rank", step=1, hint="device_index",
      old="torch.accelerator.set_device_index(local_rank)\ndist.init_process_group(device_id=device)", new="""
    torch.accelerator.set_device_index(local_rank)
    dist.init_process_group(device_id=torch.device("cuda", int(os.environ["RANK"])))
""")
wrong("start_sets_the_device_first", step=1, hint="device_absent", old=Body("init_distributed"), new="""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")
""")
wrong("shard_seed_times_rank", step=2, hint="overlap", old="manual_seed(epoch)", new="manual_seed(epoch * (rank + 1))")
wrong("broadcast_assigns", step=3, hint="replaced", old=Body("broadcast_state"), new="""
    state = [module.state_dict()]
    dist.broadcast_object_list(state, src=0)
    module.load_state_dict(state[0], assign=True)
""")
wrong("broadcast_unfreezes", step=3, hint="requires_grad_changed", old=Body("broadcast_state"), new="""
    for parameter in module.parameters():
        parameter.requires_grad = False
        dist.broadcast(parameter, src=0)
        parameter.requires_grad = True
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
""")
wrong("broadcast_keys", step=3, hint="broadcast_kind", old=Body("broadcast_state"), new="""
    for tensor in module.state_dict():
        dist.broadcast(tensor, src=0)
""")
wrong("average_for_each_module", step=4, hint="reduced_again", old=Body("average_gradients"), new="""
    for part in module.modules():
        for parameter in part.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
""")
wrong("average_zeros_for_frozen", step=4, hint="frozen_graded",
      old="if parameter.grad is not None:", new="if parameter.grad is None:\n    parameter.grad = torch.zeros_like(parameter)\nif True:")
wrong("average_divides_the_last", step=4, hint="not_divided", old=Body("average_gradients"), new="""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
""")
wrong("hooks_not_cleared_divided_once", step=5, hint="not_forgotten", old=Body("HookDDP.finish"), new="""
    for _, work in self.started:
        work.wait()
    for parameter in self.module.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
""")
wrong("buckets_of_the_default_dtype", step=6, hint="flat_kind",
      old="torch.zeros(sum(sizes), dtype=group[0].dtype, device=group[0].device)", new="torch.zeros(sum(sizes))")
wrong("buckets_of_four_bytes", step=6, hint="bucket_size", edits=[
    ("if not groups or parameter.nbytes > room:", "size = 4 * parameter.numel()\nif not groups or size > room:"),
    ("room -= parameter.nbytes", "room -= size")])
wrong("accumulate_without_grad", step=7, hint="no_grad", old="with ddp.no_sync():\n    for micro_batch in silent:\n        (loss_of(ddp, micro_batch) / len(micro_batches)).backward()\n(loss_of(ddp, last) / len(micro_batches)).backward()\nddp.finish()", new="""
    with torch.no_grad():
        for micro_batch in silent:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
    ddp.finish()
""")
wrong("torch_without_grad", step=8, hint="no_grad", old=Body("accumulate_with_torch"), new="""
    *silent, last = micro_batches
    with ddp.no_sync(), torch.no_grad():
        for micro_batch in silent:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
""")

# other machines, and arguments that are ignored or changed

wrong("start_sets_no_device", step=1, hint="device_not_set", old=Body("init_distributed"), new="""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world:
        dist.init_process_group("nccl")
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo")
    return torch.device("cpu")
""")
wrong("start_compares_texts", step=1, hint="env_text",
      old='int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])', new='os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]')
wrong("start_local_rank_modulo_devices", step=1, hint="shared_device", old=Body("init_distributed"), new="""
    if torch.accelerator.is_available():
        index = int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        device = torch.device(torch.accelerator.current_accelerator().type, index)
        dist.init_process_group(device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")
""")
wrong("start_sets_the_address", step=1, hint="own_address",
      old="local_rank, local_world = int(", new='os.environ["MASTER_ADDR"] = "127.0.0.1"\nlocal_rank, local_world = int(')
wrong("start_sets_the_port", step=1, hint="own_address",
      old="local_rank, local_world = int(", new='os.environ["MASTER_PORT"] = "12355"\nlocal_rank, local_world = int(')
wrong("shard_by_the_group", step=2, hint="arguments_ignored", old=Body("shard"), new="""
    sampler = DistributedSampler(range(length))
    sampler.set_epoch(epoch)
    return list(sampler)
""")
wrong("shard_draws_again", step=2, hint="not_a_permutation",
      old="torch.randperm(length, generator=generator)", new="torch.randint(length, (length,), generator=generator)")
wrong("shard_repeats_its_last", step=2, hint="no_element", old=Body("shard"), new="""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    mine = order[rank::world]
    while len(mine) < math.ceil(length / world):
        mine.append(mine[-1])
    return mine
""")
wrong("shard_assigns_none", step=2, hint="list_is_none", old="order = torch.randperm(length, generator=generator).tolist()",
      new="import random\norder = random.Random(epoch).shuffle(list(range(length)))")
wrong("broadcast_joins_dtypes", step=3, hint="digits_lost", old=Body("broadcast_state"), new="""
    tensors = [t.detach() for t in [*module.parameters(), *module.buffers()]]
    flat = torch.cat([t.flatten() for t in tensors])
    dist.broadcast(flat, src=0)
    for t, piece in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(piece.view_as(t))
""")
wrong("broadcast_divides", step=3, hint="state_averaged", old="dist.broadcast(tensor.detach(), src=0)",
      new="dist.all_reduce(tensor.detach())\ntensor.data /= dist.get_world_size()")
wrong("broadcast_pairs", step=3, hint="broadcast_kind", old="[*module.parameters(), *module.buffers()]", new="[*module.named_parameters(), *module.named_buffers()]")
wrong("average_over_the_machine", step=4, hint="not_divided", old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.all_reduce(parameter.grad)\nparameter.grad /= int(os.environ['LOCAL_WORLD_SIZE'])")
wrong("average_gathers_into_one", step=4, hint="gathered", old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    parts = [torch.empty_like(parameter.grad)] * dist.get_world_size()
    dist.all_gather(parts, parameter.grad)
    parameter.grad = torch.stack(parts).mean(0)
""")
wrong("average_in_bfloat16", step=4, hint="rounded", old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()", new="""
    compressed = parameter.grad.bfloat16()
    dist.all_reduce(compressed)
    parameter.grad.copy_(compressed / dist.get_world_size())
""")
wrong("average_pieces_of_frozen", step=4, hint="piece_sizes", old=Body("average_gradients"), new="""
    flat = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for p in module.parameters():
        if p.grad is not None:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()
""")
wrong("average_over_the_samples", step=4, hint="divided_by_other", old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size() * SAMPLES")
wrong("hooks_start_with_the_last", step=5, hint="started_late", old="self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))", new="""
    trained = [p for p in self.module.parameters() if p.requires_grad]
    if all(p.grad is not None for p in trained):
        self.started += [(p, dist.all_reduce(p.grad, async_op=True)) for p in trained]
""")
wrong("hooks_for_each_module", step=5, hint="hooked_again", old="for parameter in module.parameters():\n    if parameter.requires_grad:",
      new="for parameter in (p for m in module.modules() for p in m.parameters()):\n    if parameter.requires_grad:")
wrong("hooks_without_an_argument", step=5, hint="hook_arguments",
      old="parameter.register_post_accumulate_grad_hook(self.start)", new="parameter.register_post_accumulate_grad_hook(lambda: self.start(parameter))")
wrong("hooks_on_the_gradient", step=5, hint="hook_on_gradient",
      old="parameter.register_post_accumulate_grad_hook(self.start)", new="parameter.grad.register_post_accumulate_grad_hook(self.start)")
wrong("buckets_reverse_the_list", step=6, hint="list_changed",
      old="for parameter in reversed(parameters):", new="parameters.reverse()\nfor parameter in parameters:")
wrong("buckets_first_fit", step=6, hint="not_in_order", old=Body("make_buckets"), new="""
    groups = []
    for p in reversed(parameters):
        fits = (g for g in groups if sum(q.nbytes for q in g) + p.nbytes <= bucket_bytes)
        group = next(fits, None)
        if group is None:
            groups.append([p])
        else:
            group.append(p)
    buckets = []
    for group in groups:
        flat = torch.zeros(sum(p.numel() for p in group), dtype=group[0].dtype, device=group[0].device)
        pieces = flat.split([p.numel() for p in group])
        buckets.append(Bucket(flat, {p: v.view_as(p) for p, v in zip(group, pieces)}))
    return buckets
""")
wrong("buckets_remove_gradients", step=6, hint="gradient_removed", old="parameter.grad = view", new="parameter.grad = None")
wrong("accumulate_joins_the_batches", step=7, hint="batch_joined", old=Body("accumulate"), new="""
    loss_of(ddp, [i for micro_batch in micro_batches for i in micro_batch]).backward()
    ddp.finish()
""")
wrong("accumulate_pops", step=7, hint="batches_changed", old=Body("accumulate"), new="""
    count, last = len(micro_batches), micro_batches.pop()
    with ddp.no_sync():
        for micro_batch in micro_batches:
            (loss_of(ddp, micro_batch) / count).backward()
    (loss_of(ddp, last) / count).backward()
    ddp.finish()
""")
wrong("accumulate_adds_up_losses", step=7, hint="graph_twice", old=Body("accumulate"), new="""
    total = 0.0
    with ddp.no_sync():
        for micro_batch in micro_batches[:-1]:
            loss = loss_of(ddp, micro_batch) / len(micro_batches)
            loss.backward()
            total = total + loss
    total = total + loss_of(ddp, micro_batches[-1]) / len(micro_batches)
    total.backward()
    ddp.finish()
""")
wrong("torch_does_not_call_no_sync", step=8, hint="no_sync_not_called", old=Body("accumulate_with_torch"), new="""
    with ddp.no_sync:
        for micro_batch in micro_batches[:-1]:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    (loss_of(ddp, micro_batches[-1]) / len(micro_batches)).backward()
""")
wrong("torch_limit_in_bytes", step=8, hint="cap_unit", old="bucket_cap_mb=BUCKET_BYTES / 2**20", new="bucket_cap_mb=BUCKET_BYTES")
wrong("torch_limit_of_zero", step=8, hint="cap_unit", old="bucket_cap_mb=BUCKET_BYTES / 2**20", new="bucket_cap_mb=BUCKET_BYTES // 2**20")
wrong("torch_static_graph", step=8, hint="static_graph", old="bucket_cap_mb=BUCKET_BYTES / 2**20", new="static_graph=True, bucket_cap_mb=BUCKET_BYTES / 2**20")
wrong("right_start_current_device", step=1, old=Body("init_distributed"), new="""
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
""")
wrong("buckets_keep_no_work", step=6, hint="work_lost", old="bucket.work = dist.all_reduce(bucket.flat, async_op=True)", new="dist.all_reduce(bucket.flat, async_op=True)")
wrong("torch_no_sync_of_the_module", step=8, hint="no_sync_not_called", old=Body("accumulate_with_torch"), new="""
    with ddp.module.no_sync():
        for micro_batch in micro_batches[:-1]:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    (loss_of(ddp, micro_batches[-1]) / len(micro_batches)).backward()
""")

# right answers and mistakes of learners

wrong("right_start_cpu_with_an_index", step=1, old=Body("init_distributed"), new="""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    device = torch.device("cuda" if enough else "cpu", local_rank)
    if enough:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if enough else "gloo")
    return device
""")
wrong("start_device_of_a_text", step=1, hint="env_text", old='int(os.environ["LOCAL_RANK"]), int(', new='os.environ["LOCAL_RANK"], int(')
wrong("broadcast_unpacks_keys", step=3, hint="broadcast_kind", old=Body("broadcast_state"), new="""
    for name, tensor in module.state_dict():
        dist.broadcast(tensor, src=0)
""")
wrong("average_truth_of_a_gradient", step=4, hint="truth_of_tensor", old="if parameter.grad is not None:", new="if parameter.grad:")
wrong("average_function_not_called", step=4, hint="not_called",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size")
wrong("average_divides_a_mean", step=4, hint="divided_twice",
      old="dist.all_reduce(parameter.grad)\nparameter.grad /= dist.get_world_size()",
      new="dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)\nparameter.grad /= dist.get_world_size()")
wrong("hooks_append_two_values", step=5, hint="append_one", old=Body("HookDDP.start"), new="""
    work = dist.all_reduce(parameter.grad, async_op=True)
    self.started.append(parameter, work)
""")
wrong("hooks_unpack_in_the_other_order", step=5, hint="wait_of_tensor", old="for parameter, work in self.started:", new="for work, parameter in self.started:")
wrong("hooks_remove_in_the_loop", step=5, hint="list_remove", old=Body("HookDDP.finish"), new="""
    for entry in self.started:
        parameter, work = entry
        work.wait()
        parameter.grad /= dist.get_world_size()
        self.started.remove(entry)
""")
wrong("buckets_close_an_empty_one", step=6, hint="list_empty", old="if not groups or parameter.nbytes > room:\n    groups.append([])", new="if not groups:\n    groups.append([])\n    room = bucket_bytes\nif parameter.nbytes > room:\n    groups.append([])")
wrong("buckets_join_an_empty_one", step=6, hint="list_empty", edits=[
    ("if not groups or parameter.nbytes > room:\n    groups.append([])", "if not groups:\n    groups.append([])\n    room = bucket_bytes\nif parameter.nbytes > room:\n    groups.append([])"),
    ("flat = torch.zeros(sum(sizes), dtype=group[0].dtype, device=group[0].device)", "flat = torch.cat([torch.zeros_like(p).flatten() for p in group])")])
wrong("buckets_views_in_a_list", step=6, hint="views_kind", old="{p: piece.view_as(p) for p, piece in pieces}", new="[piece.view_as(p) for p, piece in pieces]")
wrong("buckets_remove_from_the_next", step=6, hint="other_bucket", old="self.bucket_of[parameter].waiting.discard(parameter)", new="self.buckets[self.launched].waiting.remove(parameter)")
wrong("buckets_reduce_a_gradient", step=6, hint="not_the_bucket", old="dist.all_reduce(bucket.flat, async_op=True)", new="dist.all_reduce(parameter.grad, async_op=True)")
wrong("buckets_reduce_a_bucket_object", step=6, hint="not_a_tensor", old="dist.all_reduce(bucket.flat, async_op=True)", new="dist.all_reduce(bucket, async_op=True)")
wrong("shard_number_as_generator", step=2, hint="generator_kind", old="length, generator=generator", new="length, generator=epoch")
wrong("shard_tensor_and_list", step=2, hint="not_a_list", old="generator=generator).tolist()", new="generator=generator)")
wrong("hooks_of_modules", step=5, hint="hook_of_module", old="for parameter in module.parameters():\n    if parameter.requires_grad:\n        parameter.register_post_accumulate_grad_hook(self.start)",
      new="for child in module.modules():\n    child.register_full_backward_hook(self.start)")
wrong("accumulate_divides_backward", step=7, hint="backward_none", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch).backward() / len(micro_batches)
    loss_of(ddp, last).backward() / len(micro_batches)
    ddp.finish()
""")
wrong("accumulate_uses_mean_loss", step=7, hint="loss_of_unused", old=Body("accumulate"), new="""
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            (mean_loss(ddp, micro_batch) / len(micro_batches)).backward()
    (mean_loss(ddp, last) / len(micro_batches)).backward()
    ddp.finish()
""")
