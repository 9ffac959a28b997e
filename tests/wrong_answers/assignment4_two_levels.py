"""Wrong answers to assessment/assignment4_two_levels.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("assessment/assignment4_two_levels.py")

# step 1

wrong("groups_own_only", step=1, hint="not_all", old=Body("make_groups"), new="""
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank // local * local
    node = dist.new_group(list(range(first, first + local)))
    rail = dist.new_group(list(range(rank % local, world, local)))
    return node, rail
""")
wrong("groups_rail_of_all", step=1, hint="rail", old=Body("make_groups"), new="""
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes = [dist.new_group(list(range(i, i + local))) for i in range(0, world, local)]
    return nodes[rank // local], dist.new_group(list(range(world)))
""")
wrong("groups_swapped", step=1, hint="node", old=Body("make_groups"), new="""
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes = [dist.new_group(list(range(i, i + local))) for i in range(0, world, local)]
    rails = [dist.new_group(list(range(i, world, local))) for i in range(local)]
    return rails[rank % local], nodes[rank // local]
""")

wrong("groups_nothing", step=1, hint="two_groups", old="return node, rail", new="pass")
wrong("groups_one", step=1, hint="two_groups", old="return node, rail", new="return node")
wrong("groups_rail_by_nodes", step=1, hint="rail",
      old="range(place, world, local)", new="range(place, world, world // local)")
wrong("groups_rail_of_two", step=1, hint="outside",
      old="list(range(place, world, local))", new="[place, place + local]")
wrong("right_groups_by_enumeration", step=1, old=Body("make_groups"), new="""
    world = dist.get_world_size()
    node, _ = dist.new_subgroups(local)
    rails = [list(range(place, world, local)) for place in range(local)]
    return node, dist.new_subgroups_by_enumeration(rails)[0]
""")
wrong("right_groups_by_membership", step=1, old=Body("make_groups"), new="""
    world = dist.get_world_size()
    nodes = [dist.new_group(list(range(i, i + local))) for i in range(0, world, local)]
    rails = [dist.new_group(list(range(i, world, local))) for i in range(local)]
    none = dist.GroupMember.NON_GROUP_MEMBER
    return tuple(next(g for g in groups if g != none) for groups in (nodes, rails))
""")
wrong("right_groups_by_mesh", step=1, old=Body("make_groups"), new="""
    shape = dist.get_world_size() // local, local
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("rail", "node"))
    return mesh.get_group("node"), mesh.get_group("rail")
""")
wrong("right_groups_of_members_alone", step=1, old=Body("make_groups"), new="""
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank // local * local
    node, rail = list(range(first, first + local)), list(range(rank % local, world, local))
    alone = {"use_local_synchronization": True}
    return dist.new_group(node, **alone), dist.new_group(rail, **alone)
""")
wrong("groups_of_lists", step=1, hint="two_groups", old="[dist.new_group(ranks) for ranks in groups][index]", new="groups[index]")

# step 2

wrong("levels_by_leaders", step=2, hint="between", old=Body("all_reduce_two_levels"), new="""
    ranks = dist.get_process_group_ranks(node)
    dist.reduce(flat, ranks[0], group=node)
    if dist.get_rank() == ranks[0]:
        dist.all_reduce(flat, group=rail)
    dist.broadcast(flat, ranks[0], group=node)
""")
wrong("levels_flat_if_odd", step=2, hint="between", edits=[
    ("def all_reduce_two_levels(", "def in_two_levels("),
    ("def bf16_hook(", """def all_reduce_two_levels(tensor, node, rail):
    if tensor.numel() % dist.get_world_size(node):
        dist.all_reduce(tensor)
    else:
        in_two_levels(tensor, node, rail)


def bf16_hook(""")])
wrong("levels_elsewhere", step=2, hint="in_place",
      old="flat.copy_(padded[: len(flat)])", new="flat = padded[: len(flat)]")
wrong("levels_not_padded", step=2, hint="not_padded",
      old="padded, group", new="flat.clone(), group")
wrong("levels_one_node", step=2, hint="one_node",
      old=Body("all_reduce_two_levels"), new="dist.all_reduce(flat, group=node)")
wrong("levels_twice", step=2, hint="twice",
      old="dist.all_reduce(piece, group=rail)", new="dist.all_reduce(piece, group=node)")
wrong("levels_whole_on_rail", step=2, hint="between",
      old=Body("all_reduce_two_levels"),
      new="dist.all_reduce(flat, group=node)\ndist.all_reduce(flat, group=rail)")

wrong("levels_mean", step=2, hint="not_sum", old="flat.copy_(padded[: len(flat)])",
      new="flat.copy_(padded[: len(flat)] / dist.get_world_size())")
wrong("levels_no_gather", step=2, hint="not_gathered",
      old="dist.all_gather_into_tensor(padded, piece, group=node)", new="")
wrong("levels_own_piece_only", step=2, hint="not_gathered",
      old="dist.all_gather_into_tensor(padded, piece, group=node)", new="""
    start = dist.get_rank(node) * len(piece)
    padded[start : start + len(piece)] = piece
""")
wrong("levels_no_rail", step=2, hint="one_node",
      old="dist.all_reduce(piece, group=rail)", new="")
wrong("levels_padded_always", step=2, hint="padded_always",
      old="-len(flat) % local", new="local - len(flat) % local")
wrong("levels_padded_in_front", step=2, hint="not_padded",
      old="(0, -len(flat) % local)", new="(-len(flat) % local, 0)")
wrong("levels_piece_too_large", step=2, hint="piece_size",
      old="padded.new_empty(len(padded) // local)", new="padded.new_empty(len(padded))")
wrong("levels_returned", step=2, hint="in_place",
      old="flat.copy_(padded[: len(flat)])", new="return padded[: len(flat)]")
wrong("right_levels_by_broadcasts", step=2, old=Body("all_reduce_two_levels"), new="""
    local, place = dist.get_world_size(node), dist.get_rank(node)
    dist.all_reduce(flat, group=node)
    for i, piece in enumerate(flat.tensor_split(local)):
        whole = piece.clone()
        if i == place:
            dist.all_reduce(whole, group=rail)
        dist.broadcast(whole, dist.get_global_rank(node, i), group=node)
        piece.copy_(whole)
""")
wrong("right_levels_by_lists", step=2, old=Body("all_reduce_two_levels"), new="""
    local = dist.get_world_size(node)
    size = -(-len(flat) // local)
    padded = flat.new_zeros(size * local)
    padded[: len(flat)] = flat
    piece = torch.empty(size)
    dist.reduce_scatter(piece, list(padded.chunk(local)), group=node)
    dist.all_reduce(piece, group=rail, async_op=True).wait()
    pieces = [torch.empty(size) for _ in range(local)]
    dist.all_gather(pieces, piece, group=node)
    flat[:] = torch.cat(pieces)[: len(flat)]
""")
wrong("right_levels_functional", step=2, old=Body("all_reduce_two_levels"), new="""
    import torch.distributed._functional_collectives as functional
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size(node)))
    piece = functional.reduce_scatter_tensor(padded, "sum", 0, node)
    piece = functional.all_reduce(piece, "sum", rail)
    flat.copy_(functional.all_gather_tensor(piece, 0, node)[: len(flat)])
""")
wrong("levels_not_waited", step=2, hint="not_waited", old="dist.all_reduce(piece, group=rail)", new="dist.all_reduce(piece, group=rail, async_op=True)")
wrong("levels_local_of_two", step=2, hint="piece_size", old="local = dist.get_world_size(node)", new="local = 2")
wrong("levels_divided_by_nodes", step=2, hint="not_sum", old="flat.copy_(padded[: len(flat)])", new="flat.copy_(padded[: len(flat)] / 2)")

# step 3

wrong("hook_forgets", step=3, hint="no_feedback",
      old="wanted / world", new="bucket.buffer() / dist.get_world_size()")
wrong("hook_fp32", step=3, hint="wire",
      old="sent, async_op", new="gradient, async_op")
wrong("hook_narrow", step=3, hint="mean",
      old="return gradient.copy_(sent)", new="return sent")
wrong("hook_one_residual", step=3, hint="shared",
      old="[bucket.index()]", new="[0]")
wrong("hook_scale", step=3, hint="feedback_scale",
      old="sent.float() * world", new="sent.float()")
wrong("hook_sums", step=3, hint="mean", old=Body("bf16_hook"), new="""
    wanted = bucket.buffer() + state.residual.get(bucket.index(), 0)
    sent = wanted.bfloat16()
    state.residual[bucket.index()] = wanted - sent.float()
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda _: sent.float())
""")
wrong("hook_waits", step=3, hint="waits", old=Body("bf16_hook"), new="""
    world, gradient = dist.get_world_size(), bucket.buffer()
    wanted = gradient + state.residual.get(bucket.index(), 0)
    sent = (wanted / world).bfloat16()
    state.residual[bucket.index()] = wanted - sent.float() * world
    dist.all_reduce(sent)
    future = torch.futures.Future()
    future.set_result(sent.float())
    return future
