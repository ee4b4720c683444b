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

PASSED_ON = ("HF_", "MMKIT_", "OMP_", "PYTHONPATH", "TOKENIZERS_", "VLLM_")
"""The prefixes of environment variables that Ray passes to the actors on all nodes. Variables of
one machine, VLLM_HOST_IP among them, stay there."""

RUN_KEY = b"mmkit"
"""The key of a part file's metadata that holds the worker and the options of the run."""


class Worker(Protocol):
    """The work of an actor: a class at the top of a module that all nodes can import.

    Each actor makes one instance.

    Attributes:
        schema: the columns of an answer, without `id` and `error`.
    """

    schema: ClassVar[pa.Schema]

    def __call__(self, rows: list[Row]) -> Sequence[Row]:
        """Return the answers to rows, in their order: columns of the schema, or an `error`."""
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
        answers: list[Row] = [{} for _ in rows]
        accepted = []
        for i, row in enumerate(rows):
            try:
                self.llm.enqueue([make_request(row)], self.sampling, use_tqdm=False)
                accepted.append(i)
            except (ValueError, TypeError) as error:
                answers[i] = {"error": " ".join(str(error).split())}
        # in the order of the requests
        outputs = self.llm.wait_for_completion(use_tqdm=False)
        for i, output in zip(accepted, outputs, strict=True):
            answers[i] = read_answer(output)
        return answers


def make_request(row: Row) -> Row:
    """Return the request of a row, as `vllm.LLM` takes it.

    Raises:
        InputError: the prompt has another form, or an item is no image file.
    """
    request: Row = {}
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        request["prompt"] = prompt
    elif isinstance(prompt, list):
        request["prompt_token_ids"] = prompt
    else:
        raise InputError("prompt", "a text or a list of token ids", f"a {type(prompt).__name__}")
    data = {}
    for name, value in row.items():
        if name not in ("id", "prompt") and value is not None:
            values = value if isinstance(value, list) else [value]
            data[name] = [decode_item(item) for item in values]
    if data:
        request["multi_modal_data"] = data
    return request


def read_answer(output: Any) -> Row:
    """Return the columns of vLLM's answer to a request."""
    (answer,) = output.outputs
    if answer.finish_reason == "error":
        return {"error": "answer: expected tokens, got an error of the engine, whose log has it."}
    return {
        "tokens": list(answer.token_ids),
        "text": answer.text or None,
        "finish_reason": answer.finish_reason,
    }


def decode_item(value: Any) -> Any:
    """Return an item as vLLM takes it: the bytes of an image file become an image."""
    if isinstance(value, dict):
        return {key: decode_item(part) for key, part in value.items()}
    if isinstance(value, bytes):
        from PIL import Image

        try:
            image = Image.open(BytesIO(value))
            image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InputError("item", "the bytes of an image file", str(error)) from None
        return image
    return value


class Actor:
    """A worker, as Ray Data holds it."""

    def __init__(self, worker: Callable[..., Worker], options: Options) -> None:
        # the actor is the engine: a child would outlive an actor that is killed
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self._worker = worker(**options)

    def __call__(self, table: pa.Table) -> pa.Table:
        rows = read_rows(table)
        answers = self._worker(rows)
        outputs = []
        for row, answer in zip(rows, answers, strict=True):
            outputs.append({"id": row["id"]} | dict(answer))
        columns = [table.schema.field("id")]
        columns.extend(self._worker.schema)
        columns.append(pa.field("error", pa.string()))
        return pa.Table.from_pylist(outputs, schema=pa.schema(columns))


def read_rows(table: pa.Table) -> list[Row]:
    """Return rows as Python values; each ``fixed_shape_tensor`` as an array of its shape."""
    rows: list[Row] = [{} for _ in range(len(table))]
    for name, column in zip(table.column_names, table.columns, strict=True):
        for row, value in zip(rows, _read_column(column), strict=True):
            row[name] = value
    return rows


