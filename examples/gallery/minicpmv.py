"""MiniCPM-V 2.6 and later: an image and its slices, behind the image's number; a video is its frames, unsliced.

The image processor writes the text of an image's placeholder; the embeddings stand at its unknown tokens.
"""

from typing import Any

from mmkit import Image, Modality, ModelSpec, Video, batched, hf, item, later, proc, replace, select, tok


@later
def image_text(processor: Any, width: int, height: int, number: int) -> str:
    """Return the text of an image and its slices, behind its number."""
    return processor.get_slice_image_placeholder((width, height), number)


@later
def frame_text(processor: Any, width: int, height: int) -> str:
    """Return the text of a frame: one slice, no number."""
    return processor.get_slice_image_placeholder((width, height), 0, 1, False)


IMAGES = proc.image_processor
SIDE = IMAGES.scale_resolution


def vision(name, item_type, prefix, layout, kwargs):
    """Return the modality of images or videos: lists of slices of different sizes, with their numbers of patches."""
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
        process=hf(IMAGES, inputs={f"{name}s": "images"}, outputs=outputs, kwargs=kwargs, one_by_one=True),
    )


IMAGE = select(tok.text(image_text(IMAGES, item.width, item.height, item.index)), embed=tok["<unk>"])
FRAME = select(tok.text(frame_text(IMAGES, item.width, item.height)), embed=tok["<unk>"])

MINICPMV = ModelSpec(
    "minicpmv",
    vision("image", Image(largest=(SIDE, SIDE * IMAGES.max_slice_nums)), "", IMAGE, {}),
    vision("video", Video(largest=(64, SIDE, SIDE)), "video_", FRAME * item.frames, {"max_slice_nums": 1}),
)
