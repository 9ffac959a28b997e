"""Does a manifest say what its schema knows? Kubeflow's published models answer, no cluster.

    python kubernetes/understood.py kubernetes/trainjob.yaml

A field that the model does not have is named, with its path: a typing mistake, or a field of
another version. What only a cluster knows (the runtime, the volume, the image) stays unknown.
Needs kubeflow-trainer-api and kubeflow-training.
"""

import importlib
import json
import sys
from pathlib import Path

import yaml


def lost(asked: object, understood: object, path: str = "") -> list[str]:
    """The fields of a manifest that the model does not have, or reads as something else."""
    if isinstance(asked, dict):
        if not isinstance(understood, dict):
            return [path]
        return [f for k, v in asked.items() for f in lost(v, understood.get(k), f"{path}/{k}")]
    if isinstance(asked, list):
        if not isinstance(understood, list) or len(asked) != len(understood):
            return [path]
        pairs = zip(asked, understood, strict=True)
        return [f for n, (a, b) in enumerate(pairs) for f in lost(a, b, f"{path}[{n}]")]
    return [] if asked == understood else [path]


# --8<-- [start:understood]
def understood(manifest: dict) -> dict:
    """The manifest read into the published model of its kind, and written out again."""
    if manifest["kind"] == "TrainJob":
        models = importlib.import_module("kubeflow_trainer_api.models")
        return models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()
    client = importlib.import_module("kubeflow.training.api_client").ApiClient()

    class Answer:  # as a cluster would have sent it
        data = json.dumps(manifest)

    job = client.deserialize(Answer(), f"KubeflowOrgV1{manifest['kind']}")
    return client.sanitize_for_serialization(job)


# --8<-- [end:understood]


def main() -> int:
    found = 0
    for name in sys.argv[1:]:
        manifest = yaml.safe_load(Path(name).read_text())
        try:
            unknown = lost(manifest, understood(manifest))
        except ImportError as error:
            print(f"{error.name} is not installed", file=sys.stderr)
            return 1
        print(f"{name}: {manifest['kind']} {manifest['apiVersion']}, ", end="")
        print(f"unknown: {', '.join(unknown)}" if unknown else "every field is known")
        found += len(unknown)
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
