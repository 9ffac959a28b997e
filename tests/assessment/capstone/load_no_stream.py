"""The data begin again."""

STEP, HINT = 9, "resume_stream"


def load(config: Config, model: GPT, optimizer: torch.optim.Optimizer, stream: Stream) -> int:
    """Go back to the newest complete checkpoint; return its step, 0 if there is none."""
    steps = [max(complete(config), default=0)]
    dist.broadcast_object_list(steps, src=0)
    if not steps[0]:
        return 0
    state = training_state(model, optimizer, stream, 0)
    dcp.load(state, checkpoint_id=Path(config.folder) / f"step-{steps[0]}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"],
        optim_state_dict=state["optimizer"], options=FLAT,
    )  # fmt: skip
    return int(state["step"])
