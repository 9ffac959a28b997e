"""Wrong answers to labs/lab10_model_parallel.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab10_model_parallel.py")

# step 1

wrong("join_own_first", step=1, hint="new_group_by_all", old=Body("join"), new="""
    groups = sorted(groups, key=lambda ranks: dist.get_rank() not in ranks)
    made = [dist.new_group(ranks) for ranks in groups]
    return made[0]
""")
wrong("join_own_only", step=1, hint="new_group_by_all", old=Body("join"), new="""
    mine = next(ranks for ranks in groups if dist.get_rank() in ranks)
    return dist.new_group(mine)
""")
wrong("join_returns_last", step=1, hint="wrong_group",
      old=Body("join"),
      new="for ranks in groups:\n    group = dist.new_group(ranks)\nreturn group")
wrong("lines_dp_outermost", step=1, hint="axes_swapped", old=Body("lines"), new="""
    box = torch.arange(world).view(-1, pp, tp)
    names = ("dp", "pp", "tp")
    return {k: box.movedim(i, -1).flatten(0, 1).tolist() for i, k in enumerate(names)}
""")
wrong("lines_list", step=1, hint="lines_kind", old=Body("lines"), new="""
    box = torch.arange(world).view(pp, -1, tp)
    return [box.movedim(axis, -1).flatten(0, 1).tolist() for axis in range(3)]
""")
wrong("lines_one_of_each", step=1, hint="lines_partition", old=Body("lines"), new="""
    box = torch.arange(world).view(pp, -1, tp)
    return {
        "pp": [box[:, 0, 0].tolist()],
        "dp": [box[0, :, 0].tolist()],
        "tp": [box[0, 0].tolist()],
    }
""")
wrong("lines_tp_first", step=1, hint="tp_neighbours", old=Body("lines"), new="""
    box = torch.arange(world).view(tp, -1, pp)
    names = ("tp", "dp", "pp")
    return {k: box.movedim(i, -1).flatten(0, 1).tolist() for i, k in enumerate(names)}
""")

wrong("join_first", step=1, hint="wrong_group",
      old=Body("join"), new="return [dist.new_group(ranks) for ranks in groups][0]")
wrong("join_if_mine", step=1, hint="new_group_by_all", old=Body("join"), new="""
    mine = None
    for ranks in groups:
        if dist.get_rank() in ranks:
            mine = dist.new_group(ranks)
    return mine
""")
wrong("join_nothing", step=1, hint="wrong_group",
      old=Body("join"), new="for ranks in groups:\n    dist.new_group(ranks)")
wrong("lines_nothing", step=1, hint="lines_kind",
      old=Body("lines"), new="box = torch.arange(world).view(pp, -1, tp)")
wrong("right_join_by_device_mesh", step=1, old=Body("join"), new="""
    from torch.distributed.device_mesh import DeviceMesh
    return DeviceMesh("cpu", torch.tensor(groups)).get_group(1)
""")
wrong("right_join_by_dict", step=1, old=Body("join"), new="""
    made = {tuple(ranks): dist.new_group(ranks=list(ranks)) for ranks in groups}
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)
""")
wrong("right_join_by_enumeration", step=1,
      old=Body("join"), new="return dist.new_subgroups_by_enumeration(groups)[0]")
wrong("right_join_by_membership", step=1, old=Body("join"), new="""
    made = [dist.new_group(ranks) for ranks in groups]
    return next(group for group in made if group != dist.GroupMember.NON_GROUP_MEMBER)
""")
wrong("right_join_by_rank", step=1, old=Body("join"), new="""
    made = [dist.new_group(ranks) for ranks in groups]
    return next(group for group in made if dist.get_rank(group) >= 0)
""")
wrong("right_join_of_members_alone", step=1, old=Body("join"), new="""
    mine = next(ranks for ranks in groups if dist.get_rank() in ranks)
    return dist.new_group(mine, use_local_synchronization=True)
""")
wrong("right_lines_by_ranges", step=1, old=Body("lines"), new="""
    inner = world // pp  # ranks in a stage
    return {
        "tp": [range(first, first + tp) for first in range(0, world, tp)],
        "dp": [range(s + k, s + inner, tp) for s in range(0, world, inner) for k in range(tp)],
        "pp": [range(k, world, inner) for k in range(inner)],
    }
