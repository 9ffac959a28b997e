"""Stages count over all ranks."""

STEP, HINT = 6, "pp_group"


def make_schedule(config: Config, model: GPT, mesh: DeviceMesh, device: torch.device):
    """One forward, one backward, over the stages of the pp dimension."""
    number, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    stage = PipelineStage(model, number, config.pp, device)
    return Schedule1F1B(stage, config.micro_batches, loss_fn=loss_of)
