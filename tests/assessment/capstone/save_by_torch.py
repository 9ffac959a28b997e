"""Each rank writes its part by torch.save, for a mesh like this one alone."""

STEP, HINT = 8, "no_dcp"


def save(config: Config, state: dict) -> None:
    """Write a checkpoint so that at every moment the newest complete one can be found."""
    root, step = Path(config.folder), int(state["step"])
    unfinished, finished = root / f"step-{step}.unfinished", root / f"step-{step}"
    unfinished.mkdir(parents=True, exist_ok=True)
    torch.save(state, unfinished / f"rank-{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        unfinished.rename(finished)
        for old in complete(config)[: -config.keep]:
            shutil.rmtree(root / f"step-{old}")
    dist.barrier()  # nobody goes on before the checkpoint has its name
