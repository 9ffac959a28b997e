"""The graders, which judge a learner's program for `labs/check.py`.

- `dsl`         how a grader defines its steps
- `hints`       the texts that the learner reads below a mistake
- `protocol`    what a rank reports to the checker
- `step`        the definition of a step
- `rank`        the code that runs in each rank
- `supervisor`  starts the ranks, watches them and ends them
- `verdict`     decides what the reports of the ranks mean
- `sandbox`     limits what a learner's program can use and change
- `scores`      counts messages, bytes and other costs
- `labs`, `assessment`  one grader for each program

The graders import `worldsize.execution`. They must also run in a copy of the repository in
which nothing is installed, so this module adds the folder `src` to the module path.
"""

import sys
from pathlib import Path

SOURCES = str(Path(__file__).resolve().parents[1] / "src")
if SOURCES not in sys.path:
    sys.path.append(SOURCES)
