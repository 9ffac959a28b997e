"""Wrong answers to assessment/assignment1_allocator.py."""

# fmt: off
from wrong import Body, Table

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
wrong("split_always", step=1, hint="always_split",
      old="rest < MIN_BLOCK if block.small else rest <= SMALL", new="rest < MIN_BLOCK ")
wrong("split_half_linked", step=1, hint="links",
      old="if block.next:\n    block.next.previous = new", new="")
wrong("split_never", step=1, hint="never_split",
      old=Body("Allocator.split"), new="return")
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
wrong("merge_not", step=2, hint="not_merged",
      old=Body("Allocator.give_back"), new='block.state = "free"\nself.cached.append(block)')
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
wrong("free_at_once", step=3, hint="given_early", edits=[
    (Body("Allocator.free"), "self.used.remove(block)\nself.give_back(block)"),
    (Body("Allocator.collect"), "pass")])
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
wrong("free_synchronizes", step=3, hint="host_waits", old=Body("Allocator.collect"), new="""
    for block in list(self.waiting):
        if not all(map(self.device.query, block.events)):
            finished = self.device.finished.copy()
            self.device.synchronize()
            self.device.finished = finished
            continue
        self.waiting.remove(block)
        self.give_back(block)
""")
wrong("free_waits_for_itself", step=3, hint="own_event", edits=[
    ("block.events = [self.device.event(stream) for stream in sorted(block.users)]",
     "users = block.users | {block.stream}"),
    ("users = set()", "events = [self.device.event(stream) for stream in users]"),
    ("if all(map(self.device.query, block.events)):", """
        others = block.users
        done = all(map(self.device.query, block.events))
        if done or (
            len(others) > 1
            and all(self.device.query(e) for e in block.events if e[0] != block.stream)
        ):
    """)])

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
wrong("grow_skips", step=4, hint="no_retry",
      old="self.device.free(block.segment)", new="")

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
wrong("report_no_reserved", step=5, hint="report",
      old='"reserved": used + waiting + cached, "used"', new='"used"')
wrong("report_no_waiting", step=5, hint="report", old=Body("Allocator.report"), new="""
    used = sum(block.size for block in self.used + self.waiting)
    cached = sum(block.size for block in self.cached)
    largest = max((block.size for block in self.cached), default=0)
    return {
        "reserved": used + cached, "used": used, "waiting": 0, "cached": cached,
        "largest": largest,
    }  # fmt: skip
""")
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
