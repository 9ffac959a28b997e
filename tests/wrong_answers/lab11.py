"""Wrong answers to labs/lab11_post_training.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab11_post_training.py")

# step 1

CENTRED = "centred / (grouped.std(1, keepdim=True) + 1e-4)"

wrong("advantages_centred", step=1, hint="adv_centred", old=CENTRED, new="centred")
wrong("advantages_population", step=1, hint="adv_population",
      old=CENTRED, new="centred / (grouped.std(1, keepdim=True, correction=0) + 1e-4)")
wrong("advantages_variance", step=1, hint="adv_variance",
      old=CENTRED, new="centred / (grouped.var(1, keepdim=True) + 1e-4)")
wrong("advantages_not_centred", step=1, hint="adv_not_centred",
      old=CENTRED, new="grouped / (grouped.std(1, keepdim=True) + 1e-4)")
wrong("advantages_sign", step=1, hint="adv_sign", old=CENTRED, new=f"-{CENTRED}")
wrong("advantages_of_the_batch", step=1, hint="adv_batch", old=Body("group_advantages"), new="""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)
""")
wrong("advantages_of_columns", step=1, hint="adv_order", old=Body("group_advantages"), new="""
    grouped = rewards.view(group, -1)
    return ((grouped - grouped.mean(0)) / (grouped.std(0) + 1e-4)).flatten()
""")
wrong("advantages_of_the_constant", step=1, hint="adv_group",
      old="rewards.view(-1, group)", new="rewards.view(-1, min(GROUP, len(rewards)))")
wrong("advantages_nan", step=1, hint="adv_equal",
      old=CENTRED, new="centred / grouped.std(1, keepdim=True)")
wrong("advantages_two_dimensions", step=1, hint="adv_shape",
      old="1e-4)).flatten()", new="1e-4))")
wrong("advantages_of_one_mean", step=1, hint="adv_shape",
      old="grouped.mean(1, keepdim=True)", new="grouped.mean(1)")
wrong("advantages_in_place", step=1, hint="adv_in_place",
      old="centred = grouped - grouped.mean(1, keepdim=True)",
      new="centred = grouped.sub_(grouped.mean(1, keepdim=True))")
wrong("advantages_zero", step=1, hint="other", old=CENTRED, new="0 * centred")
wrong("right_advantages_by_a_loop", step=1, old=Body("group_advantages"), new="""
    parts = []
    for part in rewards.split(group):
        deviation = part.std()
        parts.append((part - part.mean()) / deviation if deviation > 1e-6 else part * 0)
    return torch.cat(parts)
""")
wrong("right_advantages_by_unflatten", step=1, old=Body("group_advantages"), new="""
    deviation, mean = torch.std_mean(rewards.unflatten(0, (-1, group)), 1)
    deviation, mean = deviation.repeat_interleave(group), mean.repeat_interleave(group)
    return (rewards - mean) / deviation.clamp(min=1e-4)
""")
wrong("right_advantages_with_a_smaller_epsilon", step=1, old=CENTRED,
      new="centred / (grouped.std(1, keepdim=True) + 1e-6)")

# step 2

wrong("mask_without_end", step=2, hint="mask_end",
      old="(is_end.cumsum(1) - is_end == 0)", new="(is_end.cumsum(1) == 0)")
wrong("mask_not_pad", step=2, hint="mask_after_end",
      old=Body("answer_mask"), new="return (answers != PAD).float()")
wrong("mask_up_to_one_end", step=2, hint="mask_after_end",
      old="(is_end.cumsum(1) - is_end == 0)", new="(is_end.cumsum(1) <= 1)")
wrong("mask_until_last_end", step=2, hint="mask_after_end", old=Body("answer_mask"), new="""
    is_end = (answers == END).int()
    return ((is_end.flip(1).cumsum(1).flip(1) > 0) | (is_end.sum(1, keepdim=True) == 0)).float()
""")
wrong("mask_by_length", step=2, hint="mask_without_end", old=Body("answer_mask"), new="""
    length = (answers == END).int().argmax(1, keepdim=True)
    return (torch.arange(answers.shape[1]) <= length).float()
""")
wrong("mask_and_pad", step=2, hint="mask_by_pad",
      old="return (is_end.cumsum(1) - is_end == 0).float()",
      new="return ((is_end.cumsum(1) - is_end == 0) & (answers != PAD)).float()")
wrong("right_mask_of_bool", step=2,
      old="(is_end.cumsum(1) - is_end == 0).float()", new="is_end.cumsum(1) - is_end == 0")
wrong("mask_of_rows", step=2, hint="mask_shape",
      old="(is_end.cumsum(1) - is_end == 0).float()",
      new="(is_end.cumsum(1) - is_end == 0).float().sum(1)")
wrong("right_mask_by_a_loop", step=2, old=Body("answer_mask"), new="""
    mask = torch.ones(answers.shape, device=answers.device)
    for row, answer in enumerate(answers.tolist()):
        if END in answer:
            mask[row, answer.index(END) + 1 :] = 0
    return mask
""")
wrong("right_mask_of_integers", step=2, old=Body("answer_mask"), new="""
    ended = torch.zeros(len(answers), dtype=torch.bool, device=answers.device)
    columns = []
    for column in answers.T:
        columns.append((~ended).long())
        ended = ended | (column == END)
    return torch.stack(columns, 1)