""")
wrong("lines_not_flat", step=1, hint="lines_kind", old=".flatten(0, 1).tolist()", new=".tolist()")
wrong("lines_of_tensors", step=1, hint="lines_kind", old=".flatten(0, 1).tolist()", new=".flatten(0, 1)")

# step 2

wrong("f_backward_nothing", step=2, hint="f_backward",
      old="all_reduced(gradient, ctx.group)", new="gradient")
wrong("f_forward_sums", step=2, hint="f_forward", edits=[
    (Body("CopyToShards.forward"), "ctx.group = group\nreturn all_reduced(x, group)"),
    (Body("CopyToShards.backward"), "return gradient, None")])
wrong("f_one_gradient", step=2, hint="gradient_count",
      old=Body("CopyToShards.backward"), new="return all_reduced(gradient, ctx.group)")
wrong("g_backward_sums", step=2, hint="g_backward", edits=[
    ("return all_reduced(part, group)", "ctx.group = group\nreturn all_reduced(part, group)"),
    ("gradient, None", "all_reduced(gradient, ctx.group), None")])
wrong("g_forward_nothing", step=2, hint="g_forward",
      old="all_reduced(part, group)", new="part.view_as(part)")
wrong("g_in_all_ranks", step=2, hint="not_tp_group",
      old=Body("SumOverShards.forward"),
      new="total = part.detach().clone()\ndist.all_reduce(total)\nreturn total")
wrong("g_in_place", step=2, hint="in_place",
      old=Body("SumOverShards.forward"),
      new="dist.all_reduce(part, group=group)\nreturn part.clone()")

wrong("f_backward_in_place", step=2, hint="in_place",
      old="return all_reduced(gradient, ctx.group), None",
      new="dist.all_reduce(gradient, group=ctx.group)\nreturn gradient, None")
wrong("f_backward_mean", step=2, hint="f_backward",
      old="return all_reduced(gradient, ctx.group), None",
      new="return all_reduced(gradient, ctx.group) / dist.get_world_size(ctx.group), None")
wrong("f_group_not_stored", step=2, hint="not_stored",
      old=Body("CopyToShards.forward"), new="return x.view_as(x)")
wrong("f_returns_nothing", step=2, hint="returned",
      old=Body("CopyToShards.forward"), new="ctx.group = group")
wrong("g_result_of_all_reduce", step=2, hint="returned",
      old=Body("SumOverShards.forward"),
      new="part = part.clone()\nreturn dist.all_reduce(part, group=group)")
wrong("right_f_returns_x", step=2,
      old=Body("CopyToShards.forward"), new="ctx.group = group\nreturn x")
wrong("right_g_by_gather", step=2, old=Body("SumOverShards.forward"), new="""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.stack(parts).sum(0)
""")
wrong("right_g_by_group", step=2,
      old=Body("SumOverShards.forward"),
      new="total = part.clone()\ngroup.allreduce([total]).wait()\nreturn total")
wrong("right_g_functional", step=2, old=Body("SumOverShards.forward"), new="""
    from torch.distributed._functional_collectives import all_reduce
    return all_reduce(part, "sum", group)
""")
wrong("f_gradients_swapped", step=2, hint="gradient_count", old="return all_reduced(gradient, ctx.group), None", new="return None, all_reduced(gradient, ctx.group)")
wrong("f_group_of_the_class", step=2, hint="not_tp_group", edits=[("ctx.group = group\nreturn x.view_as(x)", "CopyToShards.group = group\nreturn x.view_as(x)"), ("return all_reduced(gradient, ctx.group), None", "return all_reduced(gradient, CopyToShards.group), None")])

# step 3

wrong("column_cut_across", step=3, hint="column_dim",
      old="cut(full.weight, 0, grid)", new="cut(full.weight, 1, grid)")
wrong("column_mark_lost", step=3, hint="not_marked",
      old="cut(full.weight, 0, grid)", new="nn.Parameter(cut(full.weight, 0, grid))")
wrong("column_no_weight", step=3, hint="no_pieces",
      old="self.weight = cut(full.weight, 0, grid)\nself.bias = cut(full.bias, 0, grid)",
      new="self.w, self.b = cut(full.weight, 0, grid), cut(full.bias, 0, grid)")
wrong("column_sums", step=3, hint="column_summed", old=Body("ColumnLinear.forward"), new="""
    x = copy_to_shards(x, self.grid)
    return sum_over_shards(F.linear(x, self.weight, self.bias), self.grid)
""")
wrong("column_whole_bias", step=3, hint="column_bias",
      old="cut(full.bias, 0, grid)", new="whole(full.bias)")
wrong("column_without_f", step=3, hint="column_input",
      old="copy_to_shards(x, self.grid)", new="x")
wrong("row_bias_each", step=3, hint="bias_each",
      old=Body("RowLinear.forward"),
      new="return sum_over_shards(F.linear(x, self.weight, self.bias), self.grid)")
wrong("row_bias_share", step=3, hint="bias_each", old=Body("RowLinear.forward"), new="""
    part = F.linear(x, self.weight, self.bias / self.grid.tp)
    return sum_over_shards(part, self.grid)
""")
wrong("row_cut_across", step=3, hint="row_dim",
      old="cut(full.weight, 1, grid)", new="cut(full.weight, 0, grid)")
wrong("row_cut_bias", step=3, hint="row_bias",
      old="whole(full.bias)", new="cut(full.bias, 0, grid)")
wrong("row_sum_detached", step=3, hint="shard_gradient", old=Body("RowLinear.forward"), new="""
    part = F.linear(x, self.weight)
    return all_reduced(part, self.grid.tp_group) + self.bias
""")
wrong("row_without_g", step=3, hint="row_not_summed",
      old=Body("RowLinear.forward"), new="return F.linear(x, self.weight, self.bias)")
wrong("mlp_of_another_activation", step=3, hint="other",
      old=Body("ParallelMLP.forward"), new="return self.down(F.relu(self.up(x)))")

wrong("column_returns_nothing", step=3, hint="returned",
      old="return F.linear(copy_to_shards(x, self.grid), self.weight, self.bias)",
      new="F.linear(copy_to_shards(x, self.grid), self.weight, self.bias)")
wrong("column_without_bias", step=3, hint="column_no_bias",
      old="self.weight, self.bias)", new="self.weight)")
wrong("row_bias_of_one_rank", step=3, hint="bias_one", old=Body("RowLinear.forward"), new="""
    part = F.linear(x, self.weight)
    if self.grid.shard == 0:
        part = part + self.bias
    return sum_over_shards(part, self.grid)
