"""Grade whole runs of the capstone, on two ranks: python whole_runs.py FINISHED WRONG...

This is a separate program, because a supervisor ends all processes that its own process has
started. It prints, as JSON, the error of each wrong program and the hint.
"""

import json
import os
import random
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
sys.path.append(str(Path(__file__).resolve().parents[1]))

from graders.assessment import capstone
from graders.protocol import Wrong
from graders.supervisor import Supervisor

RUN = {"dp": 2, "layers": 2, "steps": 7, "every": 3, "log": 1}
BOX = {"pp": 2, "steps": 2}
NOT_KILLED = ("not_truth", "slow")  # hints that do not need a killed run


def main() -> None:
    finished, *wrong = (Path(word).resolve() for word in sys.argv[1:])
    step, found = capstone.LAB[10], {}
    with Supervisor("capstone", 120.0) as supervisor:
        with supervisor.workspace(step, finished) as workspace:
            undisturbed = workspace.group(2, config=RUN).facts("history")[0]
        for path in wrong:
            hint = path.stem.partition("-")[0]
            with supervisor.workspace(step, path) as workspace:
                try:
                    if hint in NOT_KILLED:
                        list(step.trial(workspace, RUN, BOX))
                    else:  # the parts before the kill would find no error
                        capstone.kill_and_resume(workspace, undisturbed, random.Random(0), RUN)
                except Wrong as verdict:
                    found[path.stem] = verdict.what, verdict.hint
    print(json.dumps(found))


if __name__ == "__main__":
    main()
