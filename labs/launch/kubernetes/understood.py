"""Checks without a cluster whether every field of a manifest exists in Kubeflow's schema.

    python kubernetes/understood.py kubernetes/trainjob.yaml

The program reads the manifest into the Python model that Kubeflow publishes, and writes it out
again. If a field is then missing, the program prints its path: the field is misspelled, or it
belongs to a different version. Whether the runtime, the volume and the image exist can only be
checked in a cluster. The program needs kubeflow-trainer-api and kubeflow-training.
"""

import importlib
import json
import sys
from pathlib import Path

import yaml


def unknown_fields(given: object, copy: object, path: str = "") -> list[str]:
    """Return the paths of the fields that are missing or different in the copy."""
    if isinstance(given, dict):
        if not isinstance(copy, dict):
            return [path]
        parts = [(given[key], copy.get(key), f"{path}/{key}") for key in given]
    elif isinstance(given, list):
        if not isinstance(copy, list) or len(given) != len(copy):
            return [path]
        pairs = zip(given, copy, strict=True)
        parts = [(a, b, f"{path}[{n}]") for n, (a, b) in enumerate(pairs)]
    else:
        return [] if given == copy else [path]
    return [field for part in parts for field in unknown_fields(*part)]


# --8<-- [start:understood]
def round_trip(manifest: dict) -> dict:
    """Read a manifest into the published model of its kind, and write it out again."""
    if manifest["kind"] == "TrainJob":
        models = importlib.import_module("kubeflow_trainer_api.models")
        return models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()
    client = importlib.import_module("kubeflow.training.api_client").ApiClient()

    class Response:  # deserialize() expects the response of a cluster
        data = json.dumps(manifest)

    job = client.deserialize(Response(), f"KubeflowOrgV1{manifest['kind']}")
    return client.sanitize_for_serialization(job)


# --8<-- [end:understood]


def main() -> int:
    found = 0
    for name in sys.argv[1:]:
        manifest = yaml.safe_load(Path(name).read_text())
        try:
            unknown = unknown_fields(manifest, round_trip(manifest))
        except ImportError as error:
            packages = "kubeflow-trainer-api kubeflow-training"
            print(f"{error.name} is missing: pip install {packages}", file=sys.stderr)
            return 1
        print(f"{name}: {manifest['kind']} {manifest['apiVersion']}, ", end="")
        print(f"unknown: {', '.join(unknown)}" if unknown else "every field exists")
        found += len(unknown)
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