""")
wrong("row_copies_first", step=3, hint="row_input",
      old="sum_over_shards(F.linear(x,", new="sum_over_shards(F.linear(copy_to_shards(x, self.grid),")
wrong("row_without_bias", step=3, hint="row_bias",
      old="F.linear(x, self.weight), self.grid) + self.bias",
      new="F.linear(x, self.weight), self.grid)")
wrong("right_column_by_matmul", step=3, old=Body("ColumnLinear.forward"),
      new="return copy_to_shards(x, self.grid) @ self.weight.T + self.bias")
wrong("right_column_by_slices", step=3, old="self.weight = cut(full.weight, 0, grid)", new="""
    n = full.weight.size(0) // grid.tp
    rows = full.weight.detach()[grid.shard * n : (grid.shard + 1) * n]
    self.weight = nn.Parameter(rows.clone())
    self.weight.is_cut = True
""")
wrong("row_bias_of_the_whole", step=3, hint="shared_bias", old="self.bias = whole(full.bias)", new="self.bias = full.bias")

# step 4

wrong("attention_all_heads", step=4, hint="local_heads",
      old="HEADS // self.grid.tp", new="HEADS")
wrong("attention_sees_ahead", step=4, hint="not_causal", old="""
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.out(y.transpose(1, 2).flatten(2))  # -> [b, s, h/t] -> [b, s, h]
""", new="""
    y = F.scaled_dot_product_attention(q, k, v)
    return self.out(y.transpose(1, 2).flatten(2))  # -> [b, s, h/t] -> [b, s, h]
""")
wrong("rows_by_head", step=4, hint="per_head", old=Body("rows_by_shard"), new="""
    rows = torch.arange(3 * HIDDEN)
    return rows.view(3, HEADS, -1).transpose(0, 1).flatten()
""")
wrong("rows_of_queries", step=4, hint="not_an_order",
      old=Body("rows_by_shard"), new="return torch.arange(HIDDEN)")
wrong("rows_unchanged", step=4, hint="heads_mixed",
      old=".view(3, tp, -1).transpose(0, 1).flatten()", new="")
wrong("block_from_norm", step=4, hint="other",
      old=Body("ParallelBlock.forward"), new="""
    x = self.norm1(x)
    x = x + self.attention(x)
    return x + self.mlp(self.norm2(x))
