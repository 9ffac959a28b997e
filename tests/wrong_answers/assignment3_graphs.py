"""Wrong answers to assessment/assignment3_graphs.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("assessment/assignment3_graphs.py")

# step 1

wrong("capture_flat", step=1, hint="nested",
      old="map(self.number, tensors)", new="self.number(t) for t in args if torch.is_tensor(t)")
wrong("capture_host", step=1, hint="host_read", edits=[
    ("""
        if name in HOST_READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
    """, ""),
    ("not func.is_view", "not func.is_view and isinstance(result, torch.Tensor)")])
wrong("capture_last_first", step=1, hint="order",
      old="self.nodes.append(", new="self.nodes.insert(0, ")
wrong("capture_new_number", step=1, hint="in_place",
      old="self.number(result)", new="1000 + len(self.nodes)")
wrong("capture_reads_first", step=1, hint="host_read", edits=[
    ("if name in HOST_READS:", "result = func(*args, **kwargs)\nif name in HOST_READS:"),
    ("result = func(*args, **kwargs)", "")])
wrong("capture_returns_nothing", step=1, hint="no_return",
      old="return result", new="")
wrong("capture_twice", step=1, hint="twice",
      old="if not func.is_view:",
      new="if not func.is_view:\n    inputs = tuple(map(self.number, tensors))")
wrong("capture_views", step=1, hint="views",
      old="if not func.is_view:", new="if True:")

wrong("capture_without_kwargs", step=1, hint="not_run",
      old="func(*args, **kwargs)", new="func(*args)")
wrong("capture_other_error", step=1, hint="host_read",
      old="raise RuntimeError(", new="raise ValueError(")
wrong("capture_inputs_read_only", step=1, hint="inputs", old="Node(name, inputs, self.number(result))", new="""
    Node(
        name, tuple(n for n in inputs if n != self.number(result)), self.number(result)
    )
""")
wrong("capture_in_place_as_view", step=1, hint="in_place",
      old="if not func.is_view:",
      new="if not func.is_view and result.untyped_storage()._cdata not in [\n    t.untyped_storage()._cdata for t in tensors\n]:")
wrong("capture_whole_name", step=1, hint="nodes", old="Node(name, inputs", new="Node(str(func), inputs")

# step 2

wrong("plan_all_apart", step=2, hint="no_reuse", old=Body("plan"), new="""
    offsets, seen, top = {}, set(), 0
    for node in nodes:
        seen |= set(node.inputs)
        if node.output not in seen:
            seen.add(node.output)
            offsets[node.output] = top
            top += sizes[node.output]
    return offsets
""")
wrong("plan_fits_the_last", step=2, hint="overlap",
      old="sizes[number]", new="sizes[node.output]")
wrong("plan_forgets_keep", step=2, hint="overlap",
      old="len(nodes) if number in keep else i", new="i")
wrong("plan_inputs", step=2, hint="inputs_planned", old=Body("plan"), new="""
    offsets, top = {}, 0
    for node in nodes:
        for number in (*node.inputs, node.output):
            if number not in offsets:
                offsets[number] = top
                top += sizes[number]
    return offsets
""")
wrong("plan_on_top", step=2, hint="first_gap", old=Body("plan"), new="""
    last = {n: i for i, node in enumerate(nodes) for n in (*node.inputs, node.output)}
    last |= dict.fromkeys(keep, len(nodes))
    seen, offsets = set(), {}
    for i, node in enumerate(nodes):
        seen |= set(node.inputs)
        if node.output in seen:
            continue
        seen.add(node.output)
        living = [(o, o + sizes[n]) for n, o in offsets.items() if last[n] >= i]
        bottom = min((start for start, _ in living), default=0)
        top = max((end for _, end in living), default=0)
        offsets[node.output] = 0 if bottom >= sizes[node.output] else top
    return offsets
""")
wrong("plan_as_list", step=2, hint="offsets",
      old="return offsets", new="return list(offsets.values())")
wrong("plan_born_again", step=2, hint="reborn",
      old="born.setdefault(node.output, i)", new="born[node.output] = i")
wrong("plan_changes_keep", step=2, hint="changed",
      old="inputs = set()", new="inputs = set()\nkeep |= {nodes[0].output}")
wrong("plan_read_only", step=2, hint="missing", old="for number, birth in born.items():", new="""
    for number, birth in born.items():
        if number not in {n for node in nodes for n in node.inputs}:
            continue
""")
wrong("plan_strict", step=2, hint="first_gap",
      old="start - place >= sizes", new="start - place > sizes")

# step 3

wrong("fuse_far", step=3, hint="reordered", old=Body("fuse"), new="""
    kernels: list[list[Node]] = []
    for node in nodes:
        for kernel in kernels:
            made = {n.output for n in kernel}
            if node.pointwise and kernel[0].pointwise and made & set(node.inputs):
                kernel.append(node)
                break
        else:
            kernels.append([node])
    return kernels
""")
wrong("fuse_nothing", step=3, hint="no_chain",
      old=Body("fuse"), new="return [[node] for node in nodes]")
wrong("fuse_names", step=3, hint="kernels",
      old="return kernels", new="return [[node.name for node in kernel] for kernel in kernels]")
wrong("fuse_of_one_input", step=3, hint="stranger", old="if joins and made & set(node.inputs):", new="""
    made |= {n for other in last for n in other.inputs}
    if joins and made & set(node.inputs):
""")
wrong("fuse_products", step=3, hint="product_fused",
      old="joins and made", new="kernels and {n.output for n in kernels[-1]}")
wrong("fuse_strangers", step=3, hint="stranger", old=Body("fuse"), new="""
    kernels: list[list[Node]] = []
    for node in nodes:
        if node.pointwise and kernels and kernels[-1][0].pointwise:
            kernels[-1].append(node)
        else:
            kernels.append([node])
    return kernels
