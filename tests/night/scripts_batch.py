"""A program that answers a dataset by a model, and tells which process of which node answered each row.

usage: python -m tests.night.scripts_batch INPUTS OUTPUTS OPTIONS
"""

import json
import os
import sys

import pyarrow as pa
import ray

from examples.batch import Generate, Row, run


class GenerateAndTellProcess(Generate):
    schema = Generate.schema.append(pa.field("pid", pa.int64())).append(pa.field("node", pa.string()))

    def __call__(self, rows: list[Row]) -> list[Row]:
        answers = super().__call__(rows)
        for answer in answers:
            answer["pid"] = os.getpid()
            answer["node"] = ray.get_runtime_context().get_node_id()
        return answers


if __name__ == "__main__":
    # imported by its name, since Ray's processes cannot import a class of __main__
    from tests.night import scripts_batch

    inputs, outputs, options = sys.argv[1:]
    print(run(inputs, outputs, scripts_batch.GenerateAndTellProcess, json.loads(options), engines=2, batch_size=2))