""")

wrong("rows_in_two_dimensions", step=4, hint="not_an_order",
      old="transpose(0, 1).flatten()", new="transpose(0, 1)")
wrong("rows_not_returned", step=4, hint="not_an_order",
      old=Body("rows_by_shard"), new="torch.arange(3 * HIDDEN)")
wrong("right_attention_by_hand", step=4, old=Body("ParallelAttention.forward"), new="""
    b, s, _ = x.shape
    width = HIDDEN // HEADS
    qkv = self.qkv(x).view(b, s, 3, HEADS // self.grid.tp, width).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    later = torch.ones(s, s, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / width**0.5).masked_fill(later, -torch.inf)
    y = scores.softmax(-1) @ v
    return self.out(y.transpose(1, 2).reshape(b, s, -1))
""")
wrong("right_rows_by_loops", step=4, old=Body("rows_by_shard"), new="""
    n = HIDDEN // tp
    starts = [kind * HIDDEN + shard * n for shard in range(tp) for kind in range(3)]
    return torch.tensor([start + i for start in starts for i in range(n)])
""")

# step 5

wrong("loss_no_maximum", step=5, hint="overflow",
      old="all_reduced(logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX)",
      new="logits.new_zeros(targets.shape)")
wrong("loss_no_offset", step=5, hint="target_offset",
      old="targets - grid.shard * width", new="targets ")
wrong("loss_not_masked", step=5, hint="target_not_masked",
      old="found * mine", new="found")
wrong("loss_own_maximum", step=5, hint="own_maximum",
      old="all_reduced(logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX)",
      new="logits.detach().amax(dim=-1)")
wrong("loss_own_target", step=5, hint="target_not_summed",
      old="sum_over_shards(found * mine, grid)", new="found * mine")
wrong("loss_own_total", step=5, hint="total_not_summed",
      old="sum_over_shards(shifted.exp().sum(dim=-1), grid)", new="shifted.exp().sum(dim=-1)")
wrong("loss_summed", step=5, hint="loss_not_mean",
      old="(total.log() - target).mean", new="(total.log() - target).sum")
wrong("loss_without_gradient", step=5, hint="loss_gradient",
      old="sum_over_shards(shifted.exp().sum(dim=-1), grid)",
      new="all_reduced(shifted.exp().sum(dim=-1), grid.tp_group)")

wrong("loss_border_twice", step=5, hint="target_not_masked",
      old="(place < width)", new="(place <= width)")
wrong("loss_gradient_of_maximum", step=5, hint="loss_gradient",
      old="highest = all_reduced(logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX)",
      new="highest = logits.amax(-1)\ndist.all_reduce(highest, dist.ReduceOp.MAX, grid.tp_group)")
wrong("loss_not_clamped", step=5, hint="target_clamp",
      old="place.clamp(0, width - 1)", new="place")
wrong("loss_sum_of_maxima", step=5, hint="overflow",
      old="logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX", new="logits.amax(dim=-1), grid.tp_group")
wrong("right_loss_by_columns", step=5, old="""
    found = shifted.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    target = sum_over_shards(found * mine, grid)
""", new="""
    chosen = torch.arange(width) == place.unsqueeze(-1)
    target = sum_over_shards((shifted * chosen).sum(-1), grid)
""")
wrong("right_loss_by_where", step=5, old="""
    found = shifted.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    target = sum_over_shards(found * mine, grid)
""", new="""
    found = shifted.gather(-1, torch.where(mine, place, 0).unsqueeze(-1)).squeeze(-1)
    target = sum_over_shards(torch.where(mine, found, 0.0), grid)
""")
wrong("right_maximum_by_gather", step=5,
      old="highest = all_reduced(logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX)", new="""
    own = logits.detach().amax(-1)
    every = [torch.empty_like(own) for _ in range(grid.tp)]
    dist.all_gather(every, own, group=grid.tp_group)
    highest = torch.stack(every).amax(0)
""")
wrong("loss_one_maximum", step=5, hint="underflow", old="all_reduced(logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX)", new="all_reduced(logits.amax(), grid.tp_group, dist.ReduceOp.MAX).expand(targets.shape)")
wrong("loss_gathers", step=5, hint="logits_gathered", old=Body("vocabulary_parallel_loss"), new="""
    parts = [torch.empty_like(logits) for _ in range(grid.tp)]
    dist.all_gather(parts, logits.detach().contiguous(), group=grid.tp_group)
    parts[grid.shard] = logits
    return mean_loss(torch.cat(parts, -1), targets)
""")
wrong("loss_target_not_shifted", step=5, hint="target_not_shifted", old="found = shifted.gather", new="found = logits.gather")
wrong("loss_half_of_the_mask", step=5, hint="target_not_masked", old="mine = (place >= 0) & (place < width)", new="mine = place >= 0")

# step 6

wrong("backward_keeps", step=6, hint="not_forgotten",
      old="self.live.pop(k)", new="self.live[k]")
wrong("backward_sends_activation", step=6, hint="sent_back",
      old="taken.grad", new="taken")
wrong("backward_without_start", step=6, hint="start_gradient",
      old="output.backward(self.receive(self.grid.stage + 1))",
      new="self.receive(self.grid.stage + 1)\noutput.backward()")
wrong("forward_detached", step=6, hint="detached",
      old="self.live[k] = taken, output", new="self.live[k] = taken, output.detach()")
wrong("forward_no_leaf", step=6, hint="leaf",
      old="(grid.stage - 1).requires_grad_()", new="(grid.stage - 1)")
wrong("forward_no_loss", step=6, hint="loss_not_added",
      old="self.loss += output.detach()", new="")
wrong("forward_not_divided", step=6, hint="loss_not_divided",
      old="vocabulary_parallel_loss(output, self.targets[k], grid) / self.m",
      new="vocabulary_parallel_loss(output, self.targets[k], grid)")
wrong("gpipe_one_by_one", step=6, hint="not_gpipe",
      old="for k in range(pipe.m):\n    pipe.backward(k)", new="    pipe.backward(k)")
wrong("gpipe_one_short", step=6, hint="each_once",
      old="for k in range(pipe.m):\n    pipe.forward(k)\nfor k in range(pipe.m):",
      new="for k in range(pipe.m - 1):\n    pipe.forward(k)\nfor k in range(pipe.m - 1):")
wrong("layers_round_robin", step=6, hint="layers",
      old=Body("layers_of"), new="return range(stage, LAYERS, pp)")
wrong("send_in_back_group", step=6, hint="one_group",
      old="self.group_to(to)", new="self.grid.back_group")
wrong("send_forgotten", step=6, hint="not_kept",
      old=Body("Pipeline.send"),
      new="dist.isend(tensor.detach().contiguous(), group=self.group_to(to), group_dst=to)")
wrong("send_to_rank", step=6, hint="group_rank",
      old="group=self.group_to(to), group_dst=to", new="dst=to, group=self.group_to(to)")

wrong("backward_of_newest", step=6, hint="other_micro_batch",
      old="taken, output = self.live.pop(k)",
      new="_, (taken, output) = self.live.popitem()")
wrong("backward_of_oldest", step=6, hint="other_micro_batch",
      old="self.live.pop(k)", new="self.live.pop(min(self.live))")
wrong("backward_sends_to_itself", step=6, hint="to_itself",
      old="self.send(taken.grad, self.grid.stage - 1)",
      new="self.send(taken.grad, self.grid.stage)")
wrong("backward_sends_nothing", step=6, hint="pipeline_stuck",
      old="self.send(taken.grad, self.grid.stage - 1)", new="pass")
wrong("backward_zeroes", step=6, hint="last_only", old="taken, output = self.live.pop(k)", new="""
    taken, output = self.live.pop(k)
    self.stage.zero_grad()
""")
wrong("forward_first_inputs", step=6, hint="which_micro_batch",
      old="self.inputs[k] if", new="self.inputs[0] if")
wrong("forward_first_targets", step=6, hint="which_micro_batch",
      old="self.targets[k], grid", new="self.targets[0], grid")
wrong("forward_pair_swapped", step=6, hint="live_pair",
      old="self.live[k] = taken, output", new="self.live[k] = output, taken")
wrong("forward_stores_under_0", step=6, hint="live_key",
      old="self.live[k] = taken, output", new="self.live[0] = taken, output")
wrong("layers_returns_nothing", step=6, hint="layers",
      old=Body("layers_of"), new="share = LAYERS // pp")
wrong("rank_dies", step=6, hint="killed",
      old="share = LAYERS // pp", new="dist.get_rank() == 1 and os._exit(1)\nshare = LAYERS // pp")
wrong("receive_float32", step=6, hint="message",
      old="torch.empty(shape, dtype=torch.float64, device=self.loss.device)",
      new="torch.empty(shape)")
wrong("receive_returns_nothing", step=6, hint="received",
      old="dist.recv(tensor, group=self.group_from(source), group_src=source)\nreturn tensor",
      new="dist.recv(tensor, group=self.group_from(source), group_src=source)")
wrong("receive_returns_the_source", step=6, hint="received",
      old="dist.recv(tensor, group=self.group_from(source), group_src=source)\nreturn tensor",
      new="return dist.recv(tensor, group=self.group_from(source), group_src=source)")
wrong("receive_without_wait", step=6, hint="not_received",
      old="dist.recv(tensor, group=self", new="dist.irecv(tensor, group=self")
wrong("receive_wrong_shape", step=6, hint="message",
      old="torch.empty(shape, dtype", new="torch.empty(self.inputs[0].shape, dtype")
wrong("send_and_receive_in_one_group", step=6, hint="one_group", edits=[
    ("self.group_to(to)", "self.grid.pp_group"),
    ("self.group_from(source)", "self.grid.pp_group")])
wrong("send_keeps_last", step=6, hint="not_kept",
      old="self.sends.append((work, tensor))", new="self.sends = [(work, tensor)]")
wrong("send_keeps_work_only", step=6, hint="send_pairs",
      old="self.sends.append((work, tensor))", new="self.sends.append(work)")
wrong("right_backward_by_autograd", step=6,
      old="output.backward(self.receive(self.grid.stage + 1))",
      new="torch.autograd.backward([output], [self.receive(self.grid.stage + 1)])")
wrong("right_batched_messages", step=6, edits=[
    (Body("Pipeline.send"), """
        tensor = tensor.detach().contiguous()
        op = dist.P2POp(dist.isend, tensor, group=self.group_to(to), group_peer=to)
        self.sends += [(work, tensor) for work in dist.batch_isend_irecv([op])]
    """), (Body("Pipeline.receive"), """
        tensor = torch.empty(*self.inputs[0].shape, HIDDEN, dtype=torch.float64)
        group = self.group_from(source)
        op = dist.P2POp(dist.irecv, tensor, group=group, group_peer=source)
        dist.batch_isend_irecv([op])[0].wait()
        return tensor
    """)])
wrong("right_gpipe_reversed", step=6,
      old="for k in range(pipe.m):\n    pipe.backward(k)",
      new="for k in reversed(range(pipe.m)):\n    pipe.backward(k)")
wrong("right_layers_list", step=6, old=Body("layers_of"), new="""
    share = LAYERS // pp
    return [layer for layer in range(LAYERS) if layer // share == stage]
""")
wrong("right_receive_by_irecv", step=6,
      old="dist.recv(tensor, group=self.group_from(source), group_src=source)",
      new="dist.irecv(tensor, group=self.group_from(source), group_src=source).wait()")
wrong("right_send_by_global_rank", step=6, old=Body("Pipeline.send"), new="""
    group, tensor = self.group_to(to), tensor.detach().clone()
    work = dist.isend(tensor, dist.get_global_rank(group, to), group)
    self.sends.append((work, tensor))
""")
wrong("right_send_that_waits", step=6, old=Body("Pipeline.send"), new="""
    tensor = tensor.detach().contiguous()
    dist.isend(tensor, group=self.group_to(to), group_dst=to).wait()
""")
wrong("right_send_blocks", step=6,
      old=Body("Pipeline.send"),
      new="dist.send(tensor.detach().contiguous(), group=self.group_to(to), group_dst=to)")

# step 7

wrong("backwards_reversed", step=7, hint="backward_order",
      old="range(pipe.m - warm_up, pipe.m)", new="reversed(range(pipe.m - warm_up, pipe.m))")
wrong("schedule_gpipe", step=7, hint="not_1f1b", old=Body("one_f_one_b"), new="""
    for k in range(pipe.m):
        pipe.forward(k)
    for k in range(pipe.m):
        pipe.backward(k)
""")
wrong("send_blocks", step=7, hint="blocking_send",
      old=Body("Pipeline.send"),
      new="dist.send(tensor.detach().contiguous(), group=self.group_to(to), group_dst=to)")
wrong("warm_up_by_stage", step=7, hint="warm_up_backwards",
      old="pipe.grid.pp - 1 - pipe.grid.stage", new="pipe.grid.stage")
wrong("warm_up_one_less", step=7, hint="warm_up_short",
      old="pipe.grid.pp - 1 - pipe.grid.stage",
      new="max(pipe.grid.pp - 2 - pipe.grid.stage, 0)")
wrong("warm_up_one_more", step=7, hint="warm_up_long",
      old="pipe.grid.pp - 1 - pipe.grid.stage", new="pipe.grid.pp - pipe.grid.stage")
wrong("warm_up_without_min", step=7, hint="few_micro_batches",
      old="min(pipe.grid.pp - 1 - pipe.grid.stage, pipe.m)",
      new="pipe.grid.pp - 1 - pipe.grid.stage")

wrong("backward_before_forward", step=7, hint="live_key",
      old="pipe.forward(warm_up + k)\npipe.backward(k)",
      new="pipe.backward(k)\npipe.forward(warm_up + k)")
wrong("backwards_left_out", step=7, hint="each_once",
      old="for k in range(pipe.m - warm_up, pipe.m):\n    pipe.backward(k)", new="")
wrong("isend_that_waits", step=7, hint="blocking_send", old=Body("Pipeline.send"), new="""
    tensor = tensor.detach().contiguous()
    dist.isend(tensor, group=self.group_to(to), group_dst=to).wait()
""")
wrong("warm_up_of_every_stage", step=7, hint="warm_up_long",
      old="pipe.grid.pp - 1 - pipe.grid.stage", new="pipe.grid.pp - 1")
wrong("right_schedule_by_counts", step=7, old=Body("one_f_one_b"), new="""
    forwards = backwards = 0
    while backwards < pipe.m:
        lead = forwards - backwards
        if forwards < pipe.m and lead < pipe.grid.pp - pipe.grid.stage:
            pipe.forward(forwards)
            forwards += 1
        else:
            pipe.backward(backwards)
            backwards += 1
""")

# step 8

wrong("average_by_world", step=8, hint="average_divisor",
      old="parameter.grad /= grid.dp", new="parameter.grad /= dist.get_world_size()")
wrong("average_cut_only", step=8, hint="not_averaged", old=Body("average_gradients"), new="""
    for parameter in stage.parameters():
        if getattr(parameter, "is_cut", False):
            dist.all_reduce(parameter.grad, group=grid.dp_group)
            parameter.grad /= grid.dp
""")
wrong("average_over_all", step=8, hint="averaged_over_all", edits=[
    ("grad, group=grid.dp_group", "grad"),
    ("parameter.grad /= grid.dp", "parameter.grad /= dist.get_world_size()")])
wrong("average_whole_over_tp", step=8, hint="whole_reduced",
      old="dist.all_reduce(parameter.grad, group=grid.dp_group)", new="""
    if not getattr(parameter, "is_cut", False):
        dist.all_reduce(parameter.grad, group=grid.tp_group)
    dist.all_reduce(parameter.grad, group=grid.dp_group)
""")
wrong("clip_always", step=8, hint="clip_grows",
      old="min(1.0, limit / (norm + 1e-6))", new="limit / (norm + 1e-6)")
wrong("clip_forgotten", step=8, hint="not_clipped",
      old="min(1.0, limit / (norm + 1e-6))", new="1.0")
wrong("norm_counts_copies", step=8, hint="norm_copies", edits=[
    ("float64, device=next(stage.parameters()).device", "float64"),
    ('getattr(parameter, "is_cut", False) or grid.shard == 0', "parameter.grad is not None")])
wrong("norm_counts_replicas", step=8, hint="norm_replicas",
      old="dist.all_reduce(square, group=grid.tp_group)", new="dist.all_reduce(square)")
wrong("norm_cut_only", step=8, hint="norm_missed",
      old="or grid.shard == 0", new="")
wrong("norm_no_root", step=8, hint="norm_of_norms",
      old="square.sqrt().item", new="square.item")
wrong("norm_of_this_rank", step=8, hint="norm_local",
      old=Body("clip_gradients"),
      new="return torch.nn.utils.clip_grad_norm_(stage.parameters(), limit).item()")
wrong("norm_over_tp_only", step=8, hint="norm_one_axis",
      old="dist.all_reduce(square, group=grid.pp_group)", new="")
wrong("share_all", step=8, hint="share_same",
      old=Body("my_share"), new="return batch")
wrong("share_by_rank", step=8, hint="share_by_rank",
      old="(grid.dp)[grid.replica]", new="(dist.get_world_size())[dist.get_rank()]")
wrong("share_half", step=8, hint="share_lost",
      old="batch.chunk(grid.dp)", new="batch.chunk(2 * grid.dp)")
wrong("train_clips_first", step=8, hint="other",
      old="average_gradients(stage, grid)\nnorms.append(clip_gradients(stage, grid, CLIP))",
      new="norms.append(clip_gradients(stage, grid, CLIP))\naverage_gradients(stage, grid)")
wrong("clip_cut_only", step=8, hint="not_clipped", old="parameter.grad *= scale",
      new="parameter.grad *= scale if hasattr(parameter, 'is_cut') else 1.0")
wrong("clip_returns_new_norm", step=8, hint="norm_returned",
      old="    parameter.grad *= scale\nreturn norm",
      new="    parameter.grad *= scale\nreturn norm * scale")
wrong("clip_returns_nothing", step=8, hint="norm_returned",
      old="    parameter.grad *= scale\nreturn norm", new="    parameter.grad *= scale")
wrong("share_not_returned", step=8, hint="returned",
      old=Body("my_share"), new="batch.chunk(grid.dp)[grid.replica]")
wrong("right_average_in_one_tensor", step=8, old=Body("average_gradients"), new="""
    gradients = [parameter.grad for parameter in stage.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=grid.dp_group)
    parts = (flat / grid.dp).split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts):
        gradient.copy_(part.view_as(gradient))
""")
wrong("right_average_started_first", step=8, old=Body("average_gradients"), new="""
    works = []
    for parameter in stage.parameters():
        parameter.grad.div_(grid.dp)
        works.append(dist.all_reduce(parameter.grad, group=grid.dp_group, async_op=True))
    for work in works:
        work.wait()
""")
wrong("right_clip_by_kinds", step=8, old=Body("clip_gradients"), new="""
    sums = [0.0, 0.0]
    for parameter in stage.parameters():
        sums[hasattr(parameter, "is_cut")] += parameter.grad.pow(2).sum()
    dist.all_reduce(sums[1], group=grid.tp_group)
    square = sums[0] + sums[1]
    dist.all_reduce(square, group=grid.pp_group)
    norm = square.sqrt()
    if norm > limit:
        for parameter in stage.parameters():
            parameter.grad.mul_(limit / (norm + 1e-6))
    return norm
""")
wrong("right_share_by_steps", step=8,
      old=Body("my_share"), new="return batch[grid.replica :: grid.dp]")
wrong("average_divided_only", step=8, hint="not_averaged",
      old="dist.all_reduce(parameter.grad, group=grid.dp_group)", new="pass")
wrong("average_over_tp", step=8, hint="averaged_over_all",
      old="dist.all_reduce(parameter.grad, group=grid.dp_group)",
      new="dist.all_reduce(parameter.grad, group=grid.tp_group)")
wrong("right_clip_by_torch", step=8, old=Body("clip_gradients"), new="""
    parameters = list(stage.parameters())
    mine = [p for p in parameters if getattr(p, "is_cut", False) or not grid.shard]
    square = sum(p.grad.norm() ** 2 for p in mine)
    for group in (grid.tp_group, grid.pp_group):
        dist.all_reduce(square, group=group)
    nn.utils.clip_grads_with_norm_(parameters, limit, square.sqrt())
    return square.sqrt().item()
""")
wrong("average_not_waited", step=8, hint="not_waited", old="dist.all_reduce(parameter.grad, group=grid.dp_group)", new="dist.all_reduce(parameter.grad, group=grid.dp_group, async_op=True)")
wrong("norm_roots_added", step=8, hint="norm_of_norms", edits=[("dist.all_reduce(square, group=grid.tp_group)", "square = square.sqrt()\ndist.all_reduce(square, group=grid.tp_group)"), ("norm = square.sqrt().item()", "norm = square.item()")])
wrong("right_forward_by_branches", step=6, old=Body("Pipeline.forward"), new="""
    if self.grid.first:
        taken = self.inputs[k]
    else:
        taken = self.receive(self.grid.stage - 1)
        taken.requires_grad = True
    output = self.stage(taken)
    if self.grid.last:
        output = vocabulary_parallel_loss(output, self.targets[k], self.grid) / self.m
        self.loss = self.loss + output.item()
    else:
        self.send(output, self.grid.stage + 1)
    self.live[k] = [taken, output]
    self.peak = max(self.peak, len(self.live))
""")
wrong("right_send_by_group", step=6, old=Body("Pipeline.send"), new="""
    tensor = tensor.detach().contiguous()
    self.sends.append((self.group_to(to).send([tensor], to, 0), tensor))
""")
wrong("forward_loss_with_graph", step=6, hint="loss_not_added", old="self.loss += output.detach()", new="self.loss = self.loss + output")
wrong("forward_divided_by_a_constant", step=6, hint="loss_not_divided", old="grid) / self.m", new="grid) / MICRO_BATCHES")
wrong("send_keeps_no_tensor", step=6, hint="send_pairs", old="self.sends.append((work, tensor))", new="self.sends.append((work, None))")
wrong("gpipe_of_a_constant", step=6, hint="each_once", old=Body("gpipe"), new="""
    for k in range(MICRO_BATCHES):
        pipe.forward(k)
    for k in range(MICRO_BATCHES):
        pipe.backward(k)
""")
wrong("right_schedule_by_list", step=7, old=Body("one_f_one_b"), new="""
    lead = min(pipe.grid.pp - 1 - pipe.grid.stage, pipe.m)
    order = [(pipe.forward, k) for k in range(lead)]
    for k in range(pipe.m - lead):
        order += [(pipe.forward, lead + k), (pipe.backward, k)]
    order += [(pipe.backward, k) for k in range(pipe.m - lead, pipe.m)]
    for call, k in order:
        call(k)
""")
wrong("warm_up_by_rank", step=7, hint="stage_number", old="pipe.grid.pp - 1 - pipe.grid.stage", new="pipe.grid.pp - 1 - dist.get_rank()")
wrong("warm_up_by_world", step=7, hint="stage_number", old="pipe.grid.pp - 1 - pipe.grid.stage", new="dist.get_world_size() - 1 - pipe.grid.stage")

# more answers to steps 1 to 8

wrong("column_first_piece", step=3, hint="first_piece", old="self.weight = cut(full.weight, 0, grid)", new="""
    n = full.weight.size(0) // grid.tp
    self.weight = nn.Parameter(full.weight.detach()[:n].clone())
    self.weight.is_cut = True
""")
wrong("column_by_rank", step=3, hint="several_groups", old="self.weight = cut(full.weight, 0, grid)", new="""
    rows = full.weight.detach().chunk(grid.tp)[dist.get_rank()]
    self.weight = nn.Parameter(rows.clone())
    self.weight.is_cut = True
""")
wrong("attention_by_world", step=4, hint="several_groups", old="HEADS // self.grid.tp", new="HEADS // dist.get_world_size()")
wrong("attention_not_transposed", step=4, hint="heads_apart", old="y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\nreturn self.out(y.transpose(1, 2).flatten(2))  # -> [b, s, h/t] -> [b, s, h]",
      new="y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\nreturn self.out(y.reshape(x.size(0), x.size(1), -1))")
wrong("loss_by_rank", step=5, hint="several_groups", old="targets - grid.shard * width", new="targets - dist.get_rank() * width")

# more mistakes in all steps

wrong("groups_kept_between_calls", step=1, hint="join_again", old=Body("join"), new="""
    known, mine = globals().setdefault("KNOWN_GROUPS", {}), None
    for ranks in groups:
        if tuple(ranks) not in known:
            known[tuple(ranks)] = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = known[tuple(ranks)]
    return mine
""")
wrong("group_saved_as_tensor", step=2, hint="not_stored",
      old="ctx.group = group\nreturn x.view_as(x)", new="ctx.save_for_backward(group)\nreturn x.view_as(x)")
wrong("bias_times_zero", step=3, hint="bias_one",
      old="return sum_over_shards(F.linear(x, self.weight), self.grid) + self.bias", new="""
    part = F.linear(x, self.weight) + self.bias * (self.grid.shard == 0)
    return sum_over_shards(part, self.grid)
""")
wrong("f_on_the_output", step=3, hint="column_input",
      old="F.linear(copy_to_shards(x, self.grid), self.weight, self.bias)",
      new="copy_to_shards(F.linear(x, self.weight, self.bias), self.grid)")
wrong("heads_last", step=4, hint="heads_swapped",
      old="part.unflatten(-1, (heads, -1))", new="part.unflatten(-1, (-1, heads))")
wrong("scale_of_the_shard", step=4, hint="scale",
      old="return self.out(y.transpose(1, 2).flatten(2))  # -> [b, s, h/t] -> [b, s, h]", new="""
    y = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=(HIDDEN // self.grid.tp) ** -0.5
    )
    return self.out(y.transpose(1, 2).flatten(2))
""")
wrong("summed_again", step=4, hint="summed_again",
      old="return self.out(y.transpose(1, 2).flatten(2))  # -> [b, s, h/t] -> [b, s, h]",
      new="return sum_over_shards(self.out(y.transpose(1, 2).flatten(2)), self.grid)")
wrong("copied_again", step=4, hint="copied_again",
      old="heads = HEADS // self.grid.tp", new="heads, x = HEADS // self.grid.tp, copy_to_shards(x, self.grid)")
wrong("total_of_logarithms", step=5, hint="total_of_logs",
      old="sum_over_shards(shifted.exp().sum(dim=-1), grid)", new="sum_over_shards(shifted.logsumexp(-1), grid).exp()")
wrong("target_by_modulo", step=5, hint="target_not_masked",
      edits=[("place.clamp(0, width - 1)", "(place % width)"), ("found * mine, grid", "found, grid")])
wrong("send_keeps_the_original", step=6, hint="kept_original",
      old=Body("Pipeline.send"), new="""
    work = dist.isend(tensor.detach().contiguous(), group=self.group_to(to), group_dst=to)
    self.sends.append((work, tensor))
""")
wrong("one_buffer_for_all", step=6, hint="one_buffer",
      old="tensor = torch.empty(shape, dtype=torch.float64, device=self.loss.device)", new="""
    if not hasattr(self, "buffer"):
        self.buffer = torch.empty(shape, dtype=torch.float64, device=self.loss.device)
    tensor = self.buffer
""")
wrong("loss_of_all_logits", step=6, hint="loss_of_part",
      old="vocabulary_parallel_loss(output, self.targets[k], grid) / self.m", new="mean_loss(output, self.targets[k]) / self.m")
wrong("live_without_input", step=6, hint="live_pair",
      old="self.live[k] = taken, output", new="self.live[k] = output")
wrong("first_or_last", step=6, hint="first_and_last",
      old="if grid.last:\n    output = vocabulary_parallel_loss(output, self.targets[k], grid) / self.m", new="""
    if grid.last and not grid.first:
        output = vocabulary_parallel_loss(output, self.targets[k], grid) / self.m
""")
wrong("gradient_of_the_output_sent", step=6, hint="leaf",
      old="self.send(taken.grad, self", new="self.send(output.grad, self")
wrong("last_stage_in_another_order", step=6, hint="same_order",
      old="for k in range(pipe.m):\n    pipe.forward(k)\nfor k in range(pipe.m):", new="""
    for k in range(pipe.m):
        pipe.forward(k)
    for k in reversed(range(pipe.m)) if pipe.grid.last else range(pipe.m):
""")
wrong("share_of_columns", step=8, hint="share_columns",
      old="batch.chunk(grid.dp)", new="batch.chunk(grid.dp, dim=1)")
wrong("is_cut_of_whole", step=8, hint="unmarked",
      old='if getattr(parameter, "is_cut", False) or', new="if parameter.is_cut or")
wrong("shard_zero_alone", step=8, hint="norm_one_shard",
      old='getattr(parameter, "is_cut", False) or grid.shard == 0', new="grid.shard == 0")

# mistakes with shared memory, groups and precision

wrong("join_leaves_single_ranks_out", step=1, hint="wrong_group", old=Body("join"), new="""
    mine = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine = group
    return mine
""")
wrong("column_view_of_the_whole", step=3, hint="shared_memory", old="self.weight = cut(full.weight, 0, grid)", new="""
    self.weight = nn.Parameter(full.weight.detach().chunk(grid.tp, 0)[grid.shard])
    self.weight.is_cut = True
""")
wrong("row_bias_is_no_parameter", step=3, hint="not_parameter",
      old="self.bias = whole(full.bias)", new="self.bias = full.bias.detach().clone()")
wrong("loss_maximum_of_all_ranks", step=5, hint="group_of_all",
      old="all_reduced(logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX)",
      new="all_reduced(logits.amax(dim=-1), dist.group.WORLD, dist.ReduceOp.MAX)")
wrong("loss_in_float32", step=5, hint="precision",
      old="shifted = logits - highest.unsqueeze(-1)", new="shifted = (logits - highest.unsqueeze(-1)).float()")
wrong("forward_gradients_of_tokens", step=6, hint="tokens",
      old="taken = self.inputs[k] if grid.first else self.receive(grid.stage - 1).requires_grad_()", new="""
    taken = self.inputs[k] if grid.first else self.receive(grid.stage - 1)
    taken.requires_grad_()
""")
wrong("pairs_for_all_micro_batches", step=7, hint="each_once",
      old="for k in range(pipe.m - warm_up):", new="for k in range(pipe.m):")
wrong("average_over_stages_too", step=8, hint="averaged_over_all",
      old="dist.all_reduce(parameter.grad, group=grid.dp_group)", new="""
    dist.all_reduce(parameter.grad, group=grid.pp_group)
    dist.all_reduce(parameter.grad, group=grid.dp_group)
""")
wrong("clip_without_epsilon", step=8, hint="epsilon", old="min(1.0, limit / (norm + 1e-6))", new="min(1.0, limit / norm)")
