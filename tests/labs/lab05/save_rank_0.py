"""Step 8: only rank 0 saves"""

import torch.distributed as dist

STEP, HINT = 8, "save_everybody"


def save(engine, folder, step):
    if dist.get_rank() == 0:
        engine.save_checkpoint(folder, client_state={"step": step})
