"""Wrong answers to labs/lab01_multi_gpu_setup.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("labs/lab01_multi_gpu_setup.py")

# step 1

wrong("device_by_rank", step=1, hint="device_index", old=Body("pick_device"), new="""
    if torch.accelerator.device_count() >= local_world:
        rank = int(os.environ["RANK"])
        torch.accelerator.set_device_index(rank)
        return torch.device(torch.accelerator.current_accelerator().type, rank)
    return torch.device("cpu")
""")
wrong("device_cpu_always", step=1, hint="no_accelerator",
      old=Body("pick_device"), new='return torch.device("cpu")')
wrong("device_each_for_itself", step=1, hint="shared_device",
      old="torch.accelerator.device_count() >= local_world",
      new="local_rank < torch.accelerator.device_count()")
wrong("device_named", step=1, hint="not_a_device",
      old='return torch.device("cpu")', new='return "cpu"')
wrong("device_not_current", step=1, hint="not_current",
      old="torch.accelerator.set_device_index(local_rank)", new="")
wrong("device_shared", step=1, hint="shared_device",
      old="() and torch.accelerator.device_count() >= local_world", new="()")
wrong("device_without_index", step=1, hint="no_index",
      old="torch.device(torch.accelerator.current_accelerator().type, local_rank)",
      new="torch.accelerator.current_accelerator()")
wrong("device_exact_fit", step=1, hint="exact_fit",
      old="torch.accelerator.device_count() >= local_world",
      new="torch.accelerator.device_count() > local_world")
wrong("device_set_too_early", step=1, hint="set_too_early", old=Body("pick_device"), new="""
    torch.accelerator.set_device_index(local_rank)
    if torch.accelerator.device_count() >= local_world:
        return torch.device(torch.accelerator.current_accelerator().type, local_rank)
    return torch.device("cpu")
""")
wrong("right_device_set_by_keyword", step=1, old=Body("pick_device"), new="""
    if torch.cuda.device_count() >= local_world:
        torch.cuda.set_device(device=local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
""")

# step 2

wrong("group_from_environment", step=2, hint="own_store",
      old=", store=store, rank=rank, world_size=world,", new=",")
wrong("group_gloo_always", step=2, hint="gloo_on_gpu",
      old='if device.type == "cpu":', new="if True:")
wrong("group_no_backend", step=2, hint="no_backend", old=Body("start_group"), new="""
    bound = None if device.type == "cpu" else device
    dist.init_process_group(
        store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound
    )
""")
wrong("group_none", step=2, hint="not_joined",
      old=Body("start_group"), new="pass")
wrong("group_not_bound", step=2, hint="not_bound", old=Body("start_group"), new="""
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
""")
wrong("group_patient", step=2, hint="no_timeout", edits=[
    ('if device.type == "cpu":',
     'who = {"store": store, "rank": rank, "world_size": world}\nif device.type == "cpu":'),
    (", store=store, rank=rank, world_size=world, timeout=timeout", ", **who")])
wrong("start_bound_on_cpu", step=2, hint="bound_on_cpu", old=Body("start_group"), new="""
    dist.init_process_group(
        "gloo" if device.type == "cpu" else None,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device,
    )
""")
wrong("group_timeout_fixed", step=2, hint="no_timeout", edits=[
    ('"gloo", store=store, rank=rank, world_size=world, timeout=timeout',
     '"gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)')])
wrong("group_bound_to_device_0", step=2, hint="bound_elsewhere",
      old="timeout=timeout, device_id=device",
      new="timeout=timeout, device_id=torch.device(device.type, 0)")
wrong("group_ranks_missing", step=2, hint="rank_and_world",
      old="store=store, rank=rank, world_size=world, timeout=timeout, device_id=device",
      new="store=store, timeout=timeout, device_id=device")
wrong("group_seconds", step=2, hint="timeout_kind",
      old="timeout=timeout, device_id=device",
      new="timeout=timeout.total_seconds(), device_id=device")
wrong("group_two_ways_to_meet", step=2, hint="own_store",
      old='"gloo", store=store', new='"gloo", "env://", store=store')
wrong("right_group_in_another_way", step=2, old=Body("start_group"), new="""
    store = dist.PrefixStore("start", store)
    cpu = device.type == "cpu"
    dist.init_process_group(
        "gloo" if cpu else "cpu:gloo,cuda:nccl", None, timeout, world, rank, store,
        device_id=None if cpu else device,
    )
    assert dist.get_rank() == rank
    dist.barrier()
""")
wrong("right_group_by_module", step=2, old=Body("start_group"), new="""
    backend, bound = ("gloo", None) if device.type == "cpu" else (None, device)
    dist.distributed_c10d.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound
    )
