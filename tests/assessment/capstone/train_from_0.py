"""Each life begins at the first step."""

STEP, HINT = 10, "lost_steps"


def train(
    config: Config, device: torch.device, say: Callable[[str], None]
) -> list[list[float]]:
    """Train to the last step from wherever the checkpoints are; [step, loss, norm] of each."""
    mesh = make_mesh(config, device.type)
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    model = build(config, mesh, device)
    adam = {"lr": config.lr, "betas": (0.9, 0.95), "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    stream = Stream(config)
    step = 0
    begin = f"resumed after step {step}" if step else "from the start"
    shape = " × ".join(map(str, mesh.shape))
    say(f"mesh pp × dp × tp = {shape} on {device.type}, {begin}")
    schedule = make_schedule(config, model, mesh, device) if config.pp > 1 else None
    peak, history = peak_flops(device) if config.log else 0.0, []
    tokens = config.batch * config.sequence * config.log
    start = now(device)
    while step < config.steps:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = rate(config, step)
        rows = stream.next(replica).to(device, non_blocking=True)
        if schedule is None:
            loss = accumulate(config, model, rows)
        else:
            loss = run_pipeline(config, schedule, rows, stage)
        norm = clip(config, model)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)  # stages but the last add 0; ranks of a tp group have the same
        history.append([step, loss / (config.dp * config.tp), norm])
        if config.log and step % config.log == 0:
            took = now(device) - start
            speed, mfu = tokens / took, flops_per_token(config) * tokens / took / peak
            line = f"step {step:4}/{config.steps}  loss ≈{history[-1][1]:.4f}  norm ≈{norm:.3f}"
            say(f"{line}  ≈{speed:,.0f} tokens/s  MFU ≈{mfu:.1%}")
            start = now(device)
        if config.every and step % config.every == 0:
            save(config, training_state(model, optimizer, stream, step))
            start = now(device)
    return [[step, float(loss), float(norm)] for step, loss, norm in history]
