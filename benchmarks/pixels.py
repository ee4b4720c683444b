"""Pixels of photographs: ``python -m benchmarks.pixels --help``.

One request with one photograph of 1, 2 or 4 megapixels, decoded before, from vLLM's parser to the
fields for the engine: by vLLM's hand-written class, by the spec with floats and with bytes, and by
the spec with the resizing of torchvision (`examples/pixels.py`), in turns in one process. Beside
them the image processor of transformers alone. Times are those of the one thread on its core.

The models have the sizes of published ones: LLaVA's images of 336 x 336 pixels, InternVL's up to 13
tiles of 448 x 448, Qwen2-VL's up to 12.8 megapixels. They are in bfloat16.
"""

from __future__ import annotations

import importlib
import io
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import thread_time as clock
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image as PILImage
from torchvision.transforms.v2.functional import InterpolationMode, resize

from examples.gallery.internvl import INTERNVL, MAX_TILES, MEAN, MIN_TILES, SIZE, STD, Tiles
from examples.pixels import Pixels
from mmkit import ModelSpec, cfg, hf, kwargs, later, proc

from . import measure, outline, render

SIZES = {"1 MP": (1152, 864), "2 MP": (1632, 1224), "4 MP": (2304, 1728)}
"""Widths and heights of the photographs."""

BASE = "vLLM's class"
"""What the others are compared with."""

TRANSFORMERS = "transformers alone"

FIELDS = {
    "llava": "pixel_values",
    "qwen2_vl": "pixel_values",
    "internvl2": "pixel_values_flat",
}
"""The field with the pixels, by model."""

MODEL_CONFIGS = {"internvl2": {"vision_config": {"hidden_act": "gelu"}}}
"""What a model needs that its stored config lacks, which is for processors alone."""


class FastTiles(Tiles):
    """The tiles of InternVL, resized by torchvision."""

    def tile_image(self, image: PILImage.Image) -> torch.Tensor:
        tiles = self.make_tiles(getattr(image, "media", image)).float()
        mean = torch.tensor(MEAN).view(3, 1, 1)
        std = torch.tensor(STD).view(3, 1, 1)
        return tiles.div_(255).sub_(mean).div_(std)

    def make_tiles(self, image: PILImage.Image) -> torch.Tensor:
        """Return bytes (tiles, 3, size, size)."""
        columns, rows = self.choose_grid(image.width, image.height)
        pixels = torch.from_numpy(np.array(image, copy=None)).permute(2, 0, 1)
        by_tile = self.resize(pixels, columns, rows).view(3, rows, self.size, columns, self.size)
        tiles = by_tile.permute(1, 3, 0, 2, 4).flatten(0, 1)
        if self.use_thumbnail and len(tiles) > 1:
            thumbnail = self.resize(pixels, 1, 1)
            tiles = torch.cat([tiles, thumbnail[None]])
        return tiles

    def resize(self, pixels: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
        """Return pixels (3, height, width) as large as so many tiles."""
        size = [self.size * rows, self.size * columns]
        resized: torch.Tensor = resize(pixels, size, InterpolationMode.BICUBIC, antialias=True)
        return resized.contiguous()


class ByteTiles(FastTiles):
    """These tiles as bytes, for a model that normalises them."""

    def tile_image(self, image: PILImage.Image) -> torch.Tensor:
        return self.make_tiles(getattr(image, "media", image))


def change_process(spec: ModelSpec, process: Any) -> ModelSpec:
    """Return the images of a spec, processed otherwise."""
    return ModelSpec(spec.name, spec["image"].model_copy(update={"process": process}))


def make_tiled(tiles: type[Tiles]) -> ModelSpec:
    """Return the images of InternVL, made into tiles by another class."""
    use_thumbnail = kwargs.get("use_thumbnail", cfg.use_thumbnail)
    return change_process(INTERNVL, hf(later(tiles)(SIZE, MIN_TILES, MAX_TILES, use_thumbnail)))


INTERNVL_FLOATS = make_tiled(FastTiles)
INTERNVL_BYTES = make_tiled(ByteTiles)


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each size, in turns.")] = 20,
    systems: Annotated[
        list[str] | None, typer.Option(help="Which models; may be given several times.")
    ] = None,
) -> None:
    """Measure the time, the bytes and the values of the pixels of photographs."""
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mmkit-bench-") as folder:
        for name in measure.show_progress(systems or list(FIELDS), "pixels"):
            figures += measure_system(name, Path(folder) / name, rounds)
    report = {"rounds": rounds, "rows": figures}
    columns = ["model", "by", *SIZES, "bytes at 4 MP", "worst difference"]
    measure.store("pixels", report, columns, [make_row(figure) for figure in figures])


