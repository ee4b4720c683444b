"""Batch inference without a server: parquet in, parquet out, by engines in actors of Ray Data.

``python -m examples.batch MODEL INPUTS OUTPUTS``; needs ``vllm-mmkit[ray]``.

========== =====================================================================================
column     holds
========== =====================================================================================
`id`       what names the row: integers or texts, each once
`prompt`   a text, or a list of token ids
a modality a list of items, one item that is no list, or null. An item is nested lists of numbers,
           an element of pyarrow's ``fixed_shape_tensor``, the bytes of an image file, a text, or a
           struct of the parts of a record, each in one of these forms
========== =====================================================================================

Outputs have the `id`, the columns of the answer, and `error`: null, or why there is no answer in
one sentence. The process that was started writes them, batch by batch, each in a part file that is
there as a whole or not at all. A run that was stopped goes on with the rows whose ids are in none.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from mmkit.errors import DISTRIBUTION, InputError, MmkitError

if "RAY_ADDRESS" not in os.environ:
    # read when Ray is imported: what it starts here listens on 127.0.0.1, not on all interfaces
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq
    import ray
    import typer
    from tqdm import tqdm
except ImportError as error:
    remedy = f"Install {DISTRIBUTION}[ray]."
    raise MmkitError("batch inference", "Ray Data", str(error), remedy) from error

Row = dict[str, Any]
Options = Mapping[str, Any]

HANDED_ON = ("HF_", "MMKIT_", "OMP_", "PYTHONPATH", "TOKENIZERS_", "VLLM_")
"""The prefixes of environment variables that Ray passes to the actors on all nodes. Variables of
one machine, VLLM_HOST_IP among them, stay there."""

OPTIONS = b"mmkit"
"""The key of a part file's metadata that holds what the run was asked for."""


class Worker(Protocol):
    """The work of an actor: a class at the top of a module that all nodes can import. Each actor
    makes one instance.

    Attributes:
        schema: the columns of an answer, without `id` and `error`.
    """

    schema: ClassVar[pa.Schema]

    def __call__(self, rows: list[Row]) -> Sequence[Row]:
        """The answers to some rows, in their order: columns of the schema, or an `error`."""
        ...


class Generate:
    """Answers rows by one request to vLLM each.

    Args:
        model: directory of a checkpoint.
        engine: more arguments of `vllm.LLM`.
        sampling: arguments of `vllm.SamplingParams`.
    """

    schema: ClassVar = pa.schema(
        [("tokens", pa.list_(pa.int32())), ("text", pa.string()), ("finish_reason", pa.string())]
    )

    def __init__(self, model: str, engine: Options, sampling: Options) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(model, **engine)
        self.sampling = SamplingParams(**sampling)

    def __call__(self, rows: list[Row]) -> list[Row]:
        refused = [self._refused(row) for row in rows]
        outputs = iter(self.llm.wait_for_completion(use_tqdm=False))  # in the order of the requests
        return [{"error": error} if error else _answer(next(outputs)) for error in refused]

    def _refused(self, row: Row) -> str | None:
        """Hand a row to the engine; say why not if that cannot be."""
        prompt, items = row.get("prompt"), {k: row[k] for k in row if k not in ("id", "prompt")}
        try:
            if not isinstance(prompt, (str, list)):
                expected = "a text or a list of token ids"
                raise InputError("prompt", expected, f"a {type(prompt).__name__}")
            request: Row = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
            data = {k: _items(value) for k, value in items.items() if value is not None}
            request |= {"multi_modal_data": data} if data else {}
            self.llm.enqueue([request], self.sampling, use_tqdm=False)
        except (ValueError, TypeError) as error:
            return " ".join(str(error).split())
        return None


def _answer(output: Any) -> Row:
    (of,) = output.outputs
    if of.finish_reason == "error":
        return {"error": "answer: expected tokens, got an error of the engine, whose log has it."}
    text = of.text or None
    return {"tokens": list(of.token_ids), "text": text, "finish_reason": of.finish_reason}


def _items(value: Any) -> list[Any]:
    return [_item(item) for item in (value if isinstance(value, list) else [value])]


def _item(value: Any) -> Any:
    """An item as vLLM takes it."""
    if isinstance(value, bytes):
        from PIL import Image

        try:
            image = Image.open(BytesIO(value))
            image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InputError("item", "the bytes of an image file", str(error)) from None
        return image
    return {k: _item(v) for k, v in value.items()} if isinstance(value, dict) else value


