"""Wrong answers to assessment/assignment1_allocator.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("assessment/assignment1_allocator.py")

# step 1

wrong("fit_any_stream", step=1, hint="streams", old=Body("Allocator.best_fit"), new="""
    fitting = [b for b in self.cached if b.size >= size and b.small == (size <= SMALL)]
    return min(fitting, key=lambda block: (block.size, block.address), default=None)
""")
wrong("fit_first", step=1, hint="first_fit", old=Body("Allocator.best_fit"), new="""
    for block in sorted(self.cached, key=lambda block: block.address):
        small = size <= SMALL
        if block.size >= size and block.stream == stream and block.small == small:
            return block
""")
wrong("fit_last", step=1, hint="tie",
      old="(block.size, block.address)", new="(block.size, -block.address)")
wrong("fit_nearest", step=1, hint="too_small",
      old="if block.size >= size and block.stream == stream and block.small == (size <= SMALL)",
      new="")
wrong("fit_one_pool", step=1, hint="pools", old=Body("Allocator.best_fit"), new="""
    fitting = [b for b in self.cached if b.size >= size and b.stream == stream]
    return min(fitting, key=lambda block: (block.size, block.address), default=None)
""")
wrong("fit_exactly_not", step=1, hint="exact_fit",
      old="block.size >= size and", new="block.size > size and")
wrong("fit_index", step=1, hint="no_block", old="""
    return min(fitting, key=lambda block: (block.size, block.address), default=None)
""", new="return fitting.index(min(fitting, key=lambda block: block.size)) if fitting else None")
wrong("fit_no_default", step=1, hint="none_fits", old=", default=None)", new=")")
wrong("fit_not_returned", step=1, hint="nothing_found", old="return min(", new="min(")
wrong("fit_removes", step=1, hint="removes", old="""
    return min(fitting, key=lambda block: (block.size, block.address), default=None)
""", new="""
    best = min(fitting, key=lambda block: (block.size, block.address), default=None)
    if best:
        self.cached.remove(best)
    return best
""")
wrong("split_address", step=1, hint="rest_address",
      old="block.address + size, rest", new="block.address + rest, rest")
wrong("split_both_cached", step=1, hint="block_cached",
      old="self.cached.append(new)", new="self.cached += block, new")
wrong("split_by_request", step=1,
      old="rest < MIN_BLOCK if block.small else rest <= SMALL",
      new="rest < MIN_BLOCK if size <= SMALL else rest <= SMALL")
wrong("split_copies", step=1, hint="rest_users", edits=[
    ("import sys", "import copy\nimport sys"),
    ("new = Block(block.address + size, rest, block.segment, block.stream)", """
    new = copy.copy(block)
    new.address, new.size = block.address + size, rest
    """)])
wrong("split_exact", step=1, hint="empty_rest",
      old="rest < MIN_BLOCK if block.small else rest <= SMALL",
      new="not block.small and rest <= SMALL")
wrong("split_half_linked", step=1, hint="links",
      old="if block.next:\n    block.next.previous = new", new="")
wrong("split_never", step=1, hint="never_split",
      old=Body("Allocator.split"), new="return")
wrong("split_rest_as_segment", step=1, hint="rest_segment",
      old="rest, block.segment,", new="rest, rest,")
wrong("split_rest_of_one", step=1, hint="always_split", old="rest <= SMALL", new="rest < SMALL")
wrong("split_size", step=1, hint="cut_size",
      old="block.next, block.size = new, size", new="block.next = new")
wrong("split_small_rest", step=1, hint="small_rest",
      old="rest < MIN_BLOCK if block.small else rest <= SMALL",
      new="rest <= (MIN_BLOCK if block.small else SMALL)")
wrong("split_stream", step=1, hint="rest_stream",
      old="segment, block.stream", new="segment, 0")

# step 2

wrong("merge_anything", step=2, hint="merged_used", old=Body("Allocator.give_back"), new="""
    block.state = "free"
    if block.next:
        gone = block.next
        if gone in self.cached:
            self.cached.remove(gone)
        block.size, block.next = block.size + gone.size, gone.next
        if gone.next:
            gone.next.previous = block
    total = sum(other.size for other in self.cached)
    block.size = min(block.size, 20 * MIB - total)
    self.cached.append(block)
""")
wrong("merge_across", step=2, hint="across", old=Body("Allocator.give_back"), new="""
    block.state = "free"
    for other in list(self.cached):
        if block.address + block.size == other.address:
            block, other = other, block
        elif other.address + other.size != block.address:
            continue
        first, second = sorted((block, other), key=lambda block: block.address)
        self.cached = [each for each in self.cached if each not in (first, second)]
        first.size, first.next = first.size + second.size, second.next
        if first.next:
            first.next.previous = first
        block = first
    self.cached.append(block)
""")
wrong("merge_twice", step=2, hint="listed_twice", old="""
    block = block.previous
    self.cached.remove(block)
""", new="block = block.previous")
wrong("merge_waiting", step=2, hint="merged_used",
      old='if block.next and block.next.state == "free":',
      new='if block.next and block.next.state != "used":')
wrong("merge_without_size", step=2, hint="lost", old="block.size += gone.size", new="")
wrong("merge_half_linked", step=2, hint="links",
      old="block.next = gone.next", new="")
wrong("merge_next", step=2, hint="not_merged", old=Body("Allocator.give_back"), new="""
    block.state = "free"
    if block.next and block.next.state == "free":
        gone = block.next
        self.cached.remove(gone)
        block.size, block.next = block.size + gone.size, gone.next
        if gone.next:
            gone.next.previous = block
    self.cached.append(block)
