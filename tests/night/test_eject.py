"""A package with a copy of mmkit inside makes the same of requests where there is no mmkit."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.llava_like.spec import LLAVA_LIKE
from mmkit.testing import Request, of_spec, vllm_path
from mmkit.testing.differences import find_difference
from mmkit.testing.strategies import for_each
from tests import ROOT
from tests.oracles import SYSTEMS
from tests.profiles import scaled

NO_MMKIT = "import sys; sys.modules['mmkit'] = sys.modules['tests'] = None  # whatever imports them fails"
RUN = """
import pickle, sys
from examples.llava_like.laws import testing
from examples.llava_like.spec import LLAVA_LIKE

processor = testing.of_spec(LLAVA_LIKE, sys.argv[1]).processor
outcomes = [testing.vllm_path.run(processor, *request) for request in pickle.load(open("requests", "rb"))]
assert sys.modules["mmkit"] is None
results = []
for outcome in outcomes:
    ranges = {name: [tuple(place) for place in places] for name, places in outcome.ranges.items()}
    results.append((outcome.ids, ranges, outcome.hashes, outcome.fields))
pickle.dump((type(processor).__module__, results), open("results", "wb"))
"""


def test_the_copy_makes_the_same_of_drawn_requests(tmp_path: Path) -> None:
    """Ids, ranges, hashes and fields; a package's laws come along."""
    checkpoint = SYSTEMS["llava"].checkpoint
    subject = of_spec(LLAVA_LIKE, checkpoint)
    requests: list[tuple[Any, ...]] = []
    outcomes: list[tuple[Any, ...]] = []

    def collect(request: Request) -> None:
        arguments = (list(request.prompt), request.data(), dict(request.kwargs))
        outcome = vllm_path.run(subject.processor, *arguments)
        requests.append(arguments)
        outcomes.append((outcome.ids, outcome.ranges, outcome.hashes, outcome.fields))

    for_each(subject.requests(most=2), collect, max_examples=scaled(60), database=None)
    (tmp_path / "requests").write_bytes(pickle.dumps(requests))
    package = tmp_path / "examples" / "llava_like"
    shutil.copytree(ROOT / "examples" / "llava_like", package)
    shutil.copy(ROOT / "examples" / "__init__.py", package.parent)
    (package / "laws.py").write_text("import mmkit.testing as testing\n")
    command = [sys.executable, "-m", "mmkit", "eject", "examples.llava_like"]
    subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "sitecustomize.py").write_text(NO_MMKIT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_PLUGINS": "llava_like", "MMKIT_MODULES": ""}
    subprocess.run([sys.executable, "-c", RUN, str(checkpoint)], cwd=tmp_path, env=environment, check=True)
    module, outcomes_of_copy = pickle.loads((tmp_path / "results").read_bytes())
    assert module == "examples.llava_like._mmkit.generated.examples.llava_like.spec.LLAVA_LIKE"
    assert find_difference(outcomes, outcomes_of_copy) is None
