"""All forwards first."""

STEP, HINT = 6, "gpipe"


def make_schedule(config: Config, model: GPT, mesh: DeviceMesh, device: torch.device):
    """One forward, one backward, over the stages of the pp dimension."""
    number, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    stage = PipelineStage(model, number, config.pp, device, group=group)
    from torch.distributed.pipelining import ScheduleGPipe

    return ScheduleGPipe(stage, config.micro_batches, loss_fn=loss_of)