""")
wrong("hook_waits_for_work", step=3, hint="waits", old=Body("bf16_hook"), new="""
    world, gradient = dist.get_world_size(), bucket.buffer()
    wanted = gradient + state.residual.get(bucket.index(), 0)
    sent = (wanted / world).bfloat16()
    state.residual[bucket.index()] = wanted - sent.float() * world
    dist.all_reduce(sent, async_op=True).wait()
    future = torch.futures.Future()
    future.set_result(sent.float())
    return future
""")

wrong("hook_forgets_other_buckets", step=3, hint="shared",
      old="state.residual[bucket.index()] = wanted - sent.float() * world",
      new="state.residual = {bucket.index(): wanted - sent.float() * world}")
wrong("hook_returns_nothing", step=3, hint="future",
      old="return work.get_future().then(finish)", new="work.get_future().then(finish)")
wrong("hook_returns_tensor", step=3, hint="future",
      old="return work.get_future().then(finish)", new="return gradient")
wrong("hook_returns_work", step=3, hint="future",
      old="return work.get_future().then(finish)", new="return work")
wrong("hook_residual_of_gradient", step=3, hint="feedback_of_gradient",
      old="wanted - sent.float() * world", new="gradient - sent.float() * world")
wrong("hook_sends_nothing", step=3, hint="not_sent",
      old="work = dist.all_reduce(sent, async_op=True)", new="work = dist.barrier(async_op=True)")
wrong("hook_wrong_sign", step=3, hint="no_feedback",
      old="wanted - sent.float() * world", new="sent.float() * world - wanted")
wrong("hook_waits_for_future", step=3, hint="waits",
      old="return work.get_future().then(finish)", new="""
    future = work.get_future().then(finish)
    future.wait()
    return future
