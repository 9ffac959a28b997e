"""Wrong answers to assessment/assignment4_two_levels.py."""

# fmt: off
from wrong import Body, Table

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
