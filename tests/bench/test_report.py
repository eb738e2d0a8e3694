import json
from pathlib import Path

import jax

from jaxbuf.bench import report


def test_the_provenance_names_no_folder_of_the_machine():
    root = Path("/some/where/repository")
    words = ["--rows", "16", "--json", "/elsewhere/out/q.json", f"--data={root}/data/demo", "--output=/mnt/x", "a/b"]
    found = report.provenance("scripts/eval_demo", words, root)
    assert found["command"] == "scripts/eval_demo --rows 16 --json q.json --data=data/demo --output=x a/b"
    assert found["versions"]["jax"] == jax.__version__ and found["device"] == jax.devices()[0].device_kind
    assert json.loads(json.dumps(found)) == found