class Actor:
    """A worker, as Ray Data holds it."""

    def __init__(self, worker: Callable[..., Worker], options: Options) -> None:
        # the actor is the engine: a child would outlive an actor that is killed
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self._worker = worker(**options)

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = _rows(table)
        answers = self._worker(rows)
        error = pa.field("error", pa.string())
        schema = pa.schema([table.schema.field("id"), *self._worker.schema, error])
        filled = [{"id": r["id"], **answer} for r, answer in zip(rows, answers, strict=True)]
        return pa.Table.from_pylist(filled, schema=schema)


def _rows(table: pa.Table) -> list[Row]:
    """Rows as Python values; lists of ``fixed_shape_tensor`` as arrays (items, *shape)."""
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        of = getattr(column.type, "value_type", None)
        if isinstance(of, pa.FixedShapeTensorType):
            arrays = (cell.values for cell in column)
            values = [None if a is None else list(a.to_numpy_ndarray()) for a in arrays]
        else:
            values = column.to_pylist()
        columns[name] = values
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


# -- the process that was started ------------------------------------------------------------------


def run(
    inputs: Path | str,
    outputs: Path | str,
    worker: Callable[..., Worker],
    options: Options,
    *,
    engines: int = 1,
    batch_size: int = 64,
    gpus: int | None = None,
) -> tuple[int, int]:
    """Answer the rows of a dataset that have no answer yet, on this machine or on the Ray cluster
    of RAY_ADDRESS.

    Args:
        inputs: a parquet file or a folder of parquet files, on all nodes.
        outputs: folder of the part files, on this machine alone.
        worker: a class like `Worker`.
        options: its arguments, as JSON values.
        engines: number of actors.
        batch_size: number of rows that an actor takes at once, and of a part file.
        gpus: number of GPUs per actor; None for 1 where Ray sees any.

    Returns:
        The number of rows answered now, and the number of these with an `error`.

    Raises:
        MmkitError: inputs without unique ids, or outputs of another run.
    """
    inputs, outputs = Path(inputs).resolve(), Path(outputs)
    files = sorted(inputs.rglob("*.parquet")) if inputs.is_dir() else [inputs]
    asked = json.dumps([getattr(worker, "__qualname__", str(worker)), dict(options)], default=str)
    with _held(outputs):
        ids = _ids(inputs, files)
        number, done = _done(outputs, asked, ids.type)
        left = pc.sum(pc.invert(pc.is_in(ids, value_set=done))).as_py() or 0
        count = failed = 0
        if left == 0:
            return count, failed
        with (
            _cluster(engines),
            tqdm(total=len(ids), initial=len(ids) - left, unit="row") as bar,
        ):
            answers = _left_of(files, done, batch_size).map_batches(
                Actor,
                fn_constructor_args=[worker, dict(options)],
                batch_size=batch_size,
                batch_format="pyarrow",
                # an engine that is ready takes the next batch, none waits behind a slower one
                compute=ray.data.ActorPoolStrategy(size=engines, max_tasks_in_flight_per_actor=1),
                num_cpus=1,
                num_gpus=_gpus() if gpus is None else gpus,
            )
            parts = answers.iter_batches(batch_size=None, batch_format="pyarrow")
            for i, part in enumerate(parts, number):
                _write(outputs / f"part-{i:06}.parquet", part, asked)
                count += len(part)
                failed += len(part) - part["error"].null_count
                bar.update(len(part))
    if count != left:
        raise MmkitError(str(outputs), f"{left} answers", str(count), "Start the run again.")
    return count, failed


