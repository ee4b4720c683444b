"""The findings of the page that no law shows with the requests that the survey draws, by smallest
requests: `pytest tools/survey`."""

from __future__ import annotations

import pytest

from mmkit.testing import ImageSample, VideoSample, vllm_path
from tools.survey import doors
from tools.survey.zoo import subject

SMALL = ImageSample(0, 28, 28)


def test_16_qwen3_vl_many_small_frames() -> None:
    one, video = subject("qwen3_vl"), VideoSample(0, 12, 28, 112, True)
    ((_, _, mask),) = one.run(one.minimal("video", video)).ranges["video"]
    assert (vllm_path.most_rows(one.processor, "video")[0], sum(mask)) == (6, 12)


def test_33_minicpmv4_6_videos_without_the_option_of_a_request() -> None:
    one, video, few = subject("minicpmv4_6"), VideoSample(0, 2, 112, 112), {"max_slice_nums": 1}
    prompt, data = one.minimal("video", video).prompt, {"video": [video.value()]}
    server = doors.with_server_kwargs(one.processor, few)
    asked, served = (
        len(vllm_path.run(processor, prompt, data, kwargs).fields["video"][0]["video_tgt_sizes"])
        for processor, kwargs in ((one.processor, few), (server, {}))
    )
    assert (asked, served) == (10, 2)


@pytest.mark.parametrize(
    ("entry", "side", "image", "tiles"),
    [("cohere2_vision", 16, SMALL, (5, 1)), ("llama4", 28, ImageSample(0, 28, 112), (5, 3))],
)
def test_34_tiles_are_counted_without_size(
    entry: str, side: int, image: ImageSample, tiles: tuple[int, int]
) -> None:
    size = {"size": {"height": side, "width": side}}
    fields = vllm_path.round_trip(subject(entry).processor, {"image": [image.value()]}, size)
    assert tuple(map(len, fields["pixel_values"])) == tiles


def test_35_interns1_a_size_in_a_request() -> None:
    with pytest.raises(TypeError, match="multiple values for keyword argument 'size'"):
        subject("internvl_hf").pieces("image", [SMALL], {"size": {"height": 28, "width": 28}})
