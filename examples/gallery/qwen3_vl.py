"""Qwen3-VL: images as Qwen2-VL has them; a video is its pairs of frames, each behind the time at which it is shown."""

from typing import Any

from transformers.video_utils import VideoMetadata

from mmkit import Modality, ModelSpec, Video, batched, each, embed, fields, flat, hf, later, proc, replace, tok

from .qwen2_vl import MERGE, images, largest_size


@later
class VideoProcessor:
    """The video processor of a checkpoint, which also returns the time of each pair of frames, in seconds."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(
        self, videos: Any, min_pixels: int | None = None, max_pixels: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Process one video and its metadata."""
        ((frames, metadata),) = videos
        metadata = dict(metadata)  # the item keeps its own
        options.setdefault("do_sample_frames", metadata.pop("do_sample_frames", False))
        options.setdefault(
            "size",
            {
                "shortest_edge": min_pixels or self.processor.size["shortest_edge"],
                "longest_edge": max_pixels or self.processor.size["longest_edge"],
            },
        )
        outputs = self.processor(
            videos=[frames], video_metadata=[VideoMetadata(**metadata)], return_metadata=True, **options
        )
        (sampled,) = outputs.pop("video_metadata")
        outputs["timestamps"] = [self.times_of_pairs(sampled)]
        return outputs

    def times_of_pairs(self, metadata: VideoMetadata) -> list[float]:
        """Return the middle of the times of each pair's frames; the last frame stands twice if it is alone."""
        frames_per_pair = self.processor.temporal_patch_size
        seconds = [index / metadata.fps for index in metadata.frames_indices]
        while len(seconds) % frames_per_pair:
            seconds.append(seconds[-1])
        times = []
        for first in range(0, len(seconds), frames_per_pair):
            last = first + frames_per_pair - 1
            times.append((seconds[first] + seconds[last]) / 2)
        return times


VIDEOS = proc.video_processor
GRID = fields.video_grid_thw
# of five frames, which the resizing counts as four and the grid as six
SIZE = largest_size(VIDEOS.size["longest_edge"] // 4, VIDEOS.patch_size * VIDEOS.merge_size)


def pair(seconds):
    """Return the layout of two frames, behind the time at which they are shown."""
    rows = embed(tok[proc.video_token]) * (GRID[1] * GRID[2] // VIDEOS.merge_size**2)
    return tok.text("<{:.1f} seconds>", seconds) + (tok[proc.vision_start_token] + rows) + tok[proc.vision_end_token]


QWEN3_VL = ModelSpec(
    "qwen3_vl",
    images(),
    Modality(
        "video",
        item=Video((5, SIZE[0], SIZE[1]), metadata=True),
        layout=each(fields.timestamps, pair),
        update=replace(tok[proc.video_token]),
        fields={
            "pixel_values_videos": flat(GRID[0] * GRID[1] * GRID[2]),
            "video_grid_thw": batched(keep_on_cpu=True),
            "timestamps": batched(keep_on_cpu=True),
        },
        process=hf(VideoProcessor(VIDEOS), one_by_one=True),
        positions=(GRID[0], GRID[1] // MERGE, GRID[2] // MERGE),
    ),
)
