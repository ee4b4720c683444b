"""The operator's files: rules of Prometheus, a board of Grafana.

tests/engine/terra_server compares their metrics with those of a server.
"""

import json
import re
from typing import Any

import yaml

from tests import ROOT

ALERTS = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text(encoding="utf-8"))
BOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")


def test_the_page_says_what_to_do_about_each_alert() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    in_docs = re.findall(r"`([A-Z]\w+)`", PAGE.partition("## Alerts")[2].partition("## Dashboard")[0])
    assert [rule["alert"] for rule in rules] == in_docs
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")


def test_the_panels_of_the_board_do_not_overlap() -> None:
    places = set()
    for panel in BOARD["panels"]:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        places.add((position["x"], position["y"]))
        assert [target["expr"] for target in panel["targets"]]
    assert len(places) == len(BOARD["panels"]) == 12