""")

# step 3

wrong("expected_everybody", step=3, hint="everybody",
      old="total if rank == root else None", new="total")
wrong("expected_nobody", step=3, hint="nobody",
      old='"all-reduce": total,', new='"all-reduce": total if rank == root else None,')
wrong("expected_not_summed", step=3, hint="not_summed",
      old="total if rank == root else None", new="table[rank] if rank == root else None")
wrong("expected_other_way_round", step=3, hint="neighbour",
      old="[(rank - 1) % world]", new="[(rank + 1) % world]")
wrong("expected_root_0", step=3, hint="root_fixed",
      old='"broadcast": table[root],', new='"broadcast": table[0],')
wrong("expected_rows", step=3, hint="transposed",
      old="table[:, rank]", new="table[rank]")
wrong("expected_sum_of_columns", step=3, hint="transposed",
      old="len(table), table.sum(dim=0)", new="len(table), table.sum(dim=1)")
wrong("expected_summed", step=3, hint="summed",
      old="table[:, rank]", new="table.sum(dim=1)")
wrong("expected_whole_row", step=3, hint="other_part",
      old="root, rank", new="root")
wrong("expected_whole_sum", step=3, hint="whole_sum",
      old="total[rank]", new="total")
wrong("expected_divided", step=3, hint="averaged",
      old='"all-reduce": total,', new='"all-reduce": total / world,')
wrong("expected_flat", step=3, hint="shape",
      old='"all-gather": table,', new='"all-gather": table.flatten(0, 1),')
wrong("expected_in_double", step=3, hint="dtype",
      old="len(table), table.sum(dim=0)", new="len(table), table.double().sum(dim=0)")
wrong("expected_list", step=3, hint="not_a_tensor",
      old='"all-gather": table,', new='"all-gather": list(table),')
wrong("expected_of_the_root", step=3, hint="other_cell",
      old="total[rank]", new="total[root]")
wrong("expected_own_row", step=3, hint="root_is_rank",
      old='"broadcast": table[root],', new='"broadcast": table[rank],')
wrong("expected_sums_in_place", step=3, hint="table_changed",
      old="world, total = len(table), table.sum(dim=0)", new="""
    world, total = len(table), table[0]
    for row in table[1:] if "reduce" in name else ():
        total += row
""")
wrong("expected_without_a_name", step=3, hint="every_name",
      old='"send/recv": table[(rank - 1) % world],', new="")

# step 4

wrong("facts_flat", step=4, hint="facts_shape",
      old=Body("gather_facts"), new="return [mine]")
wrong("facts_for_the_root", step=4, hint="facts_root", edits=[
    ("everybody: list[dict] = [{} for _ in range(world)]",
     "everybody= [{}] * world if dist.get_rank() == 0 else None"),
    ("dist.all_gather_object(everybody, mine)", "dist.gather_object(mine, everybody, dst=0)")])
wrong("facts_mine_first", step=4, hint="facts_order", edits=[
    (": list[dict] = [{} for _ in range(world)]", "= [{}] * world"),
    ("return everybody", "rank = dist.get_rank()\nreturn everybody[rank:] + everybody[:rank]")])
wrong("facts_only_rank_0", step=4, hint="some_ranks", old=Body("gather_facts"), new="""
    everybody = [{}] * world
    if dist.get_rank() == 0:
        dist.all_gather_object(everybody, mine)
    return everybody
