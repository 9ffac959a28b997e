"""Wrong answers to labs/lab10_model_parallel.py."""

# fmt: off
from wrong import Body, Table

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
wrong("receive_other_group", step=6, hint="pipeline_stuck",
      old="self.group_to(to)", new="self.grid.back_group")
wrong("send_forgotten", step=6, hint="not_kept",
      old=Body("Pipeline.send"),
      new="dist.isend(tensor.detach().contiguous(), group=self.group_to(to), group_dst=to)")
wrong("send_to_rank", step=6, hint="group_rank",
      old="group=self.group_to(to), group_dst=to", new="dst=to, group=self.group_to(to)")

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
