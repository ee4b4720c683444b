"""Answers a dataset by a model, and tells which process of which node answered: INPUTS OUTPUTS OPTIONS."""

import json
import os
import sys

import pyarrow as pa
import ray

from examples.batch import Generate, Row, run


class Told(Generate):
    schema = pa.schema([*Generate.schema, ("pid", pa.int64()), ("node", pa.string())])

    def __call__(self, rows: list[Row]) -> list[Row]:
        who = {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}
        return [{**answer, **who} for answer in super().__call__(rows)]


if __name__ == "__main__":
    from tests.night import scripts_batch

    inputs, outputs, options = sys.argv[1:]
    print(run(inputs, outputs, scripts_batch.Told, json.loads(options), engines=2, batch_size=2))