""")
wrong("right_hook_by_default", step=3,
      old="left = state.residual.get(bucket.index())\nwanted = gradient if left is None else gradient + left",
      new="""
    left = state.residual.setdefault(bucket.index(), torch.zeros_like(gradient))
    wanted = gradient + left
""")
wrong("right_hook_by_group", step=3,
      old="dist.all_reduce(sent, async_op=True)", new="dist.group.WORLD.allreduce([sent])")
wrong("right_hook_divides_first", step=3, old=Body("bf16_hook"), new="""
    left = state.residual.get(bucket.index(), 0)
    wanted = bucket.buffer() / dist.get_world_size() + left
    sent = wanted.bfloat16()
    state.residual[bucket.index()] = wanted - sent.float()
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: done.wait()[0].float())
""")
wrong("right_hook_divides_last", step=3, old=Body("bf16_hook"), new="""
    world, wanted = dist.get_world_size(), bucket.buffer().clone()
    wanted += state.residual.get(bucket.index(), 0)
    sent = wanted.to(torch.bfloat16)
    state.residual[bucket.index()] = wanted - sent
    future = dist.all_reduce(sent, dist.ReduceOp.SUM, None, True).get_future()
    return future.then(lambda done: done.value()[0].float() / world)
""")
wrong("hook_residual_outside", step=3, hint="state", edits=[("state.residual.get(bucket.index())", "bf16_hook.__dict__.get('left', {}).get(bucket.index())"), ("state.residual[bucket.index()] = wanted - sent.float() * world", "bf16_hook.__dict__.setdefault('left', {})[bucket.index()] = wanted - sent.float() * world")])

# step 4

wrong("local_average_first", step=4, hint="gradients",
      old="self.average()", new="self.average()\nself.optimizer.step()")
wrong("local_counts_late", step=4, hint="when", edits=[
    ("self.optimizer.step()",
     "if self.steps % self.every == 0:\n    self.average()\nself.optimizer.step()"),
    ("if self.steps % self.every == 0:\n    self.average()", "")])
wrong("local_each_step", step=4, hint="too_often",
      old=Body("LocalSGD.step"), new="self.optimizer.step()\nself.average()")
wrong("local_never", step=4, hint="never",
      old="if self.steps % self.every == 0:\n    self.average()", new="")
wrong("local_one_by_one", step=4, hint="one_by_one", old=Body("LocalSGD.average"), new="""
    for group in self.optimizer.param_groups:
        for p in group["params"]:
            dist.all_reduce(p.data)
            p /= dist.get_world_size()
