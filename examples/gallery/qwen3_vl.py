"""Qwen3-VL: images as Qwen2-VL has them; a video is its pairs of frames, each behind the time at which it is shown."""

from collections.abc import Callable
from typing import Any

from transformers.video_utils import VideoMetadata

from mmkit import Image, Modality, ModelSpec, Video, batched, each, embed, fields, flat, hf, later, proc, replace, tok

from .qwen2_vl import fullest, merged, vision


@later
def timed(processor: Any) -> Callable[..., dict[str, Any]]:
    """Called like the video processor, with one video and its metadata; tells the time of each pair, in seconds."""

    def process(videos: Any, min_pixels: int | None = None, max_pixels: int | None = None, **options: Any) -> Any:
        ((frames, known),) = videos
        least, most = min_pixels or processor.size["shortest_edge"], max_pixels or processor.size["longest_edge"]
        size = {"shortest_edge": least, "longest_edge": most}
        options = {"do_sample_frames": known.get("do_sample_frames", False), "size": size, **options}
        metadata = VideoMetadata(**{key: value for key, value in known.items() if key != "do_sample_frames"})
        made = processor(videos=[frames], video_metadata=[metadata], return_metadata=True, **options)
        (shown,) = made.pop("video_metadata")
        seconds = [index / shown.fps for index in shown.frames_indices]
        step = processor.temporal_patch_size
        seconds += seconds[-1:] * (-len(seconds) % step)
        made["timestamps"] = [[(a + b) / 2 for a, b in zip(seconds[::step], seconds[step - 1 :: step], strict=True)]]
        return made

    return process


videos = proc.video_processor
grid = fields.video_grid_thw
# of five frames, which the resizing counts as four and the grid as six
size = fullest(videos.size["longest_edge"] // 4, videos.patch_size * videos.merge_size)


def pair(seconds):
    """Two frames, which are shown at a time."""
    rows = embed(tok[proc.video_token]) * (grid[1] * grid[2] // videos.merge_size**2)
    return tok.text("<{:.1f} seconds>", seconds) + (tok[proc.vision_start_token] + rows) + tok[proc.vision_end_token]


QWEN3_VL = ModelSpec(
    "qwen3_vl",
    vision("image", Image, 1, proc.image_token, proc.image_processor, "pixel_values"),
    Modality(
        "video",
        item=Video((5, size[0], size[1]), metadata=True),
        layout=each(fields.timestamps, pair),
        update=replace(tok[proc.video_token]),
        fields={
            "pixel_values_videos": flat(grid[0] * grid[1] * grid[2]),
            "video_grid_thw": batched(keep_on_cpu=True),
            "timestamps": batched(keep_on_cpu=True),
        },
        process=hf(timed(videos), one_by_one=True),
        positions=(grid[0], grid[1] // merged, grid[2] // merged),
    ),
)