""")
wrong("fuse_with_last_node", step=3, hint="no_chain", old=Body("fuse"), new="""
    ks = []
    for node in nodes:
        if ks and node.pointwise and ks[-1][-1].pointwise and ks[-1][-1].output in node.inputs:
            ks[-1].append(node)
        else:
            ks.append([node])
    return ks
""")
wrong("traffic_count", step=3, hint="bytes", edits=[
    ("sum(sizes[n] for n in loads)", "len(loads)"),
    ("sum(sizes[n] for n in made & (later | keep))", "len(made & (later | keep))")])
wrong("traffic_each_reader", step=3, hint="loads_twice",
      old="loads |= set(node.inputs) - made",
      new="total += sum(sizes[n] for n in node.inputs if n not in made)")
wrong("traffic_in_place", step=3, hint="loads_late", old=Body("traffic"), new="""
    total = 0
    for i, k in enumerate(kernels):
        made = {n.output for n in k}
        loads = {i for n in k for i in n.inputs} - made
        later = {n for o in kernels[i + 1 :] for node in o for n in node.inputs}
        total += sum(sizes[n] for n in loads) + sum(sizes[n] for n in made & (keep | later))
    return total
""")
wrong("traffic_keep_twice", step=3, hint="stores_twice",
      old="for n in made & (later | keep))",
      new="for n in made & later) + sum(sizes[n] for n in made & keep)")
wrong("traffic_next_reader", step=3, hint="not_stored",
      old="kernels[i + 1 :]", new="kernels[i + 1 : i + 2]")
wrong("traffic_other_readers", step=3, hint="stores_dead",
      old="in kernels[i + 1 :] for", new="in kernels if other is not kernel for")
wrong("traffic_of_each_write", step=3, hint="stores_twice", edits=[
    ("made: set[int] = set()", "made: list[int] = []"),
    ("set(node.inputs) - made", "set(node.inputs) - set(made)"),
    ("made.add(", "made.append("),
    ("for n in made & (later | keep)", "for n in made if n in later | keep")])
wrong("traffic_later_readers", step=3, hint="not_stored",
      old="(later | keep)", new="keep")
wrong("traffic_loads_its_own", step=3, hint="loads_made",
      old="loads |= set(node.inputs) - made", new="loads |= set(node.inputs)")
wrong("traffic_no_result", step=3, hint="result_lost",
      old="(later | keep)", new="later")
wrong("traffic_stores_all", step=3, hint="stores_dead",
      old="sum(sizes[n] for n in loads) + sum(sizes[n] for n in made & (later | keep))",
      new="sum(sizes[n] for n in loads | made)")

# step 4

wrong("buckets_all_rows", step=4, hint="rows",
      old="graph.output[:rows]", new="graph.output")
wrong("buckets_capture_all", step=4, hint="captured_early", old="if size not in self.graphs:", new="""
    for each in self.sizes:
        self.graphs[each] = self.graphs.get(each) or self.capture(each)
    if size not in self.graphs:
""")
wrong("buckets_capture_each", step=4, hint="captures_each",
      old="if size not in self.graphs:", new="if True:")
wrong("buckets_lend", step=4, hint="borrowed",
      old="graph.output[:rows].clone()", new="graph.output[:rows]")
wrong("buckets_no_replay", step=4, hint="not_replayed",
      old="graph.replay()", new="")
wrong("buckets_none_left", step=4, hint="too_large",
      old="next((size for size in self.sizes if size >= rows), None)",
      new="next(size for size in self.sizes if size >= rows)")
wrong("buckets_not_full", step=4, hint="bucket",
      old="next((size for size in self.sizes if size >= rows), None)",
      new="min((s for s in self.sizes if s > len(x)), default=None)")
wrong("buckets_rename", step=4, hint="stale",
      old="graph.input[:rows].copy_(x)", new="")

wrong("buckets_plain_lost", step=4, hint="too_large",
      old="return self.plain(x)", new="self.plain(x)\nreturn x")
wrong("buckets_replay_twice", step=4, hint="replayed_twice",
      old="graph.replay()", new="graph.replay()\ngraph.replay()")
wrong("buckets_whole_input", step=4, hint="input_rows",
      old="graph.input[:rows].copy_(x)", new="graph.input.copy_(x)")

# step 5

wrong("idle_all_late", step=5, hint="late",
      old="late += (start - latest) * (launched > latest)", new="")
wrong("idle_by_end", step=5, hint="unsorted", old="kernel[1])", new="kernel[2])")
wrong("idle_by_launch", step=5, hint="unsorted",
      old="sorted(kernels, key=lambda kernel: kernel[1])", new="sorted(kernels)")
wrong("idle_from_launch", step=5, hint="late_part",
      old="late += (start - latest) * (launched", new="late += (start - launched) * (launched")
wrong("idle_from_zero", step=5, hint="before_first", old="latest = None", new="latest = 0.0")
wrong("idle_gaps", step=5, hint="pair", old="return gaps, late", new="return gaps")
wrong("idle_in_time", step=5, hint="late", old="launched > latest", new="launched >= latest")
wrong("idle_neighbours", step=5, hint="streams",
      old="latest = end if latest is None else max(latest, end)", new="latest = end")
wrong("idle_swapped", step=5, hint="swapped",
      old="return gaps, late", new="return late, gaps")
wrong("idle_unsorted", step=5, hint="unsorted",
      old="sorted(kernels, key=lambda kernel: kernel[1])", new="kernels")