@contextmanager
def _held(outputs: Path) -> Iterator[None]:
    """Keep other runs from a folder of outputs."""
    outputs.mkdir(parents=True, exist_ok=True)
    with (outputs / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MmkitError(str(outputs), "no other run that writes here", "one") from None
        yield


def _ids(inputs: Path, files: list[Path]) -> pa.Array:
    """The ids of all rows."""
    if not all(file.is_file() for file in files) or not files:
        raise MmkitError(f"{inputs}", "a parquet file, or a folder of them", "none")
    source = ds.dataset(list(map(str, files)), format="parquet")
    if "id" not in source.schema.names:
        raise MmkitError(f"{inputs}", "a column id", ", ".join(source.schema.names))
    ids = source.to_table(columns=["id"])["id"].combine_chunks()
    counts = pc.value_counts(ids)
    twice = counts.field(0).filter(pc.greater(counts.field(1), 1))
    if len(twice) or ids.null_count:
        got = f"{twice[0]} more than once" if len(twice) else "null"
        raise MmkitError(f"{inputs}, id", "another one in each row", got)
    return ids


def _done(outputs: Path, asked: str, kind: pa.DataType) -> tuple[int, pa.Array]:
    """The number of the next part file, and the ids of the rows that have an answer."""
    parts = sorted(outputs.glob("part-*.parquet"))
    for part in parts[:1]:
        of = (pq.read_schema(part).metadata or {}).get(OPTIONS, b"").decode()
        if of != asked:
            remedy = "Take another folder for another run."
            raise MmkitError(str(outputs), f"the answers of {asked}", of or "others", remedy)
    tables = [pq.read_table(part, columns=["id"]) for part in parts]
    number = int(parts[-1].stem.removeprefix("part-")) + 1 if parts else 0
    return number, pa.chunked_array([c for t in tables for c in t["id"].chunks], kind)


def _write(path: Path, part: pa.Table, asked: str) -> None:
    """Write a part file, which is there as a whole or not at all."""
    unfinished = path.with_name(".part")  # the lock keeps others away
    pq.write_table(part.replace_schema_metadata({OPTIONS: asked}), unfinished)
    unfinished.rename(path)


# -- Ray -------------------------------------------------------------------------------------------


@contextmanager
def _cluster(engines: int) -> Iterator[None]:
    """Ray, on the cluster of RAY_ADDRESS or, without it, on this machine alone."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(HANDED_ON) and not name.startswith("VLLM_HOST_")
    }
    alone: dict[str, Any] = {
        "address": "local",  # not one that runs here by chance
        "num_cpus": engines + 1,  # one reads
        "include_dashboard": False,
    }
    ray.init(
        logging_level=logging.WARNING,
        runtime_env={"env_vars": variables},
        **({} if os.environ.get("RAY_ADDRESS") else alone),
    )
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False  # ours counts rows
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield
    finally:
        ray.shutdown()


def _gpus() -> int:
    return 1 if ray.cluster_resources().get("GPU") else 0


def _left_of(files: list[Path], done: pa.Array, batch_size: int) -> Any:
    """The rows that have no answer yet, in blocks of the size of a batch."""

    def left(table: pa.Table) -> pa.Table:
        return table.filter(pc.invert(pc.is_in(table["id"], value_set=done)))

    data = ray.data.read_parquet(list(map(str, files)), partitioning=None, file_extensions=None)
    data = data.map_batches(left, batch_format="pyarrow", batch_size=None)
    return data.repartition(target_num_rows_per_block=batch_size)


# -- the command -----------------------------------------------------------------------------------


def main(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Directory of a checkpoint.")],
    inputs: Annotated[Path, typer.Argument(help="Parquet file, or a folder of them.")],
    outputs: Annotated[Path, typer.Argument(help="Folder for the part files.")],
    engine: Annotated[Any, typer.Option(parser=json.loads, help="Of vllm.LLM, in JSON.")] = "{}",
    sampling: Annotated[Any, typer.Option(parser=json.loads, help="Of vllm.SamplingParams, in JSON.")] = "{}",
    engines: Annotated[int, typer.Option(min=1, help="Engines, each in an actor.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that an engine takes at once.")] = 64,
    gpus: Annotated[int | None, typer.Option(help="Of an engine; else 1 where Ray has any.")] = None,
) -> None:
    """Answer the rows of a dataset with a model in vLLM. A run that was stopped goes on where it
    was, and a row that cannot be answered gets one sentence."""
    options = {"model": str(model.resolve()), "engine": engine, "sampling": sampling}
    command(inputs, outputs, Generate, options, engines=engines, batch_size=batch_size, gpus=gpus)


def command(inputs: Path, outputs: Path, *arguments: Any, **options: Any) -> None:
    """`run` in a program of the command line: tells what was done, and ends with status 1 if a row
    has an `error`, with 2 if nothing was done."""
    try:
        count, failed = run(inputs, outputs, *arguments, **options)
    except MmkitError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"{count} row(s) written to {outputs}, {failed} of them refused")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    # by the name of its module: what belongs to __main__ would travel by value
    from examples import batch

    typer.run(batch.main)