""")
wrong("facts_own", step=4, hint="facts_own",
      old=Body("gather_facts"), new="return [mine] * world")
wrong("facts_by_a_key", step=4, hint="facts_keys",
      old="return everybody", new='return sorted(everybody, key=lambda fact: fact["rank"])')
wrong("facts_list_kept", step=4, hint="facts_reused", old=Body("gather_facts"), new="""
    if len(getattr(gather_facts, "facts", [])) != world:
        gather_facts.facts = [{} for _ in range(world)]
    dist.all_gather_object(gather_facts.facts, mine)
    return gather_facts.facts
""")
wrong("facts_of_the_root_alone", step=4, hint="facts_root",
      old="dist.all_gather_object(everybody, mine)",
      new="dist.gather_object(mine, everybody if dist.get_rank() == 0 else None)")
wrong("facts_returned", step=4, hint="facts_none",
      old=Body("gather_facts"), new="return dist.all_gather_object([None] * world, mine)")
wrong("facts_without_places", step=4, hint="facts_places",
      old=": list[dict] = [{} for _ in range(world)]", new="= []")

# step 5

wrong("right_time_imported", step=5, edits=[
    ("import statistics", "import statistics\nfrom time import perf_counter"),
    ("settle()\nstart = time.perf_counter()", "settle()\nstart = perf_counter()"),
    ("append(time.perf_counter()", "append(perf_counter()")])
wrong("time_all_calls", step=5, hint="total", edits=[
    ("times = []", "settle()\nstart = time.perf_counter()"),
    ("settle()\nstart = time.perf_counter()", ""),
    ("""
            settle()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    """, "settle()\nreturn time.perf_counter() - start")])
wrong("time_cold", step=5, hint="no_warm_up",
      old="for _ in range(warm_up):\n    work()", new="")
wrong("time_fastest", step=5, hint="minimum",
      old="return statistics.median(times)", new="return min(times)")
wrong("time_mean", step=5, hint="mean",
      old="return statistics.median(times)", new="return statistics.mean(times)")
wrong("time_mean_of_a_loop", step=5, hint="mean", edits=[
    ("times = []", "settle()\nstart = time.perf_counter()"),
    ("settle()\nstart = time.perf_counter()", ""),
    ("""
            settle()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    """, "settle()\nreturn (time.perf_counter() - start) / repeats")])
wrong("time_milliseconds", step=5, hint="time_other",
      old="return statistics.median(times)", new="return 1000 * statistics.median(times)")
wrong("time_not_settled", step=5, hint="not_settled",
      old="work()\nsettle()", new="work()")
wrong("time_one_call_too_many", step=5, hint="calls",
      old="range(repeats)", new="range(repeats + 1)")
wrong("time_settled_late", step=5, hint="settled_late",
      old="for _ in range(repeats):\n    settle()", new="for _ in range(repeats):")
wrong("right_time_of_timeit", step=5, edits=[
    ("import statistics", "import statistics\nfrom timeit import timeit"),
    ("settle()\nstart = time.perf_counter()\nwork()", "settle()"),
    ("settle()\ntimes.append(time.perf_counter() - start)",
     "times.append(timeit(lambda: (work(), settle()), number=1))")])
wrong("right_time_under_a_new_name", step=5, edits=[
    ("import statistics", "import statistics\nfrom timeit import default_timer as now"),
    ("settle()\nstart = time.perf_counter()", "settle()\nstart = now()"),
    ("append(time.perf_counter()", "append(now()")])
wrong("time_of_the_processor", step=5, hint="process_time", edits=[
    ("settle()\nstart = time.perf_counter()", "settle()\nstart = time.process_time()"),
    ("append(time.perf_counter()", "append(time.process_time()")])
wrong("time_synchronized_always", step=5, hint="cpu_sync", edits=[
    ("work()\nsettle()", "work()\ntorch.cuda.synchronize()")])
wrong("time_with_the_list", step=5, hint="time_kind",
      old="return statistics.median(times)", new="return statistics.median(times), times")

# step 6

wrong("bandwidth_in_gb", step=6, hint="units",
      old="algorithm = nbytes / seconds", new="algorithm = nbytes / seconds / 1e9")
wrong("bandwidth_no_factor", step=6, hint="no_factor",
      old="algorithm * 2 * (world - 1) / world", new="algorithm ")
wrong("bandwidth_once_around", step=6, hint="half_ring",
      old="algorithm * 2 * (world - 1)", new="algorithm * (world - 1)")
wrong("bandwidth_one_number", step=6, hint="pair",
      old=Body("bus_bandwidth"), new="return nbytes / seconds * 2 * (world - 1) / world")
wrong("bandwidth_per_rank", step=6, hint="bus_other",
      old="algorithm * 2 * (world - 1)", new="algorithm ")
wrong("bandwidth_whole_messages", step=6, hint="factor_n",
      old="algorithm * 2 * (world - 1) / world", new="algorithm * 2 * (world - 1)")
wrong("bandwidth_of_one_rank", step=6, hint="one_rank",
      old="algorithm * 2 * (world - 1) / world",
      new="algorithm * (2 * (world - 1) / world if world > 1 else 1)")
wrong("bandwidth_swapped", step=6, hint="pair_order",
      old="return algorithm, algorithm * 2 * (world - 1) / world",
      new="return algorithm * 2 * (world - 1) / world, algorithm")
wrong("bandwidth_text", step=6, hint="pair",
      old="return algorithm, algorithm", new='return f"{algorithm:g}", algorithm')

# step 7

wrong("links_always_3", step=7, hint="factor_fixed",
      old="link.latency > factor * latency or link.bandwidth < bandwidth / factor",
      new="link.latency > 3 * latency or link.bandwidth < bandwidth / 3")
wrong("links_backwards", step=7, hint="links_order",
      old="return slow", new="return slow[::-1]")
wrong("links_bandwidth_alone", step=7, hint="no_latency", old="""
    latency = statistics.median(other.latency for other in kin)
    bandwidth = statistics.median(other.bandwidth for other in kin)
    if link.latency > factor * latency or link.bandwidth < bandwidth / factor:
""", new="if link.bandwidth < statistics.median(other.bandwidth for other in kin) / factor:")
wrong("links_fast", step=7, hint="fast_links",
      old="link.bandwidth < bandwidth / factor", new="link.bandwidth > factor * bandwidth")
wrong("links_half", step=7, hint="links_other",
      old="bandwidth < bandwidth / factor", new="bandwidth < bandwidth / factor * 2")
wrong("links_latency_alone", step=7, hint="no_bandwidth",
      old="link.latency > factor * latency or link.bandwidth < bandwidth / factor",
      new="link.latency > factor * statistics.median(other.latency for other in kin)")
wrong("links_mean", step=7, hint="mean_link",
      old="statistics.median(other.latency for other in kin)",
      new="statistics.mean(other.latency for other in kin)")
wrong("links_of_all_kinds", step=7, hint="all_kinds",
      old="(other.latency for other in kin)", new="(other.latency for other in links)")
wrong("links_alone", step=7, hint="only_one",
      old="if other.kind == link.kind]", new="if other.kind == link.kind and other != link]")
wrong("links_by_kind", step=7, hint="links_order",
      old="for link in links:", new="for link in sorted(links, key=lambda link: link.kind):")
wrong("links_edge", step=7, hint="links_edge",
      old="link.latency > factor", new="link.latency >= factor")
wrong("links_first", step=7, hint="links_first",
      old="slow.append(link)", new="return [link]")
wrong("links_mean_bandwidth", step=7, hint="mean_link",
      old="statistics.median(other.bandwidth for", new="statistics.mean(other.bandwidth for")
wrong("links_neighbours", step=7, hint="links_grouped", old="""
    kin = [other for other in links if other.kind == link.kind]
""", new="""
    kin, at = [], links.index(link)
    for way in (links[at:], links[:at][::-1]):
        same = [other.kind == link.kind for other in way] + [False]
        kin += way[: same.index(False)]