def make_row(figure: dict[str, Any]) -> list[str]:
    row = [figure["model"], figure["by"]]
    for size in SIZES:
        row.append(f"{figure['ms'][size]:.2f} ms ({figure['ratio'][size]:.2f})")
    return [*row, f"{figure['bytes'] / 1e6:.2f} MB", f"{figure['levels']:.1f}"]


@dataclass
class Side:
    """One way to make the pixels of a photograph.

    Attributes:
        processor: of vLLM; None for the image processor of transformers alone.
        image_processor: of transformers.
        ids: of a prompt with one image.
        field: the name of the field with the pixels.
    """

    processor: Any
    image_processor: Any
    ids: list[int]
    field: str

    def process(self, image: Any) -> torch.Tensor:
        """Return the pixels of a decoded file."""
        from mmkit.testing import vllm_path

        if self.processor is None:
            result = self.image_processor(images=[image.media], return_tensors="pt")
            pixels: torch.Tensor = result["pixel_values"]
            return pixels
        result = vllm_path.render(self.processor, self.ids, {"image": [image]}, {}, None)
        (item,) = result["mm_kwargs"]["image"]
        pixels = item[self.field].data
        return pixels


def measure_system(name: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of one model, one for each way."""
    from vllm.multimodal.media.image import ImageMediaIO

    sides = make_sides(name, folder)
    loader = ImageMediaIO()
    figures = {by: {"model": name, "by": by, "ms": {}, "ratio": {}, "levels": 0.0} for by in sides}
    for size, (width, height) in SIZES.items():
        file = make_photograph(width, height)
        seconds: dict[str, list[float]] = {by: [] for by in sides}
        pixels: dict[str, torch.Tensor] = {}
        for number in range(rounds + 1):
            order = list(sides)
            if number % 2:
                order.reverse()
            for by in order:
                image = loader.load_bytes(file)
                image.media.load()
                start = clock()
                pixels[by] = sides[by].process(image)
                if number:  # the first one warms up
                    seconds[by].append(clock() - start)
        compare_pixels(name, sides, pixels, figures)
        for by, figure in figures.items():
            figure["ms"][size] = statistics.median(seconds[by]) * 1000
            figure["ratio"][size] = measure.compare(seconds, by, BASE)["ratio"]
            figure["bytes"] = pixels[by].nbytes
    return list(figures.values())


def compare_pixels(
    name: str, sides: dict[str, Side], pixels: dict[str, torch.Tensor], figures: dict[str, Any]
) -> None:
    """Note the worst difference of each side from transformers, of InternVL from vLLM's class.

    Bytes are normalised before, floats are those that the model gets, in bfloat16. The unit is a
    level of a byte.
    """
    from mmkit.vllm_api.normalization import Normalization, normalize_bytes, read_normalization

    if name == "internvl2":
        normalization = Normalization(list(MEAN), list(STD), 1 / 255)
    else:
        normalization = read_normalization(sides[BASE].processor.info)
    norm = normalization.make_torch_module()
    level = 1 / (255 * max(normalization.image_std))
    floats: dict[str, torch.Tensor] = {}
    for by, value in pixels.items():
        if value.dtype == torch.uint8:
            value = normalize_bytes(norm, value, torch.bfloat16, by)
        floats[by] = value.bfloat16().float()
    reference = floats[TRANSFORMERS if TRANSFORMERS in floats else BASE]
    for by, value in floats.items():
        difference = float((value.reshape(reference.shape) - reference).abs().max()) / level
        figures[by]["levels"] = max(figures[by]["levels"], difference)


# -- the sides -------------------------------------------------------------------------------------


def make_sides(name: str, folder: Path) -> dict[str, Side]:
    """Return the ways to make the pixels of a model."""
    oracles = importlib.import_module("tests.oracles")
    system = oracles.SYSTEMS[name]
    options: dict[str, Any] = {"dtype": "bfloat16"}
    checkpoint = copy_checkpoint(name, folder)
    if name == "internvl2":
        options["max_model_len"] = 8192
    by_hand = oracles.hand_written(name, checkpoint, **options)
    spec = system.load_spec()
    specs = {"spec, floats": (spec, False)}
    if name == "internvl2":
        specs["torchvision, floats"] = (INTERNVL_FLOATS, False)
        specs["torchvision, bytes"] = (INTERNVL_BYTES, False)
    else:
        specs["spec, bytes"] = (spec, True)
    if name == "llava":
        process = hf(later(Pixels)(proc.image_processor))
        specs["torchvision, bytes"] = (change_process(spec, process), True)
    processors = {BASE: by_hand}
    for by, (changed, normalizes) in specs.items():
        number = len(processors)
        processors[by] = make_processor(
            f"Pixels{number}{name}", changed, normalizes, checkpoint, options
        )
    image_processor = None
    if name != "internvl2":  # it has none in transformers
        image_processor = by_hand.info.get_hf_processor().image_processor
        processors[TRANSFORMERS] = None
    ids = find_prompt(system)
    sides = {}
    for by, processor in processors.items():
        sides[by] = Side(processor, image_processor, ids, FIELDS[name])
    return sides


def copy_checkpoint(name: str, folder: Path) -> str:
    """Copy the stored checkpoint of a model, with the sizes of a published one."""
    if name == "qwen2_vl":
        return outline.copy_with_geometry(name, folder)
    oracles = importlib.import_module("tests.oracles")
    checkpoint = oracles.SYSTEMS[name].checkpoint
    return str(render.copy_with_published_sizes(name, checkpoint, folder))


def make_processor(
    architecture: str, spec: ModelSpec, normalizes: bool, checkpoint: str, options: dict[str, Any]
) -> Any:
    """Return the generated processor of a spec.

    Args:
        architecture: a name of its own: vLLM keeps what it finds for a name.
        spec: the spec.
        normalizes: whether its model normalises bytes.
        checkpoint: the folder.
        options: of vLLM's ModelConfig.
    """
    from vllm import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from mmkit.vllm_api.checkpoint_processors import StandIn, load_model_config

    members = {"__module__": __name__, "supports_mm_device_do_normalize": normalizes}
    model = type(architecture, (StandIn,), members)
    globals()[architecture] = model  # vLLM imports the class by its module and name
    ModelRegistry.register_model(architecture, model)
    classes = spec.classes
    MULTIMODAL_REGISTRY.register_processor(
        classes.processor, info=classes.info, dummy_inputs=classes.dummy_inputs
    )(model)
    overrides = {"architectures": [architecture]}
    config = load_model_config(
        checkpoint, hf_overrides=overrides, trust_remote_code=True, **options
    )
    return MULTIMODAL_REGISTRY.create_processor(config)


def find_prompt(system: Any) -> list[int]:
    """Return the ids of a stored case with one image, and nothing else."""
    for case in system.cases():
        names = {name for name, items in case["items"].items() if items}
        if names == {"image"} and len(case["items"]["image"]) == 1 and "error" not in case:
            ids: list[int] = case["prompt_token_ids"]
            return ids
    raise LookupError(f"{system.name} has no case with one image")


def make_photograph(width: int, height: int, seed: int = 0) -> bytes:
    """Return a JPEG of large shapes, and noise as of a camera."""
    random = np.random.default_rng(seed)
    shapes = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    smooth = np.asarray(
        PILImage.fromarray(shapes).resize((width, height), PILImage.Resampling.BICUBIC)
    )
    noisy = smooth + random.integers(-6, 7, smooth.shape)
    file = io.BytesIO()
    PILImage.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)
