"""MiniCPM-V 2.6 and later: an image and its slices, behind the image's number; a video is its frames, unsliced.

The image processor writes the text of an image's placeholder; the embeddings stand at its unknown tokens.
"""

from typing import Any

from mmkit import Image, Modality, ModelSpec, Video, batched, hf, item, later, proc, replace, select, tok


@later
def written(processor: Any, width: int, height: int, *options: Any) -> str:
    """The text of an image, or of a frame: `options` are its number, the most slices, whether the number is written."""
    return processor.get_slice_image_placeholder((width, height), *options)


images = proc.image_processor
side = images.scale_resolution


def vision(name, item_type, prefix, layout, kwargs):
    """Images or videos: lists of slices of different sizes, with their numbers of patches."""
    outputs = {key: prefix + key for key in ("pixel_values", "image_sizes", "tgt_sizes")}
    return Modality(
        name,
        item=item_type,
        layout=layout,
        update=replace(tok.text(f"(<{name}>./</{name}>)")),
        fields={
            outputs["pixel_values"]: batched(),
            outputs["image_sizes"]: batched(keep_on_cpu=True),
            outputs["tgt_sizes"]: batched(keep_on_cpu=True),
        },
        process=hf(images, inputs={f"{name}s": "images"}, outputs=outputs, kwargs=kwargs, one_by_one=True),
    )


def shown(*options):
    """The layout of an image or a frame."""
    return select(tok.text(written(images, item.width, item.height, *options)), embed=tok["<unk>"])


MINICPMV = ModelSpec(
    "minicpmv",
    vision("image", Image(largest=(side, side * images.max_slice_nums)), "", shown(item.index), {}),
    vision("video", Video(largest=(64, side, side)), "video_", shown(0, 1, False) * item.frames, {"max_slice_nums": 1}),
)