""")
MINIMUM = "torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)"
MEAN = "-(objective * mask).sum() / mask.sum()"
wrong("loss_sign", step=2, hint="loss_sign", old=MEAN, new=MEAN[1:])
wrong("loss_maximum", step=2, hint="loss_maximum",
      old=MINIMUM, new=MINIMUM.replace("minimum", "maximum"))
wrong("loss_without_clip", step=2, hint="loss_not_clipped", old=MINIMUM, new="ratio * a")
wrong("loss_clip_alone", step=2, hint="loss_no_minimum",
      old=MINIMUM, new="ratio.clamp(1 - clip, 1 + clip) * a")
wrong("loss_minimum_of_ratios", step=2, hint="loss_minimum_first",
      old=MINIMUM, new="torch.minimum(ratio, ratio.clamp(1 - clip, 1 + clip)) * a")
wrong("loss_mean_of_all", step=2, hint="loss_mask", old=MEAN, new="-objective.mean()")
wrong("loss_divided_by_all", step=2, hint="loss_mask", old=MEAN, new="-(objective * mask).mean()")
wrong("loss_sum", step=2, hint="loss_sum", old=MEAN, new="-(objective * mask).sum()")
wrong("loss_of_sequences", step=2, hint="loss_sequence",
      old=MEAN, new="-((objective * mask).sum(1) / mask.sum(1)).mean()")
wrong("loss_inverse", step=2, hint="loss_inverse", old="(new - old).exp()", new="(old - new).exp()")
wrong("loss_no_exp", step=2, hint="loss_no_exp", old="(new - old).exp()", new="(new - old)")
wrong("loss_advantages_of_positions", step=2, hint="loss_shape",
      old="a = advantages[:, None]", new="a = advantages")
wrong("loss_clip_constant", step=2, hint="loss_clip",
      old="ratio.clamp(1 - clip, 1 + clip)", new="ratio.clamp(0.8, 1.2)")
wrong("loss_clip_above", step=2, hint="loss_clip",
      old="ratio.clamp(1 - clip, 1 + clip)", new="ratio.clamp(max=1 + clip)")
wrong("loss_detached", step=2, hint="loss_detached",
      old="ratio.clamp(1 - clip, 1 + clip)", new="ratio.detach().clamp(1 - clip, 1 + clip)")
wrong("loss_per_answer", step=2, hint="loss_scalar",
      old=MEAN, new="-(objective * mask).sum(1) / mask.sum(1)")
wrong("loss_no_gradient", step=2, hint="loss_detached", old=MEAN, new=f"({MEAN}).detach()")
wrong("right_loss_by_where", step=2, old=Body("clipped_loss"), new="""
    a, ratio = advantages.unsqueeze(1), torch.exp(new - old)
    limit = torch.where(a > 0, torch.full_like(ratio, 1 + clip), torch.full_like(ratio, 1 - clip))
    inside = torch.where(a > 0, ratio <= limit, ratio >= limit)
    objective = torch.where(inside, ratio, limit.detach()) * a
    return -objective[mask > 0].mean()
""")
wrong("right_loss_by_maximum", step=2, old=Body("clipped_loss"), new="""
    ratio = torch.exp(new - old)
    losses = torch.stack([-ratio, -ratio.clip(1 - clip, 1 + clip)]) * advantages.view(-1, 1)
    return (losses.amax(0) * mask / mask.sum()).sum()
""")
wrong("loss_dual_clip", step=2, hint="loss_limits", old=MEAN,
      new="-(torch.where(a < 0, torch.maximum(objective, 3 * a), objective) * mask).sum() / mask.sum()")
wrong("loss_log_ratio_limited", step=2, hint="loss_limits",
      old="(new - old).exp()", new="(new - old).clamp(-1, 1).exp()")
wrong("right_loss_clip_in_logs", step=2, old=Body("clipped_loss"), new="""
    import math
    difference = new - old
    limited = difference.clamp(math.log(1 - clip), math.log(1 + clip))
    a = advantages.unsqueeze(-1)
    terms = torch.minimum(difference.exp() * a, limited.exp() * a)
    return -terms[mask.bool()].mean()
""")
wrong("mask_zeros", step=2, hint="mask_zero", old="(is_end.cumsum(1) - is_end == 0).float()", new="torch.zeros(answers.shape)")

# step 3

wrong("rows_rounded_down", step=3, hint="owned_lost",
      old="size = -(-rows // trainers)", new="size = rows // trainers")
wrong("rows_beyond", step=3, hint="owned_beyond",
      old="return range(min(trainer * size, rows), min((trainer + 1) * size, rows))",
      new="return range(trainer * size, (trainer + 1) * size)")
wrong("rows_spread_evenly", step=3, hint="owned_rule", old=Body("owned_rows"), new="""
    size, rest = divmod(rows, trainers)
    start = trainer * size + min(trainer, rest)
    return range(start, start + size + (trainer < rest))
""")
wrong("rows_of_the_last", step=3, hint="owned_rule", old=Body("owned_rows"), new="""
    size = rows // trainers
    return range(trainer * size, rows if trainer == trainers - 1 else (trainer + 1) * size)
""")
wrong("rows_in_turn", step=3, hint="owned_kind",
      old=Body("owned_rows"), new="return range(trainer, rows, trainers)")
wrong("rows_as_a_slice", step=3, hint="owned_kind",
      old="return range(min(trainer * size, rows)", new="return slice(min(trainer * size, rows)")
wrong("right_rows_start_beyond", step=3,
      old="return range(min(trainer * size, rows)", new="return range(trainer * size")
wrong("right_rows_by_chunk", step=3, old=Body("owned_rows"), new="""
    parts = [part.tolist() for part in torch.arange(rows).chunk(trainers)]
    if trainer >= len(parts):
        return range(0)
    return range(parts[trainer][0], parts[trainer][-1] + 1)
""")
wrong("right_rows_by_a_slice_of_a_range", step=3, old=Body("owned_rows"), new="""
    size = (rows + trainers - 1) // trainers
    return range(rows)[trainer * size : (trainer + 1) * size]
