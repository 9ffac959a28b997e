"""The finished checkpoint is a copy, which is not made in one operation."""

STEP, HINT = 8, "left_over"


def save(config: Config, state: dict) -> None:
    """Write a checkpoint so that at every moment the newest complete one can be found."""
    root, step = Path(config.folder), int(state["step"])
    unfinished, finished = root / f"step-{step}.unfinished", root / f"step-{step}"
    dcp.save(state, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        shutil.rmtree(finished, ignore_errors=True)  # of a life that was resumed before it
        shutil.copytree(unfinished, finished)
        for old in complete(config)[: -config.keep]:
            shutil.rmtree(root / f"step-{old}")
    dist.barrier()  # nobody goes on before the checkpoint has its name
