"""Answers a dataset, and tells which process of which node answered: WORKER INPUTS OUTPUTS OPTIONS."""

import json
import os
import sys
import time

import pyarrow as pa
import ray

from mmkit.serve.batch import Generate, Row, run

WHO = [("pid", pa.int64()), ("node", pa.string())]


def who() -> Row:
    return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}


class Slow:
    """Answers without an engine, after some time."""

    schema = pa.schema(WHO)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, rows: list[Row]) -> list[Row]:
        time.sleep(self.seconds)
        return [who() for _ in rows]


class Told(Generate):
    """Answers by a model."""

    schema = pa.schema([*Generate.schema, *WHO])

    def __call__(self, rows: list[Row]) -> list[Row]:
        return [{**answer, **who()} for answer in super().__call__(rows)]


if __name__ == "__main__":
    from tests.engine import scripts_batch

    worker, inputs, outputs, options = sys.argv[1:]
    print(run(inputs, outputs, getattr(scripts_batch, worker), json.loads(options), engines=2, batch_size=2))