""")
wrong("links_numbers", step=7, hint="links_kind",
      old="slow.append(link)", new="slow.append(links.index(link))")
wrong("links_sorted_in_place", step=7, hint="links_changed",
      old="for link in links:", new="links.sort(key=lambda link: link.latency)\nfor link in links:")
wrong("links_upper_middle", step=7, hint="median_of_all",
      old="statistics.median(other.latency for other in kin)",
      new="sorted(other.latency for other in kin)[len(kin) // 2]")

# step 8

wrong("exchange_by_collective", step=8, hint="no_collective",
      old=Body("exchange_metadata"),
      new='texts = [""] * world\ndist.all_gather_object(texts, mine)\nreturn texts')
wrong("exchange_by_own_group", step=8, hint="no_collective",
      old=Body("exchange_metadata"), new="""
    if not dist.is_initialized():
        meeting = dist.PrefixStore("meeting", store)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
    texts = [""] * world
    dist.all_gather_object(texts, mine)
    return texts
""")
wrong("exchange_bytes", step=8, hint="bytes",
      old='store.get(f"{call}/{other}").decode()', new='store.get(f"{call}/{other}")')
wrong("exchange_gives_up", step=8, hint="gave_up",
      old='[f"{call}/{other}"]', new='[f"{call}/{other}" for other in range(world)]')
wrong("exchange_one_key", step=8, hint="one_key", edits=[
    ('f"{call}/{rank}"', "call"),
    ("texts: list[str | None] = []", "texts = []"),
    ('[f"{call}/{other}"]', "[call]"),
    ('(f"{call}/{other}")', "(call)")])
wrong("exchange_patient", step=8, hint="endless_wait",
      old='store.wait([f"{call}/{other}"], timeout)', new="")
wrong("exchange_silent", step=8, hint="not_told",
      old=Body("exchange_metadata"), new="return [mine] + [None] * (world - 1)")
wrong("exchange_stale", step=8, hint="stale", edits=[
    ('f"{call}/{rank}"', 'f"{rank}"'),
    ('[f"{call}/{other}"]', '[f"{other}"]'),
    ('(f"{call}/{other}")', '(f"{other}")')])
wrong("exchange_waits_for_ever", step=8, hint="endless_wait",
      old=Body("exchange_metadata"), new="""
    store.set(f"{call}/{rank}", mine)
    return [store.get(f"{call}/{other}").decode() for other in range(world)]
""")
wrong("right_exchange_that_asks_again", step=8, edits=[
    ("store.wait([f\"{call}/{other}\"], timeout)", """
    late = time.monotonic() + timeout.total_seconds()
    while not store.check([f"{call}/{other}"]):
        time.sleep(0.05)
        if time.monotonic() > late:
            raise dist.DistStoreError
""")])
wrong("right_exchange_under_a_prefix", step=8, old="""
    store.set(f"{call}/{rank}", mine)
    texts: list[str | None] = []
""", new="""
    store = dist.PrefixStore(call, store)
    store.set(f"{call}/{rank}", mine)
    texts: list[str | None] = []
""")
wrong("exchange_does_not_wait", step=8, hint="too_early", old=Body("exchange_metadata"), new="""
    store.set(f"{call}/{rank}", mine)
    keys = [f"{call}/{other}" for other in range(world)]
    return [store.get(key).decode() if store.check([key]) else None for key in keys]
""")
wrong("exchange_dictionary", step=8, hint="texts_kind",
      old="return texts", new="return dict(enumerate(texts))")
wrong("exchange_empty_text", step=8, hint="placeholder",
      old="texts.append(None)", new='texts.append("")')
wrong("exchange_ends_early", step=8, hint="gave_up",
      old="texts.append(None)", new="return texts + [None] * (world - len(texts))")
wrong("exchange_joined_key", step=8, hint="joined_key", edits=[
    ('f"{call}/{rank}"', 'f"{call}{rank}"'),
    ('[f"{call}/{other}"]', '[f"{call}{other}"]'),
    ('(f"{call}/{other}")', '(f"{call}{other}")')])
wrong("exchange_leaves_out", step=8, hint="no_place",
      old="texts.append(None)", new="pass")
wrong("right_exchange_that_compares", step=8,
      old='store.set(f"{call}/{rank}", mine)',
      new='store.compare_set(f"{call}/{rank}", "", mine)')