""")
wrong("merge_stale", step=2, hint="stale", old=Body("Allocator.give_back"), new="""
    block.state = "free"
    if block.next and block.next.state == "free":
        gone = block.next
        block.size, block.next = block.size + gone.size, gone.next
        if gone.next:
            gone.next.previous = block
    if block.previous and block.previous.state == "free":
        left = block.previous
        left.size, left.next = left.size + block.size, block.next
        if block.next:
            block.next.previous = left
    self.cached.append(block)
""")

# step 3

wrong("free_always_waits", step=3, hint="held_back", old=Body("Allocator.free"), new="""
    self.used.remove(block)
    users = block.users or {block.stream}
    block.events = [self.device.event(stream) for stream in users]
    block.state = "waiting"
    self.waiting.append(block)
""")
wrong("free_any", step=3, hint="given_early",
      old="all(map(self.device.query, block.events))",
      new="any(map(self.device.query, block.events))")
wrong("free_never", step=3, hint="kept_waiting",
      old=Body("Allocator.collect"), new="pass")
wrong("free_old_event", step=3, hint="event_of_use",
      old="self.device.event(stream) for stream in sorted(block.users)", new="""
    (stream, self.device.launched[stream] - (self.device.finished[stream] > 0))
                for stream in block.users
""")
wrong("free_skips", step=3, hint="skipped",
      old="for block in list(self.waiting):\n    if all(map(self.device.query, block.events)):",
      new="for block in self.waiting:\n    if all(self.device.query(e) for e in block.events):")
wrong("free_synchronizes", step=3, hint="host_waits",
      old="for block in list(self.waiting):",
      new="self.device.synchronize()\nfor block in list(self.waiting):")
wrong("free_waits_for_itself", step=3, hint="own_event",
      old="sorted(block.users)", new="sorted(block.users | {block.stream})")
wrong("free_of_last_stream", step=3, hint="given_early",
      old="block.events = [self.device.event(stream) for stream in sorted(block.users)]", new="""
    for stream in sorted(block.users):
        block.events = [self.device.event(stream)]
""")
wrong("free_keeps_users", step=3, hint="users_kept", old="block.users = set()", new="")
wrong("free_not_listed", step=3, hint="not_listed", old="self.waiting.append(block)", new="")
wrong("collect_keeps", step=3, hint="still_waiting", old="self.waiting.remove(block)", new="")
wrong("collect_stops", step=3, hint="stops", old="""
    for block in list(self.waiting):
        if all(map(self.device.query, block.events)):
""", new="""
    for block in list(self.waiting):
        if not all(map(self.device.query, block.events)):
            break
        if True:
""")

# step 4

wrong("grow_asks_once", step=4, hint="no_retry",
      old="self.device.free(block.segment)", new="")
wrong("grow_forgets_waiting", step=4, hint="waits_forgotten",
      old="self.device.synchronize()\nself.collect()", new="")
wrong("grow_frees_parts", step=4, hint="parts_freed", edits=[
    ("[block for block in self.cached if block.size == block.segment]", "list(self.cached)"),
    ("(block.segment)", "(block.size)")])
wrong("grow_gives_up_first", step=4, hint="gives_up_early",
      old="wanted = segment_size(size)", new="""
    wanted = segment_size(size)
    for block in [block for block in self.cached if block.size == block.segment]:
        self.cached.remove(block)
        self.device.free(block.segment)
""")
wrong("grow_never_says", step=4, hint="no_error", old="""
    if address is None:
        raise MemoryError(f"{wanted} bytes wanted: {self.report()}")
""", new="")
wrong("grow_waits_first", step=4, hint="gives_up_early", edits=[
    ("address = self.device.malloc(wanted)\nif address is None:\n    self.device.synchronize()",
     "self.device.synchronize()\naddress = self.device.malloc(wanted)\nif address is None:")])
wrong("grow_keeps_in_cache", step=4, hint="still_cached",
      old="self.cached.remove(block)\nself.device.free(block.segment)",
      new="self.device.free(block.segment)")
wrong("grow_frees_first_parts", step=4, hint="parts_freed",
      old="if block.size == block.segment]", new="if block.previous is None]")
wrong("grow_asks_for_the_request", step=4, hint="asked_size",
      old="wanted = segment_size(size)", new="wanted = size")
wrong("grow_without_numbers", step=4, hint="no_numbers", old=": {self.report()}", new="")
wrong("grow_raises_another", step=4, hint="no_error", old="MemoryError(f", new="RuntimeError(f")

# step 5

wrong("report_largest_used", step=5, hint="largest", old=Body("Allocator.report"), new="""
    blocks = self.used, self.waiting, self.cached
    used, waiting, cached = (sum(block.size for block in some) for some in blocks)
    largest = max((block.size for some in blocks for block in some), default=0)
    return {
        "reserved": used + waiting + cached, "used": used, "waiting": waiting,
        "cached": cached, "largest": largest,
    }  # fmt: skip
""")
wrong("report_no_reserved", step=5, hint="keys",
      old='"reserved": used + waiting + cached, "used"', new='"used"')
wrong("report_in_mib", step=5, hint="unit",
      old="sum(block.size for block in blocks)", new="sum(block.size for block in blocks) // MIB")
wrong("report_segments", step=5, hint="report",
      old="sum(block.size for block in blocks)", new="sum(block.segment for block in blocks)")
wrong("report_of_nothing", step=5, hint="largest", old=Body("Allocator.report"), new="""
    u, w, c = (sum(b.size for b in x) for x in (self.used, self.waiting, self.cached))
    return {
        "reserved": u + w + c,
        "used": u,
        "waiting": w,
        "cached": c,
        "largest": max(b.size for b in self.cached),
    }
""")
