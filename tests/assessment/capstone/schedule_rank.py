"""The rank as the stage's number."""

STEP, HINT = 6, "pp_stage"


def make_schedule(config: Config, model: GPT, mesh: DeviceMesh, device: torch.device):
    """One forward, one backward, over the stages of the pp dimension."""
    number, group = dist.get_rank(), mesh["pp"].get_group()
    stage = PipelineStage(model, number, config.pp, device, group=group)
    return Schedule1F1B(stage, config.micro_batches, loss_fn=loss_of)