""")
wrong("local_rebinds", step=4, hint="never", edits=[
    ("@torch.no_grad()\ndef average(self) -> None:", "def average(self):"),
    ('weights = [p for group in self.optimizer.param_groups for p in group["params"]]',
     'ps = [p for g in self.optimizer.param_groups for p in g["params"]]'),
    ("[p.reshape(-1) for p in weights]", "[p.flatten() for p in ps]"),
    ("""
        flat /= dist.get_world_size()
        for p, mean in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
            p.copy_(mean.view_as(p))
    """, """
        flat = flat / dist.get_world_size()
        i = 0
        for p in ps:
            p = flat[i : i + p.numel()].view_as(p)
            i += p.numel()
    """)])
wrong("local_sum", step=4, hint="sum",
      old="flat /= dist.get_world_size()", new="")
wrong("local_broadcasts", step=4, hint="one_rank",
      old="dist.all_reduce(flat)\nflat /= dist.get_world_size()", new="dist.broadcast(flat, 0)")
wrong("local_first_group_only", step=4, hint="all_groups",
      old='[p for group in self.optimizer.param_groups for p in group["params"]]',
      new='self.optimizer.param_groups[0]["params"]')
wrong("local_mean_of_gradients", step=4, hint="of_gradients",
      old="[p.reshape(-1) for p in weights]", new="[p.grad.reshape(-1) for p in weights]")
wrong("local_no_count", step=4, hint="too_often", old="self.steps += 1", new="pass")
wrong("local_no_step", step=4, hint="no_step", old="self.optimizer.step()", new="pass")
wrong("local_one_for_each_group", step=4, hint="one_by_one", old=Body("LocalSGD.average"), new="""
    for group in self.optimizer.param_groups:
        weights = group["params"]
        flat = torch.cat([p.reshape(-1) for p in weights])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, mean in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
            p.copy_(mean.view_as(p))
""")
wrong("local_reduces_to_one", step=4, hint="never",
      old="dist.all_reduce(flat)", new="dist.reduce(flat, 0)")
wrong("local_zeroes_first", step=4, hint="no_step",
      old="self.optimizer.step()", new="self.optimizer.zero_grad()\nself.optimizer.step()")
wrong("right_local_by_gather", step=4,
      old="dist.all_reduce(flat)\nflat /= dist.get_world_size()", new="""
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    flat = torch.stack(every).mean(0)
""")
wrong("right_local_by_vector", step=4, old=Body("LocalSGD.average"), new="""
    weights = [p for group in self.optimizer.param_groups for p in group["params"]]
    flat = nn.utils.parameters_to_vector(weights)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), weights)
""")
wrong("right_local_counts_around", step=4, old=Body("LocalSGD.step"), new="""
    self.optimizer.step()
    self.steps = (self.steps + 1) % self.every
    if not self.steps:
        self.average()
""")
wrong("local_matrices_only", step=4, hint="all_weights", old='for p in group["params"]]', new='for p in group["params"] if p.ndim > 1]')
wrong("local_divided_by_four", step=4, hint="other", old="flat /= dist.get_world_size()", new="flat /= 4")