def _read_column(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column, which may be of ``fixed_shape_tensor`` or of lists of it."""
    if isinstance(column.type, pa.FixedShapeTensorType):
        return [cell.to_numpy() if cell.is_valid else None for cell in column]
    value_type = getattr(column.type, "value_type", None)
    if not isinstance(value_type, pa.FixedShapeTensorType):
        return column.to_pylist()
    values = []
    for cell in column:
        if cell.values is None:
            values.append(None)
        else:
            values.append(list(cell.values.to_numpy_ndarray()))
    return values


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
    """Answer the rows of a dataset that have no answer yet.

    The actors are on the Ray cluster of RAY_ADDRESS, or on this machine without it.

    Args:
        inputs: a parquet file or a folder of parquet files, on all nodes.
        outputs: folder of the part files, on this machine only.
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
    inputs = Path(inputs).resolve()
    outputs = Path(outputs)
    files = [inputs]
    if inputs.is_dir():
        files = sorted(inputs.rglob("*.parquet"))
    name = getattr(worker, "__qualname__", str(worker))
    run_text = json.dumps([name, dict(options)], default=str)
    count = 0
    failed = 0
    with lock_folder(outputs):
        ids = read_ids(inputs, files)
        number, done = read_done(outputs, run_text, ids.type)
        remaining = pc.sum(pc.invert(pc.is_in(ids, value_set=done))).as_py() or 0
        if remaining == 0:
            return count, failed
        with (
            connect_to_ray(engines),
            tqdm(total=len(ids), initial=len(ids) - remaining, unit="row") as bar,
        ):
            if gpus is None:
                gpus = 1 if ray.cluster_resources().get("GPU") else 0
            answers = read_remaining(files, done, batch_size).map_batches(
                Actor,
                fn_constructor_args=[worker, dict(options)],
                batch_size=batch_size,
                batch_format="pyarrow",
                # an engine that is ready takes the next batch, none waits behind a slower one
                compute=ray.data.ActorPoolStrategy(size=engines, max_tasks_in_flight_per_actor=1),
                num_cpus=1,
                num_gpus=gpus,
            )
            parts = answers.iter_batches(batch_size=None, batch_format="pyarrow")
            for i, part in enumerate(parts, number):
                write_part(outputs / f"part-{i:06}.parquet", part, run_text)
                count += len(part)
                failed += len(part) - part["error"].null_count
                bar.update(len(part))
    if count != remaining:
        raise MmkitError(str(outputs), f"{remaining} answers", str(count), "Start the run again.")
    return count, failed


@contextmanager
def lock_folder(outputs: Path) -> Iterator[None]:
    """Keep other runs from a folder of outputs."""
    outputs.mkdir(parents=True, exist_ok=True)
    with (outputs / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MmkitError(str(outputs), "no other run that writes here", "one") from None
        yield


def read_ids(inputs: Path, files: list[Path]) -> pa.Array:
    """Return the ids of all rows.

    Raises:
        MmkitError: there are no files, or ids that are not unique.
    """
    if not files or not all(file.is_file() for file in files):
        raise MmkitError(f"{inputs}", "a parquet file, or a folder of them", "none")
    source = ds.dataset([str(file) for file in files], format="parquet")
    if "id" not in source.schema.names:
        raise MmkitError(f"{inputs}", "a column id", ", ".join(source.schema.names))
    ids = source.to_table(columns=["id"])["id"].combine_chunks()
    counts = pc.value_counts(ids)
    repeated = counts.field(0).filter(pc.greater(counts.field(1), 1))
    if len(repeated):
        got = f"{repeated[0]} more than once"
        raise MmkitError(f"{inputs}, id", "another one in each row", got)
    if ids.null_count:
        raise MmkitError(f"{inputs}, id", "another one in each row", "null")
    return ids


def read_done(outputs: Path, run_text: str, id_type: pa.DataType) -> tuple[int, pa.ChunkedArray]:
    """Return the number of the next part file, and the ids of the rows that have an answer.

    Raises:
        MmkitError: the part files are those of another run.
    """
    parts = sorted(outputs.glob("part-*.parquet"))
    if not parts:
        return 0, pa.chunked_array([], id_type)
    stored_text = (pq.read_schema(parts[0]).metadata or {}).get(RUN_KEY, b"").decode()
    if stored_text != run_text:
        remedy = "Take another folder for another run."
        raise MmkitError(str(outputs), f"the answers of {run_text}", stored_text or "others", remedy)
    chunks: list[pa.Array] = []
    for part in parts:
        chunks.extend(pq.read_table(part, columns=["id"])["id"].chunks)
    number = int(parts[-1].stem.removeprefix("part-")) + 1
    return number, pa.chunked_array(chunks, id_type)


def write_part(path: Path, part: pa.Table, run_text: str) -> None:
    """Write a part file, which is there as a whole or not at all."""
    unfinished = path.with_name(".part")  # the lock keeps others away
    pq.write_table(part.replace_schema_metadata({RUN_KEY: run_text}), unfinished)
    unfinished.rename(path)


# -- Ray -------------------------------------------------------------------------------------------


@contextmanager
def connect_to_ray(engines: int) -> Iterator[None]:
    """Use the cluster of RAY_ADDRESS or, without it, a cluster on this machine only."""
    variables = {}
    for name, value in os.environ.items():
        if name.startswith(PASSED_ON) and not name.startswith("VLLM_HOST_"):
            variables[name] = value
    options: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        options["address"] = "local"  # not one that runs here by chance
        options["num_cpus"] = engines + 1  # one reads
        options["include_dashboard"] = False
    ray.init(logging_level=logging.WARNING, runtime_env={"env_vars": variables}, **options)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False  # ours counts rows
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield
    finally:
        ray.shutdown()


def read_remaining(files: list[Path], done: pa.ChunkedArray, batch_size: int) -> Any:
    """Return the rows that have no answer yet, in blocks of the size of a batch."""

    def remove_done(table: pa.Table) -> pa.Table:
        return table.filter(pc.invert(pc.is_in(table["id"], value_set=done)))

    paths = [str(file) for file in files]
    data = ray.data.read_parquet(paths, partitioning=None, file_extensions=None)
    data = data.map_batches(remove_done, batch_format="pyarrow", batch_size=None)
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
    """Answer the rows of a dataset with a model in vLLM.

    A run that was stopped goes on where it was, and a row that cannot be answered gets one sentence.
    """
    options = {"model": str(model.resolve()), "engine": engine, "sampling": sampling}
    command(inputs, outputs, Generate, options, engines=engines, batch_size=batch_size, gpus=gpus)


def command(inputs: Path, outputs: Path, *arguments: Any, **options: Any) -> None:
    """Run in a program of the command line, and print how many rows were answered.

    The program ends with status 1 if a row has an `error`, with 2 if nothing was done.
    """
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
