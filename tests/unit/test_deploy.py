"""The operator's files: rules of Prometheus, a board of Grafana.

tests/engine/terra_server compares their metrics with those of a server.
"""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests import ROOT

ALERTS = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text(encoding="utf-8"))
BOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
PROMTOOL = shutil.which("promtool")
PAGE = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")


def test_the_page_says_what_to_do_about_each_alert() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    section = PAGE.partition("## Alerts")[2].partition("## Dashboard")[0]
    first_cells = re.findall(r"^\| (`[^|]+)", section, re.MULTILINE)
    in_docs = re.findall(r"`([A-Z]\w+)`", " ".join(first_cells))
    assert [rule["alert"] for rule in rules] == in_docs
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")


def test_alerts_on_any_event_fire_for_the_first_one() -> None:
    """A counter of mmkit appears with its first event, and `increase` of a series that begins at 1 is 0."""
    expressions = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
    first_events = [expression for expression in expressions if "increase(mmkit:" in expression]
    assert len(first_events) == 2
    for expression in first_events:
        counter, period = re.findall(r"increase\((.+)\[(\w+)\]\)", expression)[0]
        assert f"({counter} unless {counter} offset {period}) > 0" in expression


def test_the_queue_that_makes_a_ticket_fits_into_the_limit_of_the_page() -> None:
    command = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    (most_running,) = re.findall(r"--max-num-seqs (\d+)", command)
    (most_requests,) = re.findall(r"--max-num-queued-reqs (\d+)", command)
    (threshold,) = re.findall(r"num_requests_waiting > (\d+)", str(ALERTS))
    assert int(threshold) < int(most_requests) - int(most_running)
    assert f"more than {threshold} requests" in PAGE


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: apt-get install prometheus")
def test_the_alerts_fire() -> None:
    command = [str(PROMTOOL), "test", "rules", "alerts_test.yaml"]
    result = subprocess.run(command, cwd=ROOT / "deploy", capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_panels_of_the_board_do_not_overlap() -> None:
    places = set()
    for panel in BOARD["panels"]:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        places.add((position["x"], position["y"]))
        assert [target["expr"] for target in panel["targets"]]
    assert len(places) == len(BOARD["panels"]) == 12
