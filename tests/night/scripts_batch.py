"""Answers a dataset by a model, and tells which process answered: INPUTS OUTPUTS OPTIONS."""

import json
import os
import sys

import pyarrow as pa

from examples.batch import Generate, Row, run


class Told(Generate):
    schema = pa.schema([*Generate.schema, ("pid", pa.int64())])

    def __call__(self, rows: list[Row]) -> list[Row]:
        return [{**answer, "pid": os.getpid()} for answer in super().__call__(rows)]


if __name__ == "__main__":
    from tests.night import scripts_batch

    inputs, outputs, options = sys.argv[1:]
    print(run(inputs, outputs, scripts_batch.Told, json.loads(options), engines=2, batch_size=2))