""")
wrong("qkv_as_up", step=3, hint="qkv_heads",
      edits=[('    if kind == "qkv":', '    if kind == "never":'),
             ('    if kind == "up":', '    if kind in ("qkv", "up"):')])
wrong("qkv_only_q", step=3, hint="qkv_heads", old="for part in range(3)]", new="for part in range(1)]")
wrong("qkv_of_the_first", step=3, hint="qkv_order",
      old="starts = [part * third + sampler * size for part in range(3)]",
      new="starts = [part * third for part in range(3)]")
wrong("qkv_order", step=3, hint="qkv_order", old="for part in range(3)]", new="for part in (1, 0, 2)]")
wrong("cut_across", step=3, hint="cut_across",
      edits=[('if kind == "up":', 'if kind in ("out", "down"):'),
             ('if kind in ("out", "down"):', 'if kind == "up":')])
wrong("cut_first_layer", step=3, hint="cut_nothing", old='if kind == "qkv":', new='if name == "0.qkv":')
wrong("cut_everything", step=3, hint="cut_whole", old='if kind == "up":', new='if kind in ("up", "head"):')
wrong("cut_position", step=3, hint="cut_whole",
      old='if kind in ("out", "down"):', new='if kind in ("out", "down", "position"):')
wrong("cut_first_part", step=3, hint="cut_part",
      old="return [range(sampler * size, (sampler + 1) * size)], range(columns)",
      new="return [range(size)], range(columns)")
wrong("cut_second_part", step=3, hint="cut_name",
      old='kind = name.rpartition(".")[2]', new='kind = name.split(".")[1]')
wrong("cut_third_letter", step=3, hint="cut_nothing",
      old='kind = name.rpartition(".")[2]', new="kind = name[2:]")
wrong("cut_of_this_model", step=3, hint="cut_sizes",
      old="third, size = rows // 3, rows // 3 // samplers",
      new="third, size = HIDDEN, HIDDEN // samplers")
wrong("cut_no_list", step=3, hint="cut_kind",
      old="return [range(sampler * size, (sampler + 1) * size)], range(columns)",
      new="return range(sampler * size, (sampler + 1) * size), range(columns)")
wrong("right_cut_by_match", step=3, old=Body("cut_of"), new="""
    def part(n: int, first: int = 0) -> range:
        return range(first + n * sampler // samplers, first + n * (sampler + 1) // samplers)

    match name.split(".")[-1]:
        case "qkv":
            return [part(rows // 3, first) for first in range(0, rows, rows // 3)], range(columns)
        case "up":
            return [part(rows)], range(columns)
        case "out" | "down":
            return [range(rows)], part(columns)
    return [range(rows)], range(columns)
""")
wrong("right_cut_by_head", step=3, edits=[
    ("return [range(start, start + size) for start in starts], range(columns)",
     "return [range(start + n, start + n + 1) for start in starts for n in range(size)], "
     "range(columns)")])
wrong("cut_token", step=3, hint="cut_whole", old=Body("cut_of"), new="""
    kind = name.rpartition(".")[2]
    if kind == "token":
        size = -(-rows // samplers)
        return [range(min(sampler * size, rows), min((sampler + 1) * size, rows))], range(columns)
    if kind == "qkv":
        third, size = rows // 3, rows // 3 // samplers
        starts = [part * third + sampler * size for part in range(3)]
        return [range(start, start + size) for start in starts], range(columns)
    if kind == "up":
        size = rows // samplers
        return [range(sampler * size, (sampler + 1) * size)], range(columns)
    if kind in ("out", "down"):
        size = columns // samplers
        return [range(rows)], range(sampler * size, (sampler + 1) * size)
    return [range(rows)], range(columns)
""")

# step 4

SOURCE = "source = range(start - owned.start, stop - owned.start)"
FIRST = "first = before + start - needed.start"
wrong("plan_source_global", step=4, hint="source_global", old=SOURCE, new="source = range(start, stop)")
wrong("plan_target_global", step=4, hint="target_global", old=FIRST, new="first = start")
wrong("plan_target_restarts", step=4, hint="target_before", old=FIRST, new="first = start - needed.start")
wrong("plan_target_of_range", step=4, hint="target_before", old=FIRST, new="first = before")
wrong("plan_empty_pieces", step=4, hint="piece_empty", old="if start < stop:", new="if start <= stop:")
wrong("plan_all_columns", step=4, hint="piece_columns",
      old="plan.append(Piece(name, trainer, sampler, source, target, wanted))",
      new="plan.append(Piece(name, trainer, sampler, source, target, range(columns)))")
wrong("plan_first_columns", step=4, hint="piece_columns",
      old="plan.append(Piece(name, trainer, sampler, source, target, wanted))",
      new="plan.append(Piece(name, trainer, sampler, source, target, range(len(wanted))))")
wrong("plan_one_sampler", step=4, hint="plan_sampler",
      old="for sampler in range(samplers):\n    ranges, wanted = cut_of(name, rows, columns, sampler, samplers)",
      new="for sampler in range(1):\n    ranges, wanted = cut_of(name, rows, columns, sampler, samplers)")
wrong("plan_first_range", step=4, hint="plan_missing",
      old="for needed in ranges:", new="for needed in ranges[:1]:")
wrong("plan_last_trainer_forgotten", step=4, hint="plan_missing",
      old="for trainer in range(trainers):\n    owned = owned_rows(rows, trainer, trainers)",
      new="for trainer in range(max(trainers - 1, 1)):\n    owned = owned_rows(rows, trainer, trainers)")
wrong("plan_twice", step=4, hint="plan_twice",
      old="before += len(needed)",
      new='before += len(needed)\nif name == "head":\n    plan.append(plan[-1])')
wrong("plan_whole_shard", step=4, hint="piece_lengths", old=SOURCE, new="source = range(len(owned))")
wrong("plan_two_trainers", step=4, hint="piece_ranks",
      old="for trainer in range(trainers):\n    owned = owned_rows(rows, trainer, trainers)",
      new="for trainer in range(2):\n    owned = owned_rows(rows, trainer, 2)")
wrong("plan_pairs", step=4, hint="piece_kind",
      old="source = range(start - owned.start, stop - owned.start)",
      new="source = (start - owned.start, stop - owned.start)")
wrong("plan_rows_of_the_sampler", step=4, hint="piece_rows",
      old=SOURCE, new="source = range(len(owned) - stop + start, len(owned))")
wrong("plan_by_sampler", step=4, hint="plan_kind",
      old=Body("make_plan"), new="return {sampler: [] for sampler in range(samplers)}")
wrong("plan_nothing", step=4, hint="plan_kind", old=Body("make_plan"), new="plan = []")
wrong("right_plan_by_rows", step=4, old=Body("make_plan"), new="""
    plan = []
    for name, (rows, columns) in shapes.items():
        for sampler in range(samplers):
            ranges, wanted = cut_of(name, rows, columns, sampler, samplers)
            needed = [row for each in ranges for row in each]
            for target, row in enumerate(needed):
                for trainer in range(trainers):
                    owned = owned_rows(rows, trainer, trainers)
                    if row in owned:
                        source = owned.index(row)
                        pair = range(source, source + 1), range(target, target + 1)
                        plan.append(Piece(name, trainer, sampler, *pair, wanted))
    return plan
""")
wrong("right_plan_by_trainers", step=4, old=Body("make_plan"), new="""
    plan = []
    for trainer in range(trainers):
        for name, (rows, columns) in reversed(shapes.items()):
            owned = owned_rows(rows, trainer, trainers)
            for sampler in range(samplers):
                ranges, wanted = cut_of(name, rows, columns, sampler, samplers)
                target = 0
                for needed in ranges:
                    both = sorted(set(owned) & set(needed))
                    if both:
                        source, first = both[0] - owned.start, target + both[0] - needed.start
                        pair = range(source, source + len(both)), range(first, first + len(both))
                        plan.append(Piece(name, trainer, sampler, *pair, columns=wanted))
                    target += len(needed)
    return plan
""")
wrong("plan_columns_of_part", step=4, hint="piece_columns", old="target, wanted))", new="target, range(len(wanted))))")

# step 5

WAIT = "for work in dist.batch_isend_irecv(operations):\n    work.wait()"
wrong("sync_no_wait", step=5, hint="sync_not_waited", old=WAIT, new="dist.batch_isend_irecv(operations)")
wrong("sync_one_wait", step=5, hint="sync_not_waited",
      old=WAIT, new="dist.batch_isend_irecv(operations)[0].wait()")
wrong("sync_reversed", step=5, hint="sync_shape",
      old="operations, arrived = [], []",
      new="operations, arrived = [], []\nplan = plan if rank < trainers else plan[::-1]")
wrong("sync_read_before_wait", step=5, hint="sync_early", old=Body("sync_weights"), new="""
    works = []
    for piece in plan:
        first, last = piece.columns.start, piece.columns.stop
        if rank == piece.trainer:
            rows = shards[piece.name][piece.source.start : piece.source.stop, first:last]
            works.append(dist.isend(rows.contiguous(), trainers + piece.sampler))
        elif rank == trainers + piece.sampler:
            rows = parts[piece.name].new_empty(len(piece.source), len(piece.columns))
            works.append(dist.irecv(rows, piece.trainer))
            parts[piece.name][piece.target.start : piece.target.stop] = rows
    for work in works:
        work.wait()
""")
wrong("sync_not_contiguous", step=5, hint="sync_contiguous", old="rows.contiguous()", new="rows")
wrong("sync_rank_of_sampler", step=5, hint="sync_rank",
      old="to = trainers + piece.sampler", new="to = piece.sampler")
wrong("sync_receiver", step=5, hint="sync_stuck",
      old="elif rank == trainers + piece.sampler:", new="elif rank == trainers + piece.sampler + 9:")
wrong("sync_one_sampler", step=5, hint="sync_stuck",
      old="if rank == piece.trainer:", new="if rank == piece.trainer and piece.sampler == 0:")
wrong("sync_new_tensors", step=5, hint="sync_in_place",
      old="parts[piece.name][piece.target.start : piece.target.stop] = rows",
      new="parts[piece.name] = parts[piece.name].clone()\n"
          "parts[piece.name][piece.target.start : piece.target.stop] = rows")
wrong("sync_nothing_written", step=5, hint="sync_written",
      old="parts[piece.name][piece.target.start : piece.target.stop] = rows", new="pass")
wrong("sync_source_as_target", step=5, hint="sync_target",
      old="parts[piece.name][piece.target.start : piece.target.stop] = rows",
      new="parts[piece.name][piece.target.start :][: len(rows)] = rows.flip(0)")
wrong("sync_first_columns", step=5, hint="sync_target",
      old="piece.source.stop, first:last]", new="piece.source.stop, : last - first]")
wrong("sync_first_rows", step=5, hint="sync_target",
      old="[piece.source.start : piece.source.stop, first:last]",
      new="[: len(piece.source), first:last]")
wrong("sync_all_columns", step=5, hint="sync_shape",
      old="piece.source.stop, first:last]", new="piece.source.stop]")
wrong("sync_columns_of_the_whole", step=5, hint="sync_columns",
      old="parts[piece.name][piece.target.start : piece.target.stop] = rows",
      new="parts[piece.name][piece.target.start : piece.target.stop, first:last] = rows")
wrong("sync_broadcast", step=5, hint="sync_collective", old=Body("sync_weights"), new="""
    for piece in plan:
        first, last = piece.columns.start, piece.columns.stop
        rows = torch.zeros(len(piece.source), last - first, dtype=torch.float64)
        if rank == piece.trainer:
            rows = shards[piece.name][piece.source.start : piece.source.stop, first:last]
        rows = rows.contiguous()
        dist.broadcast(rows, src=piece.trainer)
        if rank == trainers + piece.sampler:
            parts[piece.name][piece.target.start : piece.target.stop] = rows
""")
wrong("sync_no_operations", step=5, hint="sync_operations",
      old="operations.append(dist.P2POp(dist.isend, rows.contiguous(), to))",
      new="operations.append((dist.isend, rows.contiguous(), to))")
wrong("sync_shards_zeroed", step=5, hint="sync_shards",
      old=WAIT, new=WAIT + "\nfor each in shards.values():\n    each.zero_()")
wrong("sync_sent_twice", step=5, hint="sync_bytes", old=Body("sync_weights"), new="""
    works, arrived = [], []
    for piece in plan:
        first, last = piece.columns.start, piece.columns.stop
        for again in range(2):
            if rank == piece.trainer:
                rows = shards[piece.name][piece.source.start : piece.source.stop, first:last]
                works.append(dist.isend(rows.contiguous(), trainers + piece.sampler))
            elif rank == trainers + piece.sampler:
                rows = parts[piece.name].new_empty(len(piece.source), len(piece.columns))
                works.append(dist.irecv(rows, piece.trainer))
                arrived.append((piece, rows))
    for work in works:
        work.wait()
    for piece, rows in arrived:
        parts[piece.name][piece.target.start : piece.target.stop] = rows
""")
wrong("right_sync_by_send_and_recv", step=5, old=Body("sync_weights"), new="""
    for name, trainer, sampler, source, target, columns in plan:
        if rank == trainer:
            rows = shards[name][source.start : source.stop, columns.start : columns.stop]
            dist.send(rows.clone(memory_format=torch.contiguous_format), trainers + sampler)
        elif rank == trainers + sampler:
            part = parts[name][target.start : target.stop]
            dist.recv(part, trainer)
""")
wrong("right_sync_by_isend", step=5, old=Body("sync_weights"), new="""
    from torch.distributed import irecv, isend
    works, buffers = [], []
    for piece in plan:
        if rank == piece.trainer:
            rows = shards[piece.name][list(piece.source)][:, list(piece.columns)].contiguous()
            buffers.append(rows)
            works.append(isend(rows, dst=trainers + piece.sampler))
        if rank == trainers + piece.sampler:
            part = parts[piece.name][piece.target.start : piece.target.stop]
            works.append(irecv(part, src=piece.trainer))
    [work.wait() for work in works]
""")
wrong("right_sync_in_one_message_per_pair", step=5, old=Body("sync_weights"), new="""
    works, arrived = [], []
    samplers = 1 + max(piece.sampler for piece in plan)
    for trainer in range(trainers):
        for sampler in range(samplers):
            pieces = [p for p in plan if (p.trainer, p.sampler) == (trainer, sampler)]
            if not pieces:
                continue
            if rank == trainer:
                rows = [
                    shards[p.name][p.source.start : p.source.stop][:, list(p.columns)].flatten()
                    for p in pieces
                ]
                works.append((dist.isend(torch.cat(rows), trainers + sampler), rows))
            if rank == trainers + sampler:
                sizes = [len(p.source) * len(p.columns) for p in pieces]
                buffer = torch.empty(sum(sizes), dtype=torch.float64)
                works.append((dist.irecv(buffer, trainer), buffer))
                arrived.append((pieces, buffer.split(sizes)))
    for work, _ in works:
        work.wait()
    for pieces, buffers in arrived:
        for p, each in zip(pieces, buffers):
            parts[p.name][p.target.start : p.target.stop] = each.view(len(p.target), -1)
""")
wrong("right_sync_into_the_rows", step=5, old=Body("sync_weights"), new="""
    sends = [p for p in plan if p.trainer == rank]
    receives = [p for p in plan if p.sampler + trainers == rank]
    works = []
    for p in receives:
        works.append(dist.irecv(parts[p.name][p.target.start : p.target.stop], src=p.trainer))
    messages = []
    for p in sends:
        messages.append(shards[p.name][list(p.source)][:, list(p.columns)].contiguous())
        works.append(dist.isend(messages[-1], dst=p.sampler + trainers))
    [work.wait() for work in works]
""")

# step 6

DIFFERS = "~((sampler - trainer).abs() <= TOLERANCE) & (mask != 0)"
PLACE = "return (places[0][1], places[0][0]) if places else None"
wrong("first_row", step=6, hint="first_order", edits=[
    ("differs.T.nonzero()", "differs.nonzero()"),
    (PLACE, "return (places[0][0], places[0][1]) if places else None")])
wrong("first_swapped", step=6, hint="first_swapped",
      old=PLACE, new="return tuple(places[0]) if places else None")
wrong("first_nan", step=6, hint="first_nan",
      old=DIFFERS, new="((sampler - trainer).abs() > TOLERANCE) & (mask != 0)")
wrong("first_padding", step=6, hint="first_mask",
      old=DIFFERS, new="~((sampler - trainer).abs() <= TOLERANCE)")
wrong("first_times_mask", step=6, hint="first_mask",
      old=DIFFERS, new="~(((sampler - trainer) * mask).abs() <= TOLERANCE)")
wrong("first_sign", step=6, hint="first_sign",
      old=DIFFERS, new="~((sampler - trainer) <= TOLERANCE) & (mask != 0)")
wrong("first_exact", step=6, hint="first_tolerance",
      old=DIFFERS, new="(sampler != trainer) & (mask != 0)")
wrong("first_isclose", step=6, hint="first_tolerance",
      old=DIFFERS, new="~torch.isclose(sampler, trainer, atol=1e-3) & (mask != 0)")
wrong("first_largest", step=6, hint="first_order", old=Body("first_difference"), new="""
    gap = ((sampler - trainer).abs() * (mask != 0)).nan_to_num(100.0, 100.0)
    place = int(gap.argmax())
    return divmod(place, gap.shape[1]) if gap.max() > TOLERANCE else None
""")
wrong("first_largest_of_column", step=6, hint="first_largest", old=Body("first_difference"), new="""
    gap = (sampler - trainer).abs().nan_to_num(100.0, 100.0).masked_fill(mask == 0, 0)
    places = (gap > TOLERANCE).any(0).nonzero().flatten().tolist()
    return (int(gap[:, places[0]].argmax()), places[0]) if places else None
""")
wrong("first_always", step=6, hint="first_none", old=PLACE, new="return (places[0][1], places[0][0])")
wrong("first_nothing", step=6, hint="first_returned", old=PLACE, new="return None")
wrong("first_as_bool", step=6, hint="first_kind", old=PLACE, new="return bool(places) or None")
wrong("right_first_by_loops", step=6, old=Body("first_difference"), new="""
    for position in range(mask.shape[1]):
        for row in range(mask.shape[0]):
            gap = abs(float(sampler[row, position]) - float(trainer[row, position]))
            if mask[row, position] and not gap <= TOLERANCE:
                return row, position
""")
wrong("right_first_by_argmax", step=6, old=Body("first_difference"), new="""
    same = torch.isclose(sampler, trainer, rtol=0.0, atol=TOLERANCE)
    differs = ~same & mask.bool()
    if not differs.any():
        return None
    position = differs.any(0).int().argmax()
    return differs[:, position].int().argmax(), position
""")
wrong("first_isclose_default", step=6, hint="first_tolerance",
      old="~((sampler - trainer).abs() <= TOLERANCE)", new="~torch.isclose(sampler, trainer, rtol=1e-9)")
wrong("first_nan_of_sampler", step=6, hint="first_nan",
      old="~((sampler - trainer).abs() <= TOLERANCE)",
      new="(((sampler - trainer).abs() > TOLERANCE) | sampler.isnan() | sampler.isinf())")
wrong("first_equal_nan", step=6, hint="first_nan",
      old="~((sampler - trainer).abs() <= TOLERANCE)",
      new="~torch.isclose(sampler, trainer, rtol=0, atol=TOLERANCE, equal_nan=True)")
wrong("right_first_sorted", step=6, old=Body("first_difference"), new="""
    places = [
        (position, row)
        for row, position in mask.nonzero().tolist()
        if not abs(float(sampler[row, position]) - float(trainer[row, position])) <= TOLERANCE
    ]
    return min(places)[::-1] if places else None
""")

# step 7

wrong("cause_by_pattern", step=7, hint="cause_pattern", old=Body("name_the_cause"), new="""
    mask = answer_mask(evidence.answers)
    ours = token_log_probs(evidence.weights, evidence.prompts, evidence.answers)
    place = first_difference(evidence.sampler, ours, mask)
    if place is None:
        return "none"
    if evidence.answers[place] == END and evidence.sampler[place] == 0 and place[1] > 1:
        return "end token"
    if place[1] == 1:
        return "position"
    older = token_log_probs(evidence.older, evidence.prompts, evidence.answers)
    stale = first_difference(evidence.sampler, older, mask) is None
    return "stale weights" if stale else "temperature"
""")
wrong("cause_by_first_token", step=7, hint="cause_guess", old=Body("name_the_cause"), new="""
    mask = answer_mask(evidence.answers)
    for name, weights, fault in (
        ("none", evidence.weights, {}),
        ("stale weights", evidence.older, {}),
        *(("temperature", evidence.weights, {"temperature": each}) for each in TEMPERATURES),
        ("position", evidence.weights, {"shift": 1}),
    ):
        ours = token_log_probs(weights, evidence.prompts, evidence.answers, **fault)
        if first_difference(evidence.sampler, ours, mask) is None:
            return name
    return "end token"
""")
wrong("cause_with_padding", step=7, hint="cause_none",
      old="return first_difference(evidence.sampler, ours, mask) is None",
      new="return first_difference(evidence.sampler, ours, torch.ones_like(ours)) is None")
wrong("cause_one_temperature", step=7, hint="missed_temperature",
      old="for each in TEMPERATURES", new="for each in (0.7,)")
wrong("cause_inverse_temperature", step=7, hint="missed_temperature",
      old="temperature=each)", new="temperature=1 / each)")
wrong("cause_no_older", step=7, hint="missed_stale",
      old="if agrees(evidence.older):", new="if agrees(evidence.weights):")
wrong("cause_other_shift", step=7, hint="missed_position", old="shift=1)", new="shift=-1)")
wrong("cause_end_in_mask", step=7, hint="missed_end",
      old="evidence.answers == END, 0.0)", new="evidence.answers == PAD, 0.0)")
wrong("cause_last_position", step=7, hint="missed_end",
      old="ours = ours.masked_fill(evidence.answers == END, 0.0)",
      new="ours = ours.clone()\nours[:, -1] = 0")
wrong("cause_other_name", step=7, hint="cause_name",
      old='return "stale weights"', new='return "stale"')
wrong("cause_always_named", step=7, hint="cause_guess",
      old='else "unknown"', new='else "end token"')
wrong("right_cause_by_a_table", step=7, old=Body("name_the_cause"), new="""
    mask, batch = answer_mask(evidence.answers), (evidence.prompts, evidence.answers)
    ours = token_log_probs(evidence.weights, *batch)
    without_end = torch.where(evidence.answers == END, 0.0, ours)
    candidates = [("none", ours), ("stale weights", token_log_probs(evidence.older, *batch))]
    candidates += [
        ("temperature", token_log_probs(evidence.weights, *batch, each)) for each in TEMPERATURES
    ]
    candidates += [("position", token_log_probs(evidence.weights, *batch, shift=1))]
    candidates += [("end token", without_end)]
    for name, numbers in candidates:
        if torch.allclose(numbers * mask, evidence.sampler * mask, rtol=0, atol=1e-8):
            return name
    return "unknown"
""")
wrong("right_cause_in_another_order", step=7, old=Body("name_the_cause"), new="""
    counts = answer_mask(evidence.answers).bool()

    def gap(weights, keep, **fault):
        ours = token_log_probs(weights, evidence.prompts, evidence.answers, **fault)
        return (ours - evidence.sampler).abs()[keep].max()

    gaps = {"position": gap(evidence.weights, counts, shift=1)}
    gaps["temperature"] = min(
        gap(evidence.weights, counts, temperature=each) for each in TEMPERATURES
    )
    gaps["stale weights"] = gap(evidence.older, counts)
    if gap(evidence.weights, counts) > 1e-8:
        gaps["end token"] = max(
            gap(evidence.weights, counts & (evidence.answers != END)),
            evidence.sampler[evidence.answers == END].abs().max(),
        )
    else:
        gaps = {"none": 0.0}
    best = min(gaps, key=gaps.get)
    return best if gaps[best] < 1e-8 else "unknown"
""")
wrong("cause_stale_first_token", step=7, hint="cause_guess", old="if agrees(evidence.older):",
      new="theirs = token_log_probs(evidence.older, evidence.prompts, evidence.answers)\nif (theirs - evidence.sampler)[:, 0].abs().max() < 1e-9:")
wrong("right_cause_end_is_zero", step=7,
      old='''ours = ours.masked_fill(evidence.answers == END, 0.0)
found = first_difference(evidence.sampler, ours, mask)
return "end token" if found is None else "unknown"''',
      new="""
    is_end = evidence.answers == END
    zeros = (evidence.sampler[is_end] == 0).all()
    found = first_difference(evidence.sampler, ours, mask * ~is_end)
    return "end token" if zeros and found is None else "unknown"
""")
wrong("cause_end_left_out", step=7, hint="cause_end_not_zero",
      old="ours = ours.masked_fill(evidence.answers == END, 0.0)",
      new="mask = mask * (evidence.answers != END)")
wrong("cause_position_of_most_tokens", step=7, hint="cause_guess",
      old="if agrees(evidence.weights, shift=1):",
      new="""
    shifted = token_log_probs(evidence.weights, evidence.prompts, evidence.answers, shift=1)
    if ((shifted - evidence.sampler) * mask).abs().mean() < 1e-2:
""")

# step 8

SHARE = "return clipped_loss(new, old, advantages, mask) * mask.sum() / tokens"
wrong("share_own_mean", step=8, hint="share_own_tokens",
      old=SHARE, new="return clipped_loss(new, old, advantages, mask)")
wrong("share_mean_of_means", step=8, hint="share_own_tokens",
      old=SHARE,
      new="return clipped_loss(new, old, advantages, mask) / dist.get_world_size(group)")
wrong("share_divided_by_ranks", step=8, hint="share_average",
      old=SHARE, new=f"{SHARE} / dist.get_world_size(group)")
wrong("share_of_mean_tokens", step=8, hint="share_average",
      old=SHARE, new=f"{SHARE} * dist.get_world_size(group)")
wrong("share_without_group", step=8, hint="share_group",
      old="dist.all_reduce(tokens, group=group)", new="dist.all_reduce(tokens)")
wrong("share_sum", step=8, hint="share_no_divisor",
      old=SHARE, new="return clipped_loss(new, old, advantages, mask) * mask.sum()")
wrong("share_of_positions", step=8, hint="share_positions",
      old="tokens = mask.sum()", new="tokens = torch.ones_like(mask).sum()")
wrong("share_reduced", step=8, hint="share_reduced", old=SHARE, new="""
    share = clipped_loss(new, old, advantages, mask) * mask.sum() / tokens
    total = share.detach().clone()
    dist.all_reduce(total, group=group)
    return share + (total - share).detach()
""")
wrong("share_reduced_mean", step=8, hint="share_reduced", old=Body("share_of_loss"), new="""
    loss = clipped_loss(new, old, advantages, mask)
    dist.all_reduce(loss, group=group)
    return loss / dist.get_world_size(group)
""")
wrong("share_no_gradient", step=8, hint="share_detached",
      old=SHARE, new=f"{SHARE.replace('(new,', '(new.detach(),')}")
wrong("share_of_answers", step=8, hint="share_scalar", old=SHARE, new=f"{SHARE}[None].expand(2)")
wrong("share_other", step=8, hint="share_other", old=SHARE, new=f"{SHARE} + 1")
wrong("right_share_by_sum", step=8, old=Body("share_of_loss"), new="""
    ratio, a = (new - old).exp(), advantages.unsqueeze(1)
    terms = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * mask
    tokens = mask.sum().detach().clone()
    dist.all_reduce(tokens, op=dist.ReduceOp.SUM, group=group)
    return -terms.sum() / tokens
""")
wrong("right_share_by_gather", step=8, old=Body("share_of_loss"), new="""
    counts = [torch.zeros((), dtype=mask.dtype) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, mask.sum(), group=group)
    weight = mask.sum() / torch.stack(counts).sum()
    return weight * clipped_loss(new, old, advantages, mask)
""")
LOSS = "share_of_loss(new, old, advantages[mine], answer_mask(answers), trainer.group)"
wrong("train_old_recomputed", step=8, hint="old_recomputed",
      old=LOSS, new=LOSS.replace("old,", "new.detach(),"))
wrong("train_old_of_the_trainer", step=8, hint="old_recomputed",
      old="prompts, answers, old = rollouts.prompts[mine], rollouts.answers[mine], rollouts.old[mine]",
      new="prompts, answers = rollouts.prompts[mine], rollouts.answers[mine]\n"
          "old = token_log_probs(trainer.gathered(), prompts, answers).detach()")
wrong("train_gathered_once", step=8, hint="gathered_once",
      old="for _ in range(UPDATES):\n    whole = trainer.gathered()",
      new="whole = trainer.gathered()\nfor _ in range(UPDATES):")
wrong("train_own_means", step=8, hint="train_own_means",
      old=LOSS, new="clipped_loss(new, old, advantages[mine], answer_mask(answers))")
wrong("train_backward", step=8, hint="train_backward",
      old="trainer.step(loss, whole)", new="loss.backward()\ntrainer.step(loss, whole)")
wrong("train_shards", step=8, hint="train_gathered",
      old="whole = trainer.gathered()\nnew = token_log_probs(whole, prompts, answers)",
      new="whole = trainer.shards\nnew = token_log_probs(whole, prompts, answers)")
wrong("train_sign", step=8, hint="train_sign",
      old="trainer.step(loss, whole)", new="trainer.step(-loss, whole)")
wrong("train_one_step", step=8, hint="train_updates",
      old="for _ in range(UPDATES):\n    whole = trainer.gathered()",
      new="for _ in range(1):\n    whole = trainer.gathered()")
wrong("train_rewards", step=8, hint="train_rewards",
      old="advantages = group_advantages(rewards, GROUP)", new="advantages = rewards")
wrong("train_one_group", step=8, hint="train_groups",
      old="advantages = group_advantages(rewards, GROUP)",
      new="advantages = group_advantages(rewards, len(rewards))")
wrong("train_padding", step=8, hint="train_mask",
      old=LOSS, new=LOSS.replace("answer_mask(answers)", "torch.ones_like(new)"))
wrong("train_all_answers", step=8, hint="train_all",
      old="mine = slice(trainer.number * size, (trainer.number + 1) * size)",
      new="mine = slice(0, None)")
wrong("train_same_share", step=8, hint="train_shares",
      old="mine = slice(trainer.number * size, (trainer.number + 1) * size)",
      new="mine = slice(0, size)")
wrong("train_advantages_of_a_share", step=8, hint="train_shares", old=Body("train_on"), new="""
    mine = slice(trainer.number, None, trainer.count)
    prompts, answers, old = rollouts.prompts[mine], rollouts.answers[mine], rollouts.old[mine]
    advantages = group_advantages(rewards_of(prompts, answers), GROUP)
    for _ in range(UPDATES):
        whole = trainer.gathered()
        new = token_log_probs(whole, prompts, answers)
        trainer.step(
            share_of_loss(new, old, advantages, answer_mask(answers), trainer.group), whole
        )
""")
wrong("train_whole_advantages", step=8, hint="train_rows",
      old=LOSS, new=LOSS.replace("advantages[mine]", "advantages"))
wrong("train_in_place", step=8, hint="train_in_place",
      old="rewards = rewards_of(rollouts.prompts, rollouts.answers)",
      new="rewards = rewards_of(rollouts.prompts, rollouts.answers)\nrollouts.old.clamp_(min=-1)")
wrong("right_train_in_turn", step=8, old=Body("train_on"), new="""
    advantages = group_advantages(rewards_of(rollouts.prompts, rollouts.answers), GROUP)
    mine = torch.arange(trainer.number, len(advantages), trainer.count)
    for step in range(UPDATES):
        weights = trainer.gathered()
        now = token_log_probs(weights, rollouts.prompts[mine], rollouts.answers[mine])
        mask = answer_mask(rollouts.answers)[mine]
        share = share_of_loss(now, rollouts.old[mine], advantages[mine], mask, trainer.group)
        trainer.step(share, weights)
""")
wrong("right_train_by_chunks", step=8, old=Body("train_on"), new="""
    rewards = rewards_of(rollouts.prompts, rollouts.answers)
    tensors = [rollouts.prompts, rollouts.answers, rollouts.old]
    tensors += [group_advantages(rewards, GROUP), answer_mask(rollouts.answers)]
    prompts, answers, old, advantages, mask = (
        each.chunk(trainer.count)[trainer.number] for each in tensors
    )
    for _ in range(UPDATES):
        whole = trainer.gathered()
        new = token_log_probs(whole, prompts, answers)
        trainer.step(share_of_loss(new, old, advantages, mask, trainer.group), whole)
""")
wrong("train_old_in_second", step=8, hint="old_recomputed", old=Body("train_on"), new="""
    advantages = group_advantages(rewards_of(rollouts.prompts, rollouts.answers), GROUP)
    size = len(advantages) // trainer.count
    mine = slice(trainer.number * size, (trainer.number + 1) * size)
    prompts, answers, old = rollouts.prompts[mine], rollouts.answers[mine], rollouts.old[mine]
    for _ in range(UPDATES):
        whole = trainer.gathered()
        new = token_log_probs(whole, prompts, answers)
        loss = share_of_loss(new, old, advantages[mine], answer_mask(answers), trainer.group)
        old = new.detach()
        trainer.step(loss, whole)
""")
wrong("train_mask_by_pad", step=8, hint="train_mask", old=LOSS, new=LOSS.replace("answer_mask(answers)", "(answers != PAD).float()"))
wrong("train_mask_before_end", step=8, hint="train_mask", old=LOSS, new=LOSS.replace("answer_mask(answers)", "answer_mask(answers) * (answers != END)"))
wrong("share_divided_twice", step=8, hint="share_other", old=SHARE, new="return clipped_loss(new, old, advantages, mask) / tokens")
wrong("right_share_scaled_mask", step=8, old=Body("share_of_loss"), new="""
    own = int(mask.count_nonzero())
    counts = [None] * dist.get_world_size(group)
    dist.all_gather_object(counts, own, group=group)
    return own / sum(counts) * clipped_loss(new, old, advantages, mask)
""")
